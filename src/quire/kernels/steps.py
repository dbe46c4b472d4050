"""How a step reaches a backend: its shape, its inputs. What becomes a graph, and how, is the backend's business."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np


class StepShape(NamedTuple):
    """A step's size as a backend computes it, no part of it smaller than requested.

    tokens, sequences, rows: flat tokens, sequences, rows to sample; what is more than the step has is padding, see
    `AttentionMetadata`. graph_mode: "none": computed op by op, in exact sizes; "full": as one graph; "piecewise": as
    graphs of what lies between the ops that depend on how tokens belong to sequences, so that only `tokens` and `rows`
    matter.
    """

    tokens: int
    sequences: int
    rows: int
    graph_mode: Literal["none", "full", "piecewise"] = "full"

    def within(self, max_tokens: int, max_sequences: int) -> StepShape:
        """Return the same with no more padding than there is room for."""
        tokens, rows = min(self.tokens, max_tokens), min(self.rows, max_sequences)
        if self.graph_mode == "piecewise":
            rows = min(rows, tokens - 1)  # as many rows as tokens would be all of them, in order
        return StepShape(tokens, min(self.sequences, max_sequences), rows, self.graph_mode)


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
