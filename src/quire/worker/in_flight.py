"""Steps that the device has, and whose tokens the host does not know yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.step import ModelOutput
from quire.worker.input_batch import InputBatch

NOT_FINITE = "the model produced logits that are not finite"


@dataclass(slots=True)
class Tokens:
    """What a step samples: a token for each of R sequences, at these `positions` of these `rows` of the batch.

    `births` are those of the rows when it was launched.
    """

    sequence_ids: list[str]
    rows: np.ndarray
    births: np.ndarray
    positions: np.ndarray


class FlyingStep:
    """A step whose kernels were launched; see `step.Pending`.

    Args:
        output: what is known already. tokens: what it samples.
        fetched: waits for the tokens int64 [R], of which those below 0 stand for logits that are not finite; or for
            anything that comes after the step, if it samples nothing.
        gap: returns `ModelOutput.host_gap` once the step has ended.
    """

    overlaps = True

    def __init__(
        self,
        output: ModelOutput,
        batch: InputBatch,
        tokens: Tokens,
        fetched: Callable[[], np.ndarray],
        gap: Callable[[], float],
    ) -> None:
        self._output, self._batch, self._tokens = output, batch, tokens
        self._fetched: Callable[[], np.ndarray] | None = fetched
        self._gap = gap

    @property
    def landed(self) -> bool:
        """Whether the host knows all of it."""
        return self._fetched is None

    def result(self) -> ModelOutput:
        """See `Pending`."""
        if self._fetched is not None:
            drawn = self._fetched()
            self._fetched = None
            if self._tokens.sequence_ids:
                self._take(drawn)
            self._output.host_gap = self._gap()
        return self._output

    def _take(self, drawn: np.ndarray) -> None:
        output, tokens = self._output, self._tokens
        self._batch.fill(tokens.rows, tokens.births, tokens.positions, np.maximum(drawn, 0))
        for sequence_id, token in zip(tokens.sequence_ids, drawn.tolist(), strict=True):
            if token < 0:
                output.errors[sequence_id] = NOT_FINITE
            else:
                output.sampled_token_ids[sequence_id] = [token]


class PostponedStep:
    """A step that the host must take part in, which is computed when its result is wanted; see `step.Pending`."""

    overlaps = False

    def __init__(self, compute: Callable[[], ModelOutput]) -> None:
        self._compute: Callable[[], ModelOutput] | None = compute
        self._output: Any = None

    @property
    def landed(self) -> bool:
        """Whether it has been computed."""
        return self._compute is None

    def result(self) -> ModelOutput:
        """See `Pending`."""
        if self._compute is not None:
            output = self._compute()
            self._compute, self._output = None, output
        found: ModelOutput = self._output
        return found
