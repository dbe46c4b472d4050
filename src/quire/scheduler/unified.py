"""`UnifiedPlanner`, the default, decides how many tokens of which sequences the next step computes.

One token budget a step, shared by prefill chunks and decodes alike: a sequence is given some of the tokens it has not
computed yet. Running requests come first, in policy order, then waiting ones. When blocks run out, the last running
request is preempted: it gives everything back and later computes its tokens again, helped by the prefix cache, or has
its blocks swapped to the host and back.

Prompts share the budget: of those under way and those that wait, the shortest go first, and a fourth is kept for the
oldest (`share_tokens`). So a long prompt neither keeps others waiting nor is it kept waiting itself.

Why it cannot livelock: running requests are kept in policy order and served in that order, only the last one is ever
preempted, and none is admitted in a step that preempted for lack of blocks. So the first one always advances, and one
that could outgrow the whole pool is ended before it does.

Requests in the background, such as the lines of batches, come behind all others, and stay out of steps for whose result
somebody waits (`_background_budget`).

Cost is linear in the sequences scheduled and independent of the number waiting and of how many tokens each has.
"""

from __future__ import annotations

from quire.errors import ErrorData
from quire.scheduler.admission import WINDOW, Admission, AdmitResult
from quire.scheduler.in_flight import ScheduledStep
from quire.scheduler.request import Request, RequestStatus, Sequence

# Of a step's budget, prompts too long for a step get one part in LONG_PROMPT_SHARE, but LONG_PROMPT_MIN tokens at
# least: smaller steps spend their time on reading weights.
LONG_PROMPT_SHARE = 4
LONG_PROMPT_MIN = 256

OLDEST_SHARE = 4  # a fourth of the prompts' budget is kept for the oldest
UNFINISHED_SHARE = 16  # one that cannot end in the step gets a sixteenth of it at least

# Who arrives waits for the step that is being computed; requests in the background must not make it long. They get one
# part in BACKGROUND_SHARE of the budget, and one in IDLE_SHARE if there was no other request for IDLE_SECONDS.
BACKGROUND_SHARE = 128
IDLE_SHARE = 4
IDLE_SECONDS = 30.0


