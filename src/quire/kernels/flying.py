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
