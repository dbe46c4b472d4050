"""What steps that are launched before others have ended need of a backend: tokens that stay on the device, and times.

For backends whose ops are done when they return; what "in place" means for arrays, numpy's and torch's say alike.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np

Array = Any  # see `kernels.backend`


class LateTokens(NamedTuple):
    """The last tokens of rows, on the device only: that of row r is tokens[places[r]], or known if places[r] is -1.

    `tokens` is an array int64 of the backend, `places` int64 numpy [R].
    """

    tokens: Array
    places: np.ndarray

    def of(self, rows: np.ndarray) -> LateTokens | None:
        """Return those of `rows` int64 [n], in this order; None if all are known."""
        places = self.places[rows]
        return LateTokens(self.tokens, places) if (places >= 0).any() else None


class InOrder:
    """See `Backend` for each of these."""

    def bar_after(
        self: Any, logits: Array, rows: np.ndarray, tokens: np.ndarray, late: LateTokens, before: np.ndarray
    ) -> None:
        """See `Backend.bar_after`."""
        hit = self.to_numpy(late.tokens)[late.places] == before
        self.add_bias(logits, rows[hit], tokens[hit], np.full(int(hit.sum()), -np.inf, np.float32))

    def take_tokens(self, target: Array, source: Array, places: Array) -> None:
        """See `Backend.take_tokens`."""
        target[...] = source[places]

    def keep_tokens(self, target: Array, places: Array, tokens: Array, finite: Array) -> Array:
        """See `Backend.keep_tokens`."""
        kept: Any = (tokens + 1) * finite - 1
        target[places] = kept.clip(min=0)
        return kept

    def mark(self) -> Any:
        """See `Backend.mark`."""
        return time.perf_counter()

    def seconds_between(self, earlier: Any, later: Any) -> float:
        """See `Backend.seconds_between`."""
        return float(later - earlier)


def count_late(
    known: np.ndarray, places: np.ndarray, starts: np.ndarray, ids: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return starts, ids and counts of `Backend.apply_penalties` with the tokens of `LateTokens`, known by now."""
    pieces = []
    for p, place in enumerate(places.tolist()):
        own, times = ids[starts[p] : starts[p + 1]], counts[starts[p] : starts[p + 1]]
        if place >= 0:
            here = own == known[place]
            times = times + here.astype(times.dtype)
            if not here.any():
                own = np.append(own, known[place].astype(own.dtype))
                times = np.append(times, np.ones(1, times.dtype))
        pieces.append((own, times))
    lengths = [0, *(len(own) for own, _ in pieces)]
    joined_ids, joined_counts = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
    return np.cumsum(lengths, dtype=np.int64), joined_ids, joined_counts
