"""Many requests at once: others get their turn between them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading

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
        counts.append(len(started))

    asyncio.run(run())
    assert counts == [MAX_STARTED, 2 * MAX_STARTED, *[2 * MAX_STARTED + 1] * 3, 2 * MAX_STARTED + 2]
    assert started == [*range(2 * MAX_STARTED + 1), -1]


def test_a_probe_does_not_wait_for_a_hundred_requests(server: LiveServer) -> None:
    may_go_on = threading.Event()
    holder = threading.Thread(target=lambda: server.do(may_go_on.wait))
    with contextlib.ExitStack() as stack:
        address = server.listener.getsockname()
        *others, probe = (stack.enter_context(socket.create_connection(address, 20)) for _ in range(101))
        before = server.http.get("/metrics").text  # and all connections have been accepted
        holder.start()
        for other in others:
            other.sendall(POST + b"Content-Length: 2\r\nConnection: close\r\n\r\n{}")
        probe.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        may_go_on.set()
        text = read_all(probe).decode()
        assert all(read_all(other).startswith(b"HTTP/1.1 400 ") for other in others)
    holder.join()

    def answered(metrics: str) -> float:
        return sum(map(float, re.findall(r'^http_requests_total{.*status="4xx"} (\S+)', metrics, re.MULTILINE)))

    assert answered(server.http.get("/metrics").text) == answered(before) + len(others)
    assert answered(text) < answered(before) + len(others) / 2
