"""HTTP itself, on raw sockets: request ids, what is no HTTP, limits of heads and bodies, keep-alive."""

from __future__ import annotations

import json
import re
import socket
import threading
import uuid
from collections.abc import Iterator

import pytest

from quire.server import http, parsing
from tests.helpers.live_server import LiveServer, MakeServer
from tests.server.checks import COMPLETIONS
from tests.server.sockets import (
    CANARY,
    CLOSE,
    ENDLESS,
    GET,
    POST,
    check_cut_off,
    exchange,
    idle,
    read_all,
    read_until,
    request_bytes,
    sing,
    status_of,
)


@pytest.fixture(scope="module")
def sung(server: LiveServer) -> Iterator[str]:
    """What the canary says before and after all tests."""
    before = sing(server)
    yield before
    assert sing(server) == before


pytestmark = pytest.mark.usefixtures("sung")


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


CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
NO_HTTP = {
    "garbage": b"\x00\x01\x02garbage\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": GET + b"Host: y\r\n\r\n",
    "a host twice": GET + b"Host: x\r\n\r\n",
    "a blank in a host": b"GET /health HTTP/1.1\r\nHost: x y\r\n\r\n",
    "a path in a host": b"GET /v1/models HTTP/1.1\r\nHost: localhost/health?x=\r\n\r\n",
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "HTTP/0.9 by name": b"GET /health HTTP/0.9\r\nHost: x\r\n\r\n",
    "a version to come": b"GET /health HTTP/2.0\r\nHost: x\r\n\r\n",
    "length and chunks": POST + b"Content-Length: 2\r\n" + CHUNKED + b"0\r\n\r\n",
    "chunks and length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}",
    "a chunk of size ZZ": POST + CHUNKED + b"ZZ\r\n{}\r\n0\r\n\r\n",
    "a chunk of size -1": POST + CHUNKED + b"-1\r\n\r\n",
    "a chunk beyond integers": POST + CHUNKED + b"fffffffffffffffff\r\n",
    "a header in a header": GET + b"X: a\nEvil: 1\x00\r\n\r\n",
    "a blank in a name": GET + b"Evil : 1\r\n\r\n",
    **{
        head.decode("latin-1"): POST + head + b"\r\n\r\n{}"
        for head in (
            b"Content-Length: 2\r\nContent-Length: 3",
            b"Content-Length: 2\r\nContent-Length: 2",
            b"Content-Length: -1",
            b"Content-Length: 2, 2",
            b"Content-Length: +2",
            b"Content-Length: 0x2",
            b"Content-Length: 99999999999999999999999",
            b"Transfer-Encoding: gzip, chunked, gzip",
            b"Transfer-Encoding: xchunked",
            b" X: 1",
            b"X\x00: 1",
        )
    },
}
LARGE_HEADS = {
    "100 KB header": GET + b"X: " + b"a" * 100_000 + b"\r\n\r\n",
    "40 KB header": GET + b"X: " + b"a" * 40_000 + b"\r\n\r\n",
    "endless header": GET + b"X: " + b"a" * (8 << 20),
    "1000 headers": GET + b"X: 1\r\n" * 1000 + b"\r\n",
    "empty lines": b"\r\n" * 40_000,
}
REFUSED = [
    *[(name, data, 400, "invalid_http") for name, data in NO_HTTP.items()],
    *[(name, data, 431, "headers_too_large") for name, data in LARGE_HEADS.items()],
    ("100 KB URL", b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414, "url_too_long"),
    ("9 KB URL", b"GET /" + b"a" * 9_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414, "url_too_long"),
    ("a large body", POST + b"Content-Length: 4000000\r\n\r\n" + b" " * 4_000_000, 413, "request_too_large"),
    ("a long trailer", POST + CHUNKED + b"0\r\nX: " + b"a" * (8 << 20), 400, "invalid_http"),
    ("many trailers", POST + CHUNKED + b"2\r\n{}\r\n0\r\n" + b"X: 1\r\n" * (1 << 20), 400, "invalid_http"),
    ("a long chunk extension", POST + CHUNKED + b"2;x=" + b"a" * (8 << 20), 400, "invalid_http"),
    ("chunk extensions", POST + CHUNKED + (b"1;x=" + b"a" * 999 + b"\r\n \r\n") * 9999, 400, "invalid_http"),
]


