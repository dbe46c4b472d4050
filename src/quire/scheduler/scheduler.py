"""`Scheduler`: who computes how many tokens in the next step.

One token budget a step, shared by prefill chunks and decodes alike: a sequence is given some of the tokens it has not
computed yet. Running requests come first, in policy order, then waiting ones. When blocks run out, the last running
request is preempted: it gives everything back and later computes its tokens again, helped by the prefix cache, or has
its blocks swapped to the host and back.

Prompts share the budget: of those under way and those that wait, the shortest go first, and a fourth is kept for the
oldest (`share.py`). So a long prompt neither keeps others waiting nor is it kept waiting itself.

Why it cannot livelock: running requests are kept in policy order and served in that order, only the last one is ever
preempted, and none is admitted in a step that preempted for want of blocks. So the first one always advances, and one
that could outgrow the whole pool is ended before it does.

Cost is linear in the sequences scheduled and independent of the number waiting and of how many tokens each has.
"""

from __future__ import annotations

from typing import Any

from quire.kvcache.manager import KVCacheManager
from quire.scheduler.base import BaseScheduler
from quire.scheduler.plan import Plan
from quire.scheduler.request import Request, RequestStatus, Sequence
from quire.scheduler.share import share_tokens

STREAMED_TOKENS = 1024  # a step computes for longer than it takes to bring them: see docs/memory.md
WINDOW = 32  # waiting requests looked at in a step; bounds what a step costs


