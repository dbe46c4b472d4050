"""`FlightRecorder`: the last steps of an engine, in shapes and counts, never text or token ids.

Recording costs the same for every step, whatever its size: the plan's dict of tokens is referenced, not copied. The
timeline of a request is made on demand, by going through the steps since its arrival (`timeline`).
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Annotated, Any, NamedTuple

import msgspec

from quire.scheduler.request import RequestStatus
from quire.scheduler.scheduler import Scheduler
from quire.step import SchedulerOutput, SchedulerStats, Tier, TransferOp

MAX_STEPS = 4096
MAX_ENTRIES = 262144  # of all steps' dicts together: some 20 MB
MAX_WAITS = 1024
MAX_FOLLOWED = 8
MAX_CHUNKS = 32
MAX_EVENTS = 32
NUM_SLOWEST = 5
MICROSECONDS = 1e6
SHOWN_GAP = 1e-4  # seconds
_SUFFIX = re.compile(r"[/-](\d+)|#\d+")  # of the ids of a request's parts, sequences and beams


class ShowTimeline(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of the call "timeline".

    Attributes:
        request_id: as in `EngineRequest`, without the suffix that `InputProcessor` adds where it splits a request.
        num_sequences: at its start; the first `MAX_FOLLOWED` are followed.
        since_us, until_us: its arrival and end, in microseconds of the engine's clock; until 0: it is live.
    """

    request_id: Annotated[str, msgspec.Meta(max_length=1024)]
    num_sequences: Annotated[int, msgspec.Meta(ge=1, le=65536)] = 1
    since_us: Annotated[int, msgspec.Meta(ge=0)] = 0
    until_us: Annotated[int, msgspec.Meta(ge=0)] = 0


class Admission(NamedTuple):
    """A sequence that is new to the worker: it began, or was resumed after a preemption.

    It had `num_tokens`, of which `num_computed` were cached: `num_host` on the host and `num_disk` on disk.
    """

    sequence_id: str
    num_tokens: int
    num_prompt_tokens: int
    num_computed: int
    num_host: int
    num_disk: int


class Preemption(NamedTuple):
    """A preempted sequence with the tokens it had generated; `kind` is "recompute" or "swap"."""

    sequence_id: str
    kind: str
    num_generated: int


class StepRecord:
    """One step. `seconds` and `stats` are None until it ends.

    `started` is when it was planned, or when the previous step ended, if that was later. For `host_gap` seconds before
    it the device waited for the host.
    """

    def __init__(self, started: float, plan: SchedulerOutput) -> None:
        self.started = started
        self.scheduled = plan.num_scheduled_tokens
        self.total = plan.total_num_scheduled_tokens
        self.num_disk_loads = plan.num_transfers(TransferOp.LOAD, Tier.DISK)
        self.num_swapped_out = plan.num_transfers(TransferOp.STORE, Tier.HOST)
        self.num_swapped_in = plan.num_transfers(TransferOp.LOAD, Tier.HOST)
        self.admitted: list[Admission] | None = None
        self.preempted: list[Preemption] | None = None
        self.forked: list[str] | None = None
        self.host_gap = 0.0
        self.seconds: float | None = None
        self.stats: SchedulerStats | None = None

    def shape(self) -> dict[str, Any]:
        """Return its contents, in counts."""
        prompts = [count for count in self.scheduled.values() if count > 1]
        return {
            "sequences": len(self.scheduled),
            "tokens": self.total,
            "prompts": len(prompts),
            "prompt_tokens": sum(prompts),
            "admitted": len(self.admitted or ()),
            "preempted": len(self.preempted or ()),
            "swapped_out": self.num_swapped_out,
            "swapped_in": self.num_swapped_in,
            "disk_reads": self.num_disk_loads,
            "thin_blocks": 0 if self.stats is None else self.stats.num_used_layerwise_blocks,
        }

    def __str__(self) -> str:
        took = "not finished" if self.seconds is None else f"{1000 * self.seconds:.1f} ms"
        shape = ", ".join(f"{name} {count}" for name, count in self.shape().items() if count)
        gap = f"; {1000 * self.host_gap:.1f} ms after the one before" if self.host_gap > SHOWN_GAP else ""
        return f"at {self.started:.3f} s: {took}; {shape or 'nothing to compute'}{gap}"


