"""`Plan`: a step in the making, from which the `SchedulerOutput` is built."""

from __future__ import annotations

from quire.step import BlockTransfer, ContinuingSequenceData, ForkData, NewSequenceData, SchedulerOutput


class Plan:
    """What was decided so far.

    Attributes:
        budget: tokens that may still be scheduled.
        num_owed_blocks: blocks that prefills begun earlier, or in this step, still need for the rest of their tokens.
        num_streamed: thin blocks that decodes brought from the host, or were brought back for some that wait.
        starved: whether running requests were preempted for want of blocks.
        left: ids of the requests that were preempted in this step; they do not come back in it.
    """

    __slots__ = (
        "budget",
        "continuing",
        "left",
        "most_tokens",
        "new_sequences",
        "num_owed_blocks",
        "num_scheduled",
        "num_streamed",
        "preempted",
        "starved",
    )

    def __init__(self, budget: int) -> None:
        self.budget = self.most_tokens = budget
        self.num_owed_blocks = self.num_streamed = 0
        self.starved = False
        self.left: set[str] = set()
        self.new_sequences: list[NewSequenceData] = []
        self.continuing: list[ContinuingSequenceData] = []
        self.num_scheduled: dict[str, int] = {}
        self.preempted: list[str] = []

    def finish(
        self, finished_ids: list[str], forks: list[ForkData], transfers: list[BlockTransfer], *, loading: bool
    ) -> SchedulerOutput:
        """Return the plan as the worker gets it; with nothing to compute but something `loading`, it is to wait."""
        return SchedulerOutput(
            new_sequences=self.new_sequences,
            continuing=self.continuing,
            num_scheduled_tokens=self.num_scheduled,
            total_num_scheduled_tokens=self.most_tokens - self.budget,
            finished_sequence_ids=finished_ids,
            preempted_sequence_ids=self.preempted,
            forks=forks,
            transfers=transfers,
            wait_for_loads=loading and not self.num_scheduled,
        )
