"""Quantized weights as tensors: integers with scales, and codes of small floats with scales, sliced without being read.

Both have a function that unpacks rows and columns of the stored tensors, so that they do not depend on the format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from quire.checkpoint.small_floats import E4M3, E5M2
from quire.checkpoint.tensor import Codes, HostTensor, Integers, Layout, QuantizedTensor, Tensor, fits_groups

CHUNK_ROWS_BYTES = 1 << 22  # of codes checked at a time

Unpack = Callable[[slice, slice], np.ndarray]
"""Rows and columns -> uint8 or int8 [n, k]."""
ByGroup = Callable[[slice], np.ndarray]
"""Rows -> float32 [n, groups of a whole row]."""


@dataclass(frozen=True)
class _Slice(QuantizedTensor):
    """Some rows and columns of a stored matrix.

    Attributes:
        unpack: the stored numbers. scales: those of the groups. group: columns that share one.
        whole_layout: of the whole matrix, whose rows have `width` columns.
        span, across: the rows and the columns of the matrix that this is.
    """

    unpack: Unpack
    scales: ByGroup
    group: int
    whole_layout: Layout | None
    width: int
    span: range
    across: range

    @classmethod
    def whole(
        cls,
        shape: tuple[int, int],
        group: int,
        layout: Layout | None,
        unpack: Unpack,
        scales: ByGroup,
        **others: Any,
    ) -> Self:
        """Return a whole stored matrix; `others` are the attributes of the class."""
        return cls(unpack, scales, group, layout, shape[1], range(shape[0]), range(shape[1]), **others)

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K]."""
        return len(self.span), len(self.across)

    @property
    def layout(self) -> Layout | None:
        return self.whole_layout

    def rows(self, start: int, stop: int) -> QuantizedTensor:
        return replace(self, span=self.span[start:stop])

    def alternate(self, start: int) -> QuantizedTensor:
        return replace(self, span=self.span[start::2])

    def columns(self, start: int, stop: int) -> Tensor:
        if (start, stop) == (0, self.shape[1]):
            return self
        part = replace(self, across=self.across[start:stop])
        if self.whole_layout is not None and fits_groups(self.whole_layout, start, stop):
            return part
        return HostTensor(part.to_float32(), "float32")

    def _stored(self) -> np.ndarray:
        across = slice(self.across.start, self.across.stop)
        return self._by_row(lambda rows: self.unpack(rows, across))

    def _by_row(self, of: ByGroup) -> np.ndarray:
        """Return what `of` gives for these rows."""
        last = self.span[-1] + 1 if len(self.span) else self.span.start
        return of(slice(self.span.start, last))[:: self.span.step]

    def _groups(self, of: ByGroup) -> np.ndarray:
        """Return the values of the groups that these columns touch."""
        return self._by_row(of)[:, self.across.start // self.group : -(-self.across.stop // self.group)]

    def _spread(self, by_group: np.ndarray) -> np.ndarray:
        """Return a value for each column."""
        if self.group >= self.width:
            return by_group
        skipped = self.across.start % self.group
        return np.repeat(by_group, self.group, axis=1)[:, skipped : skipped + len(self.across)]


@dataclass(frozen=True)
class IntegerTensor(_Slice):
    """weight[n, k] = (stored[n, k] - zero[n, group of k]) * scale[n, group of k], in float32.

    Attributes:
        zeros: of the groups, None for `middle`. group_of: int64 [width], the group of each column, where it is not
            k // group.
        middle: what stands for 0 where there are no zeros: 8 of unsigned nibbles, 0 of signed bytes.
    """

    zeros: ByGroup | None = None
    group_of: np.ndarray | None = None
    middle: int = 0

    def to_float32(self) -> np.ndarray:
        values = self._stored().astype(np.float32)
        if self.group_of is not None:
            groups = self.group_of[self.across.start : self.across.stop]
            scales = self._by_row(self.scales)[:, groups]
            zeros = None if self.zeros is None else self._by_row(self.zeros)[:, groups]
        else:
            scales = self._spread(self._groups(self.scales))
            zeros = None if self.zeros is None else self._spread(self._groups(self.zeros))
        values -= np.float32(self.middle) if zeros is None else zeros
        values *= scales
        return values

    def integers(self) -> Integers | None:
        if self.whole_layout is None:
            return None
        values, order = self._stored(), None
        if self.whole_layout.ordered:
            assert self.group_of is not None
            order = np.argsort(self.group_of, kind="stable")
            values = values[:, order]
        zeros = None if self.zeros is None else self._groups(self.zeros)
        group = self.whole_layout.group or len(self.across)
        return Integers(self.whole_layout.bits, group, values, self._groups(self.scales), zeros, order)

    def count_nonfinite(self) -> int:
        return int(np.count_nonzero(~np.isfinite(self._groups(self.scales))))


@dataclass(frozen=True)
class CodeTensor(_Slice):
    """weight[n, k] = value(code[n, k]) * scale[n, k // group]; kind and table as in `Codes`."""

    kind: str = "table"
    table: np.ndarray | None = None

    def to_float32(self) -> np.ndarray:
        table = self.table if self.kind == "table" else E4M3 if self.kind == "e4m3" else E5M2
        assert table is not None
        values = table[self._stored()]
        values *= self._spread(self._groups(self.scales))
        return values

    def codes(self) -> Codes | None:
        if self.whole_layout is None:
            return None
        group = self.whole_layout.group or len(self.across)
        return Codes(self.kind, group, self._stored(), self._groups(self.scales), self.table)

    def count_nonfinite(self) -> int:
        found = int(np.count_nonzero(~np.isfinite(self._groups(self.scales))))
        if self.table is not None:
            return found + int(np.count_nonzero(~np.isfinite(self.table)))
        mask = 0x7F if self.kind == "e4m3" else 0x7C
        step = max(1, CHUNK_ROWS_BYTES // max(1, len(self.across)))
        for start in range(0, len(self.span), step):
            stored = replace(self, span=self.span[start : start + step])._stored()
            found += int(np.count_nonzero(stored & mask == mask))
        return found


@dataclass(frozen=True)
class StackedTensor(QuantizedTensor):
    """Matrices of one shape, one for each expert: [E, N, K]."""

    parts: tuple[QuantizedTensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """[E, N, K]."""
        return (len(self.parts), *self.parts[0].shape)

    @property
    def layout(self) -> Layout | None:
        return self.parts[0].layout

    def matrix(self, index: int) -> QuantizedTensor:
        """Return one of the matrices, [N, K]."""
        return self.parts[index]

    def rows(self, start: int, stop: int) -> QuantizedTensor:
        """Return some of the matrices."""
        return StackedTensor(self.parts[start:stop])

    def columns(self, start: int, stop: int) -> Tensor:
        """Return columns of all matrices; dequantized if that splits a group."""
        parts = [part.columns(start, stop) for part in self.parts]
        quantized = tuple(part for part in parts if isinstance(part, QuantizedTensor))
        if len(quantized) == len(parts):
            return StackedTensor(quantized)
        return HostTensor(np.stack([part.to_float32() for part in parts]), "float32")

    def to_float32(self) -> np.ndarray:
        """Return the weights, float32 [E, N, K]."""
        return np.stack([part.to_float32() for part in self.parts])

    def count_nonfinite(self) -> int:
        return sum(part.count_nonfinite() for part in self.parts)


def integer_layout(
    bits: int, group: int, width: int, *, zeros: bool = False, group_of: np.ndarray | None = None
) -> Layout | None:
    """Return how a matrix of integers can be stored; None where the kernels do not take its groups.

    Those are groups that are too small, or of different sizes; `group_of` as in `IntegerTensor`.
    """
    if group_of is not None and (width % group or not np.all(np.bincount(group_of) == group)):
        return None
    if group >= width:
        return Layout("integers", bits, 0, zeros, False)
    return (
        Layout("integers", bits, group, zeros, group_of is not None) if group % (32 if bits == 4 else 16) == 0 else None
    )


def code_layout(kind: str, group: int, width: int, scale_bytes: int = 4) -> Layout | None:
    """Return how a matrix of codes can be stored; None where groups are too small for the kernels."""
    bits = 4 if kind == "table" else 8
    if group >= width:
        return Layout(kind, bits, 0, scale_bytes=scale_bytes)
    return Layout(kind, bits, group, scale_bytes=scale_bytes) if group % 16 == 0 else None


def nibbles(packed: np.ndarray, *, high_first: bool = False) -> np.ndarray:
    """Return the halves of bytes [..., M] as [..., 2 M], the low one of each first."""
    pair = (packed >> 4, packed & 15) if high_first else (packed & 15, packed >> 4)
    return np.stack(pair, axis=-1).reshape(*packed.shape[:-1], -1)


def unpack_nibbles(packed: np.ndarray, columns: slice) -> np.ndarray:
    """Return some columns of bytes [N, M], each of two codes, the first in the low half."""
    first = columns.start // 2
    return nibbles(packed[:, first : -(-columns.stop // 2)])[:, columns.start - 2 * first : columns.stop - 2 * first]


def unpack_words(words: np.ndarray, bits: int, columns: slice, order: list[int] | None = None) -> np.ndarray:
    """Return some columns of uint32 [M, W], each of 32 / bits unsigned numbers, as uint8 [M, columns].

    Numbers lie in a word from the lowest bits on, or number i of a word at place order[i].
    """
    in_word = 32 // bits
    first = columns.start // in_word
    octets = np.ascontiguousarray(words[:, first : -(-columns.stop // in_word)]).view(np.uint8)
    values = nibbles(octets) if bits == 4 else octets
    if order is not None:
        values = values.reshape(len(words), -1, in_word)[:, :, order].reshape(len(words), -1)
    return values[:, columns.start - in_word * first : columns.stop - in_word * first]


def packed_integers(
    shape: tuple[int, int],
    group: int,
    layout: Layout | None,
    bits: int,
    words: np.ndarray,
    scales: ByGroup,
    zeros: np.ndarray | None,
    group_of: np.ndarray | None = None,
    *,
    zero_shift: int = 0,
    order: list[int] | None = None,
) -> IntegerTensor:
    """Return the matrix [N, K] of integers that lie in 32-bit words, 32 / bits in each; 8 bits have 128 added.

    Args:
        words: [N, words of a row]; with `order`, [K, words of the outputs], as in `unpack_words`.
        zeros: [groups, words of the outputs], the zero points less `zero_shift`; None for the middle of the range.
        group, group_of: as in `IntegerTensor`.
    """
    zero_words, added = None if zeros is None else zeros.view(np.uint32), 0 if bits == 4 else 128

    def unpack(rows: slice, columns: slice) -> np.ndarray:
        if order is not None:
            return unpack_words(words[columns].view(np.uint32), bits, rows, order).T
        values = unpack_words(words[rows].view(np.uint32), bits, columns)
        return values if bits == 4 else (values ^ np.uint8(128)).view(np.int8)

    def unpack_zeros(rows: slice) -> np.ndarray:
        assert zero_words is not None
        return unpack_words(zero_words, bits, rows, order).T.astype(np.float32) + np.float32(zero_shift - added)

    return IntegerTensor.whole(
        shape,
        group,
        layout,
        unpack,
        scales,
        zeros=None if zeros is None else unpack_zeros,
        group_of=group_of,
        middle=8 if bits == 4 else 0,
    )
