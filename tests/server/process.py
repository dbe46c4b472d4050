"""A server process with a fake engine, started for a test.

The processes are forked from one that has imported the server: importing it takes a second, which a test of signals and
exit codes need not pay again.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from typing import IO, Any

import httpx

from tests.server import serve_fake

SECONDS = 20.0
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([serve_fake.__name__])


class Process:
    """A server process; `url` is known once it listens."""

    def __init__(self, mode: str, **options: Any) -> None:
        out, child_out = FORKS.Pipe(duplex=False)
        err, child_err = FORKS.Pipe(duplex=False)
        self.process = FORKS.Process(
            target=serve_fake.run, args=({"port": 0, **options}, mode, dict(os.environ), child_out, child_err)
        )
        self.process.start()
        for end in (child_out, child_err):
            end.close()
        self._out: IO[str] = os.fdopen(os.dup(out.fileno()), encoding="utf-8")
        self._err: IO[str] = os.fdopen(os.dup(err.fileno()), encoding="utf-8")
        out.close()
        err.close()
        self.errors: list[str] = []
        self._reader = threading.Thread(target=lambda: self.errors.extend(self._err), daemon=True)
        self._reader.start()
        line = self._out.readline()
        self.url = line.strip().removeprefix("listening url=") if line else ""
        self.http = httpx.Client(base_url=self.url, timeout=SECONDS, trust_env=False, verify=False)

    def line(self) -> str:
        """Return the next line of standard output."""
        return self._out.readline().strip()

    def signal(self, number: int) -> None:
        """Send a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> int:
        """Wait for the end; return the exit code."""
        self.process.join(SECONDS)
        assert self.process.exitcode is not None, "it still runs"
        self._reader.join(SECONDS)
        return self.process.exitcode

    def wait_for_status(self, status: str) -> None:
        """Wait until /health says so."""
        self._wait_until(lambda: self.http.get("/health").json() == {"status": status})

    def wait_for_open(self, count: int) -> None:
        """Wait until so many requests are being worked on."""
        self._wait_until(lambda: f"quire:http_requests_open {count:.1f}" in self.http.get("/metrics").text)

    def _wait_until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not true():
            assert time.monotonic() < deadline, "it did not come"

    def close(self) -> None:
        """Kill it if it still runs."""
        self.http.close()
        self.process.kill()
        self.process.join(SECONDS)
        with contextlib.suppress(ValueError):
            self.process.close()
        self._reader.join(SECONDS)
        for pipe in (self._out, self._err):
            pipe.close()
