"""`Backlog`: how many prompt tokens wait for their first token, how fast they go, and how long one more would wait.

A listener of the front's statistics; what is done about a long wait is decided by those who ask.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from quire.frontend.stats import FinishedRequest
from quire.step import SchedulerStats

MEMORY_SECONDS = 10.0
LEAST_SECONDS = 0.05


class Backlog:
    """Prompt tokens that were accepted and whose requests have no token yet.

    The rate is that of the prompt tokens which left the backlog, over the time in which there was one, with old times
    forgotten exponentially. So it holds whatever the engine is short of: if all its places are taken by requests that
    generate, few prompts begin, and the rate falls.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.num_tokens = 0
        self._done = 0.0  # tokens that left, and seconds with a backlog; both forgotten alike
        self._seconds = 0.0
        self._latest = clock()

    def add(self, num_tokens: int) -> None:
        """A request with so many prompt tokens was accepted."""
        self._advance()
        self.num_tokens += num_tokens

    def clear(self) -> None:
        """Nothing waits any more, whatever became of it."""
        if self.num_tokens:
            self._advance()
            self.num_tokens = 0

    @property
    def rate(self) -> float | None:
        """Prompt tokens per second, lately; None while not known."""
        seconds = self._seconds + (self._clock() - self._latest if self.num_tokens else 0.0)
        if self._done <= 0 or seconds < LEAST_SECONDS:
            return None
        return self._done / seconds

    def wait(self, num_tokens: int = 0) -> float | None:
        """Return in how many seconds a request with so many prompt tokens would have its first; None: not known."""
        rate = self.rate
        return None if rate is None else (self.num_tokens + num_tokens) / rate

    def _advance(self) -> None:
        now = self._clock()
        if self.num_tokens:
            passed = now - self._latest
            kept = math.exp(-passed / MEMORY_SECONDS)
            self._done *= kept
            self._seconds = self._seconds * kept + passed
        self._latest = now

    def on_step(self, stats: SchedulerStats, num_prompt_tokens: int, num_generation_tokens: int) -> None:
        """See `StatListener.on_step`."""
        if num_prompt_tokens:
            self._advance()
            self._done += num_prompt_tokens
            self.num_tokens = max(0, self.num_tokens - num_prompt_tokens)

    def on_first_token(self, seconds: float) -> None:
        """Counted by steps."""

    def on_next_token(self, seconds: float) -> None:
        """Not counted."""

    def on_finished(self, request: FinishedRequest) -> None:
        """See `StatListener.on_finished`; those that had a token have left before."""
        if request.decode_seconds is None:
            self._advance()
            self.num_tokens = max(0, self.num_tokens - request.num_prompt_tokens)
