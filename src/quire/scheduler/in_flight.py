"""Steps in flight: planned, and their results not processed yet.

A token that is computed in such a step counts as computed, and a token that it samples as a tentative one of its
sequence (`Sequence.num_tentative_tokens`): the next step may begin with it, since its value is on the device. A device
computes its steps in order, so the blocks of a sequence that has ended meanwhile can be given to others at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from quire.errors import QuireError
from quire.scheduler.request import Sequence
from quire.step import SchedulerOutput


@dataclass(slots=True)
class ScheduledStep:
    """One step.

    Attributes:
        plan: what it computes. started: when it was planned, in seconds of the scheduler's clock.
        computes_prompts: whether it computes nothing but prompts (`PrefillFirstPlanner`).
        scheduled: its sequences, each with `max_sampled`, the most tokens that may become final for it by the result:
            the number of drafts verified and one more, 0 if not all tokens of the sequence are computed in it.
    """

    plan: SchedulerOutput
    scheduled: list[tuple[Sequence, int]]
    started: float
    computes_prompts: bool


class InFlight:
    """The steps in flight, any number, oldest first."""

    def __init__(self) -> None:
        self._steps: deque[ScheduledStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def append(self, step: ScheduledStep) -> None:
        """Note that a step was planned."""
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
        """Take a sequence out of all steps in flight: their results for it are void."""
        for step in self._steps:
            step.scheduled = [entry for entry in step.scheduled if entry[0] is not sequence]
