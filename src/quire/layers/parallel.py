"""Tensor parallelism as seen by a layer: which rank it is, of how many, and how ranks add and join their results.

A `ParallelContext` is passed in wherever a layer is built; there is no global one. How messages travel between ranks
is the business of whoever provides the `RankGroup`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from quire.errors import ConfigError
from quire.kernels.backend import Array


class RankGroup(Protocol):
    """Collective operations; every rank calls the same ones in the same order."""

    def all_reduce(self, x: Array) -> Array:
        """Return the sum of `x` over all ranks, added in rank order."""

    def all_gather(self, x: Array) -> Array:
        """Return the ranks' `x` joined along the last axis, in rank order."""


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """This rank's place among `tp_size` tensor-parallel ranks; alone by default."""

    tp_rank: int = 0
    tp_size: int = 1
    group: RankGroup | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.tp_rank < self.tp_size
        assert self.tp_size == 1 or self.group is not None, "several ranks need a group"

    def share(self, total: int, what: str) -> int:
        """Return this rank's part of `total`; raise ConfigError if it cannot be split evenly."""
        if total % self.tp_size:
            raise ConfigError(
                f"tensor_parallel_size is {self.tp_size}; it must divide the model's {what}, {total}",
                param="tensor_parallel_size",
            )
        return total // self.tp_size

    def sum_ranks(self, x: Array) -> Array:
        """Add up partial results of all ranks."""
        return x if self.group is None else self.group.all_reduce(x)

    def join_ranks(self, x: Array) -> Array:
        """Join the columns that each rank computed."""
        return x if self.group is None else self.group.all_gather(x)
