"""Tokens that were sampled but are still on the device only, for steps that are launched before others have ended."""

from __future__ import annotations

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