class UnifiedPlanner:
    """Plans steps under one token budget.

    Args:
        max_overtake_seconds: for so long may a waiting request that does not fit be overtaken by others that do.
        whole_prompts: prompts are computed in one step, since their tokens see those that follow; none is longer.
    """

    def __init__(
        self,
        admission: Admission,
        *,
        max_overtake_seconds: float = 0.0,
        whole_prompts: bool = False,
    ) -> None:
        self.admission = admission
        self.max_overtake_seconds = max_overtake_seconds
        self.whole_prompts = whole_prompts
        self._kv, self._requests = admission.kv, admission.requests
        self._long_prompt_tokens = admission.long_prefill_token_threshold or max(
            admission.max_num_batched_tokens // LONG_PROMPT_SHARE, LONG_PROMPT_MIN
        )
        # `capacity_version` when no preemption would have made room for the first waiting request.
        self._version_of_vain_search: tuple[int, int, int] | None = None
        self._last_foreground = -IDLE_SECONDS  # when there was a request that is not in the background

    def refusal(self, request: Request) -> ErrorData | None:
        return self.admission.refusal(request)

    def processed(self, step: ScheduledStep) -> None:
        """See `Planner`; this planner keeps nothing of finished steps."""

    def plan(self, step: ScheduledStep) -> None:
        """Schedule running requests first, then waiting ones; then those in the background, likewise."""
        running, waiting = self._requests.running, self._requests.waiting
        last = waiting.last()
        if not (running and running[-1].background) and (last is None or not last.background):
            if running or last is not None:
                self._last_foreground = step.started
            if self.admission.policy.preempts:
                self._preempt_for_priority(step)
            self._schedule(step)
            return
        self._preempt_for_priority(step)
        self._schedule(step)
        allowed = self._background_budget(step)
        if allowed:
            left, step.budget = step.budget, min(step.budget, allowed)
            left -= step.budget
            step.background, step.shares = True, None
            self._schedule(step)
            step.budget += left

    def _schedule(self, step: ScheduledStep) -> None:
        self._schedule_running(step)
        if not step.out_of_blocks:
            self._schedule_waiting(step)

    def _background_budget(self, step: ScheduledStep) -> int:
        """Return how many tokens of a step in which all others are scheduled may be of requests in the background.

        0 if somebody waits for a first token, which comes the sooner the shorter the step is. But if nobody gets any
        further in this step they go on: they may have what others lack.
        """
        head, running = self._requests.waiting.peek(), self._requests.running
        waits = head is not None and not head.background
        if waits or (running and not running[0].background):
            self._last_foreground = step.started
        if waits or step.new_sequences or max(step.num_scheduled.values(), default=1) > 1:
            return 0 if step.num_scheduled or step.in_flight else step.budget
        if self.whole_prompts:
            return step.budget
        is_idle = step.started - self._last_foreground >= IDLE_SECONDS
        return max(self.admission.max_num_batched_tokens // (IDLE_SHARE if is_idle else BACKGROUND_SHARE), 1)

    # ---- shares ----

    def _max_tokens(self, sequence: Sequence, step: ScheduledStep) -> int:
        """Return how many tokens of its prompt `sequence` may compute; shares are computed with the first call."""
        limit = min(step.budget, self.admission.max_tokens_per_sequence)
        if self.whole_prompts:
            return limit
        if step.shares is None:
            step.shares = self._share(step)
        return min(limit, step.shares.get(sequence.sequence_id, limit))

    def _share(self, step: ScheduledStep) -> dict[str, int]:
        """Return how many tokens each prompt may compute, by sequence id; empty if the budget is enough for all.

        Waiting requests count if they could be admitted in this step.
        """
        num_decode_tokens = 0
        prompts: list[tuple[str, int]] = []  # of running requests first: only these surely use their share
        for request in self._requests.running:
            if request.background is not step.background:
                continue
            for sequence in request.sequences:
                if sequence.sequence_id in step.num_scheduled:
                    continue
                num_uncomputed_tokens = sequence.num_uncomputed_tokens
                if num_uncomputed_tokens > 1 and not sequence.draft_token_ids:
                    prompts.append((sequence.sequence_id, num_uncomputed_tokens))
                else:
                    num_decode_tokens += num_uncomputed_tokens
        budget = max(step.budget - num_decode_tokens, 1)
        num_running = len(prompts)
        if self._may_admit(step):
            num_sequences = self._requests.num_reserved_slots
            for request in self._candidates(step):
                num_sequences += request.num_sequences
                if num_sequences > self.admission.max_num_seqs:
                    break
                if request.status is not RequestStatus.SWAPPED:
                    first = request.sequences[0]
                    prompts.append((first.sequence_id, first.num_tokens))
        if sum(num_uncomputed_tokens for _, num_uncomputed_tokens in prompts) <= budget:
            return {}
        # Prompts still waiting were counted in full; what the cache holds of them makes them shorter.
        for index in range(num_running, len(prompts)):
            name, num_uncomputed_tokens = prompts[index]
            prompts[index] = (name, max(num_uncomputed_tokens - self._expected_hit(name), 1))
        shares = share_tokens(
            budget,
            [num_uncomputed_tokens for _, num_uncomputed_tokens in prompts],
            self.admission.max_tokens_per_sequence,
            self._long_prompt_tokens,
        )
        return {name: share for (name, _), share in zip(prompts, shares, strict=True)}

    def _expected_hit(self, sequence_id: str) -> int:
        """Return how many tokens the cache held of a waiting sequence at the first look-up: an estimate."""
        sequence = self._requests.get_sequence(sequence_id)
        assert sequence is not None
        request = sequence.request
        if request.num_expected_tokens is None:
            request.num_expected_tokens = self._kv.find_prefix(sequence).num_tokens
        return request.num_expected_tokens

    # ---- running requests ----

    def _preempt_for_priority(self, step: ScheduledStep) -> None:
        """Preempt running requests of lower rank than the first waiting one, as many as make room for it, or none.

        One that would not fit even alone is ended instead.
        """
        admission, head, running = self.admission, self._requests.waiting.peek(), self._requests.running
        num_staying = len(running)
        while head is not None and num_staying and self._outranks(head, running[num_staying - 1]):
            num_staying -= 1
        if head is None or num_staying == len(running) or self._version_of_vain_search == admission.capacity_version():
            return
        needed = admission.num_blocks_alone(head)
        if needed > self._kv.pool.num_blocks:
            admission.finish_infeasible(head, needed)
            return
        self._kv.free_out_of_windows([sequence for request in running for sequence in request.sequences])
        if not self._fits_beside(num_staying, head):
            self._version_of_vain_search = admission.capacity_version()
            return
        while len(running) > num_staying and not self._fits_beside(len(running), head):
            admission.preempt(running[-1], step)

    def _outranks(self, waiting: Request, running: Request) -> bool:
        """Whether a waiting request may preempt a running one: it is not in the background as that is, or ranks higher.

        That is, with the policy of priorities, it has a better priority, also with ageing.
        """
        if running.background or waiting.background:
            return not waiting.background
        if not self.admission.policy.preempts:
            return False
        priority = running.engine_request.priority
        return priority > waiting.engine_request.priority and running.order_key > waiting.order_key

    def _fits_beside(self, num_staying: int, request: Request) -> bool:
        """Whether a waiting request could be admitted if all running ones but the first `num_staying` were preempted.

        The known tokens of those that stay come first. What windows have passed counts as taken, unless it was freed.
        """
        admission, kv, running = self.admission, self._kv, self._requests.running
        staying, leaving = running[:num_staying], running[num_staying:]
        num_slots = self._requests.num_reserved_slots - sum([other.num_sequences for other in leaving])
        if num_slots + request.num_sequences > admission.max_num_seqs or not admission.adapter_fits(request, staying):
            return False
        max_new_tokens = admission.max_tokens_per_sequence
        num_reserved = admission.watermark_blocks if staying else 0
        for other in staying:
            num_reserved += sum([admission.num_blocks_to_compute(each, max_new_tokens) for each in other.sequences])
        hit = None if request.status is RequestStatus.SWAPPED else kv.find_prefix(request.sequences[0])
        needed = admission.num_blocks_to_admit(request, max_new_tokens, hit)
        num_freed = kv.num_blocks_freed([sequence for other in leaving for sequence in other.sequences], hit)
        return needed + num_reserved <= kv.pool.num_free + num_freed

    def _schedule_running(self, step: ScheduledStep) -> None:
        """Schedule the next tokens of every running sequence, preempting from the end while blocks are lacking.

        Prompts and drafts leave one token of the budget to each sequence behind them, so that decodes never wait.
        """
        admission, kv, running = self.admission, self._kv, self._requests.running
        num_behind = sum([len(request.sequences) for request in running if request.background is step.background])
        may_offload = kv.pool.num_layerwise > 0
        index = 0
        while index < len(running) and step.budget > 0:
            request = running[index]
            index += 1
            if request.background is not step.background:
                continue
            sequences = tuple(request.sequences)  # those forked on the way draw from their parent's step
            if may_offload and not self._may_decode(request, running[index:], step):
                num_behind -= len(sequences)
                continue
            if len(sequences) > 1 and not admission.ensure_blocks(request, sequences, step):
                index -= 1  # it was preempted or ended
                continue
            for sequence in sequences:
                num_behind -= 1
                num_uncomputed_tokens = (
                    len(sequence.token_ids) + sequence.num_tentative_tokens - sequence.num_computed_tokens
                )
                num_new = num_uncomputed_tokens
                if num_uncomputed_tokens > 1:
                    num_new = min(
                        num_uncomputed_tokens, max(step.budget - num_behind, 1), self._max_tokens(sequence, step)
                    )
                if num_new and not (
                    admission.schedule_tokens(sequence, num_new, step) or self._preempt_for(sequence, num_new, step)
                ):
                    return
                if num_new < num_uncomputed_tokens:
                    step.num_remaining_prompt_blocks += admission.num_blocks_after(
                        sequence, sequence.num_computed_tokens
                    )
                if step.budget <= 0:
                    break

    def _may_decode(self, request: Request, behind: list[Request], step: ScheduledStep) -> bool:
        """Whether `request` may compute in this step although it has layerwise blocks."""
        layerwise = self._kv.layerwise
        if not layerwise.in_use or not all(sequence.is_decoding for sequence in request.sequences):
            return True
        return layerwise.can_decode(
            [sequence.sequence_id for sequence in request.sequences],
            ([sequence.sequence_id for sequence in other.sequences] for other in reversed(behind)),
            is_first=not step.num_scheduled,
            num_reserved=self.admission.watermark_blocks,
        )

    def _preempt_for(self, sequence: Sequence, num_new: int, step: ScheduledStep) -> bool:
        """Preempt from the end until `num_new` tokens of `sequence` are scheduled; False if it was preempted itself.

        Drafts are dropped before any request is preempted for them.
        """
        request, admission, running = sequence.request, self.admission, self._requests.running
        while not admission.schedule_tokens(sequence, num_new, step):
            if sequence.draft_token_ids:
                sequence.drop_drafts()
                num_new = min(num_new, sequence.num_uncomputed_tokens)
                continue
            if len(request.sequences) > 1 and running[-1] is request:
                # There is room for one token each; one that was preempted and has more to compute waits for the
                # others to end, if these go on.
                if admission.is_alone(request) and not any(
                    s.sequence_id in step.num_scheduled for s in request.sequences
                ):
                    admission.finish_infeasible(request, self._kv.num_blocks_for(sequence.num_tokens))
                    return False
                return True
            if not admission.preempt_last(request, step):
                return False
        return True

    # ---- waiting requests ----

    def _candidates(self, step: ScheduledStep) -> list[Request]:
        """Return the waiting requests to try, in order."""
        window = self.admission.first_waiting(WINDOW)
        window = [request for request in window if request.background is step.background]
        by_prefix = self.admission.policy.longest_prefix_first and len(window) > 1
        if by_prefix and self.admission.seconds_passed_over(window[0]) < self.max_overtake_seconds:
            window.sort(key=lambda request: -self._kv.find_prefix(request.sequences[0]).num_tokens)
        return window

    def _note_overtaken(self, admitted: Request) -> None:
        """Note that the first waiting request was overtaken, if `admitted` came after it."""
        head = self._requests.waiting.peek()
        if head is not None and head.order_key < admitted.order_key:
            self.admission.note_passed_over(head)

    def _may_admit(self, step: ScheduledStep) -> bool:
        """Whether a waiting request may be admitted in this step, as far as running ones decide that."""
        if step.out_of_blocks or not self._requests.waiting:
            return False
        return not self.admission.nothing_fits

    def _schedule_waiting(self, step: ScheduledStep) -> None:
        """Admit waiting requests in order while there are slots, budget and blocks.

        One that does not fit may be overtaken for `max_overtake_seconds`; then it blocks the rest. One that may preempt
        others blocks them at once: it would preempt them again in the next step.
        """
        admission = self.admission
        if not self._may_admit(step):
            return
        lacks_room, all_tried = False, True
        for request in self._candidates(step):
            if step.budget <= 0 or self._requests.num_reserved_slots >= admission.max_num_seqs:
                return
            first = request.sequences[0]
            if self.whole_prompts and first.num_tokens > step.budget:
                return  # it comes first in the next step
            if not admission.may_resume(request, step) or self._max_tokens(first, step) == 0:
                all_tried = False
                continue
            result = self._admit(request, step)
            if result is AdmitResult.WAITING:
                lacks_room = True
                all_tried &= step.budget >= len(request.sequences)  # else it may be the budget that it lacks
                if admission.note_passed_over(request) >= self.max_overtake_seconds or admission.policy.preempts:
                    break
            elif result is AdmitResult.ADMITTED and admission.policy.longest_prefix_first:
                self._note_overtaken(request)
        # What a prompt under way is going to compute may be shared with those that wait, which then need fewer blocks.
        if lacks_room and all_tried and not step.num_remaining_prompt_blocks:
            admission.note_nothing_fits()

    def _admit(self, request: Request, step: ScheduledStep) -> AdmitResult:
        """Start or resume `request` if all its known tokens fit beside what sequences in the step still need."""
        admission, kv = self.admission, self._kv
        if self._requests.num_reserved_slots + request.num_sequences > admission.max_num_seqs:
            return AdmitResult.WAITING
        num_reserved = step.num_remaining_prompt_blocks + admission.watermark_blocks if self._requests.running else 0
        if request.status is RequestStatus.SWAPPED:
            return admission.swap_in(request, step, num_reserved)
        first = request.sequences[0]
        hit = kv.find_prefix(first)
        if admission.waits_for_loads(request, hit):
            return AdmitResult.LOADING
        num_tokens, max_new_tokens = first.num_tokens, self._max_tokens(first, step)
        needed = admission.num_blocks_to_admit(request, max_new_tokens, hit)
        if needed + num_reserved > kv.pool.num_free:
            if admission.is_alone(request):
                admission.finish_infeasible(request, needed)
                return AdmitResult.ENDED
            return AdmitResult.WAITING
        started = admission.start(first, max_new_tokens, step, hit)
        assert started, "there was room"
        self._requests.admit(request)
        if first.num_computed_tokens < num_tokens:
            step.num_remaining_prompt_blocks += admission.num_blocks_after(first, first.num_computed_tokens)
        for sibling in request.sequences[1:]:
            if step.budget > 0 and not sibling.on_worker and sibling.num_computed_tokens == 0:
                admission.start(sibling, min(step.budget, admission.max_tokens_per_sequence), step)
        return AdmitResult.ADMITTED


def share_tokens(budget: int, num_tokens: list[int], max_new_tokens: int, long_chunk: int) -> list[int]:
    """Return how many of `budget` tokens each prompt may compute, at most `max_new_tokens`.

    The shortest prompts go first, so that a short one does not wait behind a long one, with two bounds:

    - A fourth of the budget is reserved for the oldest, so that it ends however many short ones arrive.
    - Prompts that do not end in this step delay those that do. So they get a third of the tokens of those (or a
      sixteenth of the budget, if that is more). If all prompts are longer than the budget, they get `long_chunk`
      tokens together: shorter steps admit sooner what arrives meanwhile.

    Args:
        num_tokens: tokens that each prompt lacks, the oldest prompt first.
    """
    shares = [0] * len(num_tokens)
    order = sorted(range(len(num_tokens)), key=num_tokens.__getitem__)
    reserved = min(num_tokens[0], max_new_tokens, -(-budget // OLDEST_SHARE))
    num_ending = 0
    for index in order:
        reserved = 0 if index == 0 else reserved
        if num_tokens[index] > min(max_new_tokens, budget - reserved - num_ending):
            break
        shares[index] = num_tokens[index]
        num_ending += num_tokens[index]
    if num_ending:
        left = min(budget - num_ending, max(num_ending // (OLDEST_SHARE - 1), budget // UNFINISHED_SHARE, 1))
    elif num_tokens[order[0]] > budget:
        left = min(budget, long_chunk)
    else:
        left = budget
    unfinished = [index for index in order if not shares[index]]
    if 0 in unfinished:
        part = left if num_ending or len(unfinished) == 1 else -(-left // OLDEST_SHARE)
        shares[0] = min(num_tokens[0], max_new_tokens, part)
        left -= shares[0]
    for index in unfinished:
        extra = min(min(num_tokens[index], max_new_tokens) - shares[index], left)
        shares[index] += extra
        left -= extra
    return shares
