"""Bounds on connections, and clients that misuse them: too many, too slow, deaf, or with methods nobody needs."""

from __future__ import annotations

import json
import resource
import socket
import threading
from typing import Any

import pytest

from quire.server import http, parsing
from quire.server.http import default_connections
from tests.helpers.live_server import LiveServer, MakeServer
from tests.server.test_connections import GET_HEALTH, error_of, status_of
from tests.server.test_lifecycle import ENDLESS, idle, read_until, request_bytes

BODY = {"model": "fake", "prompt": "a", "max_tokens": 2}


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while chunk := connection.recv(65536):
        data += chunk
    return data


def test_connections_beyond_the_limit_are_told_so(make_server: MakeServer) -> None:
    server = make_server(max_connections=3)
    held = [server.connect() for _ in range(3)]
    server.wait_until(lambda: len(server.connections) == 3)
    with server.connect() as late:
        answer = read_all(late)
    assert (status_of(answer), error_of(answer)) == (503, "engine_overloaded")
    assert b"retry-after: 1\r\n" in answer
    held[0].sendall(GET_HEALTH + b"Connection: close\r\n\r\n")
    assert status_of(read_all(held[0])) == 200, "those within it are served"
    for connection in held:
        connection.close()
    server.wait_until(lambda: not server.connections)
    assert server.http.get("/health").status_code == 200


def test_the_limit_leaves_files_for_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_files(number: int) -> int:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (number, number))
        return default_connections()

    assert with_files(64) == 24
    assert with_files(1024) == 896
    assert with_files(16) == 8
    assert with_files(10**7) == with_files(resource.RLIM_INFINITY) == 65536


