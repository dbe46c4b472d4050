"""`RequestLives`: how requests come, begin, fork, are preempted and resumed, and end, in whatever order they are run.

`base.BaseScheduler` makes steps of it; which request gets how many tokens is decided further up.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterable

from quire.errors import ConfigError, RequestError, echo
from quire.kvcache.manager import KVCacheManager
from quire.kvcache.prefix_cache import PrefixHit
from quire.scheduler.beam import BeamSearch
from quire.scheduler.plan import Plan
from quire.scheduler.policy import BY_ORDER, Policy, WaitingQueue
from quire.scheduler.request import Request, RequestStatus, Sequence
from quire.step import (
    STATS_COUNTERS,
    ContinuingSequenceData,
    ForkData,
    NewSequenceData,
    SchedulerStats,
    SequenceOutput,
)

LONG_PROMPT_SHARE = 4  # of a step's budget, one part in so many goes to prompts too long for a step,
LONG_PROMPT_LEAST = 256  # but so many tokens at least: smaller steps spend their time on reading weights
ADAPTER_WINDOWS = 8  # so many times as many requests are looked at, where some wait for room for their adapter
ADAPTER_PATIENCE_SECONDS = 5.0  # for so long may a request that waits for room for its adapter be overtaken
PREEMPTION_MODES = ("auto", "recompute", "swap")


class RequestLives:
    """The queues, and all that moves a request between them.

    Args:
        kv: the block manager.
        max_model_len: most tokens of one sequence, prompt and output.
        max_num_seqs: most sequences running. max_num_batched_tokens: most tokens computed in a step.
        policy: who comes first.
        long_prefill_token_threshold: most tokens one sequence may take of a step's budget. 0 leaves that to the
            scheduler: all of it, but for a prompt that is longer than a step a fourth.
        watermark: share of blocks kept free when a request joins others, so that those can grow a little first.
        preemption_mode: "recompute", "swap", or "auto": swap requests of several sequences, whose KV costs more to
            compute again than that of one (Kwon et al. 2023, section 4.5).
        whole_prompts: prompts are computed in one step, since their tokens see those that follow; none is longer.
        clock: seconds.
        max_loras: most LoRA adapters that running requests may have; 0 where there are none.

    Raises `ConfigError` naming the option.
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
        whole_prompts: bool = False,
        clock: Callable[[], float] = time.monotonic,
        max_loras: int = 0,
    ) -> None:
        _check_at_least("max_model_len", max_model_len, 1)
        _check_at_least("max_num_seqs", max_num_seqs, 1)
        _check_at_least("max_num_batched_tokens", max_num_batched_tokens, 1)
        _check_at_least("long_prefill_token_threshold", long_prefill_token_threshold, 0)
        if not 0.0 <= watermark < 1.0:
            raise ConfigError(f"watermark must be at least 0 and below 1, got {echo(watermark)}", param="watermark")
        if preemption_mode not in PREEMPTION_MODES:
            allowed = ", ".join(PREEMPTION_MODES)
            raise ConfigError(
                f"preemption_mode must be one of {allowed}, got {echo(preemption_mode)}", param="preemption_mode"
            )
        self.kv = kv
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunk_limit = long_prefill_token_threshold or max_num_batched_tokens
        self.long_chunk = long_prefill_token_threshold or max(
            max_num_batched_tokens // LONG_PROMPT_SHARE, LONG_PROMPT_LEAST
        )
        self.watermark_blocks = int(watermark * kv.pool.num_blocks)
        # The last token needs no slot, but a sequence that goes on does: one token beyond the pool, and it must end.
        self.length_limit = min(max_model_len, kv.longest_sequence(max_model_len) + 1)
        self.policy = policy or Policy()
        self.preemption_mode = preemption_mode
        self.whole_prompts = whole_prompts
        self.clock = clock
        self.max_loras = max_loras
        self._requests: dict[str, Request] = {}
        self._sequences: dict[str, Sequence] = {}
        self._waiting = WaitingQueue()
        self._running: list[Request] = []  # sorted by order_key
        self._loading: list[Request] = []
        self._num_seats = 0  # taken by running requests
        self._finished_ids: list[str] = []  # not yet told to the worker
        self._forks: list[ForkData] = []  # not yet told to the worker
        self._news: list[SequenceOutput] = []  # of requests that ended outside of a step
        self._num_added = 0
        self._blocked: tuple[int, int, int] | None = None  # when nothing waiting could be admitted
        self._stats = SchedulerStats(
            num_blocks=kv.pool.num_blocks,
            num_thin_blocks=kv.pool.num_thin,
            num_host_blocks=kv.host.pool.num_blocks,
        )

    def go_on_counting(self, before: SchedulerStats) -> None:
        """Take over the counters of a scheduler in whose place this one stands."""
        for name in STATS_COUNTERS:
            setattr(self._stats, name, getattr(before, name))

    # ---- requests come and go ----

    def add_request(self, request: Request) -> None:
        """Queue `request`. One that can never fit is answered with an "error" by the next `update_from_output`.

        Raises `RequestError` if a live request, or sequence, has the same id.
        """
        self.check_names(request)
        problem = self._refusal(request)
        if problem is not None:
            request.status = RequestStatus.FINISHED_IGNORED
            for sequence_id in request.sequence_ids:
                self._news.append(SequenceOutput(sequence_id, [], finish_reason="error", error=problem, refused=True))
            return
        if request.beam_params is not None:
            most = min(request.max_tokens, self.length_limit - request.num_prompt_tokens)
            request.beam = BeamSearch(request.beam_params, stop_ids=request.stop_ids, max_tokens=most)
        request.order_key = self.policy.key(request, self._num_added)
        self._num_added += 1
        self._requests[request.request_id] = request
        for sequence_id in request.sequence_ids:  # those to come answer to their names already
            self._sequences[sequence_id] = request.sequences[0]
        if request.forked:  # it had begun in another engine
            self._sequences.update((sequence.sequence_id, sequence) for sequence in request.sequences)
        self._waiting.push(request)

    def check_names(self, request: Request) -> None:
        """Raise `RequestError` if a live request, or sequence, is called like this one or one of its sequences."""
        if request.request_id in self._requests or any(name in self._sequences for name in request.sequence_ids):
            raise RequestError(f"request id {echo(request.request_id)} is in use already", param="request_id")

    def is_live(self, request_id: str) -> bool:
        """Whether a request of this id was added and has not ended."""
        return request_id in self._requests

    def request_ids(self, sequence_ids: Iterable[str]) -> list[str]:
        """Return the ids of the requests that those of these sequences belong to which are live, each once."""
        found = [self._sequences[name] for name in sequence_ids if name in self._sequences]
        return list(dict.fromkeys(sequence.request.request_id for sequence in found))

    def _refusal(self, request: Request) -> str | None:
        """Return why `request` can never run, or None. One token beyond the prompt must fit, if any is generated."""
        num_tokens = request.num_prompt_tokens + (request.pooling is None)
        if num_tokens > self.max_model_len:
            more = "; with one token to generate that exceeds" if request.pooling is None else ", which exceeds"
            return (
                f"the prompt has {request.num_prompt_tokens} tokens{more} the "
                f"context of {self.max_model_len} tokens (--max-model-len)"
            )
        if not self.kv.can_ever_fit(num_tokens):
            needed = self.kv.num_blocks_for(num_tokens)
            return (
                f"the prompt and one token more need {needed} KV blocks, but the whole pool has "
                f"{self.kv.pool.num_blocks} blocks of {self.kv.block_size} tokens, which hold {self.length_limit - 1} "
                f"tokens; --num-gpu-blocks-override {needed} would be enough"
            )
        most = min(self.max_num_seqs, self.max_num_batched_tokens)
        if request.num_seats > most:
            return (
                f"the request has {request.num_seats} sequences side by side, but max_num_seqs is {self.max_num_seqs} "
                f"and max_num_batched_tokens {self.max_num_batched_tokens}, so that {most} would fit; --max-num-seqs "
                f"{max(self.max_num_seqs, request.num_seats)} --max-num-batched-tokens "
                f"{max(self.max_num_batched_tokens, request.num_seats)} would be enough"
            )
        return None

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Forget these requests, or single sequences of them, and free their blocks at once.

        Ids that are not live are ignored. Yields no output.
        """
        aborted = set(request_ids)
        for name in aborted:
            sequence = self._sequences.get(name)
            if name in self._requests:
                self._end(self._requests[name], RequestStatus.FINISHED_ABORTED)
            elif sequence is not None:
                self._abort_sequence(sequence, name)
        self._news = [news for news in self._news if news.sequence_id not in aborted]

    def _abort_sequence(self, sequence: Sequence, sequence_id: str) -> None:
        request = sequence.request
        if not request.forked:
            request.dropped.add(sequence_id)
            if request.dropped.issuperset(request.sequence_ids):
                self._end(request, RequestStatus.FINISHED_ABORTED)
        else:
            self._end_sequence(sequence)

    def has_unfinished(self) -> bool:
        """Whether there is work: live requests, a refusal to be sent, or an end the worker has not been told of."""
        owed = self._news or self._finished_ids or self.kv.num_loading or self.kv.transfers
        return bool(self._requests or owed)

    def has_requests(self) -> bool:
        """Whether anybody waits for something: live requests, or a refusal to be sent."""
        return bool(self._requests or self._news)

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes; return the number of blocks dropped. Running sequences are not disturbed."""
        return self.kv.reset_prefix_cache()

    # ---- planning: what schedulers share ----

    def _give(
        self, sequence: Sequence, num_new: int, plan: Plan, hit: PrefixHit | None = None, num_reserved: int = 0
    ) -> bool:
        """Let `sequence` compute its next `num_new` tokens, those of `hit` not counted, if there are slots."""
        allocation = self.kv.allocate_slots(sequence, num_new, hit, num_reserved)
        if allocation is None:
            return False
        request = sequence.request
        if hit is not None:
            sequence.num_computed_tokens = hit.num_tokens
        if sequence.known:
            new_block_ids, replaced = allocation
            plan.continuing.append(
                ContinuingSequenceData(
                    sequence.sequence_id, new_block_ids, sequence.num_computed_tokens, replaced, sequence.unsent
                )
            )
            if sequence.unsent:
                sequence.unsent = []
        else:
            plan.new_sequences.append(self._describe(sequence))
        plan.num_scheduled[sequence.sequence_id] = num_new
        plan.budget -= num_new
        if not request.forked and request.beam is None and num_new == sequence.num_left:
            self._fork_samples(sequence)
        return True

    def _begin(
        self, sequence: Sequence, most: int, plan: Plan, num_reserved: int | None = None, hit: PrefixHit | None = None
    ) -> int:
        """Let a sequence without blocks begin: with what is cached of it, and up to `most` tokens to compute.

        Returns how many, 0 if there are no slots. `num_reserved` blocks, and those for the rest of its tokens, must
        remain free; with None none need. `hit` is fresh from `find_prefix`, if that was asked already.
        """
        hit = hit or self.kv.find_prefix(sequence)
        num_new = min(sequence.num_tokens - hit.num_tokens, most)
        reserved = 0
        if num_reserved is not None:
            reserved = num_reserved + self._num_blocks_after(sequence, hit.num_tokens + num_new)
        if not self._give(sequence, num_new, plan, hit, reserved):
            return 0
        self._note_hit(sequence, hit)
        return num_new

    def _note_hit(self, sequence: Sequence, hit: PrefixHit) -> None:
        request = sequence.request
        if request.num_cached_tokens is None:
            request.num_cached_tokens = hit.num_tokens
            self._stats.prefix_cache_queries += sequence.num_tokens
            self._stats.prefix_cache_hits += hit.num_tokens
            request.num_host_tokens = hit.num_host_tokens(self.kv.block_size)
        self._stats.host_cache_hits += hit.num_host_tokens(self.kv.block_size)

    def _num_blocks_after(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that the known tokens of `sequence` need beyond those for its first `num_tokens`."""
        return self.kv.num_blocks_for(sequence.num_tokens) - self.kv.num_blocks_for(num_tokens)

    def _fork_samples(self, parent: Sequence) -> None:
        """The prompt ends in this step: the other samples begin, sharing its blocks, and draw their first tokens."""
        request = parent.request
        request.forked = True
        for sequence_id, seed in zip(request.sequence_ids[1:], request.seeds[1:], strict=True):
            if sequence_id in request.dropped:
                del self._sequences[sequence_id]
                self._num_seats -= request.status is RequestStatus.RUNNING
                continue
            child = parent.fork(sequence_id, seed)
            child.num_computed_tokens = child.num_tokens
            child.known = True
            self.kv.fork(parent, child)
            request.sequences.append(child)
            self._sequences[sequence_id] = child
            self._forks.append(ForkData(parent.sequence_id, sequence_id, seed, samples=True))

    def _first_waiting(self, count: int) -> list[Request]:
        """Return the first `count` waiting requests, without those whose adapter there is no room for.

        These are overtaken by others for a while, but no longer: a stream of requests for the adapters that run would
        keep them waiting for ever.
        """
        if not self.max_loras:
            return self._waiting.first(count)
        adapters = self._running_adapters()
        found: list[Request] = []
        for request in self._waiting.first(count * ADAPTER_WINDOWS):
            if len(found) == count:
                break
            if request.lora is not None and request.spec.lora_int_id not in adapters:
                if len(adapters) == self.max_loras:
                    now = self.clock()
                    if request.blocked_since is None:
                        request.blocked_since = now
                    if now - request.blocked_since >= ADAPTER_PATIENCE_SECONDS:
                        break
                    continue
                adapters.add(request.spec.lora_int_id)
            found.append(request)
        return found

    def _running_adapters(self) -> set[int]:
        return {request.spec.lora_int_id for request in self._running if request.lora is not None}

    def _adapter_fits(self, request: Request) -> bool:
        """Whether a waiting request could have its adapter beside those of the running ones."""
        if request.lora is None:
            return True
        running = self._running_adapters()
        return request.spec.lora_int_id in running or len(running) < self.max_loras

    def _state(self) -> tuple[int, int, int]:
        """What the admission of waiting requests depends on: nothing can be admitted while it stays the same."""
        return self.kv.pool.num_released, self._num_added, self._num_seats

    def _is_alone(self, request: Request) -> bool:
        """Whether `request` has all blocks that are not free, so that nothing will be freed for it."""
        held = self.kv.num_held(request.sequences)
        return self._running in ([], [request]) and held + self.kv.pool.num_free == self.kv.pool.num_blocks

    def _describe(self, sequence: Sequence) -> NewSequenceData:
        request = sequence.request
        sequence.known = True
        sequence.unsent = []
        return NewSequenceData(
            sequence.sequence_id,
            request.spec,
            self.kv.block_ids(sequence.sequence_id),
            sequence.num_computed_tokens,
            output_token_ids=sequence.token_ids[request.num_prompt_tokens :],
            seed=sequence.seed,
            num_candidates=0 if request.beam is None else request.beam.num_candidates,
            sampler_state=sequence.sampler_state,
        )

    # ---- from one queue to another ----

    def _run(self, request: Request) -> None:
        """`request`, taken from the waiting queue, runs from now on."""
        request.status = RequestStatus.RUNNING
        request.blocked_since = None
        self._num_seats += request.num_seats
        insort(self._running, request, key=BY_ORDER)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = self.clock()
        self.policy.admitted(request)

    def _preempt(self, request: Request, plan: Plan) -> None:
        """Take the blocks of `request`, already off the running list, and put it back in line.

        None of its sequences may have been scheduled in this step.
        """
        self._num_seats -= request.num_seats
        if self._prefers_swap(request) and self.kv.swap_out(request.sequences):
            request.status = RequestStatus.SWAPPED
            self._stats.num_swapped_out += 1
        else:
            request.status = RequestStatus.PREEMPTED
            for sequence in request.sequences:
                self.kv.free(sequence)
                sequence.num_computed_tokens = 0
                sequence.candidates = None
        for sequence in request.sequences:
            if self._leave(sequence):
                plan.preempted.append(sequence.sequence_id)
        plan.left.add(request.request_id)
        request.num_expected_tokens = None
        request.num_preemptions += 1
        self._stats.num_preemptions += 1
        self._waiting.push(request)

    def _prefers_swap(self, request: Request) -> bool:
        """Whether `request`, if it is preempted, is to be swapped rather than computed again.

        What was pooled of its tokens is not kept.
        """
        if request.pooling is not None:
            return False
        return self.preemption_mode == "swap" or (self.preemption_mode == "auto" and len(request.sequences) > 1)

    def _can_swap_in(self, request: Request, num_reserved: int) -> bool | None:
        """Return whether a swapped request fits now (True), later (False), or never (None)."""
        needed = self.kv.num_blocks_to_swap_in(request.sequences)
        if needed > self.kv.pool.num_blocks:
            return None
        return needed + num_reserved <= self.kv.pool.num_free

    def _swap_in(self, request: Request, plan: Plan, num_reserved: int) -> bool | None:
        """Bring back a swapped request, if there is room for it and for a token of each of its sequences."""
        fits = self._can_swap_in(request, num_reserved if self._running else 0)
        if fits is None:
            self._infeasible(request, self.kv.num_blocks_to_swap_in(request.sequences))
            return None
        if not fits or plan.budget < sum(sequence.num_left > 0 for sequence in request.sequences):
            return False
        self._waiting.remove(request)
        self.kv.swap_in(request.sequences)
        self._run(request)
        unfinished = [sequence for sequence in request.sequences if sequence.num_left]
        for number, sequence in enumerate(unfinished, 1):
            num_behind = len(unfinished) - number
            self._give(sequence, min(sequence.num_left, plan.budget - num_behind, self.chunk_limit), plan)
        return True

    def _start_loading(self, request: Request, hit: PrefixHit) -> bool:
        """Begin to read from disk what `request` could use of it; say whether there was anything to read."""
        request.loaded = True
        # Those who run must be able to go on meanwhile: a block each, and some to grow.
        num_reserved = self._num_seats * len(self.kv.windows) + self.watermark_blocks if self._running else 0
        request.loading = set(self.kv.start_loads(hit, num_reserved))
        if not request.loading:
            return False
        request.num_disk_tokens = len(request.loading) // len(self.kv.windows) * self.kv.block_size
        self._waiting.remove(request)
        request.status = RequestStatus.LOADING
        self._loading.append(request)
        return True

    def _infeasible(self, request: Request, num_more: int) -> None:
        """End a request whose sequences, side by side, do not fit even alone; they would need `num_more` blocks."""
        held = self.kv.num_held(request.sequences)
        self._end(
            request,
            RequestStatus.FINISHED_IGNORED,
            f"the {request.num_seats} sequences of this request need {held + num_more} KV blocks side by side, but the "
            f"whole pool has {self.kv.pool.num_blocks} blocks of {self.kv.block_size} tokens; ask for fewer sequences "
            f"or tokens; --num-gpu-blocks-override {held + num_more} lets them go on",
        )

    # ---- ends ----

    def _end(self, request: Request, status: RequestStatus, error: str | None = None) -> None:
        """End `request` and free all it has. With `error` its sequences have that as their last news."""
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._num_seats -= request.num_seats
        elif request.status is RequestStatus.LOADING:
            self._loading.remove(request)
        else:
            self._waiting.remove(request)
        names = [sequence.sequence_id for sequence in request.sequences]
        if not request.forked:
            names = [name for name in request.sequence_ids if name not in request.dropped]
        if request.beam is not None:
            names = [request.request_id]
        if error is not None:
            refused = status is RequestStatus.FINISHED_IGNORED
            for name in names:
                self._news.append(SequenceOutput(name, [], finish_reason="error", error=error, refused=refused))
        for sequence in request.sequences:
            self._forget(sequence, failed=False)
        for name in request.sequence_ids:
            self._sequences.pop(name, None)
        request.sequences.clear()
        request.forked = True
        request.status = status
        del self._requests[request.request_id]
        self.policy.ended(request)

    def _end_sequence(self, sequence: Sequence, *, failed: bool = False) -> None:
        """End one sequence, and its request with the last one. With `failed` its KV may be bad."""
        request = sequence.request
        if request.status is RequestStatus.RUNNING and request.beam is None:
            self._num_seats -= 1
        request.sequences.remove(sequence)
        self._forget(sequence, failed=failed)
        if not request.sequences:
            self._end(request, RequestStatus.FINISHED_STOPPED)

    def _forget(self, sequence: Sequence, *, failed: bool) -> None:
        request = sequence.request
        request.num_output_tokens += sequence.num_tokens - sequence.num_prompt_tokens
        self._sequences.pop(sequence.sequence_id, None)
        self.kv.free(sequence, forget=failed)
        if self._leave(sequence):
            self._finished_ids.append(sequence.sequence_id)

    def _leave(self, sequence: Sequence) -> bool:
        """`sequence` leaves the worker; return whether that must be told. A fork it was not told of need not."""
        was_known, sequence.known = sequence.known, False
        kept = [fork for fork in self._forks if fork.sequence_id != sequence.sequence_id]
        was_known &= len(kept) == len(self._forks)
        self._forks = kept
        return was_known


def _check_at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{name} must be at least {low}, got {echo(value)}", param=name)
