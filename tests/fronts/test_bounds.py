"""Two fronts: bounds on queues, bodies and connections are those of the server."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import httpx
import pytest

from tests.helpers.fronts import client_of, fronts_of, stopped, wait_for_fronts
from tests.helpers.server import Server, serve

MIB = 2**20
SHORT = {"model": "quire-demo", "prompt": "a", "max_tokens": 1}
LONG = {"model": "quire-demo", "prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True}
MAX_CONNECTIONS = 24
BODY_SIZE, BODY_END = 700_000, b"[]"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = {
        "--api-server-count": 2,
        "--max-num-queued-reqs": 3,
        "--max-body-bytes": MIB,
        "--max-receiving-bytes": MIB,
        "--max-connections": 2 * MAX_CONNECTIONS,
        "--max-connections-per-address": MAX_CONNECTIONS,
    }
    arguments = [str(part) for option in options.items() for part in option]
    with serve(Path(tmp_path_factory.mktemp("bounds")) / "log", *arguments, "--disable-access-log") as running:
        wait_for_fronts(running, 2)
        yield running


@pytest.fixture
def clients(server: Server) -> Iterator[list[httpx.Client]]:
    """Two clients of each front: one, the other, one, the other."""
    pids = wait_for_fronts(server, 2)
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(client_of(server, pid)) for pid in [*pids, *pids]]


def connect(server: Server) -> HTTPConnection:
    """Return a connection that a front has answered a probe on."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=20)
    assert status(connection, "/livez") == 200
    return connection


def connect_to(server: Server, pid: int) -> HTTPConnection:
    """Return a connection to this front."""
    with stopped([other for other in fronts_of(server) if other != pid]):
        return connect(server)


def status(connection: HTTPConnection, path: str = "/v1/models") -> int:
    """Return the status of a request on a connection."""
    connection.request("GET", path)
    return answered(connection)


def answered(connection: HTTPConnection) -> int:
    response = connection.getresponse()
    response.read()
    return response.status


def begin_body(connection: HTTPConnection) -> None:
    """Send a request but for the end of its body, which `BODY_END` is."""
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(BODY_SIZE))
    connection.endheaders()
    connection.send(b" " * (BODY_SIZE - len(BODY_END)))


@pytest.mark.slow
def test_so_many_requests_in_the_queue_of_both(clients: list[httpx.Client]) -> None:
    with contextlib.ExitStack() as stack:
        chunks = []
        for client in clients[:3]:
            response = stack.enter_context(client.stream("POST", "/v1/completions", json=LONG))
            assert response.status_code == 200
            chunks.append(response.iter_bytes())  # httpx ends the response with its iterator
            next(chunks[-1])
        refused = clients[3].post("/v1/completions", json=SHORT)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_overloaded"
        assert refused.json()["error"]["message"].startswith("3 requests are waiting or running")
    deadline = time.monotonic() + 10
    while clients[3].post("/v1/completions", json=SHORT).status_code != 200:
        assert time.monotonic() < deadline, "what was aborted is counted no longer"
        time.sleep(0.02)


def test_so_many_bytes_of_bodies_in_both(server: Server) -> None:
    pids = wait_for_fronts(server, 2)
    with contextlib.ExitStack() as stack:
        first, second, third = (
            stack.enter_context(contextlib.closing(connect_to(server, pid))) for pid in [*pids, pids[1]]
        )
        begin_body(first)
        time.sleep(0.3)  # until it has arrived
        begin_body(second)
        assert answered(second) == 503
        first.send(BODY_END)
        assert answered(first) == 400, "it is complete, if not valid"
        begin_body(third)
        third.send(BODY_END)
        assert answered(third) == 400, "there is room again"


def test_so_many_connections_of_both_also_once_one_has_died(server: Server) -> None:
    pids = wait_for_fronts(server, 2)
    half = MAX_CONNECTIONS // 2
    with contextlib.ExitStack() as stack:

        def keep(connection: HTTPConnection) -> HTTPConnection:
            return stack.enter_context(contextlib.closing(connection))

        connections = [keep(connect_to(server, pid)) for pid in [pids[0]] * half + [pids[1]] * half]
        assert [status(connection) for connection in connections] == [200] * MAX_CONNECTIONS
        for pid in pids:
            excess = keep(connect_to(server, pid))
            assert status(excess, "/health") == 200, "a few more may probe"
            assert status(excess) == 503
        os.kill(pids[0], signal.SIGKILL)
        for connection in connections[:half]:
            with pytest.raises((OSError, HTTPException)):
                status(connection)
        new = [keep(connect(server)) for _ in range(half)]
        assert [status(connection) for connection in new] == [200] * half
        assert status(keep(connect(server))) == 503
