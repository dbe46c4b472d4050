"""Clients of one front of a server that has several, whichever of them would take a connection by chance."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.helpers.server import Server

MODULE = b"quire.server.run"


def fronts_of(server: Server) -> list[int]:
    """Return the process ids of a server's fronts, the oldest first."""
    found = []
    for pid in server.children():
        with contextlib.suppress(OSError):
            if MODULE in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return sorted(found)


def wait_for_fronts(server: Server, count: int, seconds: float = 30.0) -> list[int]:
    """Return the process ids of so many fronts, once all of them serve."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pids = fronts_of(server)
        if len(pids) == count and f"quire:fronts_serving {count}.0" in server.get("/metrics")[1].decode():
            return pids
        time.sleep(0.02)
    raise AssertionError(f"there are not {count} fronts within {seconds:g} s")


@contextlib.contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    """Stop processes while the block runs, which must be short: fronts that do not react for long are replaced."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def client_of(server: Server, pid: int) -> Iterator[httpx.Client]:
    """A client with one connection, to this front. It has one request at a time."""
    headers = {"Authorization": f"Bearer {server.key}"} if server.key else {}
    limits = httpx.Limits(max_connections=1, keepalive_expiry=None)
    with httpx.Client(
        base_url=server.url, headers=headers, limits=limits, timeout=30, trust_env=False, verify=False
    ) as client:
        with stopped([other for other in fronts_of(server) if other != pid]):
            client.get("/livez")
        yield client
