"""Child processes of a benchmark, of which only one works at a time: the others are stopped, their threads included.

What a process and its descendants take (memory, processor time) is read from /proc: Linux only.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

TICKS = os.sysconf("SC_CLK_TCK")
LONGEST_ANSWER = 600  # seconds; some engines compile for minutes when they start


class Child:
    """A process in a session of its own, with whatever processes it starts."""

    def __init__(self, name: str, words: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        self.started = time.perf_counter()
        self.memory: dict[str, float] = {}
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def pause(self) -> None:
        """Stop all its processes until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Write a line of JSON, return the answer."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            print(json.dumps(request), file=self.process.stdin, flush=True)
        return self.read()

    def read(self) -> dict[str, Any]:
        """Return the next answer. Raises EngineFailed if the process ended instead, or is silent for too long."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], LONGEST_ANSWER)[0]:
            raise EngineFailed(f"{self.name} was silent for {LONGEST_ANSWER} seconds, see {self.log}")
        line = self.process.stdout.readline()
        if not line:
            raise EngineFailed(f"{self.name} ended, see {self.log}")
        return dict(json.loads(line))

    def note_memory(self) -> None:
        """Note the most memory so far: each process's own peak, summed, and what of it no file backs, now, in bytes."""
        sizes = {"peak": 0, "anonymous": 0}
        for pid in self.members():
            status = _read(f"/proc/{pid}/status")
            for key, label in (("peak", "VmHWM:"), ("anonymous", "RssAnon:")):
                sizes[key] += sum(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith(label))
        for key, size in sizes.items():
            self.memory[key] = max(self.memory.get(key, 0), size)

    def cpu_seconds(self) -> float:
        """Return the processor time of its processes, with those that ended."""
        total = 0
        for pid in self.members():
            fields = _stat(pid)
            total += sum(map(int, fields[11:15])) if fields else 0
        return total / TICKS

    def members(self) -> list[int]:
        """Return the ids of its living processes, with descendants that left its session."""
        root = self.process.pid
        parents: dict[int, int] = {}
        found = {root}
        for entry in os.listdir("/proc"):
            fields = _stat(int(entry)) if entry.isdigit() else []
            if fields:
                parents[int(entry)] = int(fields[1])
                if int(fields[3]) == root:
                    found.add(int(entry))
        grown = True
        while grown:
            children = {pid for pid, parent in parents.items() if parent in found}
            grown = not children <= found
            found |= children
        return sorted(pid for pid in found if pid in parents)

    def close(self) -> None:
        """End it, kindly first: its standard input closes, then SIGTERM, then SIGKILL."""
        self.resume()
        self.note_memory()
        members = self.members()
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        for seconds, action in ((5, self.process.terminate), (20, self.process.kill), (5, lambda: None)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
                break
            action()
        self.process.stdout.close()
        for pid in members:  # helpers that outlived it; a pid that was given anew has another session
            fields = _stat(pid)
            if fields and int(fields[3]) == self.process.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _signal(self, number: int) -> None:
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class EngineFailed(Exception):
    """An engine ended, or answered wrongly. It takes no further part."""


@contextlib.contextmanager
def foreign_load(child: Child, record: dict[str, Any]) -> Iterator[None]:
    """Note in `record` which share of the machine others than `child` used meanwhile, and the child's memory."""

    def others() -> float:
        return machine_busy() - child.cpu_seconds() - time.process_time()

    before, started = others(), time.perf_counter()
    yield
    used = others() - before
    cores = os.cpu_count() or 1
    record["foreign"] = round(max(0.0, used / (time.perf_counter() - started) / cores), 3)
    child.note_memory()


def machine_busy() -> float:
    """Return the processor seconds that all processes together have used since the machine started."""
    user, nice, system, _, _, interrupt, soft_interrupt, *_ = map(
        int, _read("/proc/stat").split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + interrupt + soft_interrupt) / TICKS


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty if the process is gone or a zombie."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields if fields and fields[0] != "Z" else []


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
