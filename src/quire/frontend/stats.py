"""What the front end reports while it works, for whoever wants to count: metrics endpoints, logs, benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from quire.step import SchedulerStats


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """One request that ended, however it did.

    Attributes:
        num_generation_tokens: over all sequences. max_tokens: as limited to the context; n: completions returned.
        num_sequences: completions generated, more than n with `best_of`.
        finish_reason: of the first completion; "abort" if the caller went away. refused: whether, with "error", the
            engine could never have served it.
        e2e_seconds: arrival to end. queue_seconds: arrival to first scheduling. prefill_seconds: to the first token.
        decode_seconds: first to last token. inference_seconds: first scheduling to last token. None where the
            request did not get so far.
        most_generation_tokens: of the longest sequence.
    """

    request_id: str
    num_prompt_tokens: int
    num_generation_tokens: int
    max_tokens: int
    n: int
    num_sequences: int
    finish_reason: str
    refused: bool
    e2e_seconds: float
    queue_seconds: float | None
    prefill_seconds: float | None
    decode_seconds: float | None
    inference_seconds: float | None
    num_cached_tokens: int
    num_preemptions: int
    most_generation_tokens: int = 0

    @property
    def stage(self) -> str:
        """How far it came: "queued", "prefill" or "decode"."""
        if self.queue_seconds is None:
            return "queued"
        return "prefill" if self.prefill_seconds is None else "decode"


class StatListener(Protocol):
    """Receives events; called on the thread of the front end, so it must be quick and must not raise."""

    def on_step(self, stats: SchedulerStats, num_prompt_tokens: int, num_generation_tokens: int) -> None:
        """Report a step: tokens of the prompts it completed, and tokens it generated."""

    def on_first_token(self, seconds: float) -> None:
        """Report a first token, so long after the request's arrival."""

    def on_next_token(self, seconds: float) -> None:
        """Report another token, so long after the one before."""

    def on_finished(self, request: FinishedRequest) -> None:
        """Report a request that ended."""
