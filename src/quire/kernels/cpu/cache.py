"""One layer's keys and values on the CPU.

Where the CPU multiplies pairs of bfloat16 the cache is *paired*: two elements of a key, and two positions of a value,
lie side by side in four bytes, so that attention reads it as it is. Odd block or head sizes cannot be.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.kernels.cpu.threads import aligned_zeros

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
    """Paged keys and values in a storage dtype.

    Attributes:
        keys: [B, Hkv, D, bs], if paired [B, Hkv, D/2, bs, 2]: the keys of a block lie side by side, so that a vector
            holds sixteen keys and a dot product needs no sum over lanes.
        values: [B, Hkv, bs, D], if paired [B, Hkv, bs/2, D, 2].
        key_scales, value_scales: float32 [B, Hkv, bs] by which int8 keys and values are multiplied, else None.
        flat_keys, flat_values: the same memory in one dimension.
    """

    keys: np.ndarray
    values: np.ndarray
    flat_keys: np.ndarray
    flat_values: np.ndarray
    key_scales: np.ndarray | None = None
    value_scales: np.ndarray | None = None

    @classmethod
    def allocate(
        cls, num_blocks: int, block_size: int, heads: int, size: int, dtype: np.dtype, paired: bool = False
    ) -> CPUKVCache:
        """Return a zeroed cache; the system hands out its memory when it is first written.

        `paired` says whether kernels multiply pairs; it is for bfloat16 and int8 and has no effect on odd sizes.
        """
        count = num_blocks * block_size * heads * size
        flat_keys, flat_values = (_zeros(count, dtype) for _ in range(2))
        scales: list[np.ndarray | None] = [None, None]
        if dtype == np.int8:
            shape = (num_blocks, heads, block_size)
            scales = [_zeros(num_blocks * heads * block_size, np.dtype(np.float32)).reshape(shape) for _ in range(2)]
        if paired and size % 2 == 0 and block_size % 2 == 0:
            keys = flat_keys.reshape(num_blocks, heads, size // 2, block_size, 2)
            values = flat_values.reshape(num_blocks, heads, block_size // 2, size, 2)
        else:
            keys = flat_keys.reshape(num_blocks, heads, size, block_size)
            values = flat_values.reshape(num_blocks, heads, block_size, size)
        return cls(keys, values, flat_keys, flat_values, *scales)

    @property
    def paired(self) -> bool:
        """Whether pairs lie together."""
        return self.keys.ndim == 5

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.keys.shape[3]

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.keys.shape[1]

    @property
    def head_size(self) -> int:
        """Elements of a head."""
        return self.values.shape[3]

    def copy_blocks(self, pairs: np.ndarray) -> None:
        """Copy whole blocks; pairs int64 [n, 2] of (source, destination)."""
        source, destination = pairs[:, 0], pairs[:, 1]
        for side in self._sides():
            side[destination] = side[source]

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block, scales included."""
        return sum(side.shape[1] for side in self._sides())

    def read_blocks(self, block_ids: np.ndarray) -> np.ndarray:
        """Return blocks int64 [n] as uint8 [n, block_nbytes]: keys, values, then their scales."""
        return np.concatenate([side[block_ids] for side in self._sides()], axis=1)

    def write_blocks(self, block_ids: np.ndarray, data: np.ndarray) -> None:
        """Fill blocks int64 [n] with what `read_blocks` returned."""
        start = 0
        for side in self._sides():
            stop = start + side.shape[1]
            side[block_ids] = data[:, start:stop]
            start = stop

    def _sides(self) -> list[np.ndarray]:
        """Return all that a block consists of, as bytes: uint8 views [B, n]."""
        sides = (self.keys, self.values, self.key_scales, self.value_scales)
        return [side.reshape(len(side), -1).view(np.uint8) for side in sides if side is not None]


@dataclass(frozen=True, slots=True)
class CPULatentCache:
    """Paged vectors that all heads of a layer share, as keys and, the first elements of them, as values.

    Attributes:
        latents: [B, bs, D] in a storage dtype. flat_keys: the same memory in one dimension; there are no others.
        paired: whether kernels multiply pairs of bfloat16. The vectors lie as they always do: keys and values want
            different pairs of them, which are made for many heads at a time.
    """

    latents: np.ndarray
    flat_keys: np.ndarray
    flat_values: None = None
    key_scales: None = None
    value_scales: None = None
    paired: bool = False

    @classmethod
    def allocate(
        cls, num_blocks: int, block_size: int, size: int, dtype: np.dtype, paired: bool = False
    ) -> CPULatentCache:
        """Return a zeroed cache; the system hands out its memory when it is first written.

        `paired` says whether kernels multiply pairs; it has no effect on other formats than bfloat16.
        """
        flat = _zeros(num_blocks * block_size * size, dtype)
        latents = flat.reshape(num_blocks, block_size, size)
        return cls(latents, flat, paired=paired and dtype == KV_STORAGE["bfloat16"])

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.latents.shape[1]

    def copy_blocks(self, pairs: np.ndarray) -> None:
        """Copy whole blocks; pairs int64 [n, 2] of (source, destination)."""
        self.latents[pairs[:, 1]] = self.latents[pairs[:, 0]]

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block."""
        return self.latents[:1].nbytes

    def read_blocks(self, block_ids: np.ndarray) -> np.ndarray:
        """Return blocks int64 [n] as uint8 [n, block_nbytes]."""
        return self.latents[block_ids].reshape(len(block_ids), -1).view(np.uint8)

    def write_blocks(self, block_ids: np.ndarray, data: np.ndarray) -> None:
        """Fill blocks int64 [n] with what `read_blocks` returned."""
        blocks = np.ascontiguousarray(data).view(self.latents.dtype)
        self.latents[block_ids] = blocks.reshape(-1, *self.latents.shape[1:])


def _zeros(count: int, dtype: np.dtype) -> np.ndarray:
    return aligned_zeros(count * dtype.itemsize + OVERRUN).view(dtype)[:count]
