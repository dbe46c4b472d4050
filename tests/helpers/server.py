"""A real `quire serve` process for tests: started on a free port, waited for, and stopped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[2] / "src"
ADDRESS = re.compile(r"https?://127\.0\.0\.1:(\d+)")
TLS = ssl._create_unverified_context()


@dataclass
class Server:
    """A running server. `log` is its standard error, a file; `key` is sent with what is asked of it."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    key: str = ""

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.url.rpartition(":")[2])

    def get(self, path: str, timeout: float = 10.0) -> tuple[int, bytes]:
        """Return status and body of a GET."""
        return self._send(path, None, timeout)

    def post(self, path: str, body: Any, timeout: float = 120.0) -> tuple[int, Any]:
        """Return status and decoded JSON of a POST."""
        status, data = self._send(path, json.dumps(body).encode(), timeout)
        return status, json.loads(data)

    def _send(self, path: str, data: bytes | None, timeout: float) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        if data is not None:
            headers["Content-Type"] = "application/json"
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout, context=TLS) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def metric(self, name: str) -> float:
        """Return the value of a metric (summed over its labels)."""
        text = self.get("/metrics")[1].decode()
        values = [line.rsplit(" ", 1)[1] for line in text.splitlines() if re.match(re.escape(name) + r"[{ ]", line)]
        assert values, f"no metric {name}"
        return sum(map(float, values))

    def children(self) -> list[int]:
        """Process ids of the server's children."""
        found: list[int] = []
        for task in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # a thread that has ended
                found += [int(pid) for pid in task.read_text().split()]
        return found


@contextlib.contextmanager
def serve(log: Path, *arguments: str, seconds: float = 120.0, until: str = "ready", key: str = "") -> Iterator[Server]:
    """Run `quire serve --port 0 ARGUMENTS` until the block ends; fail if it is not "ready" within `seconds`.

    The block begins then, or, with `until` "listening", as soon as there is an address. With `key` it asks for that.
    """
    path = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "quire", "serve", "--port", "0", *(["--api-key", key] if key else []), *arguments],
            stdout=stderr,
            stderr=stderr,
            env=dict(os.environ, PYTHONPATH=path, PYTHONUNBUFFERED="1"),
        )
        try:
            yield _wait(process, log, time.monotonic() + seconds, until, key)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(60)
                finally:
                    process.kill()
                    process.wait()


def _wait(process: subprocess.Popen[bytes], log: Path, deadline: float, until: str, key: str) -> Server:
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"the server ended with {process.returncode}:\n{log.read_text()[-4000:]}")
        found = ADDRESS.search(log.read_text(errors="replace"))
        if found:
            server = Server(process, found[0], log, key)
            if until == "listening":
                return server
            with contextlib.suppress(OSError):
                if server.get("/health", 2.0)[0] == 200:
                    return server
        time.sleep(0.05)
    raise AssertionError(f"the server was not ready in time:\n{log.read_text()[-4000:]}")