class FlightRecorder:
    """The last steps of one engine.

    Args:
        clock: of the engine [seconds]. block_size, max_num_seqs, max_num_batched_tokens: limits that explain queueing.
    """

    def __init__(
        self, clock: Callable[[], float], *, block_size: int, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self._clock = clock
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._steps: deque[StepRecord] = deque()
        self._num_entries = 0
        self._ended = 0.0  # when the last step did
        self._waits: deque[tuple[str, float]] = deque(maxlen=MAX_WAITS)

    def __len__(self) -> int:
        return len(self._steps)

    def begin(self, plan: SchedulerOutput, scheduler: Scheduler) -> StepRecord:
        """Record a step that is about to be executed."""
        record = StepRecord(self._clock(), plan)
        if plan.new_sequences:
            record.admitted = [
                Admission(
                    new.sequence_id,
                    new.num_tokens,
                    new.num_prompt_tokens,
                    new.num_computed_tokens,
                    *_tiers_of(scheduler, new.sequence_id),
                )
                for new in plan.new_sequences
            ]
        if plan.preempted_sequence_ids:
            record.preempted = [_preemption(scheduler, name) for name in plan.preempted_sequence_ids]
        if plan.forks:
            record.forked = [fork.sequence_id for fork in plan.forks]
        self._steps.append(record)
        self._num_entries += len(record.scheduled)
        while len(self._steps) > MAX_STEPS or (self._num_entries > MAX_ENTRIES and len(self._steps) > 1):
            self._num_entries -= len(self._steps.popleft().scheduled)
        return record

    def end(self, record: StepRecord, stats: SchedulerStats, host_gap: float = 0.0) -> None:
        """Record the end of a step. Steps end in order."""
        now = self._clock()
        record.started = max(record.started, self._ended)
        record.seconds = now - record.started
        record.stats, record.host_gap, self._ended = stats, host_gap, now

    def note_grammar(self, request_id: str, seconds: float) -> None:
        """Record how long a request waited for its grammar."""
        self._waits.append((request_id, seconds))

    def last(self, count: int = 5) -> list[str]:
        """Return a line for each of the last steps, the newest last."""
        return [str(record) for record in list(self._steps)[-count:]]

    def timeline(self, show: ShowTimeline) -> dict[str, Any]:
        """Return what happened to a request, JSON-like; points in time are seconds of the engine's clock.

        `complete` is whether all of its steps are still recorded. See `_Timeline` for the rest.
        """
        since, until = show.since_us / MICROSECONDS, show.until_us / MICROSECONDS or math.inf
        request = _Timeline(self, show, since)
        # From the one before it arrived, which may still have run then.
        start = bisect_left(self._steps, since, key=lambda record: record.started)
        for record in islice(self._steps, max(start - 1, 0), None):
            if record.started > until:
                break
            request.add(record)
        answer = request.summary()
        oldest = self._steps[0].started if self._steps else self._clock()
        answer["complete"] = request.begun or (not request.steps and oldest <= since)
        waits = [seconds for name, seconds in self._waits if _belongs(name, show)]
        answer["grammar_seconds"] = max(waits, default=0.0)
        return answer


class _Timeline:
    """The timeline of one request, from steps added in order.

    Attributes:
        begun: whether its first admission is among them.
    """

    def __init__(self, recorder: FlightRecorder, show: ShowTimeline, since: float) -> None:
        self._recorder = recorder
        self._show = show
        self._since = since
        count = min(show.num_sequences, MAX_FOLLOWED)
        self._names = {show.request_id} if show.num_sequences == 1 else {f"{show.request_id}-{i}" for i in range(count)}
        self.begun = False
        self.steps: list[tuple[StepRecord, int]] = []
        self._events: list[dict[str, Any]] = []
        self._chunks: list[dict[str, Any]] = []
        self._num_chunks = 0
        self._prompt_left = 0
        self._queue: list[StepRecord] = []
        self._preemption: dict[str, Any] | None = None  # a preemption whose tokens are not all computed again
        self._num_recompute: int | None = None

    def add(self, record: StepRecord) -> None:
        """Add a step."""
        for preemption in record.preempted or ():
            if _belongs(preemption.sequence_id, self._show):
                self._add_preemption(record, preemption)
        for admission in record.admitted or ():
            if _belongs(admission.sequence_id, self._show):
                self._add_admission(record, admission)
        for name in record.forked or ():
            if len(self._names) < MAX_FOLLOWED and _belongs(name, self._show):
                self._names.add(name)
        scheduled = record.scheduled
        own = sum([scheduled[name] for name in self._names if name in scheduled])
        if own:
            self._add_tokens(record, own)
        elif not self.begun and not self.steps and record.started + (record.seconds or 0.0) > self._since:
            self._queue.append(record)

    def _add_admission(self, record: StepRecord, admission: Admission) -> None:
        if len(self._names) < MAX_FOLLOWED:
            self._names.add(admission.sequence_id)
        left = admission.num_tokens - admission.num_computed
        if self._preemption is not None:
            self._num_recompute = (self._num_recompute or 0) + left
            self._preemption.setdefault("resumed", record.started)
            self._preemption["recomputed"] = self._preemption.get("recomputed", 0) + (
                left if self._preemption["how"] != "swap" else 0
            )
        elif not self.begun:
            self.begun = True
            self._prompt_left = left
            device = admission.num_computed - admission.num_host - admission.num_disk
            self._event(
                "scheduled",
                record,
                cached={"device": max(device, 0), "host": admission.num_host, "disk": admission.num_disk},
                prompt_tokens=admission.num_prompt_tokens,
                waited_for=self._reason(admission),
            )

    def _add_preemption(self, record: StepRecord, preemption: Preemption) -> None:
        if self._preemption is not None and self._preemption["at"] == record.started:
            return  # another sequence of the request, which goes as a whole
        self._prompt_left = 0
        self._preemption = self._event("preempted", record, how=preemption.kind, tokens=preemption.num_generated)
        self._num_recompute = None

    def _event(self, kind: str, record: StepRecord, **details: Any) -> dict[str, Any]:
        event = {"event": kind, "at": record.started, **details}
        if len(self._events) < MAX_EVENTS:
            self._events.append(event)
        return event

    def _add_tokens(self, record: StepRecord, own: int) -> None:
        self.steps.append((record, own))
        end = record.started + (record.seconds or 0.0)
        if self._preemption is not None and self._num_recompute is not None:
            self._num_recompute -= own
            if self._num_recompute <= 0:
                self._preemption["seconds"] = end - self._preemption["at"]
                self._preemption = self._num_recompute = None
        elif self._prompt_left > 0:
            self._prompt_left -= own
            self._num_chunks += 1
            if len(self._chunks) < MAX_CHUNKS:
                others = len(record.scheduled) - sum(name in record.scheduled for name in self._names)
                self._chunks.append(
                    {
                        "at": record.started,
                        "seconds": record.seconds,
                        "tokens": own,
                        "others": others,
                        "batch_tokens": record.total,
                    }
                )

    def _reason(self, admission: Admission) -> str | None:
        """Return what it waited for longest: "seats" (`max_num_seqs`), "kv_cache", "budget" or "turn", or None."""
        recorder = self._recorder
        needed = -(-(admission.num_tokens - admission.num_computed) // recorder.block_size)
        seconds = dict.fromkeys(("seats", "kv_cache", "budget", "turn"), 0.0)
        for record in self._queue:
            stats = record.stats
            if stats is None or record.seconds is None:
                continue
            if not stats.num_waiting:
                continue  # before its arrival
            if stats.num_running >= recorder.max_num_seqs:
                reason = "seats"
            elif stats.num_free_blocks < needed or record.preempted:
                reason = "kv_cache"
            elif record.total >= recorder.max_num_batched_tokens:
                reason = "budget"
            else:
                reason = "turn"
            seconds[reason] += record.seconds
        most = max(seconds, key=lambda reason: seconds[reason])
        return most if seconds[most] else None

    def summary(self) -> dict[str, Any]:
        """Return the timeline, without the fields that only the recorder knows."""
        times = sorted(record.seconds for record, _ in self.steps if record.seconds is not None)
        slowest = sorted(self.steps, key=lambda step: -(step[0].seconds or 0.0))[:NUM_SLOWEST]
        summary: dict[str, Any] = {"count": len(self.steps)}
        if times:
            summary |= {
                "seconds": sum(times),
                "mean": sum(times) / len(times),
                "p50": times[len(times) // 2],
                "p99": times[min(len(times) * 99 // 100, len(times) - 1)],
                "max": times[-1],
                "mean_sequences": sum(len(record.scheduled) for record, _ in self.steps) / len(self.steps),
            }
        return {
            "events": self._events,
            "chunks": self._chunks,
            "num_chunks": self._num_chunks,
            "steps": summary,
            "slowest": [
                {"at": record.started, "seconds": record.seconds, "own_tokens": own, **record.shape()}
                for record, own in sorted(slowest, key=lambda step: step[0].started)
            ],
        }


def _belongs(name: str, show: ShowTimeline) -> bool:
    """Whether `name` is the request, or one of its parts, sequences and beams.

    Numbers are compared with `num_sequences`: "a-1" may be another request than "a".
    """
    if not name.startswith(show.request_id) or len(name) == len(show.request_id):
        return name == show.request_id
    found = _SUFFIX.fullmatch(name, len(show.request_id))
    return found is not None and (found[1] is None or int(found[1]) < show.num_sequences > 1)


def _tiers_of(scheduler: Scheduler, sequence_id: str) -> tuple[int, int]:
    sequence = scheduler.requests.get_sequence(sequence_id)
    if sequence is None:
        return 0, 0
    return sequence.request.num_host_tokens, sequence.request.num_disk_tokens


def _preemption(scheduler: Scheduler, sequence_id: str) -> Preemption:
    sequence = scheduler.requests.get_sequence(sequence_id)
    if sequence is None:
        return Preemption(sequence_id, "recompute", 0)
    kind = "swap" if sequence.request.status is RequestStatus.SWAPPED else "recompute"
    return Preemption(sequence_id, kind, sequence.num_tokens - sequence.num_prompt_tokens)
