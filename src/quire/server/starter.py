"""`Starter`: in which round of the event loop a request is started. What a request is served, the routes decide."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

MAX_STARTED = 4  # in a round: some milliseconds of work, for the first step of a request is its longest


class Starter:
    """Starts the requests of all connections in their order, a few in each round of the event loop.

    However many arrive at once, streams and probes get their turn between them.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._num_started = 0  # in this round
        self._round: asyncio.Handle | None = None  # the beginning of the next one

    def start(self, loop: asyncio.AbstractEventLoop, run: Callable[[], None]) -> None:
        """Call `run` now, or when its turn comes."""
        self._waiting.append(run)
        self._start_some(loop)

    def _start_some(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting and self._num_started < MAX_STARTED:
            self._num_started += 1
            self._waiting.popleft()()
        if self._round is None:
            self._round = loop.call_soon(self._begin_round, loop)

    def _begin_round(self, loop: asyncio.AbstractEventLoop) -> None:
        self._round = None
        self._num_started = 0
        if self._waiting:
            self._start_some(loop)
