"""`Starter`: in which round of the event loop a request is started. What a request is served, the routes decide."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)

MAX_STARTED = 4  # in a round: some milliseconds of work, for the first step of a request is its longest


class Starter:
    """Starts the requests of all connections in their order, a few in each round of the event loop.

    However many arrive at once, streams and probes get their turn between them. A request is never started in the round
    in which it arrived: at the end of the next one it is known whether its client has already gone.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._round: asyncio.Handle | None = None  # the beginning of the next one

    def start(self, loop: asyncio.AbstractEventLoop, run: Callable[[], None]) -> None:
        """Call `run` when its turn comes."""
        self._waiting.append(run)
        if self._round is None:
            self._round = loop.call_soon(self._begin_round, loop)

    def _begin_round(self, loop: asyncio.AbstractEventLoop) -> None:
        turn = [self._waiting.popleft() for _ in range(min(MAX_STARTED, len(self._waiting)))]
        self._round = loop.call_soon(self._begin_round, loop) if self._waiting else None
        for run in turn:
            try:
                run()
            except Exception:  # the boundary between requests: those of others are started all the same
                logger.exception("a request could not be started")