@pytest.mark.parametrize(("data", "status", "code"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_bytes_that_are_refused(server: LiveServer, data: bytes, status: int, code: str) -> None:
    answer = exchange(server, data)
    check_cut_off(answer, status, code)
    assert answer.count(b"HTTP/1.1 ") == 1, "nothing behind it is taken for a request"
    assert server.http.get("/health").status_code == 200
    server.wait_until(lambda: idle(server))


@pytest.mark.parametrize(
    ("line", "statuses"),
    [
        (b"CONNECT x:443", {400, 404, 405}),
        (b"CONNECT /v1/models", {400, 404, 405}),
        (b"OPTIONS *", {400, 404, 405}),
        (b"BREW /health", {400, 405}),
        (b"get /health", {400, 405}),
        (b"GET //health", {404}),
        (b"GET /health/", {404}),
        (b"GET /v1/../health", {404}),
        (b"GET /%2e%2e/health", {404}),
        (b"GET /health%00", {404}),
        (b"GET http://x/health", {200}),
        (b"GET http://evil/v1/nope", {404}),
        (b"GET /health?x=/v1/models", {200}),
    ],
)
def test_lines_that_proxies_and_attackers_send(server: LiveServer, line: bytes, statuses: set[int]) -> None:
    answer = server.raw(line + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert status_of(answer) in statuses, answer[:300]


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "TRACE", "OPTIONS", "PROPFIND"])
@pytest.mark.parametrize("path", [COMPLETIONS, "/health", "/v1/models"])
def test_answers_to_other_methods_name_those_that_exist(server: LiveServer, method: str, path: str) -> None:
    response = server.http.request(method, path)
    assert response.status_code == 405
    assert response.json()["error"]["code"] == "method_not_supported"
    wanted = {"POST"} if "completions" in path else {"GET", "HEAD"}
    assert wanted & {item.strip() for item in response.headers["allow"].split(",")}


def test_a_body_in_chunks(server: LiveServer) -> None:
    answer = server.raw(POST + CLOSE + CHUNKED + b"2\r\n{}\r\n0\r\n\r\n")
    assert status_of(answer) == 400
    assert b"missing_required_parameter" in answer


def chunked(body: bytes, size: int, trailer: bytes = b"") -> bytes:
    """Return a body in chunks of so many bytes."""
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join([b"%x;e=1\r\n%b\r\n" % (len(part), part) for part in parts]) + b"0\r\n" + trailer + b"\r\n"


def test_small_chunks_are_put_together(server: LiveServer, sung: str) -> None:
    body = json.dumps({**CANARY, "stop": ["-" * 1000]}).encode()
    answer = server.raw(POST + CLOSE + CHUNKED + chunked(body, 1))
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == sung


def test_trailers_are_no_headers(make_server: MakeServer) -> None:
    server = make_server(api_key=["secret"])
    trailer = b"Authorization: Bearer secret\r\nX-Request-Id: mine\r\nConnection: keep-alive\r\n"
    answer = server.raw(POST + CLOSE + CHUNKED + chunked(json.dumps(CANARY).encode(), 9, trailer))
    assert status_of(answer) == 401
    assert b"mine" not in answer
    key = b"Authorization: Bearer secret\r\n"
    answer = server.raw(POST + key + CLOSE + CHUNKED + chunked(json.dumps(CANARY).encode(), 9, trailer))
    assert status_of(answer) == 200


UPGRADES = {  # what Java's HttpClient and curl send, and browsers
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",
    "websocket": b"Connection: keep-alive, upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: YQ==\r\n",
}


@pytest.mark.parametrize("upgrade", UPGRADES.values(), ids=UPGRADES)
@pytest.mark.parametrize("step", [1, 100, 10_000])
def test_upgrades_are_ignored(server: LiveServer, sung: str, upgrade: bytes, step: int) -> None:
    body = json.dumps(CANARY).encode()
    data = POST + upgrade + b"Content-Length: %d\r\n\r\n" % len(body) + body
    data += POST + upgrade + CHUNKED + chunked(body, 50) + GET + upgrade + b"\r\n" + GET + CLOSE + b"\r\n"
    with server.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(data), step):
            connection.sendall(data[start : start + step])
        answer = read_all(connection)
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200"] * 4
    assert [json.loads(text) for text in re.findall(rb'"text":("[^"]*")', answer)] == [sung] * 2


def test_pipelined_requests_are_bounded(server: LiveServer) -> None:
    requests = request_bytes(COMPLETIONS, CANARY) + (GET + b"\r\n") * 10_000
    assert exchange(server, requests).count(b"HTTP/1.1 ") <= 2 + http.MAX_PIPELINED
    server.wait_until(lambda: idle(server))


LARGE = {**CANARY, "stop": ["-" * 900] * 16, "stop_token_ids": list(range(1000)), "user": "u" * 200}


