"""`RecentPast`: what happened in each of the last seconds, for plots that begin before anybody looked.

A `StatListener` beside the metrics, which count since the beginning. Its memory is bounded, and a second in which
nothing happened takes none.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec

from quire.step import SchedulerStats

SECONDS = 300


class Second(msgspec.Struct, array_like=True):
    """One second.

    `number` counts seconds of the listener's clock. Tokens are those of the prompts that were completed and those
    generated; `first` and `next` the times to first tokens and between tokens (how many, their sum, the longest) [s];
    then the scheduler's state at its end, and the tokens looked up and found in the prefix cache since the engine's
    start.
    """

    number: int
    prompt_tokens: int = 0
    generated_tokens: int = 0
    num_first: int = 0
    sum_first: float = 0.0
    max_first: float = 0.0
    num_next: int = 0
    sum_next: float = 0.0
    max_next: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    cache_queries: int = 0
    cache_hits: int = 0


class RecentPast:
    """The last `SECONDS` seconds of one model.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: deque[Second] = deque(maxlen=SECONDS)

    def now(self) -> int:
        """Return the number of this second."""
        return int(self._clock())

    def _latest(self) -> Second:
        number = int(self._clock())
        if not self._seconds or self._seconds[-1].number != number:
            self._seconds.append(Second(number))
        return self._seconds[-1]

    def on_step(self, stats: SchedulerStats, num_prompt_tokens: int, num_generation_tokens: int) -> None:
        """Add up a step."""
        second = self._latest()
        second.prompt_tokens += num_prompt_tokens
        second.generated_tokens += num_generation_tokens
        second.num_running, second.num_waiting = stats.num_running, stats.num_waiting
        second.kv_usage = round(stats.kv_cache_usage, 4)
        second.cache_queries, second.cache_hits = stats.prefix_cache_queries, stats.prefix_cache_hits

    def on_first_token(self, seconds: float) -> None:
        """Note the time to a first token."""
        second = self._latest()
        second.num_first += 1
        second.sum_first += seconds
        second.max_first = max(second.max_first, seconds)

    def on_next_token(self, seconds: float) -> None:
        """Note the time between two tokens."""
        second = self._latest()
        second.num_next += 1
        second.sum_next += seconds
        second.max_next = max(second.max_next, seconds)

    def since(self, number: int) -> list[Second]:
        """Return the seconds from `number` on in which something happened; the last one may not be over."""
        oldest = max(number, self.now() - SECONDS)
        return [second for second in self._seconds if second.number >= oldest]
