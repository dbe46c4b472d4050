"""Where the time of one request went, by what the front knows: for `metrics` in answers, timelines, logs and traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.frontend.output_processor import RequestStream


@dataclass(frozen=True, slots=True)
class Timings:
    """One prompt and what was generated from it. Points in time are monotonic seconds; None: it did not come so far.

    Attributes:
        engine_id: its id within the engine. finish_reasons: of all its sequences, None for those that go on.
    """

    engine_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int
    num_sequences: int
    num_preemptions: int
    finish_reasons: list[str | None]
    arrival: float
    scheduled: float | None
    first_token: float | None
    last_token: float | None
    finished: float | None

    @classmethod
    def of(cls, stream: RequestStream) -> Timings:
        """Return those of a stream, as far as it has come."""
        state = stream.state
        metrics = state.metrics
        return cls(
            engine_id=state.request_id,
            num_prompt_tokens=len(state.prompt_token_ids),
            num_cached_tokens=state.num_cached_tokens,
            num_tokens=state.num_generated_tokens,
            num_sequences=len(state.completions),
            num_preemptions=metrics.num_preemptions,
            finish_reasons=[completion.finish_reason for completion in state.completions],
            arrival=metrics.arrival_time,
            scheduled=metrics.first_scheduled_time,
            first_token=metrics.first_token_time,
            last_token=metrics.last_token_time,
            finished=metrics.finished_time,
        )

    @property
    def queue_seconds(self) -> float | None:
        """Arrival to first scheduling."""
        return _span(self.arrival, self.scheduled)

    @property
    def prefill_seconds(self) -> float | None:
        """First scheduling to first token."""
        return _span(self.scheduled, self.first_token)

    @property
    def decode_seconds(self) -> float | None:
        """First to last token."""
        return _span(self.first_token, self.last_token)

    @property
    def mean_token_seconds(self) -> float | None:
        """Mean time from a token to the next one of the same sequence."""
        per_sequence = self.num_tokens / self.num_sequences
        if self.decode_seconds is None or per_sequence <= 1:
            return None
        return self.decode_seconds / (per_sequence - 1)


def answer_metrics(streams: Sequence[RequestStream]) -> dict[str, Any] | None:
    """Return what an answer says of its times, under vLLM's names [ms]; None where several sequences share them.

    `tokens_per_second` is the rate from the first token to the last one.
    """
    if len(streams) != 1:
        return None
    timings = Timings.of(streams[0])
    if timings.num_sequences != 1:
        return None
    mean = timings.mean_token_seconds
    return {
        "time_to_first_token_ms": _milliseconds(_span(timings.arrival, timings.first_token)),
        "generation_time_ms": _milliseconds(timings.decode_seconds),
        "queue_time_ms": _milliseconds(timings.queue_seconds),
        "mean_itl_ms": _milliseconds(mean),
        "tokens_per_second": round(1.0 / mean, 3) if mean else None,
    }


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)
