"""The line of each request in the log, and what is logged of requests only if asked for."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from quire import logs
from quire.server.access_log import unlogged_paths
from tests.helpers.live_server import LiveServer, MakeServer

BODY = {"model": "fake", "prompt": "a secret", "max_tokens": 2, "ignore_eos": True}


@pytest.fixture(autouse=True)
def _all_of_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def records(server: LiveServer, caplog: pytest.LogCaptureFixture, name: str) -> list[logging.LogRecord]:
    server.wait_until(lambda: server.context.num_open == 0)
    return [record for record in caplog.records if record.name == name]


def fields(record: logging.LogRecord) -> dict[str, Any]:
    found: dict[str, Any] = record.__dict__["fields"]
    return found


def test_what_a_line_has(make_server: MakeServer, caplog: pytest.LogCaptureFixture) -> None:
    server = make_server(api_key=["sk-very-secret"])
    headers = {"authorization": "Bearer sk-very-secret", "x-request-id": "mine"}
    answer = server.http.post("/v1/completions", json=BODY, headers=headers).json()
    [record] = records(server, caplog, "quire.access")
    told = fields(record)
    assert told.pop("ms") > 0
    assert told == {
        "request_id": "mine",
        "client": "127.0.0.1",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "key": "key-0",
        "response_id": answer["id"],
        "prompt_tokens": 8,
        "completion_tokens": 2,
    }
    assert "sk-very-secret" not in caplog.text and "a secret" not in caplog.text
    assert record.getMessage().endswith("ms mine key=key-0 tokens=8+2")


def test_a_trace_is_named(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    for parent in (f"00-{trace}-00f067aa0ba902b7-01", f"00-{trace}-00f067aa0ba902b7-01-more", "forged"):
        server.http.get("/v1/models", headers={"traceparent": parent})
    told = [fields(record).get("trace_id") for record in records(server, caplog, "quire.access")]
    assert told == [trace, None, None]


def test_paths_can_be_left_out(make_server: MakeServer, caplog: pytest.LogCaptureFixture) -> None:
    server = make_server(disable_access_log_for=["/version,/nowhere", "/tokenize"])
    for path in ("/version", "/nowhere", "/tokenize", "/health", "/metrics", "/v1/models"):
        server.http.get(path)
    assert [fields(record)["path"] for record in records(server, caplog, "quire.access")] == ["/v1/models"]
    assert unlogged_paths(["/a,/b", "", "/c,"], ["/d"]) == {"/a", "/b", "/c", "/d"}


def test_prompts_are_logged_only_if_asked_for(make_server: MakeServer, caplog: pytest.LogCaptureFixture) -> None:
    server = make_server()
    server.http.post("/v1/completions", json=BODY)
    assert records(server, caplog, "quire.requests") == []

    server = make_server(enable_log_requests=True, max_log_len=3)
    server.http.post("/v1/completions", json={**BODY, "temperature": 0.5})
    [record] = records(server, caplog, "quire.requests")
    told = fields(record)
    assert told["prompt"] == "a s" and len(told["prompt_token_ids"]) == 3 and told["num_prompt_tokens"] == 8
    assert '"temperature":0.5' in told["params"]
    assert "secret" not in record.getMessage()

    server.http.post("/v1/completions", json={**BODY, "prompt": [5, 6, 7, 8]})
    [_, record] = records(server, caplog, "quire.requests")
    assert fields(record)["prompt"] is None and fields(record)["prompt_token_ids"] == [5, 6, 7]


def test_what_is_logged_meanwhile_has_the_requests_id(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str | None] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            """Note whose it is."""
            seen.append(logs.request_id.get())

    handler = Handler()
    logging.getLogger("quire.access").addHandler(handler)
    try:
        server.http.get("/v1/models", headers={"x-request-id": "one"})
        server.http.get("/v1/models", headers={"x-request-id": "bad id"})
        server.wait_until(lambda: len(seen) == 2)  # a line is written after its answer has left
    finally:
        logging.getLogger("quire.access").removeHandler(handler)
    assert seen[0] == "one"
    assert seen[1] not in (None, "one", "bad id")
