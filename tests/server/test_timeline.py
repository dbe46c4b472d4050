"""GET /requests and /requests/{id}: what happened to a request, and why it was slow; over a real scheduler."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.server.timeline import MAX_FINISHED, MAX_FINISHED_PROMPTS, RequestRecord, RequestRecords, explain_latency
from tests.helpers.live_server import LiveServer, MakeServer
from tests.server.steps import make_core


def ask(server: LiveServer, prompt: str, max_tokens: int, headers: dict[str, str] | None = None, **body: Any) -> Any:
    body = {"model": "fake", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **body}
    answer = server.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def timeline_of(server: LiveServer, name: str, **headers: str) -> Any:
    answer = server.http.get(f"/requests/{name}", headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_preemption_is_named(make_server: MakeServer) -> None:
    core = make_core(num_gpu_blocks_override=14, enable_prefix_caching=False)
    server = make_server(llm={"engine": core})
    two = ask(server, ["abcdefgh" * 2, "ABCDEFGH" * 2], 20, headers={"x-request-id": "two-at-once"})
    timeline = timeline_of(server, "two-at-once")
    assert timeline["id"] == two.json()["id"]
    [prompt] = [prompt for prompt in timeline["prompts"] if prompt["preemptions"]]
    [event] = [event for event in prompt["events"] if event["event"] == "preempted"]
    assert event["how"] == "recompute"
    assert 0 < event["tokens"] < 20
    assert event["recomputed"] == 16 + event["tokens"]
    assert 0 <= event["at"] <= event["resumed"] <= prompt["finished_at"]
    [sentence] = [line for line in timeline["why"] if line.startswith("preempted once (recompute) after ")]
    assert f"after {event['tokens']} token" in sentence
    assert timeline["prompt_tokens"] == 32 and timeline["completion_tokens"] == 40


def test_the_parts_add_up_and_every_step_is_counted(make_server: MakeServer) -> None:
    server = make_server(llm={"engine": make_core(max_num_batched_tokens=16, max_num_seqs=4)})
    answer = ask(server, "x" * 40, 8).json()
    timeline = timeline_of(server, answer["id"])
    [prompt] = timeline["prompts"]
    parts = prompt["queue_seconds"] + prompt["prefill_seconds"] + prompt["decode_seconds"]
    end = prompt["finished_at"] - prompt["arrived_at"]
    assert parts == pytest.approx(end, rel=0.05, abs=0.005)
    assert timeline["state"] == "finished" and timeline["engine_restarts"] == 0
    assert prompt["complete"]
    assert [chunk["tokens"] for chunk in prompt["chunks"]] == [16, 16, 8]
    assert prompt["steps"]["count"] == 3 + 7
    assert prompt["steps"]["p50"] <= prompt["steps"]["p99"] <= prompt["steps"]["max"]
    assert len(prompt["slowest_steps"]) == 5
    assert prompt["finish_reasons"] == ["length"]
    assert prompt["first_token_at"] <= prompt["finished_at"]


def test_what_the_cache_gave_is_told(make_server: MakeServer) -> None:
    server = make_server(llm={"engine": make_core(enable_prefix_caching=True)})
    ask(server, "abcdefghijklmnop", 2)
    timeline = timeline_of(server, ask(server, "abcdefghijklxyz", 2).json()["id"])
    [scheduled] = timeline["prompts"][0]["events"]
    assert scheduled["cached"]["device"] == timeline["cached_tokens"] == 12


def test_only_the_key_that_made_a_request_sees_it(make_server: MakeServer) -> None:
    server = make_server(api_key=["a", "b"])
    mine, theirs = {"authorization": "Bearer a"}, {"authorization": "Bearer b"}
    answer = ask(server, "abc", 2, headers={**mine, "x-request-id": "mine"})
    for name in (answer.json()["id"], "mine"):
        assert server.http.get(f"/requests/{name}", headers=mine).status_code == 200
        refused = server.http.get(f"/requests/{name}", headers=theirs)
        unknown = server.http.get("/requests/never-was", headers=theirs)
        assert refused.status_code == unknown.status_code == 404
        assert refused.json()["error"]["code"] == unknown.json()["error"]["code"] == "request_not_found"
        assert server.http.get(f"/requests/{name}").status_code == 401
    server.do(server.fake_client.hold)
    with _Held(server, mine):
        assert [item["state"] for item in server.http.get("/requests", headers=mine).json()["data"]] == ["waiting"]
        assert server.http.get("/requests", headers=theirs).json()["data"] == []


class _Held:
    """A request that waits, on a connection of its own."""

    def __init__(self, server: LiveServer, headers: dict[str, str]) -> None:
        body = b'{"model": "fake", "prompt": "abc"}'
        lines = [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join(
            [
                "POST /v1/completions HTTP/1.1",
                "host: x",
                "content-type: application/json",
                f"content-length: {len(body)}",
                *lines,
            ]
        )
        self.server = server
        self.connection = server.connect()
        self.connection.sendall(head.encode() + b"\r\nconnection: close\r\n\r\n" + body)

    def __enter__(self) -> None:
        self.server.wait_until(lambda: bool(self.server.engine.live))

    def __exit__(self, *exc: object) -> None:
        self.server.do(self.server.fake_client.resume)
        assert self.connection.recv(100).startswith(b"HTTP/1.1 200")
        self.connection.close()


def test_live_requests_are_listed_with_what_they_have(make_server: MakeServer) -> None:
    server = make_server()
    assert server.http.get("/requests").json() == {"object": "list", "data": [], "has_more": False}
    server.do(server.fake_client.hold)
    with _Held(server, {"x-request-id": "held"}):
        [item] = server.http.get("/requests").json()["data"]
        assert item["request_id"] == "held" and item["prompt_tokens"] == 3 and item["completion_tokens"] == 0
        assert item["seconds"] >= 0
        timeline = timeline_of(server, "held")
        assert timeline["state"] == "waiting" and timeline["prompts"][0]["first_token_at"] is None
    server.wait_until(lambda: not server.context.jobs)
    assert timeline_of(server, "held")["state"] == "finished"
    assert server.http.get("/requests").json()["data"] == []


def test_an_engine_that_knows_nothing_leaves_what_the_front_knows(server: LiveServer) -> None:
    timeline = timeline_of(server, ask(server, "abc", 4).json()["id"])
    [prompt] = timeline["prompts"]
    assert not prompt["complete"] and "events" not in prompt
    assert prompt["completion_tokens"] == 4
    assert timeline["why"]


def test_chats_are_found_by_the_id_the_client_chose(server: LiveServer) -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "request_id": "my-chat", "max_tokens": 3}
    answer = server.http.post("/v1/chat/completions", json=body).json()
    assert timeline_of(server, "my-chat") == timeline_of(server, answer["id"])


def test_only_the_last_ones_are_kept() -> None:
    class Named:
        def __init__(self, number: int, num_prompts: int = 1) -> None:
            self.response_id = str(number)
            self.names = {(None, str(number)), (None, "shared")}
            self.timings = [None] * num_prompts

        def end(self) -> None:
            """Nothing to keep."""

        async def fetch(self) -> None:
            """Nothing to fetch."""

    records = RequestRecords()
    records._fetched.extend([float("inf")] * 20)  # no fetching without an event loop
    for number in range(MAX_FINISHED + 5):
        named: Any = Named(number)
        records.begin(named)
        records.end(named)
    assert len(records._by_name) == MAX_FINISHED + 1
    shared = records.find(None, "shared")
    assert shared is not None and shared.response_id == str(MAX_FINISHED + 4)
    for number in range(200):
        many: Any = Named(number, num_prompts=256)
        records.begin(many)
        records.end(many)
        assert records.find(None, str(number)) is many
    kept = list(records._finished)
    assert sum([len(named.timings) for named in kept]) == records._num_prompts <= MAX_FINISHED_PROMPTS
    assert len(kept) == MAX_FINISHED_PROMPTS // 256


def test_restarts_meanwhile_are_told() -> None:
    class Engine:
        num_restarts = 3
        ready = False

    engine: Any = Engine()
    record = RequestRecord("resp", "req", None, None, "fake", engine, [], {})
    engine.num_restarts = 5
    assert record.timeline({})["engine_restarts"] == 2
    record.end()
    engine.num_restarts = 9
    timeline = record.timeline({})
    assert timeline["engine_restarts"] == 2
    assert timeline["why"] == ["the engine was restarted 2 times; what it had computed was computed again"]
    assert asyncio.run(record.fetch()) == {}


def prompt_of(**changes: Any) -> dict[str, Any]:
    return {
        "arrived_at": 0.0,
        "queue_seconds": 0.001,
        "prefill_seconds": 0.1,
        "decode_seconds": 1.0,
        "mean_token_seconds": 0.01,
        "prompt_tokens": 50,
        "cached_tokens": 0,
        "completion_tokens": 101,
        "preemptions": 0,
        **changes,
    }


def test_the_sentences() -> None:
    assert explain_latency([prompt_of()], 1.101, 0) == [
        "generating 101 tokens took 1.0 s, 10.0 ms each",
        "computing its 50 prompt tokens took 100 ms",
    ]
    waited = {"event": "scheduled", "waited_for": "kv_cache"}
    lost = {"event": "preempted", "how": "swap", "tokens": 40, "seconds": 0.8, "recomputed": 0}
    timeline = explain_latency([prompt_of(queue_seconds=3.2, events=[waited, lost], preemptions=1)], 5.1, 1)
    assert timeline == [
        "the engine was restarted once; what it had computed was computed again",
        "waited 3.2 s for room in the KV cache",
        "generating 101 tokens took 1.0 s, 10.0 ms each",
        "preempted once (swap) after 40 tokens: 800 ms",
    ]
    again = [{**lost, "how": "recompute", "tokens": count, "recomputed": 60 + count} for count in (1, 40)]
    assert explain_latency([prompt_of(events=again, preemptions=2)], 1.1, 0)[0] == (
        "preempted 2 times (recompute) after 1, 40 tokens: 1.6 s, of which some to compute 161 tokens again"
    )
    gone = {"event": "preempted", "how": "swap", "tokens": 1}
    assert explain_latency([prompt_of(events=[gone], preemptions=1)], 1.1, 0)[-1] == (
        "preempted once (swap) after 1 token: not back yet"
    )
    slow = {"seconds": 0.5, "own_tokens": 1, "prompt_tokens": 2000}
    steps = {"p50": 0.01, "mean_sequences": 13.0}
    [decode, _] = explain_latency([prompt_of(steps=steps, slowest_steps=[slow])], 1.1, 0)
    assert decode == (
        "generating 101 tokens took 1.0 s, 10.0 ms each, beside 12 other sequences on average; the slowest step took "
        "500 ms, for it computed 2000 prompt tokens of others"
    )
    assert explain_latency([prompt_of(preemptions=2)], 1.1, 0)[-1] == "preempted 2 times; when is not known any more"
