"""`PrefillFirstScheduler`: the classic scheduler of paged serving (Kwon et al. 2023, section 4.5), with three queues.

A step computes either prompts or one token of each running sequence, never both. Prompts go first, whole ones only;
who runs is preempted, the last one first, when blocks run out, and comes back before anybody new does. It gives short
times to first token and, with `delay_factor`, larger batches of prompts; `scheduler.Scheduler` gives even decodes.

Waiting requests whose KV was swapped out are the third queue: they stand in the same sorted list, marked by their
status.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import Any

from quire.errors import ConfigError, echo
from quire.kvcache.manager import KVCacheManager
from quire.kvcache.prefix_cache import PrefixHit
from quire.scheduler.base import BaseScheduler
from quire.scheduler.plan import Plan
from quire.scheduler.request import Request, RequestStatus, Sequence
from quire.scheduler.scheduler import WINDOW
from quire.step import ModelOutput, SchedulerOutput, SequenceOutput


class Room(IntEnum):
    """Whether there is memory for a prompt: now, when others have ended, or not even then."""

    OK = 0
    LATER = 1
    NEVER = 2


class PrefillFirstScheduler(BaseScheduler):
    """The three-queue scheduler.

    Args:
        kv: the block manager.
        delay_factor: new prompts wait until the first of them has waited for so many times the duration of the last
            step that computed prompts; 0 lets them in at once.
        options: those of `RequestLives`.

    Raises `ConfigError` for options that it has no use for: prompts are never cut, and only one order is kept.
    """

    def __init__(self, kv: KVCacheManager, *, delay_factor: float = 0.0, **options: Any) -> None:
        super().__init__(kv, **options)
        if not delay_factor >= 0.0:
            raise ConfigError(f"delay_factor must be at least 0, got {echo(delay_factor)}", param="delay_factor")
        if options.get("long_prefill_token_threshold"):
            raise ConfigError(
                "long_prefill_token_threshold needs scheduler unified; prefill-first never cuts prompts",
                param="long_prefill_token_threshold",
            )
        if self.policy.longest_prefix_first:
            raise ConfigError("scheduling_policy lpm needs scheduler unified", param="scheduling_policy")
        self.delay_factor = delay_factor
        self.prompt_limit = min(self.max_model_len, self.max_num_batched_tokens)
        # The steps under way, at most two: when each was planned, if it computes prompts.
        self._under_way: deque[tuple[SchedulerOutput, float | None]] = deque(maxlen=2)
        self._computes_prompts = False  # the step that was planned last
        self._prompts_took = 0.0

    def _refusal(self, request: Request) -> str | None:
        """See `RequestLives`. The whole prompt counts: what the cache holds of it today says nothing about tomorrow."""
        problem = super()._refusal(request)
        if problem is not None:
            return problem
        if request.num_prompt_tokens > self.prompt_limit:
            return (
                f"the prompt has {request.num_prompt_tokens} tokens, but the prefill-first scheduler computes prompts "
                f"in one step, of at most {self.prompt_limit} tokens (--max-num-batched-tokens); --scheduler unified "
                "has no such limit"
            )
        if self.can_allocate(request, PrefixHit([[] for _ in self.kv.windows], 0)) is Room.NEVER:
            return (
                f"the prompt needs {self._num_required(request)} KV blocks, but the pool has "
                f"{self.kv.pool.num_blocks} blocks of {self.kv.block_size} tokens, of which {self.watermark_blocks} "
                "are kept free (--watermark)"
            )
        return None

    def schedule(self) -> SchedulerOutput:
        """See `BaseScheduler`."""
        now = self.clock()
        output = super().schedule()
        self._under_way.append((output, now if self._computes_prompts else None))
        return output

    def _plan(self, plan: Plan) -> None:
        self._schedule_prefills(plan)
        self._computes_prompts = bool(plan.num_scheduled)
        if not plan.num_scheduled:
            self._schedule_decodes(plan)
            if not plan.left:
                self._schedule_swapped(plan)
            in_flight = self._flight is not None  # then its sequences may be about to end
            if not (plan.num_scheduled or in_flight) and self._running and self._is_alone(self._running[0]):
                stuck = self._running[0]  # only some of its sequences could be computed again, and these have ended
                self._infeasible(stuck, sum(self.kv.num_blocks_for(sequence.num_left) for sequence in stuck.sequences))
        assert plan.budget >= 0 and self._num_seats <= self.max_num_seqs

    def update_from_output(self, plan: SchedulerOutput, output: ModelOutput) -> list[SequenceOutput]:
        """See `BaseScheduler`. Notes how long a step of prompts took, which `delay_factor` refers to."""
        while self._under_way:
            planned, began = self._under_way.popleft()
            if planned is plan:
                if began is not None:
                    self._prompts_took = self.clock() - began
                break
        return super().update_from_output(plan, output)

    # ---- prompts ----

    def _schedule_prefills(self, plan: Plan) -> None:
        """Go on with what is being computed again; then admit waiting requests, unless any are swapped out."""
        for request in self._running[:]:
            if request.request_id not in plan.left:
                self._prefill(request, plan)
        if plan.left or self._waiting.num_swapped or self._blocked == self._state() or not self._passed_delay():
            return
        for request in self._first_waiting(WINDOW):
            if plan.budget <= 0 or self._num_seats >= self.max_num_seqs:
                break
            room = self._admit(request, plan)
            if room is Room.LATER:
                self._blocked = self._state()
            if room is not Room.OK:
                break

    def _passed_delay(self) -> bool:
        """Whether those who wait have done so for long enough, or nobody runs."""
        if not (self.delay_factor and self._running and self._waiting):
            return True
        earliest = min(request.arrival_time for request in self._waiting.first(WINDOW))
        return self.clock() - earliest > self.delay_factor * self._prompts_took

    def _admit(self, request: Request, plan: Plan) -> Room | None:
        """Start or resume `request` if its known tokens fit into the step whole, and there is room for them.

        Returns OK also if it was ended or waits for the disk, so that others may come; None if it was the step, not
        the memory, that had no room. What was generated before a preemption makes a prompt longer. One that has become
        longer than a step is computed in several, which nobody else joins, except in what is left of the last one.
        """
        if self._num_seats + request.num_seats > self.max_num_seqs:
            return None
        first = request.sequences[0]
        hit = self.kv.find_prefix(first)
        if (hit.loads or hit.loading) and not request.loaded and (hit.loading or self._start_loading(request, hit)):
            return Room.OK
        room = self.can_allocate(request, hit)
        if room is not Room.OK:
            if room is Room.NEVER or self._is_alone(request):
                self._infeasible(request, self._num_required(request))
                return Room.OK
            return room
        if first.num_tokens - hit.num_tokens > plan.budget and plan.num_scheduled:
            return None
        given = self._begin(first, plan.budget, plan, hit=hit)
        assert given, "there was room"
        self._waiting.remove(request)
        self._run(request)
        self._prefill(request, plan)
        return Room.OK

    def can_allocate(self, request: Request, hit: PrefixHit) -> Room:
        """Return whether a waiting request has room for its known tokens, of which the cache holds `hit`.

        The watermark stays free, for those who run. What was preempted once may also take that, if nobody runs.
        """
        first, num_blocks = request.sequences[0], self.kv.pool.num_blocks
        reserve = 0 if request.num_preemptions else self.watermark_blocks
        if num_blocks - self._num_required(request) < reserve:
            return Room.NEVER
        end = min(first.num_tokens, hit.num_tokens + self.max_num_batched_tokens)
        num_new = sum(max(-(-end // self.kv.block_size) - len(table), 0) for table in hit.tables)
        num_new += sum(hit.counts())
        num_later = self._num_blocks_after(first, end) + self._num_required(request)
        num_later -= self.kv.num_blocks_for(first.num_tokens)
        if self._running:
            reserve = self.watermark_blocks
        return Room.OK if self.kv.pool.num_free - num_new - num_later >= reserve else Room.LATER

    def _num_required(self, request: Request) -> int:
        """Blocks for its known tokens, and one for each sequence but the first to go on with."""
        first = request.sequences[0]
        return self.kv.num_blocks_for(first.num_tokens) + (request.num_seats - 1) * len(self.kv.windows)

    def _prefill(self, request: Request, plan: Plan) -> None:
        """Let `request`, which runs, compute what it lacks of its known tokens, preempting those behind it.

        If nobody is behind it, what is missing waits until others end; so may others of its own sequences.
        """
        for sequence in request.sequences[:]:
            if plan.budget <= 0:
                return
            if sequence.sequence_id in plan.num_scheduled or not self._is_prefill(sequence):
                continue
            while not self._continue(sequence, plan):
                if self._running[-1] is request:
                    return
                self._preempt(self._running.pop(), plan)

    def _continue(self, sequence: Sequence, plan: Plan) -> bool:
        """Give `sequence` as much of the budget as it wants; False if there are no slots."""
        if self.kv.holds_blocks(sequence):
            return self._give(sequence, min(sequence.num_left, plan.budget), plan)
        return self._begin(sequence, plan.budget, plan) > 0

    def _is_prefill(self, sequence: Sequence) -> bool:
        """Whether it has more to compute than the token it just got."""
        num_left = sequence.num_left
        return num_left > 1 or (num_left == 1 and not self.kv.holds_blocks(sequence))

    def _prefers_swap(self, request: Request) -> bool:
        """See `RequestLives`. What is half computed is not worth moving."""
        return super()._prefers_swap(request) and not any(map(self._is_prefill, request.sequences))

    # ---- decodes ----

    def _schedule_decodes(self, plan: Plan) -> None:
        """Give running sequences a token each, those of a request all or none, while the budget lasts."""
        index = 0
        while index < len(self._running):
            request = self._running[index]
            ready = [sequence for sequence in request.sequences if not self._is_prefill(sequence) and sequence.num_left]
            if len(ready) > plan.budget:
                break
            if not self._append_slots(request, ready, plan):
                continue  # it is not there any more
            index += 1

    def _append_slots(self, request: Request, ready: list[Sequence], plan: Plan) -> bool:
        """Give each of `ready` a token, preempting from the end for the slots; False if `request` itself had to go.

        For several sequences this is settled before the first of them gets one, so that none is left behind.
        """
        needed = len(ready) * len(self.kv.windows) if len(ready) > 1 else 0
        while self.kv.pool.num_free < needed:
            needed = self.kv.num_blocks_to_advance(ready)  # exactly; the above is the most it can be
            if self.kv.pool.num_free >= needed:
                break
            if self._is_alone(request):
                self._infeasible(request, needed)
                return False
            if not self._preempt_last(request, plan):
                return False
        for sequence in ready:
            while not self._give(sequence, 1, plan):
                if not self._preempt_last(request, plan):
                    return False
        return True

    def _preempt_last(self, request: Request, plan: Plan) -> bool:
        """Preempt the last running request; return whether it was another than `request`."""
        victim = self._running.pop()
        self._preempt(victim, plan)
        return victim is not request

    # ---- swapped requests ----

    def _schedule_swapped(self, plan: Plan) -> None:
        """Bring back swapped requests in order, while there are budget and blocks; nobody has taken their seats."""
        left = self._waiting.num_swapped
        swapped: list[Request] = []
        for request in self._waiting:
            if len(swapped) == left:
                break
            if request.status is RequestStatus.SWAPPED:
                swapped.append(request)
        for request in swapped:
            if not self._adapter_fits(request):
                continue
            if self._swap_in(request, plan, self.watermark_blocks) is False:
                break
