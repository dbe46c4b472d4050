"""Planning a step while the one before still runs: what is known of that one, and what becomes of it when it lands.

A step in flight counts as computed. What it samples is not known yet, so `UNKNOWN_TOKEN` stands for it in
`Sequence.token_ids`; a sequence that ends with that token by count alone gets none, since nothing comes after it. One
that turns out to have ended otherwise was computed once too often: that token is discarded. Its blocks may be given to
others at once, for a device computes its steps in order.

A block that ends with an unknown token gets its name when the token is known.
"""

from __future__ import annotations

from quire.scheduler.lives import RequestLives
from quire.scheduler.request import RequestStatus, Sequence
from quire.scheduler.stop import ends_by_count
from quire.step import UNKNOWN_TOKEN, SchedulerOutput

_RUNNING = RequestStatus.RUNNING


class Flight:
    """A step that the worker has, and whose result is not known.

    Attributes:
        plan: what it computes. ahead: the plan that was made beside it, None before.
        flown: its sequences that were live when that was made, by id. sampling: ids of those that get a token.
    """

    __slots__ = ("ahead", "flown", "plan", "sampling")

    def __init__(self, plan: SchedulerOutput) -> None:
        self.plan = plan
        self.ahead: SchedulerOutput | None = None
        self.flown: dict[str, Sequence] = {}
        self.sampling: set[str] = set()


class Flights(RequestLives):
    """At most one step is in flight while the next one is planned."""

    _flight: Flight | None = None
    _num_under_way = 0  # steps that were planned, and whose results were not taken in

    def launch(self, plan: SchedulerOutput) -> bool:
        """Say that `plan` is under way, and all before it have landed; return whether another may be planned beside it.

        Not if it may sample anything but one token for each sequence, or its result decides more than whether they end.
        Then, and whenever nothing is planned before its result is taken in, it is as if nothing had been said.
        """
        self._flight = None
        if plan.forks or not plan.num_scheduled_tokens:
            return False
        for sequence_id, num_scheduled in plan.num_scheduled_tokens.items():
            sequence = self._sequences.get(sequence_id)
            if sequence is None:
                continue
            request = sequence.request
            if request.owes_prompt_logprobs or (not request.is_plain and sequence.num_left == num_scheduled):
                return False
        self._flight = Flight(plan)
        return True

    def has_room_ahead(self) -> bool:
        """Whether every running sequence has blocks for a further step, beside the one in flight.

        If not, somebody would be preempted or ended for want of blocks that the step in flight may set free.
        """
        num_groups, num_free, size = len(self.kv.windows), self.kv.pool.num_free, self.kv.block_size
        budget = self.max_num_batched_tokens
        if self.kv.num_tables() == self._num_seats and num_groups * (budget // size + 2 * self._num_seats) <= num_free:
            return True
        flying = {} if self._flight is None else self._flight.plan.num_scheduled_tokens
        needed = 0
        for request in self._running:
            shares = request.num_seats > 1 or len(request.sequence_ids) > 1  # their last block is copied before a write
            for sequence in request.sequences:
                if not self.kv.holds_blocks(sequence):
                    needed += self.kv.num_blocks_for(sequence.num_tokens + 1) + num_groups
                    continue
                start = sequence.num_computed_tokens + flying.get(sequence.sequence_id, 0)
                end = start + min(max(sequence.num_tokens + 1 - start, 1), budget)
                needed += num_groups * (-(-end // size) - -(-start // size) + shares)
        return needed <= num_free

    def _take_off(self) -> None:
        """Count what is in flight as computed, before the next step is planned."""
        flight = self._flight
        if flight is None:
            return
        find, flown = self._sequences.get, flight.flown
        for sequence_id, num_scheduled in flight.plan.num_scheduled_tokens.items():
            sequence = find(sequence_id)
            if sequence is None or sequence.request.status is not _RUNNING:
                continue  # it was aborted; another of that name cannot run yet
            flown[sequence_id] = sequence
            sequence.num_computed_tokens += num_scheduled
            if sequence.num_computed_tokens == len(sequence.token_ids):
                flight.sampling.add(sequence_id)
                if not ends_by_count(sequence, self.length_limit):
                    sequence.token_ids.append(UNKNOWN_TOKEN)
