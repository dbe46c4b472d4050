"""Every error has the shape that the clients of its path understand, wherever it is raised."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from quire.errors import OverloadedError
from quire.server.errors import Family, error_body, family_of
from quire.server.paths import ENGINE_PATHS
from tests.helpers.live_server import LiveServer, MakeServer
from tests.server.checks import COMPLETIONS, HI, JSON, check_refused
from tests.server.sockets import read_until, request_bytes

MESSAGES, COUNT, OLLAMA_CHAT, CHAT = "/v1/messages", "/v1/messages/count_tokens", "/api/chat", "/v1/chat/completions"


def body_of(path: str) -> dict[str, Any]:
    """Return a good request."""
    said: dict[str, Any] = {"prompt": "a", "ignore_eos": True} if path == COMPLETIONS else {"messages": HI}
    return {"model": "fake", **said, **({"max_tokens": 3} if path == MESSAGES else {})}


PATHS = (MESSAGES, COUNT, OLLAMA_CHAT, CHAT)


@pytest.mark.parametrize(
    ("path", "family"),
    [
        (MESSAGES, Family.ANTHROPIC),
        (COUNT, Family.ANTHROPIC),
        ("/v1/messages/batches", Family.ANTHROPIC),
        ("/v1/messagesx", Family.OPENAI),
        ("/api/anything", Family.OLLAMA),
        ("/api", Family.OPENAI),
        ("/apix/chat", Family.OPENAI),
        (CHAT, Family.OPENAI),
        ("/", Family.OPENAI),
    ],
)
def test_the_path_tells_the_family(path: str, family: Family) -> None:
    assert family_of(path) is family


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", JSON, 400),
        (b"[]", JSON, 400),
        (b"[" * 100_000, JSON, 400),
        (b"\xff\xfe", JSON, 400),
        (b'{"temperature": NaN}', JSON, 400),
        (b"{}", JSON, 400),
        (b"{}", {"content-type": "text/plain", "sec-fetch-site": "cross-site"}, 415),
        (b"{}", {**JSON, "content-encoding": "gzip"}, 415),
        (b" " * (2**20 + 1), JSON, 413),
        (b"{}", {**JSON, **{f"x-{number}": "1" for number in range(120)}}, 431),
    ],
)
def test_errors_of_the_protocol(
    server: LiveServer, path: str, content: bytes, headers: dict[str, str], status: int
) -> None:
    check_refused(server.http.post(path, content=content, headers=headers), status=status)


@pytest.mark.parametrize("path", ["/v1/messages/batches/x/nope", "/api/nope", "/v1/nope"])
def test_unknown_paths(server: LiveServer, path: str) -> None:
    check_refused(server.http.get(path), path, status=404)


@pytest.mark.parametrize("path", PATHS)
def test_methods_that_are_not_allowed(server: LiveServer, path: str) -> None:
    response = server.http.get(path)
    assert response.headers["allow"] == "POST"
    check_refused(response, status=405)


@pytest.mark.parametrize("path", PATHS)
def test_keys(make_server: MakeServer, path: str) -> None:
    live = make_server(api_key=["secret"])
    check_refused(live.http.post(path, json={}), status=401)
    for headers in ({"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}, {"authorization": "secret"}):
        check_refused(live.http.post(path, json={}, headers=headers), status=401)
    for headers in ({"authorization": "Bearer secret"}, {"x-api-key": "secret"}):
        check_refused(live.http.post(path, json={}, headers=headers), status=400)


@pytest.mark.parametrize("path", PATHS)
def test_a_server_that_loads_or_goes_away(make_server: MakeServer, path: str) -> None:
    loading = make_server(start=False)
    response = loading.http.post(path, json={})
    assert int(response.headers["retry-after"]) > 0
    check_refused(response, status=503)
    live = make_server()
    live.context.draining = True
    check_refused(live.http.post(path, json={}), status=503)


def test_a_full_queue_refuses_before_it_reads_a_body(make_server: MakeServer) -> None:
    live = make_server(max_num_queued_reqs=1)
    live.do(live.client.hold)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(live.http.post, CHAT, json={**body_of(CHAT), "max_tokens": 2})
        live.wait_until(lambda: len(live.engine.live) == 1)
        refused = {path: live.http.post(path, content=b"{") for path in ENGINE_PATHS}
        assert live.http.post("/tokenize", json={"prompt": "a"}).status_code == 200
        live.do(live.client.resume)
        assert accepted.result().status_code == 200
    for path, response in refused.items():
        assert response.headers["retry-after"] == "1"
        check_refused(response, status=529 if path == MESSAGES else 503)


def test_a_bug_is_not_described(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("secret /home/somebody")

    live = make_server()
    monkeypatch.setattr(live.llm, "chat_prompt", fail)
    for path in PATHS:
        message = check_refused(live.http.post(path, json=body_of(path)), status=500)
        assert "log" in message and "secret" not in message


@pytest.mark.parametrize(
    ("path", "ending"),
    [
        (
            MESSAGES,
            b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"logits are not finite"},',
        ),
        (OLLAMA_CHAT, b'\n{"error":"logits are not finite"}\n'),
        (CHAT, b'data: {"error":{"message":"logits are not finite","type":"server_error"'),
        (COMPLETIONS, b'data: {"error":{"message":"logits are not finite","type":"server_error"'),
    ],
)
def test_an_error_within_a_stream(make_server: MakeServer, path: str, ending: bytes) -> None:
    live = make_server(llm={"max_model_len": 100_000})
    body = {**body_of(path), "stream": True}
    if path != OLLAMA_CHAT:
        body["max_tokens"] = 90_000
    with live.connect() as connection:
        connection.sendall(request_bytes(path, body, "Connection: close\r\n"))
        got = read_until(connection, b'"done":' if path == OLLAMA_CHAT else b"data: ")
        live.do(lambda: live.engine.fail_on.update(live.engine.live))
        while chunk := connection.recv(65536):
            got += chunk
    assert got.startswith(b"HTTP/1.1 200 ")
    assert ending in got, got[-500:]
    assert b"[DONE]" not in got and b"message_stop" not in got and b'"done":true' not in got


def test_bytes_that_are_no_request_at_all(server: LiveServer) -> None:
    for path, mark in ((b"/v1/messages", b'"type":"error"'), (b"/api/chat", b'{"error":"'), (b"/v1/x", b'"code":')):
        head = b"POST " + path + b" HTTP/1.1\r\nhost: x\r\nbig: " + b"x" * 70_000 + b"\r\n\r\n"
        answer = server.raw(head)
        assert b" 431 " in answer.split(b"\r\n")[0]
        assert mark in answer


def test_messages_are_short() -> None:
    for path in PATHS:
        assert len(error_body(OverloadedError("x" * 100_000), path, "r" * 128)) < 4096
