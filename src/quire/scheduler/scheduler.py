"""`Scheduler`: who computes how many tokens in the next step.

One token budget a step, shared by prefill chunks and decodes alike: a sequence is given some of the tokens it has not
computed yet. Running sequences come first, in policy order, then waiting ones. When blocks run out, the last running
sequence is preempted: it gives everything back and later computes its tokens again, helped by the prefix cache.

Why it cannot livelock: running sequences are kept in policy order and served in that order, only the last one is ever
preempted, and none is admitted in a step that preempted. So the first one always advances, and one that could outgrow
the whole pool is ended before it does.

`schedule` and `update_from_output` alternate. Cost is linear in the sequences scheduled and independent of the number
waiting and of how many tokens each has.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterable
from operator import attrgetter

from quire.errors import ConfigError, QuireError, RequestError, echo
from quire.kvcache.manager import KVCacheManager
from quire.scheduler.policy import POLICIES, WaitingQueue
from quire.scheduler.request import Request, RequestStatus
from quire.scheduler.stop import check_stop, stop_reason
from quire.step import (
    ContinuingSequenceData,
    ModelOutput,
    NewSequenceData,
    SchedulerOutput,
    SchedulerStats,
    SequenceOutput,
    TokenTopLogprobs,
)

_BY_ORDER = attrgetter("order_key")
_RUNNING = RequestStatus.RUNNING  # looked up once: enum attributes are slow, and this one is on the path of every token


class _Plan:
    """A step in the making.

    `num_owed_blocks` counts the blocks that prefills begun earlier, or in this step, still need for the rest of their
    tokens.
    """

    __slots__ = ("budget", "continuing", "new_sequences", "num_owed_blocks", "num_scheduled", "preempted")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.num_owed_blocks = 0
        self.new_sequences: list[NewSequenceData] = []
        self.continuing: list[ContinuingSequenceData] = []
        self.num_scheduled: dict[str, int] = {}
        self.preempted: list[str] = []


class Scheduler:
    """Plans steps and takes in their results.

    Args:
        num_blocks, block_size: the KV pool; `block_size` is tokens per block.
        max_model_len: most tokens of one sequence, prompt and output.
        max_num_seqs: most sequences running. max_num_batched_tokens: most tokens computed in a step.
        enable_prefix_caching: share the KV of common prefixes.
        policy: "fcfs" or "priority".
        long_prefill_token_threshold: most tokens one sequence may take of a step's budget; 0 means all of it.
        watermark: share of blocks kept free when a request joins others, so that those can grow a little first.
        clock: seconds; used only to note when a request was first scheduled.
        hash_key: key of the prefix hashes; None draws a random one.

    Raises `ConfigError` naming the option.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool = True,
        policy: str = "fcfs",
        long_prefill_token_threshold: int = 0,
        watermark: float = 0.01,
        clock: Callable[[], float] = time.monotonic,
        hash_key: bytes | None = None,
    ) -> None:
        _check_at_least("num_blocks", num_blocks, 1)
        _check_at_least("block_size", block_size, 1)
        _check_at_least("max_model_len", max_model_len, 1)
        _check_at_least("max_num_seqs", max_num_seqs, 1)
        _check_at_least("max_num_batched_tokens", max_num_batched_tokens, 1)
        _check_at_least("long_prefill_token_threshold", long_prefill_token_threshold, 0)
        if policy not in POLICIES:
            raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, got {echo(policy)}", param="policy")
        if not 0.0 <= watermark < 1.0:
            raise ConfigError(f"watermark must be at least 0 and below 1, got {echo(watermark)}", param="watermark")
        self.kv = KVCacheManager(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching, hash_key=hash_key)
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunk_limit = long_prefill_token_threshold or max_num_batched_tokens
        self.watermark_blocks = int(watermark * num_blocks)
        # The last token needs no slot, but a sequence that goes on does: one token beyond the pool, and it must end.
        self.length_limit = min(max_model_len, self.kv.capacity + 1)
        self._order = POLICIES[policy]
        self._clock = clock
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue()
        self._running: list[Request] = []  # sorted by order_key
        self._finished_ids: list[str] = []  # not yet told to the worker
        self._refusals: list[SequenceOutput] = []
        self._blocked: tuple[Request, int] | None = None
        self._num_added = 0
        self._stats = SchedulerStats(num_blocks=num_blocks)

    # ---- requests come and go ----

    def add_request(self, request: Request) -> None:
        """Queue `request`. One that can never fit is answered with an "error" by the next `update_from_output`.

        Raises `RequestError` if a live request has the same id.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request id {echo(request.request_id)} is in use already", param="request_id")
        problem = self._refusal(request)
        if problem is not None:
            request.status = RequestStatus.FINISHED_ERROR
            self._refusals.append(SequenceOutput(request.request_id, [], finish_reason="error", error=problem))
            return
        request.order_key = self._order(request, self._num_added)
        self._num_added += 1
        self._requests[request.request_id] = request
        self._waiting.push(request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Forget these requests and free their blocks at once; ids that are not live are ignored. Yields no output."""
        aborted = set(request_ids)
        for request_id in aborted:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request, RequestStatus.FINISHED_ABORTED)
        self._refusals = [refusal for refusal in self._refusals if refusal.sequence_id not in aborted]
        self._drop_finished_from_running()

    def has_unfinished(self) -> bool:
        """Whether there is work: live requests, a refusal to be sent, or an end the worker has not been told of."""
        return bool(self._requests or self._refusals or self._finished_ids)

    def reset_prefix_cache(self) -> int:
        """Forget all cached prefixes; return the number of blocks dropped. Running sequences are not disturbed."""
        return self.kv.reset_prefix_cache()

    # ---- planning a step ----

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. An empty plan that names finished sequences must still reach the worker."""
        plan = _Plan(self.max_num_batched_tokens)
        self._schedule_running(plan)
        if not plan.preempted:
            self._schedule_waiting(plan)
        total = self.max_num_batched_tokens - plan.budget
        self._stats.num_steps += total > 0
        self._stats.num_scheduled_tokens += total
        finished_ids, self._finished_ids = self._finished_ids, []
        return SchedulerOutput(
            new_sequences=plan.new_sequences,
            continuing=plan.continuing,
            num_scheduled_tokens=plan.num_scheduled,
            total_num_scheduled_tokens=total,
            finished_sequence_ids=finished_ids,
            preempted_sequence_ids=plan.preempted,
        )

    def _schedule_running(self, plan: _Plan) -> None:
        """Give every running sequence its next tokens, preempting from the end while blocks are missing.

        A prefill leaves one token of the budget to each sequence behind it, so that decodes never wait for it.
        """
        running = self._running
        index = 0
        while index < len(running) and plan.budget > 0:
            request = running[index]
            index += 1
            num_computed = request.num_computed_tokens
            num_left = num_new = len(request.token_ids) - num_computed
            if num_left > 1:
                num_new = min(num_left, self.chunk_limit, max(plan.budget - (len(running) - index), 1))
            new_blocks = self.kv.allocate_slots(request, num_new)
            while new_blocks is None:
                victim = running.pop()
                self._preempt(victim, plan)
                if victim is request:
                    return
                new_blocks = self.kv.allocate_slots(request, num_new)
            if num_new < num_left:
                plan.num_owed_blocks += self._num_blocks_after(request, num_computed + num_new)
            new_block_ids = [[block.block_id for block in new_blocks]] if new_blocks else []
            plan.continuing.append(ContinuingSequenceData(request.request_id, new_block_ids, num_computed))
            plan.num_scheduled[request.request_id] = num_new
            plan.budget -= num_new

    def _schedule_waiting(self, plan: _Plan) -> None:
        """Admit waiting requests in order while there are seats, budget and blocks.

        The first one that does not fit blocks the rest, and is not looked at again before a block was released.
        """
        while plan.budget > 0 and len(self._running) < self.max_num_seqs:
            request = self._waiting.peek()
            if request is None or self._blocked == (request, self.kv.pool.num_released):
                return
            if not self._admit(request, plan):
                self._blocked = (request, self.kv.pool.num_released)
                return

    def _admit(self, request: Request, plan: _Plan) -> bool:
        """Start or resume `request` if all its known tokens fit beside what others were promised; say whether."""
        computed_blocks, num_computed = self.kv.get_computed_blocks(request)
        num_new = min(len(request.token_ids) - num_computed, plan.budget, self.chunk_limit)
        num_later = self._num_blocks_after(request, num_computed + num_new)
        num_reserved = num_later
        if self._running:
            num_reserved += plan.num_owed_blocks + self.watermark_blocks
        if self.kv.allocate_slots(request, num_new, computed_blocks, num_reserved) is None:
            return False
        self._waiting.pop()
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_computed
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_computed
            request.first_scheduled_time = self._clock()
            self._stats.prefix_cache_queries += request.num_tokens
            self._stats.prefix_cache_hits += num_computed
        insort(self._running, request, key=_BY_ORDER)
        plan.new_sequences.append(self._describe(request))
        plan.num_scheduled[request.request_id] = num_new
        plan.num_owed_blocks += num_later
        plan.budget -= num_new
        return True

    def _preempt(self, request: Request, plan: _Plan) -> None:
        """Take everything from `request`, already off the running list, and put it back in line."""
        self.kv.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._stats.num_preemptions += 1
        self._waiting.push(request)
        plan.preempted.append(request.request_id)

    def _num_blocks_after(self, request: Request, num_tokens: int) -> int:
        """Blocks that the known tokens of `request` need beyond those for its first `num_tokens`."""
        return self.kv.num_blocks_for(len(request.token_ids)) - self.kv.num_blocks_for(num_tokens)

    def _describe(self, request: Request) -> NewSequenceData:
        return NewSequenceData(
            sequence_id=request.request_id,
            token_ids=list(request.token_ids),  # the worker appends to its own
            num_prompt_tokens=request.num_prompt_tokens,
            sampling_params=request.sampling_params,
            seed=request.seed,
            stop_ids=sorted(request.stop_ids),
            bad_words_ids=request.bad_words_ids,
            block_ids=[self.kv.block_ids(request.request_id)],
            num_computed_tokens=request.num_computed_tokens,
        )

    # ---- taking in the results ----

    def update_from_output(self, plan: SchedulerOutput, output: ModelOutput) -> list[SequenceOutput]:
        """Take in what the model made of `plan`; return the news, one entry per sequence that has any.

        Results of requests aborted meanwhile are dropped. Raises `QuireError` if the model left out a token it owed.
        """
        news, self._refusals = self._refusals, []
        any_finished = False
        for request_id, num_scheduled in plan.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is None or request.status is not _RUNNING:
                continue
            entry = self._advance(request, num_scheduled, output)
            if entry is not None:
                news.append(entry)
                any_finished |= entry.finish_reason is not None
        if any_finished:
            self._drop_finished_from_running()
        return news

    def _advance(self, request: Request, num_scheduled: int, output: ModelOutput) -> SequenceOutput | None:
        """Apply one sequence's results; return its news, or None if the chunk brought none."""
        request_id = request.request_id
        if output.errors and request_id in output.errors:
            self._finish(request, RequestStatus.FINISHED_ERROR)
            return self._news(request, [], error=output.errors[request_id])
        start = request.num_computed_tokens
        request.num_computed_tokens = start + num_scheduled
        prompt_logprobs = None
        if request.wants_prompt_logprobs:
            prompt_logprobs = self._new_prompt_logprobs(request, start, output.prompt_logprobs.get(request_id, []))
        sampled = output.sampled_token_ids.get(request_id, [])
        if bool(sampled) != (request.num_computed_tokens == len(request.token_ids)):
            raise QuireError(f"the model returned {len(sampled)} tokens for {request!r}")
        status = None
        num_taken = 0
        for token_id in sampled:
            request.token_ids.append(token_id)
            num_taken += 1
            status = check_stop(request, token_id, self.length_limit)
            if status is not None:
                self._finish(request, status)
                break
        if not num_taken and not prompt_logprobs:
            return None
        logprobs = output.logprobs.get(request_id) if output.logprobs else None
        if num_taken < len(sampled):
            sampled = sampled[:num_taken]
            logprobs = logprobs[:num_taken] if logprobs is not None else None
        return self._news(request, sampled, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def _new_prompt_logprobs(
        self, request: Request, start: int, entries: list[TokenTopLogprobs]
    ) -> list[TokenTopLogprobs] | None:
        """Return those of `entries`, which begin at prompt position `start + 1`, that were not sent before.

        A sequence preempted within its prompt computes its first positions twice.
        """
        fresh = entries[max(request.num_prompt_logprobs - start, 0) :]
        request.num_prompt_logprobs += len(fresh)
        return fresh or None

    def _news(
        self,
        request: Request,
        new_token_ids: list[int],
        logprobs: list[TokenTopLogprobs] | None = None,
        prompt_logprobs: list[TokenTopLogprobs] | None = None,
        error: str | None = None,
    ) -> SequenceOutput:
        news = SequenceOutput(
            request.request_id,
            new_token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            num_preemptions=request.num_preemptions,
            error=error,
        )
        if not request.has_output:
            request.has_output = True
            news.num_cached_tokens = request.num_cached_tokens
            news.first_scheduled_time = request.first_scheduled_time
        if request.status is not _RUNNING:
            news.finish_reason = request.status.finish_reason
            if request.status is RequestStatus.FINISHED_STOPPED:
                news.stop_reason = stop_reason(request)
        return news

    # ---- ends ----

    def _refusal(self, request: Request) -> str | None:
        """Return why `request` can never run, or None. One token beyond the prompt must fit, else it yields nothing."""
        num_tokens = request.num_prompt_tokens + 1
        if num_tokens > self.max_model_len:
            return (
                f"the prompt has {request.num_prompt_tokens} tokens; with one token to generate that exceeds the "
                f"context of {self.max_model_len} tokens"
            )
        if not self.kv.can_ever_fit(num_tokens):
            return (
                f"the prompt and one token more need {self.kv.num_blocks_for(num_tokens)} KV blocks, but the whole "
                f"pool has {self.kv.pool.num_blocks} blocks of {self.kv.block_size} tokens"
            )
        return None

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """End `request` and free its blocks. The caller drops it from the running list afterwards."""
        was_running = request.status is RequestStatus.RUNNING
        request.status = status
        del self._requests[request.request_id]
        if was_running:
            # After an error the KV itself may be bad (not finite): nobody may find it.
            self.kv.free(request, forget=status is RequestStatus.FINISHED_ERROR)
            self._finished_ids.append(request.request_id)
        else:
            self._waiting.discard(request)

    def _drop_finished_from_running(self) -> None:
        self._running = [request for request in self._running if request.status is RequestStatus.RUNNING]

    # ---- being watched ----

    def stats(self) -> SchedulerStats:
        """Return a snapshot; O(1)."""
        stats = self._stats
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_blocks=stats.num_blocks,
            num_free_blocks=self.kv.pool.num_free,
            num_preemptions=stats.num_preemptions,
            prefix_cache_queries=stats.prefix_cache_queries,
            prefix_cache_hits=stats.prefix_cache_hits,
            num_steps=stats.num_steps,
            num_scheduled_tokens=stats.num_scheduled_tokens,
        )

    def check_integrity(self) -> None:
        """Raise `QuireError` on a broken invariant, between steps; costs O(blocks + requests)."""
        running, waiting = self._running, list(self._waiting)
        if sorted(running, key=_BY_ORDER) != running or len(running) > self.max_num_seqs:
            raise QuireError("running sequences are out of order or too many")
        if {id(r) for r in running} | {id(r) for r in waiting} != {id(r) for r in self._requests.values()}:
            raise QuireError("live requests are not the running and the waiting ones")
        if len(running) + len(waiting) != len(self._requests) or len(waiting) != len(self._waiting):
            raise QuireError("a request stands in two queues, or the waiting queue miscounts")
        for request in running:
            num_slots = len(self.kv.block_ids(request.request_id)) * self.kv.block_size
            if request.status is not RequestStatus.RUNNING or num_slots < request.num_computed_tokens:
                raise QuireError(f"{request!r} runs with {num_slots} slots")
            if request.num_computed_tokens >= request.num_tokens:
                raise QuireError(f"{request!r} has nothing to compute")
        for request in waiting:
            if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED) or request.num_computed_tokens:
                raise QuireError(f"{request!r} waits")
        if self.kv.num_tables() != len(running):
            raise QuireError(f"{self.kv.num_tables()} block tables for {len(running)} running sequences")
        self.kv.check_integrity()


def _check_at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{name} must be at least {low}, got {echo(value)}", param=name)
