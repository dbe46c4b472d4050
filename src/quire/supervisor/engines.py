"""`Engines`: the engine processes that the supervisor has started for its fronts, which they outlive."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from typing import Any

from quire.child_process import start_module_here
from quire.engine.launch import CLOSE_SECONDS, EngineFiles, start_engine

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Engine:
    """An engine process.

    Attributes:
        number: its own; no other engine gets it later. name: of the model. files: what it shares with its users.
        users: the rows of the fronts that use it. released: whether one has left it since the last one came.
        exit_code: None while it runs. kill_at: when an engine that is to end is killed [monotonic seconds].
    """

    number: int
    name: str
    process: subprocess.Popen[bytes]
    files: EngineFiles
    users: set[int] = field(default_factory=set)
    released: bool = False
    exit_code: int | None = None
    kill_at: float | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether it has loaded its model: only then it looks whether it is to end."""
        return os.pread(self.files.heartbeat, 8, 0) not in (b"", bytes(8))


class Engines:
    """The engines, one for each name, and those that are ending."""

    def __init__(self) -> None:
        self._engines: dict[int, Engine] = {}
        self._current: dict[str, Engine] = {}
        self._num_started = 0

    def __iter__(self) -> Any:
        return iter(list(self._engines.values()))

    def get(self, number: int) -> Engine | None:
        """Return the engine of this number if it has not ended."""
        return self._engines.get(number)

    def current(self, name: str) -> Engine | None:
        """Return the engine that `find` would return, if there is one."""
        return self._current.get(name)

    def find(self, name: str, options: dict[str, Any], replaced: int | None = None) -> Engine:
        """Return the engine of a model; start one if there is none, or if it is the one to be replaced.

        Raises `OSError` if the system starts no process.
        """
        engine = self._current.get(name)
        if engine is not None and (engine.number == replaced or engine.process.poll() is not None):
            self.kill(engine)
            engine = None
        if engine is None:
            engine = self._current[name] = self._start(name, options)
        engine.released = False
        return engine

    def _start(self, name: str, options: dict[str, Any]) -> Engine:
        process, files = start_engine(options, start_module_here)
        self._num_started += 1
        engine = self._engines[self._num_started] = Engine(self._num_started, name, process, files)
        return engine

    def release(self, engine: Engine, row: int, *, reacts: bool) -> None:
        """Note that a front does not need an engine any more. It ends with its last user."""
        engine.users.discard(row)
        engine.released = True
        if not engine.users:
            self.end(engine, reacts=reacts)

    def forget(self, row: int) -> None:
        """Note that a front has ended. Its engines wait for the next front, unless all others have left them."""
        for engine in list(self._engines.values()):
            if row in engine.users:
                engine.users.discard(row)
                if engine.released and not engine.users:
                    self.end(engine)

    def end(self, engine: Engine, *, reacts: bool = True) -> None:
        """End an engine, in order if it reacts."""
        if self._current.get(engine.name) is engine:
            del self._current[engine.name]
        if engine.kill_at is None:
            engine.kill_at = time.monotonic() + (CLOSE_SECONDS if reacts else 0.0)
            os.close(engine.files.listener)  # it ends once its users have closed their copies
        self.check()

    def kill(self, engine: Engine) -> None:
        """End an engine by force."""
        engine.process.send_signal(signal.SIGKILL)
        self.end(engine, reacts=False)

    def check(self) -> None:
        """Kill those that have not ended in time; called again and again."""
        now = time.monotonic()
        for engine in self._engines.values():
            if engine.kill_at is not None and now >= engine.kill_at and engine.process.poll() is None:
                engine.process.kill()

    def reap(self) -> list[Engine]:
        """Return the engines that have ended since the last call."""
        ended = [engine for engine in self._engines.values() if engine.process.poll() is not None]
        for engine in ended:
            engine.exit_code = engine.process.returncode
            if self._current.get(engine.name) is engine:
                del self._current[engine.name]
            if engine.kill_at is None:
                os.close(engine.files.listener)
            os.close(engine.files.heartbeat)
            os.close(engine.files.stacks)
            del self._engines[engine.number]
        return ended
