"""`Admission` schedules tokens of sequences, and admits, preempts and resumes requests.

The planners (`unified`, `prefill_first`) decide which request is next and how many of its tokens a step computes.
`Admission` then allocates the blocks, moves the request between the queues and writes it into the step. It has no state
but the limits, and when nothing that waits fitted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from enum import IntEnum

from quire.errors import ErrorData
from quire.kvcache.manager import UNCHANGED, KVCacheManager
from quire.kvcache.prefix_cache import PrefixHit
from quire.scheduler.in_flight import ScheduledStep
from quire.scheduler.live import LiveRequests
from quire.scheduler.policy import Policy
from quire.scheduler.request import Request, RequestStatus, Sequence
from quire.step import SEQUENCES_DO_NOT_FIT, ContinuingSequenceData, NewSequenceData, SchedulerStats

WINDOW = 32  # most waiting requests considered in a step; bounds its cost
ADAPTER_WINDOWS = 8  # the window is so many times larger with LoRA, where some wait for a slot for their adapter
ADAPTER_MAX_OVERTAKE_SECONDS = 5.0  # how long a request that waits for a slot for its adapter may be overtaken


class AdmitResult(IntEnum):
    """What became of a waiting request that was tried.

    ADMITTED: it runs. WAITING: it lacks slots, budget or blocks that others may give back. LOADING: blocks that it
    needs are being loaded. ENDED: it would not fit even alone.
    """

    ADMITTED = 0
    WAITING = 1
    LOADING = 2
    ENDED = 3


class Admission:
    """Carries out the decisions of a planner.

    Args:
        kv: the block manager.
        max_model_len: most tokens of one sequence, prompt and output.
        max_num_seqs: most running sequences. max_num_batched_tokens: most tokens of a step.
        policy: the order in which requests are served.
        long_prefill_token_threshold: most tokens one sequence may take of a step's budget; 0 for all of it.
        watermark: share of blocks that stay free when a request is admitted beside others, so that these can grow.
        preemption_mode: "recompute", "swap", or "auto": swap requests of several sequences, whose KV costs more to
            compute again than that of one (Kwon et al. 2023, section 4.5).
        clock: seconds.
        max_loras: most LoRA adapters that running requests may have; 0 where there are none.

    Attributes:
        requests: the live requests. stats: counters, which the scheduler owns.
        max_tokens_per_sequence: most tokens one sequence may take of a step's budget.
        swaps_prompts: whether requests are swapped that have not computed all tokens they know; else these are
            recomputed.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: Policy | None = None,
        long_prefill_token_threshold: int = 0,
        watermark: float = 0.01,
        preemption_mode: str = "auto",
        clock: Callable[[], float] = time.monotonic,
        max_loras: int = 0,
    ) -> None:
        self.kv = kv
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.max_tokens_per_sequence = long_prefill_token_threshold or max_num_batched_tokens
        self.watermark_blocks = int(watermark * kv.pool.num_blocks)
        # The last token needs no slot, but a sequence that goes on does: one token beyond the pool, and it must end.
        self.length_limit = min(max_model_len, kv.longest_sequence(max_model_len) + 1)
        self.policy = policy or Policy()
        self.preemption_mode = preemption_mode
        self.clock = clock
        self.max_loras = max_loras
        self.requests = LiveRequests(kv, self.policy, clock)
        self.stats = SchedulerStats()
        self.swaps_prompts = True
        self._version_when_nothing_fitted: tuple[int, int, int] | None = None

    def refusal(self, request: Request) -> ErrorData | None:
        """Return why `request` can never run, or None.

        One token beyond the prompt must fit, if any is generated, and the first block of each further sequence.
        """
        num_tokens = request.num_prompt_tokens + (request.engine_request.pooling is None)
        if num_tokens > self.max_model_len:
            more = ", which" if request.engine_request.pooling else "; with one token to generate that"
            return refused(
                f"the prompt has {request.num_prompt_tokens} tokens{more} exceeds the "
                f"context of {self.max_model_len} tokens (--max-model-len)"
            )
        alone = self.kv.num_blocks_for(num_tokens)
        needed = alone + self._num_blocks_of_others(request)
        if needed > self.kv.pool.num_blocks:
            and_others = f", and {request.num_sequences} sequences side by side," if request.num_sequences > 1 else ""
            return refused(
                f"the prompt and one token more{and_others} need {needed} KV blocks, but the whole pool has "
                f"{self.kv.pool.num_blocks} blocks of {self.kv.block_size} tokens, which hold {self.length_limit - 1} "
                f"tokens; --num-gpu-blocks-override {needed} would be enough",
                in_turns=alone <= self.kv.pool.num_blocks and _can_run_in_turns(request),
            )
        limit = min(self.max_num_seqs, self.max_num_batched_tokens)
        if request.num_sequences > limit:
            return refused(
                f"the request has {request.num_sequences} sequences side by side, but max_num_seqs is "
                f"{self.max_num_seqs} and max_num_batched_tokens {self.max_num_batched_tokens}, so that {limit} would "
                f"fit; --max-num-seqs {max(self.max_num_seqs, request.num_sequences)} --max-num-batched-tokens "
                f"{max(self.max_num_batched_tokens, request.num_sequences)} would be enough"
            )
        return None

    # ---- tokens ----

    def schedule_tokens(
        self, sequence: Sequence, num_new: int, step: ScheduledStep, hit: PrefixHit | None = None
    ) -> bool:
        """Schedule the next `num_new` tokens of `sequence`, after those of `hit`; return False if blocks are lacking.

        They count as computed from now on, and the token that they sample as a tentative one. Drafts beyond them are
        dropped. A sequence without blocks and without `hit` begins as in `start`.
        """
        sequence_id, start, request = sequence.sequence_id, sequence.num_computed_tokens, sequence.request
        drafts, allocation = sequence.draft_token_ids, UNCHANGED
        if num_new > 1 or drafts or hit is not None or not self.kv.has_slot(sequence):  # False for nearly every decode
            if hit is None and not self.kv.has_blocks(sequence):
                return self.start(sequence, num_new, step)
            if drafts:
                sequence.drop_drafts(max(num_new - (sequence.num_uncomputed_tokens - len(drafts)), 0))
                drafts = sequence.draft_token_ids
            allocated = self.kv.allocate_slots(sequence, num_new, hit)
            if allocated is None:
                return False
            allocation = allocated
            if hit is not None:
                start += hit.num_tokens
        if sequence.on_worker:
            new_block_ids, replaced_blocks = allocation
            step.continuing.append(
                ContinuingSequenceData(
                    sequence_id, new_block_ids, start, replaced_blocks, sequence.unsent_token_ids, drafts
                )
            )
            sequence.unsent_token_ids = ()
        else:
            step.new_sequences.append(self._describe(sequence, start))
        step.num_scheduled[sequence_id] = num_new
        step.budget -= num_new
        sequence.num_computed_tokens = end = start + num_new
        max_sampled = 0
        if end == len(sequence.token_ids) + sequence.num_tentative_tokens:
            max_sampled = 1
            if drafts:
                max_sampled += len(drafts)
                sequence.draft_token_ids = ()
            if request.samples_tokens:
                if end + 1 < request.max_total_tokens:
                    sequence.num_tentative_tokens += 1
                if not request.is_forked:
                    self._fork_samples(sequence, step)
        step.scheduled.append((sequence, max_sampled))
        return True

    def start(self, sequence: Sequence, max_new_tokens: int, step: ScheduledStep, hit: PrefixHit | None = None) -> bool:
        """Schedule a sequence without blocks: its cached prefix, and up to `max_new_tokens` tokens to compute.

        Returns False if blocks are lacking. `hit` is what `find_prefix` has just returned, if it was called already.
        """
        hit = hit or self.kv.find_prefix(sequence)
        if not self.schedule_tokens(sequence, min(sequence.num_tokens - hit.num_tokens, max_new_tokens), step, hit):
            return False
        request, stats = sequence.request, self.stats
        if request.num_cached_tokens is None:
            request.num_cached_tokens = hit.num_tokens
            counts = hit.count_tokens(self.kv.block_size, request.loaded_hashes or ())
            request.num_host_tokens, request.num_disk_tokens = counts
            stats.prefix_cache_queries += len(sequence.token_ids)
            stats.prefix_cache_hits += hit.num_tokens
            stats.host_cache_hits += request.num_host_tokens
            stats.disk_cache_hits += request.num_disk_tokens
        return True

    def num_blocks_to_compute(self, sequence: Sequence, max_new_tokens: int, hit: PrefixHit | None = None) -> int:
        """Return how many free blocks the known tokens of `sequence` need; a step computes `max_new_tokens` at most.

        Those of `hit`, which is for a sequence without blocks, are not computed.
        """
        start = sequence.num_computed_tokens if hit is None else hit.num_tokens
        end = min(start + max_new_tokens, sequence.num_tokens)
        return self.kv.num_blocks_needed((sequence,), max_new_tokens, hit) + self.num_blocks_after(sequence, end)

    def num_blocks_to_admit(self, request: Request, max_new_tokens: int, hit: PrefixHit | None = None) -> int:
        """Return how many free blocks a waiting request needs for its known tokens, and to begin its other sequences.

        Args:
            max_new_tokens: most tokens that its first step computes.
            hit: what the caches hold of its first sequence, if that was looked up already.
        """
        if request.status is RequestStatus.SWAPPED:
            return self.kv.num_blocks_to_swap_in(request.sequences)
        hit = hit or self.kv.find_prefix(request.sequences[0])
        return self.num_blocks_to_compute(request.sequences[0], max_new_tokens, hit) + self._num_blocks_of_others(
            request
        )

    def num_blocks_alone(self, request: Request) -> int:
        """Return how many blocks it takes to admit a waiting request that has the pool to itself."""
        if request.status is RequestStatus.SWAPPED:
            return self.kv.num_blocks_to_swap_in(request.sequences)
        return self.kv.num_blocks_for(request.sequences[0].num_tokens) + self._num_blocks_of_others(request)

    def _num_blocks_of_others(self, request: Request) -> int:
        """Return how many blocks the sequences of `request` after the first need to begin."""
        return (request.num_sequences - 1) * len(self.kv.windows)

    def num_blocks_after(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many blocks the known tokens of `sequence` need beyond those for its first `num_tokens`."""
        return self.kv.num_blocks_for(sequence.num_tokens) - self.kv.num_blocks_for(num_tokens)

    def _describe(self, sequence: Sequence, num_computed_tokens: int) -> NewSequenceData:
        request = sequence.request
        sequence.on_worker, sequence.unsent_token_ids = True, ()
        return NewSequenceData(
            sequence.sequence_id,
            request.engine_request,
            self.kv.block_ids(sequence.sequence_id),
            num_computed_tokens,
            output_token_ids=sequence.token_ids[request.num_prompt_tokens :],
            seed=sequence.seed,
            num_candidates=0 if request.beam is None else request.beam.num_candidates,
            sampler_state=sequence.sampler_state,
        )

    def _fork_samples(self, parent: Sequence, step: ScheduledStep) -> None:
        """The prompt ends in this step: the other samples begin, sharing its blocks, and draw their first tokens."""
        request = parent.request
        request.is_forked = True
        for sequence_id, seed in zip(
            request.engine_request.sequence_ids[1:], request.engine_request.seeds[1:], strict=True
        ):
            if sequence_id in request.aborted_ids:
                self.requests.skip_fork(request, sequence_id)
                continue
            child = self.requests.fork(parent, sequence_id, seed, samples=True)
            request.sequences.append(child)
            step.forked_sequences.append((child, 1))

    # ---- requests ----

    def first_waiting(self, count: int) -> list[Request]:
        """Return the first `count` waiting requests, without those for whose LoRA adapter no slot is free.

        Others overtake these for `ADAPTER_MAX_OVERTAKE_SECONDS` at most: else a stream of requests for the adapters in
        use would keep them waiting for ever.
        """
        waiting = self.requests.waiting
        if not self.max_loras:
            return waiting.first(count)
        adapters = _adapter_ids(self.requests.running)
        requests: list[Request] = []
        for request in waiting.first(count * ADAPTER_WINDOWS):
            if len(requests) == count:
                break
            if request.engine_request.lora is not None and request.engine_request.lora_int_id not in adapters:
                if len(adapters) == self.max_loras:
                    if self.note_passed_over(request) >= ADAPTER_MAX_OVERTAKE_SECONDS:
                        break
                    continue
                adapters.add(request.engine_request.lora_int_id)
            requests.append(request)
        return requests

    def note_passed_over(self, request: Request) -> float:
        """Note that a waiting request does not fit, or was overtaken; return the seconds since that first happened."""
        if request.passed_over_since is None:
            request.passed_over_since = self.clock()
        return self.seconds_passed_over(request)

    def seconds_passed_over(self, request: Request) -> float:
        """Return the seconds since a waiting request was first passed over, 0 if it never was."""
        return 0.0 if request.passed_over_since is None else self.clock() - request.passed_over_since

    def adapter_fits(self, request: Request, running: Iterable[Request]) -> bool:
        """Whether a waiting request could have its adapter beside those of running ones."""
        if request.engine_request.lora is None:
            return True
        adapters = _adapter_ids(running)
        return request.engine_request.lora_int_id in adapters or len(adapters) < self.max_loras

    def capacity_version(self) -> tuple[int, int, int]:
        """Return a value that changes whenever a waiting request that lacked blocks or slots may fit."""
        return self.kv.pool.num_freed, self.requests.waiting.num_changes, self.requests.num_reserved_slots

    def note_nothing_fits(self) -> None:
        """Note that no waiting request fits, until `capacity_version` changes."""
        self._version_when_nothing_fitted = self.capacity_version()

    @property
    def nothing_fits(self) -> bool:
        """Whether it was noted that no waiting request fits, and nothing has changed since."""
        return self._version_when_nothing_fitted == self.capacity_version()

    def is_alone(self, request: Request) -> bool:
        """Whether `request` has all blocks that are not free, so that nothing will be freed for it."""
        num_allocated = self.kv.num_allocated_blocks(request.sequences)
        return (
            self.requests.running in ([], [request])
            and num_allocated + self.kv.pool.num_free == self.kv.pool.num_blocks
        )

    def may_resume(self, request: Request, step: ScheduledStep) -> bool:
        """Whether a waiting request may run in this step; not one that was preempted in it, or while in flight."""
        if request.request_id in step.preempted_request_ids:
            return False
        return not request.num_preemptions or not any(sequence in step.in_flight for sequence in request.sequences)

    def ensure_blocks(self, request: Request, sequences: Collection[Sequence], step: ScheduledStep) -> bool:
        """Make room for a token of each of these sequences of `request`; return False if it was preempted or ended.

        They advance together or not at all, so blocks are counted before the first of them is scheduled. A request that
        has the pool to itself and still lacks blocks is ended; otherwise the last running requests are preempted.
        Drafts are dropped where they would take blocks of siblings.
        """
        kv = self.kv
        kv.free_out_of_windows(sequences)
        needed = len(sequences) * len(kv.windows)  # the most it can be
        while kv.pool.num_free < needed:
            needed = kv.num_blocks_needed(sequences, 1)
            if kv.pool.num_free >= needed:
                break
            if self.is_alone(request):
                self.finish_infeasible(request, needed)
                return False
            if not self.preempt_last(request, step):
                return False
        num_drafts = max([len(sequence.draft_token_ids) for sequence in sequences])
        if num_drafts and kv.num_blocks_needed(sequences, 1 + num_drafts) > kv.pool.num_free:
            for sequence in sequences:
                sequence.drop_drafts()
        return True

    def preempt_last(self, request: Request, step: ScheduledStep) -> bool:
        """Preempt the last running request for lack of blocks; return whether it was another than `request`."""
        victim = self.requests.running[-1]
        step.out_of_blocks = True
        self.preempt(victim, step)
        return victim is not request

    def preempt(self, request: Request, step: ScheduledStep) -> None:
        """Free or swap out the blocks of a running request that is not in the step, and put it back into the queue."""
        if self._prefers_swap(request) and self.kv.swap_out(request.sequences):
            status = RequestStatus.SWAPPED
            self.stats.num_swapped_out += 1
        else:
            status = RequestStatus.PREEMPTED
            for sequence in request.sequences:
                self.kv.free(sequence)
                sequence.num_computed_tokens = 0
                sequence.candidates = None
        for sequence in request.sequences:
            sequence.drop_drafts()
        step.preempted_sequence_ids += self.requests.preempt(request, status)
        step.preempted_request_ids.add(request.request_id)
        request.num_expected_tokens = None
        request.num_preemptions += 1
        self.stats.num_preemptions += 1

    def _prefers_swap(self, request: Request) -> bool:
        """Whether `request` is swapped rather than recomputed. What was pooled of its tokens is not kept."""
        if request.engine_request.pooling is not None:
            return False
        if not self.swaps_prompts and any(map(self.is_prefill, request.sequences)):
            return False
        return self.preemption_mode == "swap" or (self.preemption_mode == "auto" and len(request.sequences) > 1)

    def is_prefill(self, sequence: Sequence) -> bool:
        """Whether a running sequence has more to compute than the token it just got, and drafts."""
        return not sequence.is_decoding or (sequence.num_uncomputed_tokens > 0 and not self.kv.has_blocks(sequence))

    def swap_in(self, request: Request, step: ScheduledStep, num_reserved: int) -> AdmitResult:
        """Bring back a swapped request, if there is room for it and for a token of each of its sequences."""
        needed, pool = self.kv.num_blocks_to_swap_in(request.sequences), self.kv.pool
        if needed > pool.num_blocks:
            self.finish_infeasible(request, needed)
            return AdmitResult.ENDED
        unfinished = [sequence for sequence in request.sequences if sequence.num_uncomputed_tokens]
        num_reserved = num_reserved if self.requests.running else 0
        if needed + num_reserved > pool.num_free or step.budget < len(unfinished):
            return AdmitResult.WAITING
        self.kv.swap_in(request.sequences)
        self.requests.admit(request)
        for number, sequence in enumerate(unfinished, 1):
            num_behind = len(unfinished) - number
            num_new = min(sequence.num_uncomputed_tokens, step.budget - num_behind, self.max_tokens_per_sequence)
            self.schedule_tokens(sequence, num_new, step)
        return AdmitResult.ADMITTED

    def waits_for_loads(self, request: Request, hit: PrefixHit) -> bool:
        """Whether a waiting request waits for blocks from asynchronous tiers; starts loads that are not under way.

        Loads are started once for each request.
        """
        if request.loaded_hashes is not None or not (hit.loads or hit.loading):
            return False
        if hit.loading:
            return True
        # Running requests must be able to go on meanwhile: a block for each sequence, and some to grow.
        num_reserved = 0
        if self.requests.running:
            num_reserved = self.requests.num_reserved_slots * len(self.kv.windows) + self.watermark_blocks
        request.loading, request.loaded_hashes = self.kv.start_loads(hit, num_reserved), set()
        if not request.loading:
            return False
        self.requests.start_loading(request)
        return True

    def finish_infeasible(self, request: Request, num_more: int) -> None:
        """End a request whose sequences, side by side, do not fit even alone; they would need `num_more` blocks."""
        needed = self.kv.num_allocated_blocks(request.sequences) + num_more
        message = (
            f"the {request.num_sequences} sequences of this request need {needed} KV blocks side by side, but "
            f"the whole pool has {self.kv.pool.num_blocks} blocks of {self.kv.block_size} tokens; ask for fewer "
            f"sequences or tokens; --num-gpu-blocks-override {needed} lets them go on"
        )
        error = refused(message, in_turns=_can_run_in_turns(request))
        self.requests.finish(request, RequestStatus.FINISHED_IGNORED, error)

    def make_room_ahead(self) -> bool:
        """Free what windows have passed; return whether every running sequence has blocks for a step ahead of results.

        If not, a request would be preempted or ended for lack of blocks that the steps in flight may free.
        """
        kv, budget, num_running = self.kv, self.max_num_batched_tokens, self.requests.num_reserved_slots
        bound = len(kv.windows) * (budget // kv.block_size + 2 * num_running)
        if len(kv.tables) == num_running and bound <= kv.pool.num_free:
            return True
        sequences = [sequence for request in self.requests.running for sequence in request.sequences]
        # A sequence without blocks begins with what is cached of it, beside what it computes.
        max_new_tokens = budget if all(map(kv.has_blocks, sequences)) else self.max_model_len
        kv.free_out_of_windows(sequences)
        return kv.num_blocks_needed(sequences, max_new_tokens) <= kv.pool.num_free


def refused(message: str, *, in_turns: bool = False) -> ErrorData:
    """Return the error of a request that cannot run; `in_turns`: its sequences can, each in a request of its own.

    The frontend sends these instead, with the tokens that each has.
    """
    return ErrorData("RequestError", message, code=SEQUENCES_DO_NOT_FIT if in_turns else "request_refused")


def _can_run_in_turns(request: Request) -> bool:
    return request.num_sequences > 1 and request.engine_request.beam is None  # the beams of a search need each other


def _adapter_ids(requests: Iterable[Request]) -> set[int]:
    """Return the ids of their LoRA adapters."""
    return {request.engine_request.lora_int_id for request in requests if request.engine_request.lora is not None}
