"""`Front`: the supervisor's handle of a process that serves HTTP."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from typing import Any

from quire import logs
from quire.child_process import start_module_here
from quire.engine.heartbeat_monitor import HeartbeatMonitor
from quire.engine.launch import anonymous_file, options_file
from quire.supervisor import systemd
from quire.supervisor.board import Board
from quire.supervisor.channel import Channel, ConnectionQueue
from quire.supervisor.connections import Admission
from quire.supervisor.quotas import QuotaShare

START_SECONDS = 60.0  # until its first heartbeat
WAIT_SECONDS = 0.3  # from then on it is looked up whether it waits for a processor
SILENT_SECONDS = 0.8  # without a heartbeat, until connections wait here rather than for it
DUMP_SECONDS = 0.2
DUMP_SIGNAL = signal.SIGUSR1
MAX_DUMP_BYTES = 1 << 16


class Front:
    """One process, which is started at once.

    Args:
        module: the process runs its `main`. front_args: what that reads from standard input, beside the descriptors.
        row: of the board. quotas: what it holds of the quotas of keys.

    Attributes:
        channel: messages to and from it. connections: those that it has taken, by their numbers. serving: it takes
            connections. ready: its models are loaded. exiting: it has said that it exits. killed: it was killed from
            here.
    """

    def __init__(
        self,
        module: str,
        front_args: dict[str, Any],
        row: int,
        board: Board,
        board_fd: int,
        queue: ConnectionQueue,
        quotas: QuotaShare,
    ) -> None:
        self.row = row
        self.quotas = quotas
        self._board = board
        self._began = time.monotonic()
        self._monitor = HeartbeatMonitor()
        self._last_beat = 0.0
        self._waited: float | None = None  # for a processor, when its silence was first looked into [s]
        self.connections: dict[int, Admission] = {}
        self.serving = self.ready = self.exiting = self.killed = False
        board.clear(row)
        about = {"row": row, "num_rows": board.num_rows, "num_queues": board.num_queues, "log": logs.settings()}
        with contextlib.ExitStack() as shared:
            ours, theirs = socket.socketpair()
            shared.callback(ours.close)
            with theirs:
                self._stacks = anonymous_file("quire-stacks")
                shared.callback(os.close, self._stacks)
                inherited = {
                    "channel": theirs.fileno(),
                    "queue": queue.fileno(),
                    "board": board_fd,
                    "stacks": self._stacks,
                }
                with options_file("quire-front", {**front_args, **inherited, **about}) as options:
                    self.process = start_module_here(
                        module,
                        stdin=options,
                        pass_fds=tuple(inherited.values()),
                        environment=systemd.environment_of_children(),
                    )
            shared.pop_all()
        self.channel = Channel(ours)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self.process.pid

    @property
    def reacts(self) -> bool:
        """Whether it serves, and has a heartbeat."""
        return (
            self.serving
            and not self.exiting
            and not self.killed
            and not self.channel.closed
            and self.silent_for() < SILENT_SECONDS
        )

    def silent_for(self) -> float:
        """Return for how long there has been no heartbeat [s], START_SECONDS less before the first one.

        Time in which it waited for a processor does not count, nor what `HeartbeatMonitor` excuses.
        """
        beat = self._board.last_beat(self.row)
        if beat != self._last_beat:
            self._last_beat, self._waited = beat, None
        silent = self._monitor.silent_for(time.monotonic(), beat or self._began + START_SECONDS)
        waited = _seconds_waited(self.pid) if silent > WAIT_SECONDS and sys.platform == "linux" else None
        if waited is not None:
            if self._waited is None:
                self._waited = waited
            silent -= waited - self._waited
        return max(0.0, silent)

    def dump_stacks(self) -> str:
        """Return the stacks of its threads, as far as it still writes them."""
        start = os.fstat(self._stacks).st_size
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(DUMP_SIGNAL)
        time.sleep(DUMP_SECONDS)
        return self.read_stacks(start)

    def read_stacks(self, start: int = 0) -> str:
        """Return what it has written of its stacks, which it does also when it crashes."""
        return os.pread(self._stacks, MAX_DUMP_BYTES, start).decode(errors="replace")

    def kill(self) -> None:
        """End it by force."""
        self.killed = True
        self.process.kill()

    def close(self) -> None:
        """Release what was shared with it."""
        self.channel.close()
        os.close(self._stacks)
        self._board.clear(self.row)


def how_ended(code: int) -> str:
    """Return an exit code of a process in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # one of those for real-time processes
        return f"signal {-code}"


def _seconds_waited(pid: int) -> float | None:
    """Return for how long the main thread of a process was ready to run and had no processor, see proc(5).

    None if that cannot be read.
    """
    try:
        with open(f"/proc/{pid}/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):  # it has ended, or the kernel does not count, or too many files are open
        return None
