"""One layer's keys and values on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class CPUKVCache:
    """Paged keys [B, Hkv, D, bs] and values [B, Hkv, bs, D] in a storage dtype; the order is explained in attention.py.

    `flat_keys` and `flat_values` are the same memory as kernels want it.
    """

    keys: np.ndarray
    values: np.ndarray
    flat_keys: np.ndarray
    flat_values: np.ndarray

    @classmethod
    def allocate(cls, num_blocks: int, block_size: int, heads: int, size: int, dtype: np.dtype) -> CPUKVCache:
        """Return a zeroed cache; the system hands out its memory when it is first written."""
        flat_keys, flat_values = (np.zeros(num_blocks * block_size * heads * size, dtype) for _ in range(2))
        keys = flat_keys.reshape(num_blocks, heads, size, block_size)
        values = flat_values.reshape(num_blocks, heads, block_size, size)
        return cls(keys, values, flat_keys, flat_values)

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.keys.shape[3]

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.keys.shape[1]
