"""Connections that another process accepted: counted until they end, once, however early that is."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from fastapi import FastAPI

from quire.server.http_server import HttpServer, uvicorn_config
from quire.server_config import ServerConfig
from quire.supervisor.connections import Admission
from tests.helpers.certificates import certify


def server_with(**options: str) -> HttpServer:
    settings = uvicorn_config(FastAPI(), ServerConfig(**options), farewell_seconds=1.0)  # type: ignore[arg-type]
    server = HttpServer(settings)
    server.lifespan = settings.lifespan_class(settings)
    return server


async def end(server: HttpServer, sent: bytes, rounds: int) -> tuple[int, bool]:
    """Adopt a connection, and cancel that after some rounds of the event loop.

    Returns:
        How often its end was told, and whether it was cancelled before it was established.
    """
    ends: list[None] = []
    ended = asyncio.Event()

    def note() -> None:
        ends.append(None)
        ended.set()

    theirs, ours = socket.socketpair()
    theirs.setblocking(False)
    with theirs:
        theirs.sendall(sent)
        server.adopt(ours.detach(), Admission("a"), note)
        [task] = server._handshakes
        for _ in range(rounds):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():  # it was established
            theirs.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(20):
            while await asyncio.get_running_loop().sock_recv(theirs, 1000):
                pass
            await ended.wait()
        for _ in range(5):
            await asyncio.sleep(0)
    return len(ends), task.cancelled()


@pytest.mark.parametrize("rounds", range(1, 6))
@pytest.mark.parametrize("tls", [False, True])
def test_one_that_is_cancelled_is_counted_out_once(tmp_path: Path, rounds: int, *, tls: bool) -> None:
    options = {}
    if tls:
        options = dict(zip(("ssl_certfile", "ssl_keyfile"), map(str, certify(tmp_path / "a", "x")), strict=True))

    async def run() -> None:
        num_ends, cancelled = await end(server_with(**options), b"", rounds)
        assert num_ends == 1
        assert cancelled or rounds > 1

    asyncio.run(run())


def test_one_that_speaks_no_tls_is_counted_out_once(tmp_path: Path) -> None:
    cert, key = certify(tmp_path / "a", "x")

    async def run() -> None:
        server = server_with(ssl_certfile=str(cert), ssl_keyfile=str(key))
        num_ends, _ = await end(server, b"GET / HTTP/1.1\r\n\r\n", 1000)
        assert num_ends == 1

    asyncio.run(run())
