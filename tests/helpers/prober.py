"""Probes a server again and again, as a load balancer does, from a process of its own and before other processes.

So what it measures is the server, and not the clients of a test beside it.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from tests.helpers.background import change_priority, in_background, report, stop_requested

INTERVAL = 0.02  # seconds between two probes
PATIENCE = 20.0  # seconds


def probe(url: str, path: str) -> float:
    """Return how long one probe takes [s], connecting included. Raises `OSError`, also for another status than 200."""
    parts = urlsplit(url)
    started = time.perf_counter()
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection((parts.hostname, parts.port), PATIENCE))
        if parts.scheme == "https":
            connection = stack.enter_context(ssl._create_unverified_context().wrap_socket(connection))
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while more := connection.recv(65536):
            answer += more
    if not answer.startswith(b"HTTP/1.1 200 "):
        raise OSError(f"{path}: {answer[:200]!r}")
    return time.perf_counter() - started


@contextlib.contextmanager
def probing(url: str, path: str = "/livez") -> Iterator[list[float]]:
    """Probe while the block runs; the list has the times [ms] afterwards: median, 99th percentile and longest."""
    times: list[float] = []
    with in_background("tests.helpers.prober", url, path) as told:
        yield times
    found = sorted(told[0])
    times += [1000 * found[int(part * (len(found) - 1))] for part in (0.5, 0.99, 1)]


def main() -> None:
    """Probe URL PATH."""
    change_priority(-10)
    times = [probe(*sys.argv[1:3])]
    while not stop_requested(INTERVAL):
        times.append(probe(*sys.argv[1:3]))
    report(times)


if __name__ == "__main__":
    main()
