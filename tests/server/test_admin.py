"""Routes that operate models: there only if asked for, for those who may, and never under somebody's request."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from quire.errors import ConfigError
from tests.helpers.live_server import server_config
from tests.server.several import Several, complete

ROUTES = (
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/v1/models/a/load"),
    ("POST", "/v1/models/a/unload"),
)


async def post(http: httpx.AsyncClient, path: str, **options: Any) -> tuple[int, Any]:
    answer = await http.post(path, **options)
    return answer.status_code, answer.json()


def test_they_are_not_there_unless_asked_for() -> None:
    several = Several("a", at_start="a")

    async def work(http: httpx.AsyncClient) -> None:
        for method, path in ROUTES:
            assert (await http.request(method, path)).status_code in (404, 405)

    several.run(work)


def test_without_a_profiler_folder_the_answer_names_the_flag() -> None:
    several = Several("a", at_start="a", enable_admin_endpoints=True)

    async def work(http: httpx.AsyncClient) -> None:
        for path in ("/start_profile", "/stop_profile"):
            status, answer = await post(http, path)
            assert status == 404 and "--profiler-dir" in answer["error"]["message"]

    several.run(work)


def test_sleep_and_wake_up() -> None:
    several = Several("a", at_start="a", enable_admin_endpoints=True)

    async def work(http: httpx.AsyncClient) -> None:
        assert await post(http, "/sleep") == (200, {"model": "a", "status": "sleeping"})
        assert several.clients["a"][0].engine.sleep_level == 1
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert await post(http, "/sleep?level=2") == (200, {"model": "a", "status": "sleeping"})
        assert several.clients["a"][0].engine.sleep_level == 2
        assert (await http.get("/health")).json() == {"status": "ok"}
        assert await post(http, "/wake_up") == (200, {"model": "a", "status": "loaded"})
        assert await post(http, "/wake_up") == (200, {"model": "a", "status": "loaded"})
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": False}
        await post(http, "/sleep")
        assert (await complete(http, "a")).status_code == 200, "a request wakes it, too"
        assert several.status() == {"a": "loaded"}

    several.run(work)


def test_load_unload_and_reset() -> None:
    several = Several("ab", pinned="a", enable_admin_endpoints=True)

    async def work(http: httpx.AsyncClient) -> None:
        assert await post(http, "/v1/models/a/load") == (200, {"model": "a", "status": "loaded"})
        assert await post(http, "/reset_prefix_cache?model=a") == (200, {"model": "a", "status": "loaded"})
        assert several.clients["a"][0].engine.num_resets == 1
        assert await post(http, "/reset_prefix_cache?model=b") == (200, {"model": "b", "status": "unloaded"})
        assert await post(http, "/v1/models/a/unload") == (200, {"model": "a", "status": "unloaded"})
        assert several.clients["a"][0].closed
        assert await post(http, "/v1/models/a/unload") == (200, {"model": "a", "status": "unloaded"})
        status, answer = await post(http, "/sleep?model=a")
        assert (status, answer["error"]["code"]) == (409, "model_not_loaded")
        assert await post(http, "/wake_up?model=a") == (200, {"model": "a", "status": "unloaded"})

    several.run(work)


def test_a_model_in_use_is_left_alone() -> None:
    several = Several("ab", at_start="a", enable_admin_endpoints=True)

    async def work(http: httpx.AsyncClient) -> None:
        client = several.clients["a"][0]
        client.hold()
        running = asyncio.ensure_future(complete(http, "a"))
        while not client.engine.live:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
        for path in ("/sleep?model=a", "/v1/models/a/unload"):
            status, answer = await post(http, path)
            assert (status, answer["error"]["code"]) == (409, "model_in_use")
        client.resume()
        assert (await running).status_code == 200
        assert (await post(http, "/v1/models/a/unload"))[0] == 200

    several.run(work)


@pytest.mark.parametrize(
    ("path", "status", "param"),
    [
        ("/sleep", 400, "model"),
        ("/sleep?model=a&level=3", 400, "level"),
        ("/sleep?model=a&level=", 400, "level"),
        ("/sleep?model=a&levle=1", 400, "levle"),
        ("/sleep?model=x", 404, "model"),
        ("/v1/models/x/load", 404, "model"),
        ("/v1/models/a/load?model=b", 400, "model"),
    ],
)
def test_bad_queries_are_refused_by_name(path: str, status: int, param: str) -> None:
    several = Several("ab", at_start="ab", enable_admin_endpoints=True)

    async def work(http: httpx.AsyncClient) -> None:
        found, answer = await post(http, path)
        assert (found, answer["error"]["param"]) == (status, param)

    several.run(work)
    assert several.clients["a"][0].engine.sleep_level == 0


def test_they_may_have_a_key_of_their_own_which_is_good_for_nothing_else() -> None:
    several = Several("a", at_start="a", enable_admin_endpoints=True, api_key=["user"], admin_api_key=["root"])

    async def work(http: httpx.AsyncClient) -> None:
        user, root = {"Authorization": "Bearer user"}, {"Authorization": "Bearer root"}
        for method, path in ROUTES:
            assert (await http.request(method, path)).status_code == 401
            assert (await http.request(method, path, headers=user)).status_code == 401, path
        assert several.status() == {"a": "loaded"}
        for method, path in ROUTES:
            assert (await http.request(method, path, headers=root)).status_code == 200, path
        for path in ("/v1/models", "/v1/models/a", "/metrics"):
            assert (await http.get(path, headers=root)).status_code == 401
            assert (await http.get(path, headers=user)).status_code == 200

    several.run(work)


def test_no_spelling_of_a_path_lets_an_ordinary_key_in() -> None:
    several = Several(
        "a", at_start="a", enable_admin_endpoints=True, api_key=["user"], admin_api_key=["root"], root_path="/llm"
    )

    async def work(http: httpx.AsyncClient) -> None:
        headers = {"Authorization": "Bearer user"}
        for method, path in (*ROUTES, ("POST", "/v1/models//unload"), ("POST", "/v1/models/a%2Funload")):
            for spelling in (path, "/llm" + path, "/llm/llm" + path, path + "/", path + "?", "/" + path):
                answer = await http.request(method, "http://server" + spelling, headers=headers)
                assert answer.status_code in (401, 404, 405), spelling
        assert several.status() == {"a": "loaded"}
        for _, path in ROUTES[3:]:
            answer = await http.post("/llm" + path, headers={"Authorization": "Bearer root"})
            assert answer.status_code == 200

    several.run(work)


def test_without_one_any_key_will_do() -> None:
    several = Several("a", at_start="a", enable_admin_endpoints=True, api_key=["user"])

    async def work(http: httpx.AsyncClient) -> None:
        for method, path in ROUTES:
            assert (await http.request(method, path)).status_code == 401
            headers = {"Authorization": "Bearer user", "Origin": "http://elsewhere"}
            assert (await http.request(method, path, headers=headers)).status_code == 200

    several.run(work)


def test_a_page_of_another_site_cannot_operate_a_server_without_keys() -> None:
    several = Several("a", at_start="a", enable_admin_endpoints=True)

    async def work(http: httpx.AsyncClient) -> None:
        for origin in ("http://evil.example", "null", "http://server.evil.example"):
            status, answer = await post(http, "/sleep", headers={"Origin": origin})
            assert (status, answer["error"]["code"]) == (403, "not_allowed")
        assert several.status() == {"a": "loaded"}
        assert (await post(http, "/sleep", headers={"Origin": "http://server"}))[0] == 200

    several.run(work)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"enable_admin_endpoints": True, "host": "0.0.0.0"}, "enable_admin_endpoints"),
        ({"enable_admin_endpoints": True, "host": "example.com"}, "enable_admin_endpoints"),
        ({"admin_api_key": ["x"]}, "admin_api_key"),
        ({"enable_admin_endpoints": True, "admin_api_key": ["x"], "api_key": ["x"]}, "admin_api_key"),
    ],
)
def test_options_that_would_leave_them_open_are_refused(options: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        server_config(**options)
    assert caught.value.param == param


@pytest.mark.parametrize("guard", [{"api_key": ["x"]}, {"admin_api_key": ["x"]}])
def test_with_a_key_any_address_will_do(guard: dict[str, Any]) -> None:
    assert server_config(enable_admin_endpoints=True, host="0.0.0.0", **guard).server.enable_admin_endpoints
