"""What steps that are launched before others have ended need of a backend: tokens that stay on the device, and times.

For backends whose ops are done when they return; what "in place" means for arrays, numpy's and torch's say alike.
"""

from __future__ import annotations

import time
from typing import Any

from quire.kernels.backend import Array


class InOrder:
    """See `Backend` for each of these."""

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
