"""Steps that the device has, and whose tokens the host does not know yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.sampling.sampler import REFUSALS, Sampled
from quire.step import ModelOutput
from quire.worker.guidance import refuse
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
        drawn: waits for what is sampled, where tokens below 0 without an error stand for logits that are not finite;
            or for anything that comes after the step, if it samples nothing.
        gap: returns `ModelOutput.host_gap` once the step has ended.
    """

    overlaps = True

    def __init__(
        self,
        output: ModelOutput,
        batch: InputBatch,
        tokens: Tokens,
        drawn: Callable[[], Sampled],
        gap: Callable[[], float],
    ) -> None:
        self._output, self._batch, self._tokens = output, batch, tokens
        self._drawn: Callable[[], Sampled] | None = drawn
        self._gap = gap

    @property
    def landed(self) -> bool:
        """Whether the host knows all of it."""
        return self._drawn is None

    def result(self) -> ModelOutput:
        """See `Pending`."""
        if self._drawn is not None:
            sampled = self._drawn()
            self._drawn = None
            if self._tokens.sequence_ids:
                self._take(sampled)
            self._output.host_gap = self._gap()
        return self._output

    def _take(self, sampled: Sampled) -> None:
        output, tokens = self._output, self._tokens
        self._batch.fill(tokens.rows, tokens.births, tokens.positions, np.maximum(sampled.token_ids, 0))
        for place, (sequence_id, token) in enumerate(zip(tokens.sequence_ids, sampled.token_ids.tolist(), strict=True)):
            if place in sampled.errors:
                error = sampled.errors[place]
                refuse(output, sequence_id, error, at_fault=error in REFUSALS)
            elif token < 0:
                output.errors[sequence_id] = NOT_FINITE
            else:
                output.sampled_token_ids[sequence_id] = [token]
                if place in sampled.logprobs:
                    output.logprobs[sequence_id] = [sampled.logprobs[place]]


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
