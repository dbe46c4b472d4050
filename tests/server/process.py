"""A server process with a fake engine, started for a test."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]


class Process:
    """A server process; `url` is known once it listens."""

    def __init__(self, mode: str, **options: Any) -> None:
        command = [sys.executable, "-m", "tests.server.serve_fake", json.dumps({"port": 0, **options}), mode]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.errors: list[str] = []
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()
        line = self.process.stdout.readline()
        self.url = line.strip().removeprefix("listening url=") if line else ""

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        code = self.process.wait(20)
        self._reader.join(10)
        return code

    def wait_for_status(self, status: str) -> None:
        while httpx.get(f"{self.url}/health", timeout=10).json() != {"status": status}:
            pass

    def wait_for_open(self, count: int) -> None:
        """Wait until so many requests are being worked on."""
        while f"quire:http_requests_open {count:.1f}" not in httpx.get(f"{self.url}/metrics", timeout=10).text:
            pass

    def close(self) -> None:
        """Kill it if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
