"""How a step reaches a backend: its shape, its inputs, and what recordings of steps cost. What is recorded, and how, is
each backend's own business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np


class StepShape(NamedTuple):
    """A step's size as a backend computes it, no part of it smaller than requested.

    tokens, sequences, rows: flat tokens, sequences, rows to sample; what is more than the step has is padding, see
    `AttentionMetadata`. recorded: "no": computed op by op, in exact sizes; "whole": as one recording; "pieces": as
    recordings of what lies between the ops that depend on how tokens belong to sequences, so that only `tokens` and
    `rows` matter.
    """

    tokens: int
    sequences: int
    rows: int
    recorded: Literal["no", "whole", "pieces"] = "whole"

    def within(self, max_tokens: int, max_sequences: int) -> StepShape:
        """Return the same with no more padding than there is room for."""
        tokens, rows = min(self.tokens, max_tokens), min(self.rows, max_sequences)
        if self.recorded == "pieces":
            rows = min(rows, tokens - 1)  # as many rows as tokens would be all of them, in order
        return StepShape(tokens, min(self.sequences, max_sequences), rows, self.recorded)


@dataclass(frozen=True, slots=True)
class GraphStats:
    """The costs of recordings so far.

    Attributes:
        recordings: steps that are recorded now. graphs: what they consist of; one that is whole is one.
        seconds: spent on recording. nbytes: device memory that was taken for them; they share it.
        failed: shapes that could not be recorded, and are computed op by op.
    """

    recordings: int = 0
    graphs: int = 0
    seconds: float = 0.0
    nbytes: int = 0
    failed: int = 0


class Stager(Protocol):
    """Copies the inputs of a step to their fixed addresses."""

    def put(self, target: Any, values: np.ndarray, count: int | None = None, fill: int = 0) -> None:
        """target[..., :n] = values, where n is the length of their last axis; `fill` up to `count`, if that is more.

        Integers that fit into 32 bits. On the other axes `values` are the first of `target`, too.
        """

    def send(self) -> None:
        """Complete the copies of `put` before anything that is computed from now on."""


class DirectStager:
    """A `Stager` that assigns array by array."""

    def __init__(self, assign: Callable[[Any, np.ndarray], None]) -> None:
        self._assign = assign

    def put(self, target: Any, values: np.ndarray, count: int | None = None, fill: int = 0) -> None:
        places = tuple([slice(n) for n in values.shape])
        self._assign(target[places], values)
        if count is not None and count > values.shape[-1]:
            target[(*places[:-1], slice(values.shape[-1], count))] = fill

    def send(self) -> None:
        """Nothing is left to do."""
