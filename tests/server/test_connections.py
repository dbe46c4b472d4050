"""HTTP itself, on raw sockets: request ids, limits of the head, smuggling, keep-alive."""

from __future__ import annotations

import json
import re
import uuid

import pytest

from quire.server import http, parsing
from tests.helpers.live_server import LiveServer, MakeServer

GET_HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n"


def status_of(answer: bytes) -> int:
    assert answer.startswith(b"HTTP/1.1 "), answer[:200]
    return int(answer.split()[1])


def error_of(answer: bytes) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in head
    assert b"connection: close" in head.lower()
    code: str = json.loads(body)["error"]["code"]
    return code


def test_every_answer_has_a_request_id(server: LiveServer) -> None:
    made_up = server.http.get("/nope").headers["x-request-id"]
    assert str(uuid.UUID(made_up)) == made_up
    assert server.http.get("/health", headers={"x-request-id": "Abc-1.2:3_4"}).headers["x-request-id"] == "Abc-1.2:3_4"
    for bad in ("a" * 129, "a b", "a\x1b[2J", "<x>", ""):
        answered = server.http.get("/health", headers={"x-request-id": bad}).headers["x-request-id"]
        assert str(uuid.UUID(answered)) == answered


def test_probes_use_head(server: LiveServer) -> None:
    response = server.http.head("/health")
    assert (response.status_code, response.content) == (200, b"")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"\x16\x03\x01\x02\x00garbage\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"0\r\n\r\n",
            400,
        ),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (GET_HEALTH + b"X: " + b"a" * 100_000 + b"\r\n\r\n", 431),
        (GET_HEALTH + b"X: " + b"a" * 40_000 + b"\r\n\r\n", 431),
        (GET_HEALTH + b"X: " + b"a" * 1_000_000, 431),
        (GET_HEALTH + b"X: 1\r\n" * 1000 + b"\r\n", 431),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        (b"GET /" + b"a" * 9_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        (b"\r\n" * 40_000, 431),
    ],
    ids=[
        "TLS",
        "HTTP/2",
        "two lengths",
        "negative length",
        "length and chunks",
        "no host",
        "100 KB header",
        "40 KB header",
        "endless header",
        "1000 headers",
        "100 KB URL",
        "9 KB URL",
        "empty lines",
    ],
)
def test_heads_that_are_refused(server: LiveServer, request_bytes: bytes, status: int) -> None:
    with server.connect() as connection:
        try:
            connection.sendall(request_bytes)
            answer = b""
            while chunk := connection.recv(65536):
                answer += chunk
        except (ConnectionResetError, BrokenPipeError):
            answer = answer if status >= 414 else b""  # a client that sends without reading may only see the reset
            if not answer:
                return
    assert status_of(answer) == status
    error_of(answer)
    assert server.http.get("/health").status_code == 200


def test_a_large_body_still_lets_the_client_read_why(server: LiveServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    answer = server.raw(head + b"Content-Length: 4000000\r\n\r\n" + b" " * 4_000_000)
    assert status_of(answer) == 413
    assert error_of(answer) == "request_too_large"


def test_pipelined_requests_are_answered_in_order(server: LiveServer) -> None:
    requests = b"".join(GET_HEALTH + b"X-Request-Id: r%d\r\n\r\n" % index for index in range(3))
    answer = server.raw(requests + GET_HEALTH + b"Connection: close\r\n\r\n")
    assert re.findall(rb"x-request-id: (r\d)", answer) == [b"r0", b"r1", b"r2"]


def test_http_1_0_works(server: LiveServer) -> None:
    answer = server.raw(b"GET /health HTTP/1.0\r\n\r\n")
    assert status_of(answer) == 200
    assert answer.endswith(b'{"status":"ok"}')


def test_a_body_that_stops_half_way_is_dropped(server: LiveServer) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{}"
    )
    assert server.raw(head, shut=True) == b""
    server.wait_until(lambda: server.context.num_open == 0)


def test_slow_heads_and_bodies_are_cut_off(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "HEAD_SECONDS", 0.05)
    monkeypatch.setattr(parsing, "BODY_SECONDS", 0.05)
    server = make_server()
    late_head = server.raw(GET_HEALTH)
    assert (status_of(late_head), error_of(late_head)) == (408, "request_timeout")
    assert server.raw(b"") == b""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    late_body = server.raw(head + b"{}")
    assert (status_of(late_body), error_of(late_body)) == (408, "request_timeout")


def test_a_slow_next_head_does_not_disturb_the_answer_under_way(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "HEAD_SECONDS", 0.05)
    server = make_server()
    server.do(server.fake_client.hold)
    body = json.dumps({"model": "fake", "prompt": "a", "max_tokens": 2}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with server.connect() as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        server.wait_until(lambda: bool(server.engine.live))
        connection.sendall(b"GET /hea")
        protocol = next(iter(server.connections))
        server.wait_until(lambda: not protocol.cycle.keep_alive)
        server.do(server.fake_client.resume)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    assert status_of(answer) == 200
    assert b'"finish_reason":"length"' in answer
