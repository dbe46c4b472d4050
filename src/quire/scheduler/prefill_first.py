"""`PrefillFirstPlanner` schedules as paged serving did at first (Kwon et al. 2023, section 4.5), with three queues.

A step computes either prompts or one token of each running sequence, never both. Prompts go first, whole ones only;
the last running request is preempted when blocks run out, and comes back before any new one is admitted. It gives short
times to first token and, with `delay_factor`, larger batches of prompts; `unified.UnifiedPlanner` gives even decodes.

The third queue, of requests whose KV was swapped out, is a part of the waiting one, marked by their status.
"""

from __future__ import annotations

from enum import IntEnum

from quire.errors import ErrorData
from quire.kvcache.prefix_cache import PrefixHit
from quire.scheduler.admission import WINDOW, Admission, AdmitResult, refused
from quire.scheduler.in_flight import ScheduledStep
from quire.scheduler.request import Request, RequestStatus, Sequence


class AllocStatus(IntEnum):
    """Whether there are blocks for a waiting request: now, once others have given back theirs, or never."""

    OK = 0
    LATER = 1
    NEVER = 2


class PrefillFirstPlanner:
    """Plans steps of prompts or of decodes.

    Args:
        delay_factor: new prompts wait until the first of them has waited for so many times the duration of the last
            step that computed prompts; 0 lets them in at once.
    """

    def __init__(self, admission: Admission, *, delay_factor: float = 0.0) -> None:
        self.admission = admission
        self.delay_factor = delay_factor
        self._kv, self._requests = admission.kv, admission.requests
        self._max_prompt_tokens = min(admission.max_model_len, admission.max_num_batched_tokens)
        self._last_prefill_seconds = 0.0
        admission.swaps_prompts = False  # a prompt that is not computed is not worth moving

    def refusal(self, request: Request) -> ErrorData | None:
        """See `Planner`. The whole prompt counts: what is cached of it now may be evicted before it runs."""
        problem = self.admission.refusal(request)
        if problem is not None:
            return problem
        if request.num_prompt_tokens > self._max_prompt_tokens:
            return refused(
                f"the prompt has {request.num_prompt_tokens} tokens, but the prefill-first scheduler computes prompts "
                f"in one step, of at most {self._max_prompt_tokens} tokens (--max-num-batched-tokens); --scheduler "
                "unified has no such limit"
            )
        if self.can_allocate(request, PrefixHit([[] for _ in self._kv.windows], 0)) is AllocStatus.NEVER:
            return refused(
                f"the prompt needs {self.admission.num_blocks_alone(request)} KV blocks, but the pool has "
                f"{self._kv.pool.num_blocks} blocks of {self._kv.block_size} tokens, of which "
                f"{self.admission.watermark_blocks} are kept free (--watermark)"
            )
        return None

    def processed(self, step: ScheduledStep) -> None:
        """See `Planner`; keeps the duration of a step of prompts, which `delay_factor` refers to."""
        if step.computes_prompts:
            self._last_prefill_seconds = self.admission.clock() - step.started

    def plan(self, step: ScheduledStep) -> None:
        """Schedule prompts if there are any to compute, otherwise decodes."""
        self._schedule_prefills(step)
        step.computes_prompts = bool(step.num_scheduled)
        if not step.num_scheduled:
            self._schedule_decodes(step)
            if not step.preempted_request_ids:
                self._schedule_swapped(step)
            running = self._requests.running
            # Sequences in flight may be about to end.
            if not (step.num_scheduled or step.in_flight) and running and self.admission.is_alone(running[0]):
                stuck = running[0]  # only some of its sequences could be computed again, and these have ended
                needed = sum(self._kv.num_blocks_for(sequence.num_uncomputed_tokens) for sequence in stuck.sequences)
                self.admission.finish_infeasible(stuck, needed)
        assert step.budget >= 0 and self._requests.num_reserved_slots <= self.admission.max_num_seqs

    # ---- prompts ----

    def _schedule_prefills(self, step: ScheduledStep) -> None:
        """Continue requests that are being recomputed; then admit waiting ones, unless any are swapped out."""
        for request in self._requests.running[:]:
            if request.request_id not in step.preempted_request_ids:
                self._prefill(request, step)
        if step.preempted_request_ids or self._requests.waiting.num_swapped:
            return
        if self.admission.nothing_fits or not self._passed_delay():
            return
        for request in self.admission.first_waiting(WINDOW):
            if step.budget <= 0 or self._requests.num_reserved_slots >= self.admission.max_num_seqs:
                break
            if not self.admission.may_resume(request, step):
                break
            if self._admit(request, step) is AdmitResult.WAITING:
                break

    def _passed_delay(self) -> bool:
        """Whether waiting requests have waited for long enough, or none runs."""
        if not (self.delay_factor and self._requests.running and self._requests.waiting):
            return True
        earliest = min(request.engine_request.arrival_time for request in self._requests.waiting.first(WINDOW))
        return self.admission.clock() - earliest > self.delay_factor * self._last_prefill_seconds

    def _admit(self, request: Request, step: ScheduledStep) -> AdmitResult:
        """Start or resume `request` if all its known tokens fit into the step, and there are blocks for them.

        A preempted request computes its output again, too. If it has thereby become longer than a step it is computed
        in several steps, which other requests join only in the rest of the last one.
        """
        if self._requests.num_reserved_slots + request.num_sequences > self.admission.max_num_seqs:
            return AdmitResult.WAITING
        first = request.sequences[0]
        hit = self._kv.find_prefix(first)
        if self.admission.waits_for_loads(request, hit):
            return AdmitResult.LOADING
        status = self.can_allocate(request, hit)
        if status is AllocStatus.NEVER or (status is AllocStatus.LATER and self.admission.is_alone(request)):
            self.admission.finish_infeasible(request, self.admission.num_blocks_alone(request))
            return AdmitResult.ENDED
        if status is AllocStatus.LATER:
            self.admission.note_nothing_fits()
            return AdmitResult.WAITING
        if first.num_tokens - hit.num_tokens > step.budget and step.num_scheduled:
            return AdmitResult.WAITING  # in the next step
        started = self.admission.start(first, step.budget, step, hit)
        assert started, "there was room"
        self._requests.admit(request)
        self._prefill(request, step)
        return AdmitResult.ADMITTED

    def can_allocate(self, request: Request, hit: PrefixHit) -> AllocStatus:
        """Return whether there are blocks for the known tokens of a waiting request, of which the cache holds `hit`.

        The watermark stays free for running requests. A preempted request may take it, too, if none runs.
        """
        admission, pool = self.admission, self._kv.pool
        reserve = 0 if request.num_preemptions else admission.watermark_blocks
        if pool.num_blocks - self.admission.num_blocks_alone(request) < reserve:
            return AllocStatus.NEVER
        if self._requests.running:
            reserve = admission.watermark_blocks
        needed = admission.num_blocks_to_admit(request, admission.max_num_batched_tokens, hit)
        return AllocStatus.OK if needed + reserve <= pool.num_free else AllocStatus.LATER

    def _prefill(self, request: Request, step: ScheduledStep) -> None:
        """Schedule the uncomputed known tokens of a running `request`, preempting requests behind it.

        If none is behind it, the rest waits until other sequences end, perhaps its own.
        """
        for sequence in request.sequences[:]:
            if step.budget <= 0:
                return
            if sequence.sequence_id in step.num_scheduled or not self.admission.is_prefill(sequence):
                continue
            while not self.admission.schedule_tokens(sequence, min(sequence.num_uncomputed_tokens, step.budget), step):
                if self._requests.running[-1] is request:
                    return
                self.admission.preempt_last(request, step)

    # ---- decodes ----

    def _schedule_decodes(self, step: ScheduledStep) -> None:
        """Schedule a token of each running sequence, of all those of a request or none, while the budget lasts.

        Drafts are verified with the budget that the decodes leave.
        """
        running = self._requests.running
        num_spare = step.budget - self._requests.num_reserved_slots
        index = 0
        while index < len(running):
            request = running[index]
            ready = [
                sequence
                for sequence in request.sequences
                if not self.admission.is_prefill(sequence) and sequence.num_uncomputed_tokens
            ]
            if len(ready) > step.budget:
                break
            for sequence in ready:
                if sequence.draft_token_ids:
                    sequence.drop_drafts(max(num_spare, 0))
                    num_spare -= len(sequence.draft_token_ids)
            if not self._append_slots(request, ready, step):
                continue  # it is not there any more
            index += 1

    def _append_slots(self, request: Request, ready: list[Sequence], step: ScheduledStep) -> bool:
        """Schedule a token of each of `ready`, preempting from the end; False if `request` was preempted itself."""
        if len(ready) > 1 and not self.admission.ensure_blocks(request, ready, step):
            return False
        for sequence in ready:
            while not self.admission.schedule_tokens(sequence, sequence.num_uncomputed_tokens, step):
                if sequence.draft_token_ids:
                    sequence.drop_drafts()
                elif not self.admission.preempt_last(request, step):
                    return False
        return True

    # ---- swapped requests ----

    def _schedule_swapped(self, step: ScheduledStep) -> None:
        """Bring back swapped requests in order, while there are budget and blocks; their slots are free."""
        for request in [r for r in self._requests.waiting if r.status is RequestStatus.SWAPPED]:
            if not self.admission.adapter_fits(request, self._requests.running):
                continue
            if not self.admission.may_resume(request, step):
                continue
            if self.admission.swap_in(request, step, self.admission.watermark_blocks) is AdmitResult.WAITING:
                break