@pytest.mark.parametrize("rest", [b"", request_bytes(COMPLETIONS, CANARY), request_bytes(COMPLETIONS, LARGE)[:9000]])
def test_a_request_ends_with_its_connection_though_another_waits_behind_it(server: LiveServer, rest: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(request_bytes(COMPLETIONS, {**ENDLESS, "max_tokens": 100_000, "stream": True}))
        read_until(connection, b"data: ")
        connection.sendall(rest)
        if rest:
            server.wait_until(lambda: any(protocol.pipeline for protocol in server.connections))
    server.wait_until(lambda: idle(server))


def chats(answer: bytes) -> list[str]:
    """Return the texts of completions, in their order."""
    return [json.loads(text) for text in re.findall(rb'"text":("[^"]*")', answer)]


@pytest.mark.parametrize("piece", [5_000, 70_000, 10**7])
def test_pipelined_requests_with_large_bodies(server: LiveServer, sung: str, piece: int) -> None:
    """Bodies end and begin anywhere in what arrives at once."""
    blanks = b" " * 80_000
    bodies = [json.dumps(CANARY).encode() + blanks, blanks + json.dumps(CANARY).encode()] * 2
    data = (
        b"".join([POST + b"Content-Length: %d\r\n\r\n" % len(body) + body for body in bodies]) + GET + CLOSE + b"\r\n"
    )
    with server.connect() as connection:
        for start in range(0, len(data), piece):
            connection.sendall(data[start : start + piece])
        answer = read_all(connection)
    assert chats(answer) == [sung] * 4
    assert answer.count(b"HTTP/1.1 200 ") == 5


def held_request(server: LiveServer) -> socket.socket:
    """Return a connection whose request waits for an engine that makes no step."""
    server.do(server.fake_client.hold)
    connection = server.connect()
    connection.sendall(request_bytes(COMPLETIONS, CANARY))
    server.wait_until(lambda: bool(server.engine.live))
    return connection


def test_a_body_may_arrive_after_the_response_to_the_request_before(
    server: LiveServer, sung: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "LEFTOVER_SECONDS", 0.01)
    body = json.dumps(CANARY).encode()
    with held_request(server) as connection:
        connection.sendall(POST + CLOSE + b"Content-Length: %d\r\n\r\n" % len(body) + body[:9])
        server.wait_until(lambda: any(protocol.pipeline for protocol in server.connections))
        server.do(server.fake_client.resume)
        assert chats(read_until(connection, b'"finish_reason":"length"')) == [sung]
        connection.settimeout(0.1)
        with pytest.raises(TimeoutError):  # it is not closed
            connection.recv(1)
        connection.settimeout(20)
        connection.sendall(body[9:])
        assert chats(read_all(connection)) == [sung]


@pytest.mark.parametrize(
    ("rest", "status"),
    [
        (b"\0\r\n\r\n", 400),
        (GET + b"X: " + b"a" * 400_000, 431),
        (POST + CHUNKED + b"2\r\n{}\r\nZZ\r\n", 400),
    ],
)
def test_what_is_refused_leaves_the_request_before_alone(
    server: LiveServer, sung: str, rest: bytes, status: int
) -> None:
    with held_request(server) as connection:
        connection.sendall(GET + b"\r\n" + rest)
        server.wait_until(lambda: any(protocol._refused for protocol in server.connections))
        server.do(server.fake_client.resume)
        answer = read_all(connection)
    assert chats(answer) == [sung]
    assert re.findall(rb"HTTP/1\.1 (\d+)", answer) == [b"200", b"200", b"%d" % status]
    check_cut_off(
        answer[answer.rindex(b"HTTP/1.1 ") :], status, "invalid_http" if status == 400 else "headers_too_large"
    )


def test_who_sends_a_large_body_before_reading_sees_why_it_is_refused(server: LiveServer) -> None:
    size = 24 << 20
    with server.connect() as connection:
        connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % size)
        for _ in range(24):
            connection.sendall(b" " * (1 << 20))
        check_cut_off(read_all(connection), 413, "request_too_large")


def test_pipelined_requests_are_answered_in_order(server: LiveServer) -> None:
    requests = b"".join(GET + b"X-Request-Id: r%d\r\n\r\n" % index for index in range(3))
    answer = server.raw(requests + GET + CLOSE + b"\r\n")
    assert re.findall(rb"x-request-id: (r\d)", answer) == [b"r0", b"r1", b"r2"]
    assert answer.count(b"HTTP/1.1 200 ") == 4


