"""`ChromeTrace`: a profile in the trace event format, which Perfetto and chrome://tracing open.

What is traced, and when, is decided by those who add to it (`engine/profiler.py`, the backends). Times are those of
`time.perf_counter_ns`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

_encoder = msgspec.json.Encoder()


class ChromeTrace:
    """Complete events of one process, each on a thread of the picture, kept in memory until they are written.

    Args:
        max_bytes: of the file. Events beyond it are dropped and counted.
    """

    def __init__(self, max_bytes: int) -> None:
        self._begin = time.perf_counter_ns()
        self._pid = os.getpid()
        self._events: list[bytes] = []
        self._left = max_bytes
        self._num_dropped = 0

    def name_thread(self, thread: int, name: str) -> None:
        """Give a thread its name in the picture; threads are shown in the order of their numbers."""
        self._append({"name": "thread_name", "ph": "M", "pid": self._pid, "tid": thread, "args": {"name": name}})

    def add(self, name: str, begin: int, end: int, *, thread: int = 0, **args: Any) -> None:
        """Add what went on from `begin` to `end` [ns of `time.perf_counter_ns`]; `args` are shown beside it."""
        times = {"ts": (begin - self._begin) / 1000, "dur": (end - begin) / 1000}
        self._append({"name": name, "ph": "X", **times, "pid": self._pid, "tid": thread, "args": args})

    @contextmanager
    def span(self, name: str, **args: Any) -> Iterator[None]:
        """Add what happens inside, on thread 0."""
        begin = time.perf_counter_ns()
        try:
            yield
        finally:
            self.add(name, begin, time.perf_counter_ns(), **args)

    def _append(self, event: dict[str, Any]) -> None:
        encoded = _encoder.encode(event)
        if len(encoded) + 2 > self._left:
            self._num_dropped += 1
            return
        self._left -= len(encoded) + 2
        self._events.append(encoded)

    def write(self, path: Path) -> None:
        """Write the file, at once or not at all. Raises `OSError`."""
        partial = path.with_name(path.name + ".partial")
        with partial.open("wb") as file:
            file.write(
                b'{"displayTimeUnit": "ms", "otherData": {"dropped_events": %d}, "traceEvents": [' % self._num_dropped
            )
            for number, event in enumerate(self._events):
                file.write(b",\n" + event if number else event)
            file.write(b"]}\n")
        partial.replace(path)
