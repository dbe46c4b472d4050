"""The events that the frontend reports to listeners (metrics, logs, benchmarks), and the estimate of TTFT by them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from quire.outputs import RequestMetrics
from quire.step import SchedulerStats

DECAY_SECONDS = 10.0
MIN_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """One request that ended, however it did.

    Attributes:
        num_generation_tokens: over all sequences. max_tokens: as limited to the context; n: completions returned.
        num_sequences: completions generated, more than n with `best_of`.
        finish_reason: of the first completion; "abort" if the caller went away. refused: whether, with "error", the
            engine did not fail: it could never have served it, or was asleep.
        max_generation_tokens: of the longest sequence.
    """

    request_id: str
    num_prompt_tokens: int
    num_generation_tokens: int
    max_tokens: int
    n: int
    num_sequences: int
    finish_reason: str
    refused: bool
    num_cached_tokens: int
    metrics: RequestMetrics
    max_generation_tokens: int = 0

    @property
    def stage(self) -> str:
        """How far it came: "queued", "prefill" or "decode"."""
        if self.metrics.queue_seconds is None:
            return "queued"
        return "prefill" if self.metrics.prefill_seconds is None else "decode"


class StatListener(Protocol):
    """Receives events; called on the thread of the frontend, so it must be quick and must not raise."""

    def on_step(self, stats: SchedulerStats, num_prompt_tokens: int, num_generation_tokens: int) -> None:
        """Report a step: tokens of the prompts it completed, and tokens it generated."""

    def on_first_token(self, seconds: float) -> None:
        """Report a first token, so long after the request's arrival."""

    def on_next_token(self, seconds: float) -> None:
        """Report another token, so long after the one before."""

    def on_finished(self, request: FinishedRequest) -> None:
        """Report a request that ended."""


class QueueLoad(NamedTuple):
    """What a client of an engine has queued there.

    Attributes:
        num_requests: unfinished ones. num_tokens: of prompts that wait. rate: prompt tokens that begin per second; 0 if
            none wait, or while unknown.
    """

    num_requests: int = 0
    num_tokens: int = 0
    rate: float = 0.0


NO_LOAD = QueueLoad()


class TTFTEstimator:
    """Estimates the time to the first token of a request, by the prompt tokens queued before it.

    A prompt is queued from its acceptance to its first token. The rate is that of the prompt tokens that left the
    queue, over the time in which it was not empty, with exponential decay. So it holds whatever the engine is short of:
    if requests that generate take all of it, few prompts begin, and the rate falls.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.num_queued_tokens = 0
        self._done = 0.0  # tokens that left, and seconds with a queue; both decay
        self._seconds = 0.0
        self._latest = clock()

    def add(self, num_tokens: int) -> None:
        """Count a request with so many prompt tokens that was accepted."""
        self._advance()
        self.num_queued_tokens += num_tokens

    def clear(self) -> None:
        """Empty the queue."""
        if self.num_queued_tokens:
            self._advance()
            self.num_queued_tokens = 0

    @property
    def rate(self) -> float | None:
        """Prompt tokens per second; None while unknown."""
        seconds = self._seconds + (self._clock() - self._latest if self.num_queued_tokens else 0.0)
        if self._done <= 0 or seconds < MIN_SECONDS:
            return None
        return self._done / seconds

    def estimate(self, num_tokens: int = 0, others: QueueLoad = NO_LOAD) -> float | None:
        """Return the seconds to the first token of a request with so many prompt tokens; None while unknown.

        Args:
            others: what other clients of the engine have queued.
        """
        rate = (self.load(0).rate + others.rate) or self.rate
        return None if rate is None else (self.num_queued_tokens + others.num_tokens + num_tokens) / rate

    def load(self, num_requests: int) -> QueueLoad:
        """Return what this queue is to others, with so many unfinished requests."""
        return QueueLoad(num_requests, self.num_queued_tokens, (self.rate or 0.0) if self.num_queued_tokens else 0.0)

    def _advance(self) -> None:
        now = self._clock()
        if self.num_queued_tokens:
            passed = now - self._latest
            decay = math.exp(-passed / DECAY_SECONDS)
            self._done *= decay
            self._seconds = self._seconds * decay + passed
        self._latest = now

    def on_step(self, stats: SchedulerStats, num_prompt_tokens: int, num_generation_tokens: int) -> None:
        if num_prompt_tokens:
            self._advance()
            self._done += num_prompt_tokens
            self.num_queued_tokens = max(0, self.num_queued_tokens - num_prompt_tokens)

    def on_first_token(self, seconds: float) -> None:
        """Counted by steps."""

    def on_next_token(self, seconds: float) -> None:
        """Not counted."""

    def on_finished(self, request: FinishedRequest) -> None:
        """See `StatListener.on_finished`; those that had a token have left before."""
        if request.metrics.decode_seconds is None:
            self._advance()
            self.num_queued_tokens = max(0, self.num_queued_tokens - request.num_prompt_tokens)
