"""Usage that adds up, and times that do."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from starlette.requests import Request

from quire.frontend.stats import FinishedRequest
from quire.server.http import BoundedHttpProtocol
from tests.helpers.fake_engine import fake_async_llm
from tests.helpers.live_server import LiveServer, MakeServer, server_config
from tests.server.streams import stream

NAMES = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "ignore_eos": True}
TEXT = {"model": "fake", "prompt": "abc", "max_tokens": 5, "ignore_eos": True}
ROUTES = [("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_an_answer_tells_its_times_if_asked_to(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    answer = server.http.post(path, json={**body, "include_metrics": True})
    metrics = answer.json()["metrics"]
    assert set(metrics) == NAMES
    assert 0 <= metrics["queue_time_ms"] <= metrics["time_to_first_token_ms"]
    assert metrics["mean_itl_ms"] * 4 == pytest.approx(metrics["generation_time_ms"], abs=0.01)
    total = metrics["time_to_first_token_ms"] + metrics["generation_time_ms"]
    assert total <= float(answer.headers["openai-processing-ms"]) + 1
    assert "metrics" not in server.http.post(path, json=body).json()


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_stream_tells_them_in_its_last_chunk(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    *others, last = stream(server, path, {**body, "include_metrics": True})
    assert last["choices"] == [] and set(last["metrics"]) == NAMES and "usage" not in last
    assert all("metrics" not in chunk and chunk["choices"] for chunk in others)
    last = stream(server, path, {**body, "include_metrics": True, "stream_options": {"include_usage": True}})[-1]
    assert set(last["metrics"]) == NAMES and last["usage"]["completion_tokens"] == 5
    assert stream(server, path, body)[-1]["choices"]


def test_several_sequences_have_no_times_of_their_own(server: LiveServer) -> None:
    for more in ({"n": 2}, {"prompt": ["a", "b"]}):
        answer = server.http.post("/v1/completions", json={**TEXT, **more, "include_metrics": True})
        assert answer.status_code == 200 and "metrics" not in answer.json()


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("more", [{}, {"n": 3}, {"echo": True}, {"n": 2, "best_of": 4}, {"max_tokens": 1}])
def test_usage_adds_up(server: LiveServer, path: str, body: dict[str, Any], more: dict[str, Any]) -> None:
    if path != "/v1/completions" and not more.keys() <= {"n", "max_tokens"}:
        more = {}
    body = {**body, **more}
    usage = server.http.post(path, json=body).json()["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
    assert usage["completion_tokens"] == body["max_tokens"] * body.get("best_of", body.get("n", 1))
    if "best_of" not in body:
        streamed = stream(server, path, {**body, "stream_options": {"include_usage": True}})[-1]["usage"]
        assert streamed == usage


def test_only_whole_answers_say_how_long_they_took(server: LiveServer) -> None:
    assert float(server.http.post("/v1/completions", json=TEXT).headers["openai-processing-ms"]) > 0
    assert "openai-processing-ms" not in server.http.post("/v1/completions", json={**TEXT, "stream": True}).headers
    assert "openai-processing-ms" not in server.http.get("/v1/models").headers


class Listener:
    """Keeps what it is told of finished requests."""

    def __init__(self) -> None:
        self.finished: list[FinishedRequest] = []

    def on_step(self, *args: object) -> None:
        """Not of interest."""

    on_first_token = on_next_token = on_step

    def on_finished(self, request: FinishedRequest) -> None:
        """Keep it."""
        self.finished.append(request)


def test_the_parts_are_the_whole() -> None:
    listener = Listener()

    async def run() -> None:
        llm, _ = fake_async_llm(config=server_config(), listeners=[listener])
        async with llm:
            for number in range(20):
                async for _ in await llm.submit("abc" * number + "x"):
                    pass

    asyncio.run(run())
    assert len(listener.finished) == 20
    for request in listener.finished:
        times = request.metrics
        assert times.queue_seconds is not None and times.prefill_seconds is not None
        assert times.decode_seconds is not None
        parts = times.queue_seconds + times.prefill_seconds + times.decode_seconds
        assert parts == pytest.approx(times.e2e_seconds, abs=1e-6)
        assert request.stage == "decode"


def test_timelines_and_usage_agree(make_server: MakeServer) -> None:
    server = make_server()
    answer = server.http.post("/v1/completions", json={**TEXT, "n": 2}).json()
    told = server.http.get(f"/requests/{answer['id']}").json()
    assert told["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert told["completion_tokens"] == answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_request_is_freed_as_it_ends(server: LiveServer, streamed: bool) -> None:
    """Garbage of many requests would stop all streams for a tenth of a second every few seconds."""
    chat = {"model": "fake", "messages": CHAT["messages"], "max_tokens": 5}
    response = {"model": "fake", "input": "hi", "max_output_tokens": 5}
    gc.collect()
    gc.disable()
    try:
        for path, body in (*ROUTES, ("/v1/responses", response), ("/v1/messages", chat)):
            answer = server.http.post(path, json={**body, "stream": streamed}, headers={"connection": "close"})
            assert answer.status_code == 200, answer.text
        server.http.post("/v1/completions", json={"model": "none"}, headers={"connection": "close"})
        server.wait_until(lambda: not server.connections)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert not [item for item in gc.garbage if isinstance(item, Request | BoundedHttpProtocol)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
