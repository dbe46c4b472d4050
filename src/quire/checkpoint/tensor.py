"""A tensor as it lies in a checkpoint: what a weight file yields and what backends pack. Reading files is not here.

`HostTensor` holds plain numbers. `QuantizedTensor` stands for those that some files hold in fewer bits: it is cut like
a plain one, and made into numbers only when a backend packs it, piece by piece.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

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


class Integers(NamedTuple):
    """Rows of weights as integers: weight[n, k] = scales[n, k // group] * (values[n, k] - zeros[n, k // group]).

    values: int8 (8 bits) or uint8 in 0..15 (4 bits) [N, K]. scales: float32 [N, K / group]. zeros: as scales, or None
    where they are 0 (8 bits) or 8 (4 bits).
    """

    bits: int
    group: int
    values: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None = None


class QuantizedTensor(ABC):
    """A weight that a checkpoint holds in fewer bits than a float has; usually views of mapped memory.

    Cutting is cheap and reads nothing. `to_float32` is what the format says the weights are, to the last bit.
    """

    dtype = "quantized"

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the weights that it stands for."""

    @abstractmethod
    def rows(self, start: int, stop: int) -> QuantizedTensor:
        """Return rows [start, stop) of the first axis."""

    @abstractmethod
    def columns(self, start: int, stop: int) -> Tensor:
        """Return columns [start, stop) of the last axis; plain numbers where a group would be cut."""

    @abstractmethod
    def to_float32(self) -> np.ndarray:
        """Return the weights."""

    def integers(self) -> Integers | None:
        """Return the weights as integers with scales, without loss; None where the format is something else."""
        return None

    @property
    def array(self) -> np.ndarray:
        """The weights, float32; for what takes tensors apart in its own way."""
        return self.to_float32()

    def transposed(self) -> HostTensor:
        """Return the matrix transposed, as plain numbers."""
        return HostTensor(self.to_float32().T, "float32")


Tensor = HostTensor | QuantizedTensor


# All bits of the exponent set: the smallest bit pattern without a sign that is no finite number.
_EXPONENT = {"float64": 0x7FF << 52, "float32": 0xFF << 23, "bfloat16": 0xFF << 7, "float16": 0x1F << 10}
_CHUNK_BYTES = 1 << 18  # looked at in one go, so that the second look finds them in the cache


def count_nonfinite(tensor: HostTensor) -> int:
    """Return how many values are NaN or infinite; integers are always finite.

    As signed integers, the bits of positive numbers are ordered like the numbers; as unsigned ones, those of negative
    numbers are, and lie above all others. So two maxima tell whether any is too large, at the speed of memory.
    """
    exponent = _EXPONENT.get(tensor.dtype)
    if exponent is None:
        return 0
    array = np.ascontiguousarray(tensor.array).reshape(-1)
    signed, unsigned = (array.view(f"{kind}{array.itemsize}") for kind in "iu")
    sign, step, found = 1 << (8 * array.itemsize - 1), _CHUNK_BYTES // array.itemsize, 0
    for start in range(0, array.size, step):
        some = unsigned[start : start + step]
        if signed[start : start + step].max() >= exponent or some.max() >= sign | exponent:
            found += int(np.count_nonzero(some & (sign - 1) >= exponent))
    return found
