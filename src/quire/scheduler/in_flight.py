"""`ScheduledStep` is a step as the scheduler has it; `InFlight` are those whose results are not processed yet.

A token that is computed in such a step counts as computed, and a token that it samples as a tentative one of its
sequence (`Sequence.num_tentative_tokens`): the next step may begin with it, since its value is on the device. A device
computes its steps in order, so the blocks of a sequence that has ended meanwhile can be given to others at once.
"""

from __future__ import annotations

from collections import deque

from quire.errors import QuireError
from quire.scheduler.request import Sequence
from quire.step import BlockTransfer, ContinuingSequenceData, ForkData, NewSequenceData, SchedulerOutput


class ScheduledStep:
    """A step as the scheduler has it: while it is planned, and then until its result is processed.

    Attributes:
        started: when planning began, in seconds of the scheduler's clock.
        budget: tokens that may still be scheduled.
        background: whether requests in the background are being scheduled, after all others (`UnifiedPlanner`).
        in_flight: the steps before this one whose results are not known.
        scheduled: its sequences, each with `max_sampled`, the most tokens that may become final for it by the result:
            the number of drafts verified and one more, 0 if not all tokens of the sequence are computed in it.
        computes_prompts: whether it computes nothing but prompts (`PrefillFirstPlanner`).
        num_remaining_prompt_blocks: blocks that prompts of which a part is scheduled will need for the rest.
        out_of_blocks: whether running requests were preempted for lack of blocks.
        preempted_request_ids: the requests that were preempted in this step; they are not resumed in it.
        shares: how many tokens each prompt may compute (`UnifiedPlanner`), by sequence id; None before it is computed.
        plan: for the worker; made by `finish`.
    """

    def __init__(self, budget: int, in_flight: InFlight, started: float = 0.0) -> None:
        self.started = started
        self.budget = self._max_tokens = budget
        self.in_flight = in_flight
        self.num_remaining_prompt_blocks = 0
        self.out_of_blocks = self.computes_prompts = self.background = False
        self.new_sequences: list[NewSequenceData] = []
        self.continuing: list[ContinuingSequenceData] = []
        self.num_scheduled: dict[str, int] = {}
        self.scheduled: list[tuple[Sequence, int]] = []
        self.forked_sequences: list[tuple[Sequence, int]] = []
        self.preempted_request_ids: set[str] = set()
        self.shares: dict[str, int] | None = None
        self.preempted_sequence_ids: list[str] = []
        self.plan: SchedulerOutput | None = None

    def finish(
        self, finished_ids: list[str], forks: list[ForkData], transfers: list[BlockTransfer], *, waits_for_loads: bool
    ) -> SchedulerOutput:
        """Make and return the plan for the worker, which waits for loads only if there is nothing to compute."""
        self.scheduled += self.forked_sequences
        self.plan = SchedulerOutput(
            new_sequences=self.new_sequences,
            continuing=self.continuing,
            num_scheduled_tokens=self.num_scheduled,
            total_num_scheduled_tokens=self._max_tokens - self.budget,
            finished_sequence_ids=finished_ids,
            preempted_sequence_ids=self.preempted_sequence_ids,
            forks=forks,
            transfers=transfers,
            wait_for_loads=waits_for_loads and not self.num_scheduled,
        )
        return self.plan


class InFlight:
    """Holds the steps in flight, any number, oldest first."""

    def __init__(self) -> None:
        self._steps: deque[ScheduledStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def append(self, step: ScheduledStep) -> None:
        """Add a step whose plan is made."""
        self._steps.append(step)

    def pop(self, plan: SchedulerOutput) -> ScheduledStep:
        """Return the oldest step, of which this is the plan, and remove it. Raises `QuireError` if it is another's."""
        if not self._steps or self._steps[0].plan is not plan:
            raise QuireError("results must be processed in the order in which their steps were planned")
        return self._steps.popleft()

    def __contains__(self, sequence: object) -> bool:
        """Whether a step that is in flight computes tokens of this sequence."""
        return any(scheduled is sequence for step in self._steps for scheduled, _ in step.scheduled)

    def discard(self, sequence: Sequence) -> None:
        """Take a sequence out of all steps in flight: their results for it are discarded."""
        for step in self._steps:
            step.scheduled = [entry for entry in step.scheduled if entry[0] is not sequence]
