"""A tensor as it lies in a checkpoint: what a weight file yields and what backends pack. Reading files is not here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class HostTensor:
    """A tensor as it lies in a checkpoint file, usually a view of mapped memory.

    `array` has the logical shape; bfloat16 has no numpy dtype and is held as uint16 (the raw bits), which `dtype` says.
    `dtype` is one of "float32", "float16", "bfloat16", "float64", "int64", "int32", "int8", "uint8", "bool".
    """

    array: np.ndarray
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape."""
        return tuple(self.array.shape)

    def to_float32(self) -> np.ndarray:
        """Return the values as a float32 array (a copy unless it is float32 already)."""
        if self.dtype == "bfloat16":
            return (self.array.astype(np.uint32) << 16).view(np.float32)
        return self.array.astype(np.float32, copy=False)

    def rows(self, start: int, stop: int) -> HostTensor:
        """Return rows [start, stop) of the first axis, as a view."""
        return HostTensor(self.array[start:stop], self.dtype)

    def columns(self, start: int, stop: int) -> HostTensor:
        """Return columns [start, stop) of the last axis, as a view."""
        return HostTensor(self.array[..., start:stop], self.dtype)

    def transposed(self) -> HostTensor:
        """Return the matrix transposed, as a view."""
        return HostTensor(self.array.T, self.dtype)


# All bits of the exponent set, with the sign bit shifted out: the smallest bit pattern that is no finite number.
_NONFINITE = {"float64": 0x7FF << 53, "float32": 0xFF << 24, "bfloat16": 0xFF << 8, "float16": 0x1F << 11}
_CHUNK = 1 << 18  # values looked at in one go, so that the scratch copy stays in the cache


def count_nonfinite(tensor: HostTensor) -> int:
    """Return how many values are NaN or infinite; integers are always finite."""
    limit = _NONFINITE.get(tensor.dtype)
    if limit is None:
        return 0
    array = np.ascontiguousarray(tensor.array)
    bits = array.reshape(-1).view(f"u{array.itemsize}")
    scratch = np.empty(min(_CHUNK, bits.size), bits.dtype)
    found = 0
    for start in range(0, bits.size, _CHUNK):
        chunk = bits[start : start + _CHUNK]
        shifted = np.left_shift(chunk, 1, out=scratch[: chunk.size])
        if shifted.max() >= limit:
            found += int(np.count_nonzero(shifted >= limit))
    return found
