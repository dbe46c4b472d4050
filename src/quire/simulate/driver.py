"""`drive` replays a trace against an engine and records when each request was added, started and finished.

It runs under a `Clock`: a `VirtualClock`, which a cost model moves, or a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire.engine.core import EngineCore
from quire.engine_request import EngineRequest
from quire.errors import QuireError
from quire.sampling_params import SamplingParams
from quire.simulate.trace import TraceRequest
from quire.step import SchedulerStats


class Clock(Protocol):
    """Seconds since the replay began."""

    def __call__(self) -> float:
        """Return the time."""

    def wait_until(self, when: float) -> None:
        """Let time pass until `when`; return at once if that is past."""


class VirtualClock:
    """A clock that stands still unless it is moved."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the virtual time [s]."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self.now += seconds

    def wait_until(self, when: float) -> None:
        """Jump to `when`, never back."""
        self.now = max(self.now, when)


MAX_IDLE_STEPS = 1000  # consecutive steps without tokens, elapsed time or outputs


@dataclass(slots=True)
class Record:
    """What happened to one request. Times in seconds of the replay, None for events that did not happen.

    Attributes:
        num_generated: tokens. num_cached: prompt tokens that were not computed. error: why it failed, or None.
    """

    request: TraceRequest
    first_scheduled: float | None = None
    first_token: float | None = None
    second_token: float | None = None
    finish: float | None = None
    num_generated: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.request.arrival

    @property
    def second(self) -> float | None:
        """Seconds from the first token to the second."""
        if self.first_token is None or self.second_token is None:
            return None
        return self.second_token - self.first_token

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None with fewer than two."""
        if self.finish is None or self.first_token is None or self.num_generated < 2:
            return None
        return (self.finish - self.first_token) / (self.num_generated - 1)

    @property
    def e2e(self) -> float | None:
        """Seconds from arrival to the end."""
        return None if self.finish is None else self.finish - self.request.arrival


@dataclass(slots=True)
class RunLog:
    """What happened in a replay.

    Attributes:
        records: one per request, in order of arrival. duration: when the last request ended [s].
        stats: of the scheduler at the end.
        running, waiting, usage: sequences running, requests waiting and the share of blocks in use at the end of each
            step, summed over steps times their seconds. max_running, max_waiting, max_usage: their maxima.
    """

    records: list[Record]
    duration: float = 0.0
    stats: SchedulerStats = field(default_factory=SchedulerStats)
    running: float = 0.0
    waiting: float = 0.0
    usage: float = 0.0
    max_running: int = 0
    max_waiting: int = 0
    max_usage: float = 0.0

    def add(self, stats: SchedulerStats, seconds: float) -> None:
        """Add the state of the queues, which lasted `seconds`."""
        usage = stats.kv_cache_usage
        self.running += stats.num_running * seconds
        self.waiting += stats.num_waiting * seconds
        self.usage += usage * seconds
        self.max_running = max(self.max_running, stats.num_running)
        self.max_waiting = max(self.max_waiting, stats.num_waiting)
        self.max_usage = max(self.max_usage, usage)


def drive(
    core: EngineCore,
    requests: Sequence[TraceRequest],
    clock: Clock,
    prompt_of: Callable[[TraceRequest], list[int]] = TraceRequest.prompt_token_ids,
) -> RunLog:
    """Replay `requests`, sorted by arrival, against `core`, whose clock is `clock`; return when all have ended.

    A request is added before the first step that begins after its arrival, as in the engine's own loop. It generates
    exactly its number of output tokens, or as many as fit.

    Raises:
        QuireError: the engine does nothing although requests are unfinished.
    """
    log = RunLog([Record(request) for request in requests])
    by_id = {str(record.request.number): record for record in log.records}
    if len(by_id) != len(log.records):
        raise QuireError("two requests have the same number")
    params: dict[int, SamplingParams] = {}
    next_index, num_idle, last = 0, 0, clock()
    while next_index < len(requests) or core.has_unfinished():
        if not core.has_unfinished():
            clock.wait_until(requests[next_index].arrival)
            last = clock()  # an idle engine adds nothing to the sums
        now = clock()
        while next_index < len(requests) and requests[next_index].arrival <= now:
            request = requests[next_index]
            core.add(message_of(request, prompt_of(request), params))
            next_index += 1
        result = core.step()
        now = clock()
        log.add(result.stats, now - last)
        num_idle = num_idle + 1 if now == last and not result.outputs else 0
        last = now
        for output in result.outputs:
            record = by_id[output.sequence_id]
            if record.first_token is None and output.new_token_ids:
                record.first_token = now
                record.first_scheduled = output.first_scheduled_time
                record.num_cached = output.num_cached_tokens or 0
            record.num_generated += len(output.new_token_ids)
            if record.second_token is None and record.num_generated > 1:
                record.second_token = now
            if output.finish_reason is not None:
                record.finish = now
                record.num_preemptions = output.num_preemptions
                record.error = None if output.error is None else output.error.message
        if num_idle > MAX_IDLE_STEPS:
            if next_index == len(requests):
                raise QuireError(f"the scheduler does nothing at {now:.6f} s: {result.stats}")
            clock.wait_until(requests[next_index].arrival)
    log.duration = max((record.finish or 0.0 for record in log.records), default=0.0)
    log.stats = core.scheduler.stats()
    return log


def message_of(
    request: TraceRequest, prompt: list[int], params: dict[int, SamplingParams] | None = None
) -> EngineRequest:
    """Return the request as the frontend would send it; `params` caches sampling options by number of tokens."""
    length = request.num_output_tokens
    params = {} if params is None else params
    if length not in params:
        params[length] = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)
    name = str(request.number)
    return EngineRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=params[length],
        arrival_time=request.arrival,
        sequence_ids=[name],
        seeds=[request.number],
        stop_ids=[],
        max_tokens=length,
        priority=request.priority,
        tenant=request.tenant,
        background=request.background,
    )