class Scheduler(BaseScheduler):
    """The unified scheduler.

    Args:
        kv: the block manager.
        max_overtake_seconds: for so long may a waiting request that does not fit be overtaken by others that do.
        streamed_tokens: most tokens whose thin blocks a step brings from the host for decodes.
        options: those of `RequestLives`.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        max_overtake_seconds: float = 0.0,
        streamed_tokens: int = STREAMED_TOKENS,
        **options: Any,
    ) -> None:
        super().__init__(kv, **options)
        self.streamed_blocks = streamed_tokens // kv.block_size
        self.max_overtake_seconds = max_overtake_seconds

    def _plan(self, plan: Plan) -> None:
        if self.policy.preempts:
            self._make_room(plan)
        shares = None if self.whole_prompts else self._share(plan)
        self._schedule_running(plan, shares)
        if not plan.starved:
            self._schedule_waiting(plan, shares)

    # ---- shares ----

    def _share(self, plan: Plan) -> dict[str, int] | None:
        """Return how many tokens each prompt may compute, by sequence id; None if there is enough for all.

        Of waiting requests those count that could begin in this step.
        """
        num_decodes = 0
        prompts: list[tuple[str, int]] = []  # of running requests first: only these are sure to use what they get
        for request in self._running:
            for sequence in request.sequences:
                num_left = len(sequence.token_ids) - sequence.num_computed_tokens
                if num_left == 1:
                    num_decodes += 1
                elif num_left:
                    prompts.append((sequence.sequence_id, num_left))
        budget = max(plan.budget - num_decodes, 1)
        num_running = len(prompts)
        if self._waiting and self._blocked != self._state():
            num_seats = self._num_seats
            for request in self._candidates():
                num_seats += request.num_seats
                if num_seats > self.max_num_seqs:
                    break
                if request.status is not RequestStatus.SWAPPED:
                    first = request.sequences[0]
                    prompts.append((first.sequence_id, first.num_tokens))
        if sum(wanted for _, wanted in prompts) <= budget:
            return None
        # Prompts still waiting were counted in full; what the cache holds of them makes them shorter.
        for index in range(num_running, len(prompts)):
            name, wanted = prompts[index]
            prompts[index] = (name, max(wanted - self._expected_hit(self._sequences[name]), 1))
        shares = share_tokens(budget, [wanted for _, wanted in prompts], self.chunk_limit, self.long_chunk)
        return {name: share for (name, _), share in zip(prompts, shares, strict=True)}

    def _expected_hit(self, sequence: Sequence) -> int:
        """Return how many tokens the cache held of a waiting sequence when it was first asked: an estimate."""
        request = sequence.request
        if request.num_expected_tokens is None:
            request.num_expected_tokens = self.kv.find_prefix(sequence).num_tokens
        return request.num_expected_tokens

    # ---- running requests ----

    def _make_room(self, plan: Plan) -> None:
        """Preempt running requests of lower rank than the first waiting one, while that has no seat or no blocks."""
        head = self._waiting.peek()
        while (
            head is not None and self._running and self._running[-1].priority > head.priority and not self._fits(head)
        ):
            self._preempt(self._running.pop(), plan)

    def _fits(self, request: Request) -> bool:
        if not self._adapter_fits(request):
            # Others give way for that if it helps: those that stay must leave room for its adapter.
            return (
                len({r.spec.lora_int_id for r in self._running if r.lora and r.priority <= request.priority})
                >= self.max_loras
            )
        if self._num_seats + request.num_seats > self.max_num_seqs:
            return False
        if request.status is RequestStatus.SWAPPED:
            return self._can_swap_in(request, self.watermark_blocks) is not False
        first = request.sequences[0]
        num_cached = self.kv.find_prefix(first).num_tokens // self.kv.block_size
        return self.kv.num_blocks_for(first.num_tokens) - num_cached + self.watermark_blocks <= self.kv.pool.num_free

    def _schedule_running(self, plan: Plan, shares: dict[str, int] | None) -> None:
        """Give every running sequence its next tokens, preempting from the end while blocks are missing.

        A prompt leaves one token of the budget to each sequence behind it, so that decodes never wait for it.
        """
        running = self._running
        num_behind = sum(len(request.sequences) for request in running)
        index = 0
        while index < len(running) and plan.budget > 0:
            request = running[index]
            index += 1
            if self.kv.thin.in_use and not self._is_at_hand(request, plan):
                num_behind -= len(request.sequences)
                continue
            if len(request.sequences) > 1 and not self._secure(request, plan):
                index -= 1  # it was preempted or ended
                continue
            for sequence in request.sequences[:]:  # those forked on the way draw from their parent's step
                num_behind -= 1
                num_left = num_new = len(sequence.token_ids) - sequence.num_computed_tokens
                if num_left == 0 or plan.budget <= 0:
                    continue
                if num_left > 1:
                    most = max(plan.budget - num_behind, 1)
                    num_new = min(num_left, self.chunk_limit, most)
                    if shares is not None:
                        num_new = min(num_new, shares.get(sequence.sequence_id, num_new))
                    if num_new == 0:
                        plan.num_owed_blocks += self._num_blocks_after(sequence, sequence.num_computed_tokens)
                        continue
                if not (sequence.known and self._give(sequence, num_new, plan)) and not self._continue(
                    sequence, num_new, plan
                ):
                    return
                if num_new < num_left:
                    num_done = sequence.num_computed_tokens + plan.num_scheduled.get(sequence.sequence_id, 0)
                    plan.num_owed_blocks += self._num_blocks_after(sequence, num_done)

    def _is_at_hand(self, request: Request, plan: Plan) -> bool:
        """Whether `request` may go on in this step for all the thin blocks that it has.

        Prompts may: while they are computed there is time to bring what is on the host. Decodes would keep all others
        waiting for it in every step. So they get whole blocks in place of thin ones as these become free, in order and
        some in each step, and wait until no more are left than all others can do with beside those. A few they take
        from the last in line, who get thin ones. Only the first in a step never waits: where nobody goes before it,
        nobody may ever give it the blocks.
        """
        if any(sequence.num_left > 1 or not self.kv.holds_blocks(sequence) for sequence in request.sequences):
            return True
        is_first = not plan.num_scheduled
        room = max(0, self.streamed_blocks - plan.num_streamed)
        most = self.kv.pool.num_blocks if is_first else room
        names = [sequence.sequence_id for sequence in request.sequences]
        left, moved = self.kv.thin.bring_back(names, most, self.watermark_blocks)
        if 0 < left <= room - moved:
            taken = self._take_from_the_last(request, left)
            left, more = self.kv.thin.bring_back(names, taken, 0)
            moved += more
        plan.num_streamed += moved
        if not is_first and left > room - moved:
            return False
        plan.num_streamed += left
        return True

    def _take_from_the_last(self, request: Request, count: int) -> int:
        """Free up to `count` whole blocks of requests behind `request`, which have thin ones then; return how many."""
        taken = 0
        for victim in reversed(self._running):
            if victim is request or taken == count:
                break
            taken += self.kv.thin.send_out([sequence.sequence_id for sequence in victim.sequences], count - taken)
        return taken

    def _continue(self, sequence: Sequence, num_new: int, plan: Plan) -> bool:
        """Give a running sequence `num_new` tokens, preempting from the end for them; False if it was preempted."""
        request = sequence.request
        give = self._give if self.kv.holds_blocks(sequence) else self._begin
        while not give(sequence, num_new, plan):
            if len(request.sequences) > 1 and self._running[-1] is request:
                # `_secure` has seen to one token each; one that was preempted and has more to compute waits for the
                # others to end, if these go on.
                if self._is_alone(request) and not any(s.sequence_id in plan.num_scheduled for s in request.sequences):
                    self._infeasible(request, self.kv.num_blocks_for(sequence.num_tokens))
                    return False
                return True
            victim = self._running.pop()
            plan.starved = True
            self._preempt(victim, plan)
            if victim is request:
                return False
        return True

    def _secure(self, request: Request, plan: Plan) -> bool:
        """See to it that each sequence of `request` could take a block, preempting others; False if that failed.

        Its sequences advance together or not at all, so this is settled before the first of them gets a token. A
        request that has the pool to itself and still lacks blocks is ended.
        """
        needed = sum(sequence.num_left > 0 for sequence in request.sequences) * len(self.kv.windows)
        while self.kv.pool.num_free < needed:
            needed = self.kv.num_blocks_to_advance(request.sequences)  # exactly; the above is the most it can be
            if self.kv.pool.num_free >= needed:
                break
            if self._is_alone(request):
                self._infeasible(request, needed)
                return False
            victim = self._running.pop()
            plan.starved = True
            self._preempt(victim, plan)
            if victim is request:
                return False
        return True

    # ---- waiting requests ----

    def _candidates(self) -> list[Request]:
        """Return the waiting requests that may be next, in the order in which they are tried."""
        window = self._first_waiting(WINDOW)
        if self.policy.longest_prefix_first and len(window) > 1:
            head = window[0]
            if head.blocked_since is None:
                head.blocked_since = self.clock()
            if self.clock() - head.blocked_since < self.max_overtake_seconds:
                window.sort(key=lambda request: -self.kv.find_prefix(request.sequences[0]).num_tokens)
        return window

    def _schedule_waiting(self, plan: Plan, shares: dict[str, int] | None) -> None:
        """Admit waiting requests in order while there are seats, budget and blocks.

        One that does not fit blocks the rest, but not before it was overtaken for `max_overtake_seconds`. Where it may
        preempt others it is not overtaken: they would have to go again in the next step.
        """
        if not self._waiting or self._blocked == self._state():
            return
        blocked, all_tried = False, True
        for request in self._candidates():
            if plan.budget <= 0 or self._num_seats >= self.max_num_seqs:
                return
            if request.request_id in plan.left:
                continue
            if self.whole_prompts and request.sequences[0].num_tokens > plan.budget:
                return  # it comes first in the next step
            if shares is not None and shares.get(request.sequences[0].sequence_id) == 0:
                all_tried = False
                continue
            outcome = self._admit(request, plan, shares)
            if outcome is None:
                continue
            if not outcome:
                blocked = True
                now = self.clock()
                if request.blocked_since is None:
                    request.blocked_since = now
                if self.policy.preempts or now - request.blocked_since >= self.max_overtake_seconds:
                    break
        if blocked and all_tried:
            self._blocked = self._state()

    def _admit(self, request: Request, plan: Plan, shares: dict[str, int] | None) -> bool | None:
        """Start or resume `request` if all its known tokens fit beside what others were promised.

        Returns whether it did; None if it is not its fault: it waits for the disk, or was ended.
        """
        if self._num_seats + request.num_seats > self.max_num_seqs:
            return False
        num_reserved = (request.num_seats - 1) * len(self.kv.windows)
        if self._running:
            num_reserved += plan.num_owed_blocks + self.watermark_blocks
        if request.status is RequestStatus.SWAPPED:
            return self._swap_in(request, plan, num_reserved)
        first = request.sequences[0]
        hit = self.kv.find_prefix(first)
        if (hit.loads or hit.loading) and not request.loaded and (hit.loading or self._start_loading(request, hit)):
            return None
        most = min(plan.budget, self.chunk_limit)
        if shares is not None:
            most = min(most, shares.get(first.sequence_id, most))
        num_new = self._begin(first, most, plan, num_reserved, hit)
        if not num_new:
            if self._is_alone(request):
                self._infeasible(request, self.kv.num_blocks_for(first.num_tokens) + num_reserved)
                return None
            return False
        self._waiting.remove(request)
        self._run(request)
        plan.num_owed_blocks += self._num_blocks_after(first, first.num_computed_tokens + num_new)
        for sibling in request.sequences[1:]:
            if plan.budget > 0 and not sibling.known and sibling.num_computed_tokens == 0:
                self._begin(sibling, min(plan.budget, self.chunk_limit), plan)
        return True
