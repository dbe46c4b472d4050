"""Random numbers that depend on nothing but (seed, position): the same request gets the same draws in any batch.

A counter-based generator: each (seed, position) pair is mixed into 64 bits on its own, so there is no state to save,
restore, or share, and preemption, batching, and caching cannot change a draw.
"""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer (Steele, Lea & Flood 2014, fig. 15) on uint64 arrays; wraps around by design."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: np.ndarray, positions: np.ndarray, purpose: int = 0) -> np.ndarray:
    """Return float64 [R] in [0, 1), one for each seed (int64 or uint64 [R]) and token position (int [R]).

    Draws of another `purpose` at the same position are independent; 0 is that of the token itself.
    """
    stream = _mix(seeds.astype(np.uint64) + _GOLDEN)
    if purpose:
        stream = _mix(stream ^ np.uint64(purpose))
    bits = _mix(stream + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
