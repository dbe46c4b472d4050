"""Tensors as they are stored in checkpoints: weight files yield them, backends pack them. Files are read elsewhere.

`HostTensor` holds unquantized values, `QuantizedTensor` weights in fewer bits: it is sliced in the same way, and
dequantized only when a backend packs it, piece by piece.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from quire.checkpoint.mapped import RESIDENT_BYTES, release
from quire.checkpoint.small_floats import FLOAT8


@dataclass(frozen=True, slots=True)
class HostTensor:
    """A tensor as it is stored in a checkpoint file, usually a view of mapped memory.

    `array` has the logical shape; bfloat16, which numpy lacks, is stored as uint16 (the raw bits).
    `dtype` is one of "float32", "float16", "bfloat16", "float64", "int64", "int32", "int8", "uint8", "bool", and
    "float8_e4m3", "float8_e5m2", "float8_e8m0", whose bits are stored as uint8.
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
        if self.dtype in FLOAT8:
            return FLOAT8[self.dtype][self.array]
        return self.array.astype(np.float32, copy=False)

    def rows(self, start: int, stop: int) -> HostTensor:
        """Return rows [start, stop) of the first axis, as a view."""
        return HostTensor(self.array[start:stop], self.dtype)

    def columns(self, start: int, stop: int) -> HostTensor:
        """Return columns [start, stop) of the last axis, as a view."""
        return HostTensor(self.array[..., start:stop], self.dtype)

    def matrix(self, index: int) -> HostTensor:
        """Return number `index` of a stack of matrices, [E, N, K], as a view."""
        return HostTensor(self.array[index], self.dtype)

    def alternate(self, start: int) -> HostTensor:
        """Return every other row, from row `start`, 0 or 1, on, as a view."""
        return HostTensor(self.array[start::2], self.dtype)

    def transposed(self) -> HostTensor:
        """Return the matrix transposed, as a view."""
        return HostTensor(self.array.T, self.dtype)

    def release(self) -> None:
        """Release the mapped pages; they are read again on use."""
        release(self.array)


class Layout(NamedTuple):
    """The storage format in which backends can keep a quantized weight, known before its values are read.

    kind: "integers" for `QuantizedTensor.integers`; "table", "e4m3" or "e5m2" for `QuantizedTensor.codes`.
    bits: 4 or 8. group: adjacent weights of a row that share a scale; 0 where a whole row does. zeros: whether groups
    have zero points. ordered: whether the inputs have to be put in another order first (`Integers.order`). scale_bytes:
    2 where bfloat16 holds the scales exactly, else 4; for codes only.
    """

    kind: str
    bits: int
    group: int
    zeros: bool = False
    ordered: bool = False
    scale_bytes: int = 4


class Integers(NamedTuple):
    """Rows of weights as integers: weight[n, k] = scales[n, k // group] * (values[n, k] - zeros[n, k // group]).

    values: int8 (8 bits) or uint8 in 0..15 (4 bits) [N, K]. scales: float32 [N, K / group]. zeros: as scales, or None
    where they are 0 (8 bits) or 8 (4 bits). order: int64 [K], None for 0, 1, ...: column k is for input order[k].
    """

    bits: int
    group: int
    values: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None = None
    order: np.ndarray | None = None


class Codes(NamedTuple):
    """Rows of weights as codes of small floats: weight[n, k] = scales[n, k // group] * value(codes[n, k]).

    The value is table[code], float32 [16], for 4 bits; for 8 bits that of an OCP "e4m3" or "e5m2" number, and `table`
    is None. codes: uint8 [N, K]. scales: float32 [N, K / group].
    """

    kind: str
    group: int
    codes: np.ndarray
    scales: np.ndarray
    table: np.ndarray | None = None


class QuantizedTensor(ABC):
    """A weight that is stored in fewer bits than a float has; usually views of mapped memory.

    Slicing is cheap and reads nothing. `to_float32` gives the weights that the format defines, to the last bit.
    """

    dtype = "quantized"

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the weights."""

    @abstractmethod
    def rows(self, start: int, stop: int) -> QuantizedTensor:
        """Return rows [start, stop) of the first axis."""

    @abstractmethod
    def columns(self, start: int, stop: int) -> Tensor:
        """Return columns [start, stop) of the last axis; dequantized if that splits a group."""

    @abstractmethod
    def to_float32(self) -> np.ndarray:
        """Return the weights."""

    def matrix(self, index: int) -> Tensor:
        """Return number `index` of a stack of matrices, [E, N, K]; dequantized by default."""
        return HostTensor(self.rows(index, index + 1).to_float32()[0], "float32")

    def alternate(self, start: int) -> Tensor:
        """Return every other row, from row `start`, 0 or 1, on; dequantized by default."""
        return HostTensor(self.to_float32()[start::2], "float32")

    @property
    def layout(self) -> Layout | None:
        """The layout of what `integers` or `codes` returns, known without reading; None where both return None."""
        return None

    def integers(self) -> Integers | None:
        """Return the weights as integers with scales, without loss; None for other formats."""
        return None

    def codes(self) -> Codes | None:
        """Return the weights as codes of small floats with scales; None for other formats."""
        return None

    def count_nonfinite(self) -> int:
        """Return how many stored numbers, scales or codes, are NaN or infinite."""
        return 0

    def release(self) -> None:
        """Release the file's mapped pages, where the format knows them."""
        return

    @property
    def array(self) -> np.ndarray:
        """The weights, float32."""
        return self.to_float32()

    def transposed(self) -> Tensor:
        """Return the matrix transposed; dequantized by default."""
        return HostTensor(self.to_float32().T, "float32")