def deaf(server: LiveServer) -> socket.socket:
    """Return a connection with little room for what the server sends."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    connection.settimeout(20)
    connection.connect(server.listener.getsockname())
    return connection


ALL_SHOWN = {"logprobs": 20, "echo": True, "prompt": [5] * 5000}


@pytest.mark.parametrize("body", [{"stream": True, "logprobs": 20}, ALL_SHOWN], ids=["stream", "whole"])
def test_a_client_that_reads_nothing_is_cut_off_and_its_request_ends(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    monkeypatch.setattr(http, "SLOW_CLIENT_SECONDS", 0.2)
    server = make_server(llm={"max_model_len": 200_000})
    most = 150_000 if "stream" in body else 50
    with deaf(server) as connection:
        connection.sendall(request_bytes("/v1/completions", {**ENDLESS, "max_tokens": most, **body}))
        server.wait_until(lambda: any(item.flow.write_paused for item in server.connections))
        protocol = next(item for item in server.connections if item.flow.write_paused)
        assert protocol.transport.get_write_buffer_size() < 2**23
        others = server.http.post("/v1/completions", json=BODY)
        assert others.status_code == 200, "nobody else waits"
        server.wait_until(lambda: protocol not in server.connections)
    server.wait_until(lambda: idle(server))


def test_a_stream_waits_for_its_reader_and_keeps_little(make_server: MakeServer) -> None:
    server = make_server(llm={"max_model_len": 200_000})
    with deaf(server) as connection:
        connection.sendall(request_bytes("/v1/completions", {**ENDLESS, "max_tokens": 6_000, "stream": True}))
        server.wait_until(lambda: not server.engine.live or any(p.flow.write_paused for p in server.connections))
        most = max(item.transport.get_write_buffer_size() for item in server.connections)
        assert most <= 2**20
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
        text = read_until(connection, b"data: [DONE]")
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith(b"data: {")]
    assert sum(len(chunk["choices"][0]["text"]) for chunk in chunks) == 6_000, "what it reads late is all there"


def test_a_body_that_drips_is_cut_off(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "BODY_SECONDS", 0.2)
    server = make_server()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
    stop = threading.Event()
    with server.connect() as connection:
        connection.sendall(head)

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
    assert (status_of(answer), error_of(answer)) == (408, "request_timeout")


def test_a_body_behind_an_early_answer_does_not_hold_the_connection(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "LEFTOVER_SECONDS", 0.05)
    server = make_server()
    head = b"POST /v1/nope HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    answer = server.raw(head + b"{}")
    assert status_of(answer) == 404
    with server.connect() as connection:  # one that does come, late, is skipped
        connection.sendall(head)
        assert status_of(read_until(connection, b"unknown_url")) == 404
        connection.sendall(b" " * 100 + GET_HEALTH + b"Connection: close\r\n\r\n")
        assert status_of(read_all(connection)) == 200


def test_1500_half_open_connections_are_closed_and_disturb_nobody(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip("needs 4096 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    monkeypatch.setattr(http, "HEAD_SECONDS", 1.0)
    server = make_server(max_connections=1600)
    connections = []
    try:
        for _ in range(1500):
            connections.append(server.connect())
            connections[-1].sendall(b"GET /health HTTP/1.1\r\nHo")
        assert server.http.post("/v1/completions", json=BODY).status_code == 200
        for connection in connections:
            assert b" 408 " in read_all(connection)
        server.wait_until(lambda: len(server.connections) <= 1)
    finally:
        for connection in connections:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "TRACE", "OPTIONS", "PROPFIND"])
@pytest.mark.parametrize("path", ["/v1/completions", "/health", "/v1/models"])
def test_other_methods_are_told_which_ones_there_are(server: LiveServer, method: str, path: str) -> None:
    response = server.http.request(method, path)
    assert response.status_code == 405
    assert response.json()["error"]["code"] == "method_not_supported"
    wanted = {"POST"} if "completions" in path else {"GET", "HEAD"}
    assert wanted & {item.strip() for item in response.headers["allow"].split(",")}


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


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 2\r\nContent-Length: 2",
        b"Content-Length: 2, 2",
        b"Content-Length: +2",
        b"Content-Length: 0x2",
        b"Content-Length: 99999999999999999999999",
        b"Transfer-Encoding: chunked\r\nContent-Length: 2",
        b"Transfer-Encoding: gzip, chunked, gzip",
        b"Transfer-Encoding: xchunked",
        b"X : 1",
        b" X: 1",
        b"X\x00: 1",
    ],
)
def test_heads_that_two_servers_could_read_differently(server: LiveServer, head: bytes) -> None:
    start = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    answer = server.raw(start + head + b"\r\n\r\n{}")
    assert status_of(answer) in (400, 413), answer[:300]
    assert answer.count(b"HTTP/1.1 ") == 1, "nothing behind it is taken for a request"
    assert server.http.get("/health").status_code == 200


def test_chunks_that_are_none(server: LiveServer) -> None:
    start = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked"
    for chunks in (b"ZZ\r\n{}\r\n0\r\n\r\n", b"-1\r\n\r\n", b"fffffffffffffffff\r\n"):
        answer = server.raw(start + b"\r\n\r\n" + chunks)
        assert status_of(answer) == 400
    good = server.raw(start + b"\r\nConnection: close\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
    assert status_of(good) == 400
    assert b"missing_required_parameter" in good


def test_who_expects_100_gets_it_before_the_body_is_sent(server: LiveServer) -> None:
    data = json.dumps(BODY).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
    with server.connect() as connection:
        connection.sendall(head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(data))
        assert read_until(connection, b"\r\n\r\n").startswith(b"HTTP/1.1 100 ")
        connection.sendall(data)
        assert status_of(read_all(connection)) == 200


def test_an_answer_comes_also_to_who_has_stopped_sending(server: LiveServer) -> None:
    answer = server.raw(request_bytes("/v1/completions", BODY, "Connection: close\r\n"), shut=True)
    assert answer == b"" or status_of(answer) == 200, "whole or not at all"


def test_one_connection_serves_a_thousand_requests(server: LiveServer) -> None:
    with server.connect() as connection:
        for _ in range(1000):
            connection.sendall(GET_HEALTH + b"\r\n")
            assert read_until(connection, b'"}').startswith(b"HTTP/1.1 200 ")
