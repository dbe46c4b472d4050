"""Probes a server again and again, as a load balancer does, from a process of its own: `python prober.py URL [PATH]`.

Until its standard input ends; then it prints the seconds that each probe took, connecting included, as JSON. It runs
before other processes if it may, so that what it measures is the server and not the clients of a test beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

INTERVAL = 0.02  # seconds between two probes
PATIENCE = 20.0  # seconds


def probe(url: str, path: str) -> float:
    """Return how long one probe takes [s]. Raises `OSError`, also for another status than 200."""
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
    """Probe while the block runs; the list has the times afterwards, in order of length."""
    command = [sys.executable, str(Path(__file__)), url, path]
    times: list[float] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield times
        finally:
            told, _ = process.communicate()
        assert process.returncode == 0, "a probe failed"
        times += sorted(json.loads(told))


def main() -> None:
    """See the module."""
    with contextlib.suppress(OSError):
        os.nice(-10)
    times = []
    while not select.select([sys.stdin], [], [], INTERVAL)[0]:
        times.append(probe(*sys.argv[1:3]))
    json.dump(times, sys.stdout)


if __name__ == "__main__":
    main()
