"""Many requests at once: others get their turn between them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
from collections.abc import Iterator

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire.server.starter import MAX_STARTED, Starter
from tests.helpers.live_server import LiveServer
from tests.server.sockets import POST, read_all


def test_a_few_are_started_in_each_round_in_their_order() -> None:
    started: list[int] = []
    counts: list[int] = []

    async def run() -> None:
        loop, starter = asyncio.get_running_loop(), Starter()
        for number in range(2 * MAX_STARTED + 1):
            starter.start(loop, lambda number=number: started.append(number))  # type: ignore[misc]
        for _ in range(5):
            counts.append(len(started))
            await asyncio.sleep(0)
        starter.start(loop, lambda: started.append(-1))
        await asyncio.sleep(0)
        counts.append(len(started))

    asyncio.run(run())
    assert counts == [0, MAX_STARTED, 2 * MAX_STARTED, *[2 * MAX_STARTED + 1] * 2, 2 * MAX_STARTED + 2]
    assert started == [*range(2 * MAX_STARTED + 1), -1]


def test_one_that_cannot_be_started_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    started: list[int] = []

    async def run() -> None:
        loop, starter = asyncio.get_running_loop(), Starter()
        for number in range(2 * MAX_STARTED):
            starter.start(loop, fail)
            starter.start(loop, lambda number=number: started.append(number))  # type: ignore[misc]
        for _ in range(8):
            await asyncio.sleep(0)

    def fail() -> None:
        raise MemoryError

    asyncio.run(run())
    assert started == [*range(2 * MAX_STARTED)]
    assert "a request could not be started" in caplog.text


def test_the_connection_of_one_that_cannot_be_started_is_closed(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(HttpToolsProtocol, "_start_asgi_task", fail)
    with socket.create_connection(server.listener.getsockname(), 20) as connection:
        connection.sendall(POSTED)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(100) == b""
    monkeypatch.undo()
    assert server.http.post("/v1/completions", json={}).status_code == 400


POSTED = POST + b"Content-Length: 2\r\nConnection: close\r\n\r\n{}"


def refused(metrics: str) -> float:
    """Return how many requests were answered with 4xx."""
    return sum(map(float, re.findall(r'^http_requests_total{.*status="4xx"} (\S+)', metrics, re.MULTILINE)))


@contextlib.contextmanager
def held(server: LiveServer) -> Iterator[list[socket.socket]]:
    """Make 101 connections, and let the event loop wait while the block runs."""
    holds, may_go_on = threading.Event(), threading.Event()

    def hold() -> None:
        holds.set()
        may_go_on.wait()

    holder = threading.Thread(target=lambda: server.do(hold))
    with contextlib.ExitStack() as stack:
        address = server.listener.getsockname()
        connections = [stack.enter_context(socket.create_connection(address, 20)) for _ in range(101)]
        server.http.get("/metrics")  # now all have been accepted
        holder.start()
        holds.wait()
        try:
            yield connections
        finally:
            may_go_on.set()
            holder.join()


def test_a_probe_does_not_wait_for_a_hundred_requests(server: LiveServer) -> None:
    before = refused(server.http.get("/metrics").text)
    with contextlib.ExitStack() as stack:
        with held(server) as connections:
            *others, probe = (stack.enter_context(connection.dup()) for connection in connections)
            for other in others:
                other.sendall(POSTED)
            probe.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        text = read_all(probe).decode()
        assert all(read_all(other).startswith(b"HTTP/1.1 400 ") for other in others)
    assert refused(server.http.get("/metrics").text) == before + len(others)
    assert refused(text) < before + len(others) / 2


def test_who_has_gone_is_not_served(server: LiveServer) -> None:
    before = refused(server.http.get("/metrics").text)
    with held(server) as connections:
        for connection in connections:
            connection.sendall(POSTED)
            connection.close()
    server.wait_until(lambda: server.context.num_open == 0)
    assert server.http.post("/v1/completions", json={}).status_code == 400  # which comes behind them
    assert refused(server.http.get("/metrics").text) == before + 1