@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0(server: LiveServer, sung: str, stream: bool) -> None:
    data = request_bytes(COMPLETIONS, {**CANARY, "stream": stream}).replace(b"HTTP/1.1\r\nHost: x", b"HTTP/1.0")
    answer = server.raw(data)
    assert status_of(answer) == 200
    assert b"transfer-encoding" not in answer.lower()
    assert answer.endswith(b"data: [DONE]\n\n" if stream else b"}")
    assert "".join(re.findall(r'"text":"([^"]*)"', answer.decode())) == sung


@pytest.mark.parametrize("stream", [False, True])
def test_who_stops_sending_gets_the_whole_answer_or_none(server: LiveServer, sung: str, stream: bool) -> None:
    """It is taken for a client that has gone away, unless the answer was there already."""
    data = request_bytes(COMPLETIONS, {**CANARY, "stream": stream}, "Connection: close\r\n")
    if answer := server.raw(data, shut=True):
        assert status_of(answer) == 200
        text = "".join(re.findall(r'"text":"([^"]*)"', answer.decode()))
        assert text == sung or (stream and sung.startswith(text) and b"[DONE]" not in answer)
    server.wait_until(lambda: idle(server))


def test_a_body_that_stops_half_way_is_dropped(server: LiveServer) -> None:
    assert server.raw(POST + b"Content-Length: 100\r\n\r\n{}", shut=True) == b""
    server.wait_until(lambda: idle(server))


def test_slow_heads_and_bodies_are_cut_off(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert http.HEAD_SECONDS <= 10
    assert parsing.BODY_SECONDS <= 20
    monkeypatch.setattr(http, "HEAD_SECONDS", 0.05)
    monkeypatch.setattr(parsing, "BODY_SECONDS", 0.05)
    assert server.raw(b"") == b""
    check_cut_off(server.raw(GET), 408, "request_timeout")
    for more in (b"", b"Expect: 100-continue\r\n"):
        answer = server.raw(POST + more + b"Content-Length: 100\r\n\r\n{}")
        check_cut_off(answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n"), 408, "request_timeout")


def test_a_body_that_drips_is_cut_off(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "BODY_SECONDS", 0.2)
    stop = threading.Event()
    with server.connect() as connection:
        connection.sendall(POST + b"Content-Length: 1000\r\n\r\n")

        def drip() -> None:
            while not stop.wait(0.05):  # never silent for as long as a body may be
                try:
                    connection.sendall(b" ")
                except OSError:
                    return

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            answer = read_until(connection, b"}}")
        finally:
            stop.set()
            thread.join()
    check_cut_off(answer, 408, "request_timeout")


def test_a_body_behind_an_early_answer_does_not_hold_the_connection(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "LEFTOVER_SECONDS", 0.05)
    head = POST.replace(b"completions", b"nope") + b"Content-Length: 100\r\n\r\n"
    assert status_of(server.raw(head + b"{}")) == 404
    with server.connect() as connection:  # one that does come, late, is skipped
        connection.sendall(head)
        assert status_of(read_until(connection, b"unknown_url")) == 404
        connection.sendall(b" " * 100 + GET + CLOSE + b"\r\n")
        assert status_of(read_all(connection)) == 200


def test_a_slow_next_head_does_not_disturb_the_answer_under_way(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "HEAD_SECONDS", 0.05)
    server.do(server.fake_client.hold)
    with server.connect() as connection:
        connection.sendall(request_bytes(COMPLETIONS, {"model": "fake", "prompt": "a", "max_tokens": 2}))
        server.wait_until(lambda: bool(server.engine.live))
        connection.sendall(b"GET /hea")
        name = connection.getsockname()
        protocol = next(item for item in server.connections if item.client == name)
        server.wait_until(lambda: not protocol.cycle.keep_alive)
        server.do(server.fake_client.resume)
        answer = read_all(connection)
    assert status_of(answer) == 200
    assert b'"finish_reason":"length"' in answer


def test_who_expects_100_gets_it_before_the_body_is_sent(server: LiveServer, sung: str) -> None:
    data = json.dumps(CANARY).encode()
    with server.connect() as connection:
        connection.sendall(POST + CLOSE + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(data))
        assert read_until(connection, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(data)
        answer = read_all(connection)
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == sung


def test_one_connection_serves_a_thousand_requests(server: LiveServer) -> None:
    with server.connect() as connection:
        for _ in range(1000):
            connection.sendall(GET + b"\r\n")
            assert read_until(connection, b'"}').startswith(b"HTTP/1.1 200 ")
