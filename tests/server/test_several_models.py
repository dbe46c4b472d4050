"""Several models over HTTP: named by requests, loaded by them, listed as they are."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from quire.errors import ModelError
from tests.server.several import Several, call_and_leave, complete


def test_each_request_reaches_its_model() -> None:
    several = Several("abc", max_loaded_models=2)

    async def work(http: httpx.AsyncClient) -> None:
        for name in "abcacb":
            answer = (await complete(http, name)).json()
            assert (answer["model"], answer["choices"][0]["text"]) == (name, f"I am {name}.")
        chat = {"model": "a", "messages": [{"role": "user", "content": "hello"}]}
        answer = (await http.post("/v1/chat/completions", json=chat)).json()
        assert answer["choices"][0]["message"]["content"] == "I am a."
        tokens = await http.post("/tokenize", json={"model": "c", "prompt": "x"})
        assert tokens.status_code == 200

    several.run(work)
    assert [model.num_users for model in several.pool.models] == [0, 0, 0]


def test_requests_to_all_of_them_at_once_all_succeed() -> None:
    several = Several("abcd", pinned="a", max_loaded_models=2)

    async def work(http: httpx.AsyncClient) -> list[httpx.Response]:
        names = [name for _ in range(15) for name in "dacb"]
        answers = await asyncio.gather(
            *[complete(http, name, stream=index % 3 == 0) for index, name in enumerate(names)]
        )
        for name, answer in zip(names, answers, strict=True):
            assert answer.status_code == 200
            assert f"I am {name}." in answer.text or answer.headers["content-type"].startswith("text/event-stream")
        assert len(several.clients["a"]) == 1, "the pinned one was loaded once"
        return answers

    several.run(work)
    assert [model.num_users for model in several.pool.models] == [0, 0, 0, 0]
    assert all(client.closed for clients in several.clients.values() for client in clients)


def test_the_list_says_how_each_model_is() -> None:
    several = Several("abc", at_start="a", max_loaded_models=2)

    async def work(http: httpx.AsyncClient) -> None:
        listed = (await http.get("/v1/models")).json()["data"]
        assert {item["id"]: item["status"] for item in listed} == {
            "a": {"value": "loaded"},
            "b": {"value": "unloaded"},
            "c": {"value": "unloaded"},
        }
        assert [(item["root"], item["parent"], item["object"]) for item in listed] == [
            (name, None, "model") for name in "abc"
        ]
        assert [item["max_model_len"] for item in listed] == [256, 77, 77], "of those not loaded, what was predicted"
        await complete(http, "b")
        assert (await http.get("/v1/models/b")).json()["status"] == {"value": "loaded"}
        assert (await http.get("/v1/models/d")).status_code == 404

    several.run(work)


def test_an_unknown_model_is_told_which_there_are() -> None:
    several = Several("abc")

    async def work(http: httpx.AsyncClient) -> None:
        answer = await complete(http, "nobody")
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert error["message"].endswith("this server has a, b, c")
        assert set(several.status().values()) == {"unloaded"}

    several.run(work)


def test_while_models_are_loaded_that_must_be_there_everybody_is_told_so() -> None:
    several = Several("ab", at_start="a")

    async def main() -> None:
        transport = httpx.ASGITransport(several.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            answer = await complete(http, "b")
            assert answer.status_code == 503
            assert "loaded" in answer.json()["error"]["message"]
            assert int(answer.headers["retry-after"]) >= 1
            assert (await http.get("/health")).json() == {"status": "loading"}
            await several.pool.start()
            assert (await http.get("/health")).json() == {"status": "ok"}
            assert (await complete(http, "b")).status_code == 200
        await several.pool.close()

    asyncio.run(main())


def test_a_model_that_cannot_be_loaded_leaves_the_others_alone() -> None:
    several = Several("ab")
    broken = several.clients["a"][0]

    async def fail() -> None:
        raise ModelError("/models/a/model.safetensors: tensor lm_head is missing")

    broken.start = fail  # type: ignore[method-assign,assignment]

    async def work(http: httpx.AsyncClient) -> None:
        answers = await asyncio.gather(*[complete(http, name) for name in "aabb"])
        assert [answer.status_code for answer in answers] == [503, 503, 200, 200]
        error = answers[0].json()["error"]
        assert error["message"] == "the model a cannot be loaded: model.safetensors: tensor lm_head is missing"
        assert (error["type"], error["code"]) == ("server_error", "model_unavailable")
        assert answers[0].headers["retry-after"] == "1"
        assert several.status() == {"a": "failed", "b": "loaded"}
        assert (await http.get("/health")).json() == {"status": "ok"}

    several.run(work)


def test_the_death_of_one_engine_is_no_end_of_the_server() -> None:
    several = Several("ab", at_start="ab", max_engine_restarts=0)

    async def work(http: httpx.AsyncClient) -> None:
        several.clients["a"][0].die()
        while several.status()["a"] != "failed":  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
        assert (await complete(http, "b")).status_code == 200
        assert (await http.get("/livez")).status_code == 200
        assert (await complete(http, "a")).status_code == 503, "it died as soon as it was loaded"
        several.pool.find("a").retry_at = 0.0  # as if that were a while ago
        answer = await complete(http, "a")
        assert answer.json()["choices"][0]["text"] == "I am a."

    several.run(work)


def test_a_client_that_goes_away_while_a_model_is_loaded_is_forgotten() -> None:
    several = Several("ab")
    client = several.clients["a"][0]
    loading, go_on = asyncio.Event(), asyncio.Event()
    start = client.start

    async def slow() -> object:
        loading.set()
        await go_on.wait()
        return await start()

    client.start = slow  # type: ignore[method-assign,assignment]

    async def work(http: httpx.AsyncClient) -> None:
        left = asyncio.Event()
        call = asyncio.ensure_future(call_and_leave(several.app, {"model": "a", "prompt": "x"}, left))
        await loading.wait()
        model = several.pool.find("a")
        assert len(model.waiters) == 1
        left.set()
        sent = await call
        assert sent[0]["status"] == 499
        assert not model.waiters
        go_on.set()
        assert (await complete(http, "a")).status_code == 200
        assert client.engine.added[0].prompt_token_ids, "only the second request came so far"
        assert len(client.engine.added) == 1

    several.run(work)


def test_nobody_waits_for_a_model_longer_than_the_answer_may_take() -> None:
    several = Several("ab", request_timeout=0.05)
    several.clients["a"][0].start = asyncio.Event().wait  # type: ignore[method-assign,assignment]

    async def work(http: httpx.AsyncClient) -> None:
        answer = await complete(http, "a")
        assert answer.status_code == 504
        assert several.status()["a"] == "loading", "others may want it"

    several.run(work)


def test_metrics_are_of_each_model_and_go_on_after_it_was_loaded_again() -> None:
    several = Several("abc", max_loaded_models=1)

    async def work(http: httpx.AsyncClient) -> None:
        for name in "aba":
            await complete(http, name)
        text = (await http.get("/metrics")).text
        assert 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="a"} 2.0' in text
        assert 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="b"} 1.0' in text

    several.run(work)


@pytest.mark.parametrize("name", ["sleep", "unload"])
def test_an_idle_model_gives_up_memory_and_comes_back(name: str) -> None:
    several = Several("ab", model_idle_timeout=1e-6, model_idle_action=name)

    async def work(http: httpx.AsyncClient) -> None:
        first = (await complete(http, "a")).json()["choices"]
        several.pool.sweep()
        while several.status()["a"] == "loaded" or several.pool.find("a").task is not None:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
        assert several.status()["a"] == ("sleeping" if name == "sleep" else "unloaded")
        metric = (await http.get("/metrics")).text
        if name == "sleep":
            assert 'vllm:engine_sleep_state{engine="0",model_name="a",sleep_state="weights_offloaded"} 1.0' in metric
        assert (await complete(http, "a")).json()["choices"] == first

    several.run(work)
