"""Bounds on connections, and clients that misuse them: too many, too slow, or deaf."""

from __future__ import annotations

import json
import resource
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from quire.server import http
from quire.supervisor.connections import PROBE_CONNECTIONS, address_of, default_connections
from tests.helpers.live_server import LiveServer, MakeServer
from tests.server.checks import COMPLETIONS, check_error
from tests.server.sockets import (
    CANARY,
    CLOSE,
    ENDLESS,
    GET,
    check_cut_off,
    idle,
    read_all,
    read_until,
    request_bytes,
    sing,
    status_of,
)

BODY = {"model": "fake", "prompt": "a", "max_tokens": 2}


def test_connections_beyond_the_limit_may_only_probe(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "PROBE_SECONDS", 0.1)
    server = make_server(max_connections=3, max_connections_per_address=100)
    held = [server.connect() for _ in range(3)]
    server.wait_until(lambda: len(server.connections) == 3)
    for data in (request_bytes(COMPLETIONS, BODY), b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", GET, b""):
        answer = server.raw(data)
        check_cut_off(answer, 503, "engine_overloaded")
        assert b"retry-after: 1\r\n" in answer
    for path in (b"/livez", b"/readyz", b"/health", b"/metrics"):
        answer = server.raw(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path)
        assert status_of(answer) == 200
        assert b"connection: close\r\n" in answer
    probing = [server.connect() for _ in range(PROBE_CONNECTIONS)]
    server.wait_until(lambda: len(server.connections) == 3 + PROBE_CONNECTIONS)
    check_cut_off(server.raw(b""), 503, "engine_overloaded")
    for connection in probing:
        connection.close()
    held[0].sendall(GET + CLOSE + b"\r\n")
    assert status_of(read_all(held[0])) == 200, "those within it are served"
    for connection in held:
        connection.close()
    server.wait_until(lambda: not server.connections)
    assert server.http.get("/health").status_code == 200


def test_one_address_leaves_connections_to_others(make_server: MakeServer) -> None:
    server = make_server(max_connections=8)
    held = [server.connect() for _ in range(6)]
    server.wait_until(lambda: len(server.connections) == 6)
    claim = "X-Forwarded-For: 192.0.2.1\r\nForwarded: for=192.0.2.1\r\nX-Real-IP: 192.0.2.1\r\n"
    for _ in range(2 * PROBE_CONNECTIONS):  # those that are refused leave their places at once
        check_cut_off(server.raw(request_bytes(COMPLETIONS, BODY, claim)), 503, "engine_overloaded")
    assert status_of(server.raw(GET + b"\r\n")) == 200, "of the same address, as behind a proxy"
    with socket.create_connection(server.listener.getsockname(), 20, ("127.0.0.2", 0)) as other:
        other.sendall(GET + CLOSE + b"\r\n")
        assert status_of(read_all(other)) == 200
    held.pop().close()
    server.wait_until(lambda: len(server.connections) == 5)
    assert status_of(server.raw(GET + CLOSE + b"\r\n")) == 200
    for connection in held:
        connection.close()


@pytest.mark.parametrize("others", [1, 2])
def test_idle_connections_stay_while_there_is_room(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    monkeypatch.setattr(http, "CROWDED_IDLE_SECONDS", 0)
    server = make_server(max_connections=4)
    held = [server.connect() for _ in range(others)]
    server.wait_until(lambda: len(server.connections) == others)
    with server.connect() as connection:
        connection.sendall(GET + b"\r\n")
        read_until(connection, b'{"status":"ok"}')
        if others == 2:
            assert connection.recv(1) == b"", "more than half of the connections are in use"
        else:
            connection.settimeout(0.1)
            with pytest.raises(TimeoutError):
                connection.recv(1)
    for connection in held:
        connection.close()


@pytest.mark.parametrize(
    ("address", "counted_as"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::2:0:0:1", "2001:db8::/64"),
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_a_network_of_ipv6_is_one_address(address: str, counted_as: str) -> None:
    assert address_of((address, 1)) == counted_as


POST_JSON = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def begin_body(server: LiveServer, limits: http.ReceivingLimit, sent: int) -> socket.socket:
    """Return a connection on which the first bytes of a body have arrived."""
    connection = server.connect()
    before = {body for body, _ in server.do(lambda: list(limits._incomplete.items()))}
    connection.sendall(POST_JSON + b"Content-Length: 4096\r\n\r\n" + b" " * sent)
    server.wait_until(lambda: any(body.size == sent for body in limits._incomplete if body not in before))
    return connection


def receiving_limit(server: LiveServer) -> http.ReceivingLimit:
    """Return the limit of bodies that the server's connections share."""
    with server.connect():
        server.wait_until(lambda: bool(server.connections))
        return next(iter(server.connections)).receiving


def test_bodies_that_are_received_are_bounded_together(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(max_body_bytes=4096, max_receiving_bytes=10_000)
    limits = receiving_limit(server)
    slow = [begin_body(server, limits, 3000) for _ in range(3)]
    answer = server.raw(POST_JSON + b"Content-Length: 4096\r\n\r\n" + b" " * 2000)
    check_cut_off(answer, 503, "engine_overloaded")
    assert b"retry-after: 1\r\n" in answer
    assert server.http.post(COMPLETIONS, json=BODY).status_code == 200, "small ones still fit"
    server.wait_until(lambda: limits.num_bytes == 9000)
    monkeypatch.setattr(http, "BODY_SECONDS", 0.0)  # those that take long make room
    more = begin_body(server, limits, 1500)
    check_cut_off(read_all(slow[0]), 408, "request_timeout")
    more.sendall(b" " * (4096 - 1500))
    assert b"invalid_json" in read_until(more, b"}}")
    for connection in (*slow, more):
        connection.close()
    server.wait_until(lambda: idle(server) and limits.num_bytes == 0)


def test_a_body_that_has_arrived_is_not_slow(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_SECONDS", 0.0)
    server = make_server(max_body_bytes=4096, max_receiving_bytes=8192)
    sung = sing(server)
    limits = receiving_limit(server)
    with server.connect() as connection:
        connection.sendall(request_bytes(COMPLETIONS, {**ENDLESS, "max_tokens": 5000, "stream": True}))
        read_until(connection, b"data: ")
        waiting = request_bytes(COMPLETIONS, {**CANARY, "stop": ["-" * 999] * 3}, "Connection: close\r\n")
        connection.sendall(waiting)
        server.wait_until(lambda: limits.num_bytes > 3000 and not limits._incomplete)
        with begin_body(server, limits, 3000) as slow, begin_body(server, limits, 2500):
            check_cut_off(read_all(slow), 408, "request_timeout")
        assert json.dumps(sung).encode() in read_all(connection)


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
        paused: list[http.BoundedHttpProtocol] = []  # taken on the server's loop, before the connection is cut off

        def find_paused() -> bool:
            paused[:] = [item for item in server.connections if item.flow.write_paused]
            return bool(paused)

        server.wait_until(find_paused)
        (protocol,) = paused
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


@pytest.mark.slow
def test_1500_half_open_connections_are_closed_and_disturb_nobody(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip("needs 4096 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    monkeypatch.setattr(http, "HEAD_SECONDS", 1.0)
    server = make_server(max_connections=1600, max_connections_per_address=1600)
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


def test_peers_that_are_silent_are_probed(server: LiveServer) -> None:
    assert server.listener.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    if hasattr(socket, "TCP_KEEPIDLE"):
        waits = [
            server.listener.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{name}"))
            for name in ("IDLE", "INTVL", "CNT")
        ]
        assert waits[0] + waits[1] * waits[2] <= 300


def ask_many(server: LiveServer, count: int, accepted: int) -> list[httpx.Response]:
    """Send so many requests at once to an engine that makes no step until all of them were judged."""
    server.do(server.fake_client.hold)
    refused: list[int] = []

    def ask(_: int) -> httpx.Response:
        with httpx.Client(base_url=server.url, timeout=20, trust_env=False, verify=False) as client:
            response = client.post(COMPLETIONS, json=BODY)
        if response.status_code != 200:
            refused.append(1)
        return response

    with ThreadPoolExecutor(count) as pool:
        asked = [pool.submit(ask, number) for number in range(count)]
        server.wait_until(lambda: len(refused) == count - accepted)
        server.do(server.fake_client.resume)
        return [future.result() for future in asked]


@pytest.mark.parametrize(
    ("options", "count", "accepted"),
    [({"max_num_queued_reqs": 16}, 100, 16), ({"max_num_seqs": 2}, 20, 8)],
    ids=["of the option", "four times those that run"],
)
def test_queues_are_bounded(make_server: MakeServer, options: dict[str, int], count: int, accepted: int) -> None:
    server = make_server(**options)
    sung = sing(server)
    answers = ask_many(server, count, accepted)
    assert Counter(answer.status_code for answer in answers) == {200: accepted, 503: count - accepted}
    for answer in answers:
        if answer.status_code == 503:
            assert int(answer.headers["retry-after"]) >= 1
            assert int(answer.headers["retry-after-ms"]) >= 1
            check_error(answer, 503, "engine_overloaded")
    server.wait_until(lambda: idle(server))
    assert sing(server) == sung
    rejections = (
        f'vllm:admission_rejections_total{{engine="0",model_name="fake",reason="queue_full"}} {count - accepted}'
    )
    assert rejections in server.http.get("/metrics").text


def test_a_long_prompt_among_short_ones(make_server: MakeServer) -> None:
    """All are answered, each with its own text; how long they wait is measured where steps are simulated."""
    server = make_server(llm={"max_model_len": 5000})
    sung = sing(server)
    with ThreadPoolExecutor(20) as pool:
        first = pool.submit(
            server.http.post, COMPLETIONS, json={"model": "fake", "prompt": [5] * 4000, "max_tokens": 8}
        )
        texts = {pool.submit(sing, server) for _ in range(50)}
        assert {future.result() for future in texts} == {sung}
        assert first.result().status_code == 200
