"""The playground's files and its view of the engine, over HTTP; what the page does with them is in tests/browser."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from quire.engine.core import EngineCore
from quire.errors import EngineDeadError
from quire.frontend.async_llm import AsyncLLM
from quire.server.context import ServerContext
from quire.server.metrics import HISTORY_SECONDS, History
from quire.server.paths import OPEN_PATHS, PAGE_FOLDER, PROBES, STATE_PATH, page_path
from quire.server.served_model import ServedModel
from quire.step import SchedulerStats
from tests.helpers.live_server import LiveServer, MakeServer
from tests.server.steps import Ask, asking, make_core, step

MAX_LINES = 600
PAGE_FILES = sorted(file.name for file in PAGE_FOLDER.iterdir())
PAGE_PATHS = OPEN_PATHS - PROBES


@pytest.fixture
def core() -> EngineCore:
    """An engine whose model adds one to the last token."""
    return make_core()


@pytest.fixture
def held(core: EngineCore, make_server: MakeServer) -> LiveServer:
    """A server with two keys in front of the engine."""
    return make_server(llm={"engine": core}, api_key=["a", "b"])


@pytest.fixture
def ask(held: LiveServer) -> Iterator[Ask]:
    """Sends a completion request, of which only the test makes steps."""
    with asking(held) as post:
        yield post


def state(server: LiveServer, key: str = "a", **query: Any) -> dict[str, Any]:
    answer = server.http.get(STATE_PATH, params=query, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


# ---- files -----------------------------------------------------------------------------------------------------------


def test_all_files_of_the_folder_are_served_and_small() -> None:
    assert len(PAGE_PATHS) == len(PAGE_FILES) > 10
    for name in PAGE_FILES:
        assert len((PAGE_FOLDER / name).read_text("utf-8").splitlines()) <= MAX_LINES, name


def test_the_page_needs_nothing_from_elsewhere() -> None:
    for name in PAGE_FILES:
        text = (PAGE_FOLDER / name).read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//[a-z]+\.[a-z]|@import|\burl\(", text), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            name
        )
    page = (PAGE_FOLDER / "index.html").read_text("utf-8")
    assert not re.search(r"\son[a-z]+=|\sstyle=|<style|javascript:", page)
    assert re.findall(r"<script(.*?)>", page) == [' type="module" src="playground/main.js"']
    for link in re.findall(r'(?:src|href)="([^"#]+)"', page):
        assert f"/{link}" in PAGE_PATHS


@pytest.mark.parametrize("path", sorted(PAGE_PATHS))
def test_files_have_types_and_headers_that_confine_them(server: LiveServer, path: str) -> None:
    answer = server.http.get(path)
    assert answer.status_code == 200 and answer.content
    kinds = {"": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert answer.headers["content-type"].startswith(kinds[path.rpartition(".")[2] if "." in path else ""])
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-cache"
    head = server.http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["etag"] == answer.headers["etag"]


def test_who_has_a_file_does_not_get_it_again(server: LiveServer) -> None:
    tag = server.http.get("/").headers["etag"]
    for given in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        answer = server.http.get("/", headers={"If-None-Match": given})
        assert (answer.status_code, answer.content) == (304, b"")
        assert answer.headers["etag"] == tag and answer.headers["cache-control"] == "no-cache"
    assert server.http.get("/", headers={"If-None-Match": '"other"'}).status_code == 200
    assert len({server.http.get(path).headers["etag"] for path in PAGE_PATHS}) == len(PAGE_PATHS)


def test_only_the_files_are_open_where_there_are_keys(make_server: MakeServer) -> None:
    server = make_server(api_key=["secret"])
    for path in PAGE_PATHS:
        assert server.http.get(path).status_code == 200
        assert server.http.head(path).status_code == 200
        assert server.http.post(path).status_code == 401
    for path in (STATE_PATH, "/playground", "/playground/", "/playground/x.js", "/playground/../v1/models"):
        assert server.http.get(path).status_code in (401, 404), path
    assert server.http.get(STATE_PATH).status_code == 401
    assert server.http.get("/v1/models").status_code == 401
    assert server.http.get(STATE_PATH, headers={"Authorization": "Bearer secret"}).status_code == 200


def test_it_can_be_left_out(make_server: MakeServer) -> None:
    server = make_server(disable_playground=True)
    for path in [*PAGE_PATHS, STATE_PATH]:
        assert server.http.get(path).status_code == 404
    assert server.http.get("/v1/models").status_code == 200


def test_it_is_there_while_the_model_loads(make_server: MakeServer) -> None:
    server = make_server(start=False)
    assert server.http.get("/").status_code == 200
    found = server.http.get(STATE_PATH).json()
    assert found["state"] == "loading" and "picture" not in found
    server.call(server.llm.start)
    assert server.http.get(STATE_PATH).json()["state"] == "ready"


def test_polls_are_not_in_the_log(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "quire.access")
    server.http.get(STATE_PATH)
    server.http.get(page_path("main.js"))
    server.do(lambda: None)  # the lines are written behind the answers
    assert "main.js" in caplog.text and STATE_PATH not in caplog.text


# ---- state -----------------------------------------------------------------------------------------------------------


def test_the_engine_is_described(held: LiveServer, core: EngineCore, ask: Ask) -> None:
    ask(prompt=list(range(20, 30)), n=3, request_id="mine")
    step(held, core, 3, num_requests=1)
    found = state(held)
    assert (found["state"], found["model"]) == ("ready", "fake")
    picture = found["picture"]
    assert picture["block_size"] == 4
    assert picture["queues"] == {"running": 1, "waiting": 0, "swapped": 0, "loading": 0}
    (request,) = picture["requests"]
    assert request["id"] == "cmpl-mine"
    assert (request["queue"], request["sequences"], request["prompt_tokens"]) == ("running", 3, 10)
    assert (request["tokens_generated"], request["max_tokens"], request["blocks"]) == (9, 90, 5)
    (device,) = picture["maps"]
    assert device["counts"] == {"used": 5, "cached": 0, "free": 35, "loading": 0, "shared": 2}
    assert device["states"].count("3") == 2 and device["states"].count("1") == 3
    assert device["sets"] == [[], [0]]
    assert "token_ids" not in str(found) and "tenant" not in str(found)


def test_other_keys_requests_have_no_names(held: LiveServer, core: EngineCore, ask: Ask) -> None:
    ask("a", prompt=[20] * 9, request_id="secret-of-a")
    held.wait_until(lambda: len(core.scheduler.requests) == 1)
    ask("b", prompt=[21] * 9, request_id="secret-of-b", user="somebody")
    step(held, core, 1, num_requests=2)
    for key, own in (("a", "cmpl-secret-of-a"), ("b", "cmpl-secret-of-b")):
        found = state(held, key)
        assert sorted(str(row["id"]) for row in found["picture"]["requests"]) == sorted(["None", own])
        assert "secret-of-" + ("b" if key == "a" else "a") not in str(found)
        assert "somebody" not in str(found)


def test_one_key_sees_everything(make_server: MakeServer) -> None:
    core = make_core()
    server = make_server(llm={"engine": core}, api_key=["a"])
    with asking(server) as ask:
        ask(prompt=[20] * 9, request_id="named", max_tokens=2)
        step(server, core, 1, num_requests=1)
        assert [row["id"] for row in state(server)["picture"]["requests"]] == ["cmpl-named"]


def test_who_has_the_picture_does_not_get_it_again(held: LiveServer) -> None:
    first = state(held)
    again = state(held, seen=first["picture_number"])
    assert "picture" in first and "picture" not in again
    assert again["picture_number"] == first["picture_number"] and again["picture_age"] >= 0


def test_the_engine_is_asked_once_for_all(held: LiveServer, core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = core.call

    def call(method: str, arguments: Any = None) -> dict[str, Any]:
        calls.append(method)
        return original(method, arguments)

    monkeypatch.setattr(core, "call", call)
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(lambda _: state(held), range(48)))
    assert {item["picture_number"] for item in found} == {found[0]["picture_number"]}
    assert len(calls) == 1  # and nothing has changed since, so there was no second one


def test_an_engine_that_does_not_answer_holds_up_nobody(held: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = asyncio.Event()

    async def call(method: str, **arguments: Any) -> dict[str, Any]:
        await answered.wait()
        raise EngineDeadError("gone")

    monkeypatch.setattr("quire.server.playground.WAIT_SECONDS", 0.05)
    monkeypatch.setattr(held.llm, "call", call)
    for _ in range(2):
        found = state(held)
        assert found["state"] == "ready" and "picture" not in found
    held.do(answered.set)


def test_an_engine_that_died_for_good_has_failed(make_server: MakeServer) -> None:
    server = make_server()
    server.do(server.fake_client.die)
    server.wait_until(lambda: server.llm.errored)
    found = server.http.get(STATE_PATH).json()
    assert found["state"] == "failed" and "picture" not in found


@pytest.mark.parametrize(
    ("owner", "name", "value", "word", "drawn"),
    [
        (AsyncLLM, "recovering", True, "restarting", False),
        (AsyncLLM, "stalled", True, "stalled", True),
        (AsyncLLM, "is_sleeping", True, "sleeping", False),
        (ServedModel, "status", "unloaded", "unloaded", True),
        (ServerContext, "draining", True, "draining", True),
    ],
)
def test_it_says_in_a_word_how_the_engine_is(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, value: Any, word: str, drawn: bool
) -> None:
    server = make_server(llm={"engine": make_core()})
    assert server.http.get(STATE_PATH).json()["state"] == "ready"
    if owner is ServerContext:
        monkeypatch.setattr(server.context, name, value)
    else:
        monkeypatch.setattr(owner, name, property(lambda _: value))
    found = server.http.get(STATE_PATH).json()
    assert (found["state"], "picture" in found) == (word, drawn)


def test_a_large_pool_is_a_small_answer(make_server: MakeServer) -> None:
    core = make_core(num_gpu_blocks_override=50_000)
    server = make_server(llm={"engine": core})
    answer = server.http.get(STATE_PATH)
    (device,) = answer.json()["picture"]["maps"]
    assert device["num_blocks"] == 50_000 and len(device["states"]) <= 16384
    assert len(answer.content) < 50_000


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("seen=x", "seen"),
        ("since=-1", "since"),
        ("since=" + "9" * 400, "since"),
        ("look=1", "look"),
        ("model=no", "model"),
    ],
)
def test_bad_queries_are_refused_by_name(server: LiveServer, query: str, param: str) -> None:
    answer = server.http.get(f"{STATE_PATH}?{query}")
    assert answer.status_code == (404 if param == "model" else 400)
    assert answer.json()["error"]["param"] == param


def test_the_last_minutes_are_told(make_server: MakeServer) -> None:
    server = make_server(llm={"reply_text": "abc"})
    answer = server.http.post("/v1/completions", json={"model": "fake", "prompt": "hello", "max_tokens": 20})
    usage = answer.json()["usage"]
    history = server.http.get(STATE_PATH).json()["history"]
    seconds = history["seconds"]
    assert history["length"] == HISTORY_SECONDS
    assert sum(row[1] for row in seconds) == usage["prompt_tokens"]
    assert sum(row[2] for row in seconds) == usage["completion_tokens"]
    assert sum(row[3] for row in seconds) == 1
    later = server.http.get(STATE_PATH, params={"since": history["now"] + 1000}).json()["history"]
    assert later["seconds"] == []


# ---- the last minutes ------------------------------------------------------------------------------------------------


def test_seconds_are_added_up_and_forgotten() -> None:
    now = [1000.2]
    past = History(lambda: now[0])
    stats = SchedulerStats(num_running=2, num_blocks=10, num_free_blocks=5)
    past.on_step(stats, 7, 2)
    past.on_first_token(0.5)
    past.on_first_token(0.1)
    now[0] = 1000.9
    past.on_step(stats, 0, 2)
    past.on_next_token(0.01)
    now[0] = 1004.0
    past.on_next_token(0.03)
    first, second = past.since(0)
    assert (first.number, first.prompt_tokens, first.generated_tokens) == (1000, 7, 4)
    assert (first.num_first, first.max_first, first.num_next, first.kv_usage) == (2, 0.5, 1, 0.5)
    assert first.sum_first == pytest.approx(0.6)
    assert (second.number, second.num_next) == (1004, 1)
    assert [item.number for item in past.since(1001)] == [1004]
    for number in range(2 * HISTORY_SECONDS):
        now[0] = 2000.0 + number
        past.on_next_token(0.01)
    assert len(past.since(0)) <= HISTORY_SECONDS
    now[0] += 10 * HISTORY_SECONDS
    assert past.since(0) == []
