"""`SleepSwitch`: puts an engine to sleep and wakes it up, for a front end in asyncio.

What an engine frees when it sleeps is the engine's business (`EngineCore.call`); when it should, its owner's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from quire.errors import EngineAsleepError, RequestError

LEVELS = (1, 2)


class SleepSwitch:
    """Knows whether the engine sleeps. From the moment it is told to, no request may begin.

    Args:
        call: runs an operation of the engine. num_unfinished: says how many requests have not ended.

    Attributes:
        level: 0 awake, 1 without KV cache, 2 without weights.
    """

    def __init__(self, call: Callable[..., Awaitable[dict[str, Any]]], num_unfinished: Callable[[], int]) -> None:
        self._call = call
        self._num_unfinished = num_unfinished
        self._changing = asyncio.Lock()
        self.level = 0

    def check_awake(self) -> None:
        """Raise `EngineAsleepError` unless requests may begin."""
        if self.level:
            raise EngineAsleepError("the engine is asleep; wake it up first")

    async def sleep(self, level: int) -> int:
        """Free memory; return how many bytes were freed. Raises `RequestError` while requests are unfinished."""
        check_level(level)
        async with self._changing:
            check_idle(self._num_unfinished())
            before, self.level = self.level, max(self.level, level)
            try:
                answer = await self._call("sleep", level=level)
            except BaseException:
                self.level = before
                raise
            return int(answer["freed"])

    async def wake_up(self) -> None:
        """Have requests served again. Raises `QuireError`, and goes on sleeping, if there is no memory for it."""
        async with self._changing:
            if self.level:
                await self._call("wake_up")
                self.level = 0

    def note_new_engine(self) -> None:
        """Say that another engine has taken the place of the one that slept; a new one is awake."""
        self.level = 0


def check_level(level: int) -> None:
    """Raise `RequestError` unless this is a level of sleep."""
    if level not in LEVELS:
        raise RequestError(f"level must be 1 or 2, got {level}", param="level")


def check_idle(num_unfinished: int) -> None:
    """Raise `RequestError` if requests run, which would have to begin again."""
    if num_unfinished:
        raise RequestError(
            f"{num_unfinished} requests are unfinished; the engine can sleep once they have ended", code="engine_busy"
        )