@dataclass(frozen=True)
class TransposedTensor(QuantizedTensor):
    """A matrix [K, N] of which the transposed one, [N, K], is stored."""

    inner: QuantizedTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """[K, N]."""
        return self.inner.shape[::-1]

    @property
    def layout(self) -> Layout | None:
        """That of the stored matrix, which layers transpose back."""
        return self.inner.layout

    def rows(self, start: int, stop: int) -> QuantizedTensor:
        """Return some of the stored columns."""
        columns = self.inner.columns(start, stop)
        assert isinstance(columns, QuantizedTensor), "such a slice would split a group"
        return TransposedTensor(columns)

    def columns(self, start: int, stop: int) -> Tensor:
        """Return some of the stored rows."""
        return TransposedTensor(self.inner.rows(start, stop))

    def transposed(self) -> Tensor:
        """Return the stored matrix."""
        return self.inner

    def to_float32(self) -> np.ndarray:
        return self.inner.to_float32().T

    def count_nonfinite(self) -> int:
        return self.inner.count_nonfinite()


@lru_cache(maxsize=256)
def meta_tensor(shape: tuple[int, ...]) -> HostTensor:
    """Return a float32 tensor that has a shape and takes no memory; its values are arbitrary."""
    return HostTensor(np.broadcast_to(np.float32(0), shape), "float32")


class MetaTensor(QuantizedTensor):
    """The shape and layout of a quantized weight, for a dry run; its values are arbitrary."""

    def __init__(self, shape: tuple[int, ...], layout: Layout) -> None:
        self._shape, self._layout = shape, layout

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weights."""
        return self._shape

    @property
    def layout(self) -> Layout | None:
        return self._layout

    def matrix(self, index: int) -> Tensor:
        return MetaTensor(self._shape[1:], self._layout)

    def alternate(self, start: int) -> Tensor:
        return MetaTensor((len(range(start, self._shape[0], 2)), *self._shape[1:]), self._layout)

    def transposed(self) -> Tensor:
        """See `QuantizedTensor`; the layout is that of the matrix that a layer packs."""
        return MetaTensor(self._shape[::-1], self._layout)

    def rows(self, start: int, stop: int) -> MetaTensor:
        stop = min(stop, self._shape[0])
        return MetaTensor((max(0, stop - start), *self._shape[1:]), self._layout)

    def columns(self, start: int, stop: int) -> Tensor:
        shape = (*self._shape[:-1], stop - start)
        if shape == self._shape or fits_groups(self._layout, start, stop):
            return MetaTensor(shape, self._layout)
        return meta_tensor(shape)

    def to_float32(self) -> np.ndarray:
        return np.broadcast_to(np.float32(0), self._shape)


def fits_groups(layout: Layout | None, start: int, stop: int) -> bool:
    """Whether some columns of a weight, not all, can have the layout of the whole."""
    if layout is None or layout.ordered:
        return False
    return layout.group == 0 or (start % layout.group == 0 and stop % layout.group == 0)


Tensor = HostTensor | QuantizedTensor


# All bits of the exponent set: the smallest bit pattern without a sign that is no finite number.
_EXPONENT = {"float64": 0x7FF << 52, "float32": 0xFF << 23, "bfloat16": 0xFF << 7, "float16": 0x1F << 10}
_CHUNK_BYTES = 1 << 18  # checked at a time, so that the second pass finds them in the cache


def count_nonfinite(tensor: Tensor) -> int:
    """Return how many values are NaN or infinite; integers are always finite.

    The bits of positive numbers, as signed integers, are ordered like the numbers. As unsigned integers, the bits of
    negative numbers are ordered by size, above all others. So two maxima show whether any value is not finite.
    """
    if isinstance(tensor, QuantizedTensor):
        return tensor.count_nonfinite()
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
        if array.nbytes > RESIDENT_BYTES:  # smaller ones are about to be used
            release(some)
    return found
