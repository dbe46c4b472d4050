"""One layer's keys and values on the CPU.

Where the CPU multiplies pairs of bfloat16 the cache is *paired*: two elements of a key, and two positions of a value,
lie side by side in four bytes, so that attention reads it as it is. Odd block or head sizes cannot be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from quire.kernels.cpu.arrays import aligned

# Signed or unsigned says which 16-bit float the bits are: see simd.py.
KV_STORAGE: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.int16),
    "int8": np.dtype(np.int8),
}
PAIRED = ("bfloat16", "int8")
OVERRUN = 256  # bytes that kernels may read past the end, in lanes they do not use


@dataclass(frozen=True, slots=True)
class CPUKVCache:
    """One layer's paged cache in a storage dtype.

    A latent cache has one vector of D elements per token, which all heads share as their key and whose first elements
    are their value. It lies as it always does, `paired` or not: keys and values need different pairs of it.

    Attributes:
        keys: [B, Hkv, D, bs], if paired [B, Hkv, D/2, bs, 2]: the keys of a block lie side by side, so that a vector
            holds sixteen keys and a dot product needs no sum over lanes. Latent: [B, bs, D].
        values: [B, Hkv, bs, D], if paired [B, Hkv, bs/2, D, 2]. None if latent.
        key_scales, value_scales: float32 [B, Hkv, bs] by which int8 keys and values are multiplied, else None.
        block_size: tokens per block. paired: whether kernels multiply pairs of bfloat16.
    """

    keys: np.ndarray
    values: np.ndarray | None
    block_size: int
    paired: bool = False
    key_scales: np.ndarray | None = None
    value_scales: np.ndarray | None = None

    @classmethod
    def allocate(
        cls, num_blocks: int, block_size: int, heads: int, size: int, dtype: np.dtype, paired: bool = False
    ) -> CPUKVCache:
        """Return a zeroed cache; the system hands out its memory when it is first written.

        `paired` is for bfloat16 and int8 and has no effect on odd sizes.
        """
        keys: tuple[int, ...] = num_blocks, heads, size, block_size
        values: tuple[int, ...] = num_blocks, heads, block_size, size
        paired = paired and size % 2 == 0 and block_size % 2 == 0
        if paired:
            keys, values = (*keys[:2], size // 2, block_size, 2), (*values[:2], block_size // 2, size, 2)
        scales: list[np.ndarray | None] = [None, None]
        if dtype == np.int8:
            scales = [_zeros((num_blocks, heads, block_size), np.dtype(np.float32)) for _ in range(2)]
        return cls(_zeros(keys, dtype), _zeros(values, dtype), block_size, paired, *scales)

    @classmethod
    def allocate_latent(
        cls, num_blocks: int, block_size: int, size: int, dtype: np.dtype, paired: bool = False
    ) -> CPUKVCache:
        """Return a zeroed latent cache; `paired` has no effect on other formats than bfloat16."""
        return cls(
            _zeros((num_blocks, block_size, size), dtype), None, block_size, paired and dtype == KV_STORAGE["bfloat16"]
        )

    @property
    def latent(self) -> bool:
        """Whether there is one vector per token for keys and values."""
        return self.values is None

    def sides(self) -> list[np.ndarray]:
        """Return keys, values, and their scales, as far as there are any, as bytes: uint8 views [B, n]."""
        sides = (self.keys, self.values, self.key_scales, self.value_scales)
        return [side.reshape(len(side), -1).view(np.uint8) for side in sides if side is not None]


def copy_blocks(cache: CPUKVCache, pairs: np.ndarray) -> None:
    """See `Backend.copy_blocks`."""
    for side in cache.sides():
        side[pairs[:, 1]] = side[pairs[:, 0]]


def block_nbytes(cache: CPUKVCache) -> int:
    """See `Backend.block_nbytes`."""
    return sum(side.shape[1] for side in cache.sides())


def read_blocks(cache: CPUKVCache, block_ids: np.ndarray) -> np.ndarray:
    """See `Backend.read_blocks`: the keys of a block, its values, then their scales."""
    return np.concatenate([side[block_ids] for side in cache.sides()], axis=1)


def write_blocks(cache: CPUKVCache, block_ids: np.ndarray, data: np.ndarray) -> None:
    """See `Backend.write_blocks`."""
    start = 0
    for side in cache.sides():
        stop = start + side.shape[1]
        side[block_ids] = data[:, start:stop]
        start = stop


def _zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    count = math.prod(shape)
    return aligned(count * dtype.itemsize + OVERRUN, np.zeros).view(dtype)[:count].reshape(shape)
