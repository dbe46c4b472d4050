"""Quantized weights of a GGUF file; slicing them reads nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from quire.checkpoint.gguf.blocks import Decoded, Format
from quire.checkpoint.mapped import RESIDENT_BYTES, release
from quire.checkpoint.tensor import HostTensor, Integers, Layout, QuantizedTensor, Tensor, fits_groups

CHUNK_BYTES = 1 << 22  # of blocks that are decoded at a time


@dataclass(frozen=True)
class GGUFTensor(QuantizedTensor):
    """Rows and columns of a stored matrix.

    Attributes:
        stored: uint8 [rows, blocks, bytes of a block], a view of the file.
        order: int64, which rows of `stored` these are, in order; None for all.
        across: the columns of `stored` that these are; None for all. Some begin or end inside a block.
    """

    form: Format
    stored: np.ndarray
    order: np.ndarray | None = None
    across: range | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K]."""
        rows = len(self.stored) if self.order is None else len(self.order)
        return rows, self.stored.shape[1] * self.form.size if self.across is None else len(self.across)

    @property
    def layout(self) -> Layout | None:
        return layout_of(self.form)

    def rows(self, start: int, stop: int) -> GGUFTensor:
        if self.order is None:
            return replace(self, stored=self.stored[start:stop])
        return replace(self, order=self.order[start:stop])

    def alternate(self, start: int) -> GGUFTensor:
        return self.reordered(np.arange(start, self.shape[0], 2))

    def reordered(self, order: np.ndarray) -> GGUFTensor:
        """Return these of the rows, in this order."""
        return replace(self, order=order if self.order is None else self.order[order])

    def columns(self, start: int, stop: int) -> Tensor:
        """See `QuantizedTensor.columns`; the columns may split a block, not a group."""
        if (start, stop) == (0, self.shape[1]):
            return self
        size, columns = self.form.size, (self.across or range(self.stored.shape[1] * self.form.size))[start:stop]
        first, last = columns.start // size, -(-columns.stop // size)
        part = replace(
            self,
            stored=self.stored[:, first:last],
            across=range(columns.start - first * size, columns.stop - first * size),
        )
        return part if fits_groups(self.layout, start, stop) else HostTensor(part.to_float32(), "float32")

    def _decoded(self) -> Decoded:
        """Decode the stored blocks, each part [N, ...]; they may have more columns than this."""
        stored = self.stored if self.order is None else self.stored[self.order]
        assert self.form.decode is not None
        parts = self.form.decode(stored.reshape(-1, self.form.bytes))
        rows = self.shape[0]
        values, scales = parts.values.reshape(rows, -1), parts.scales.reshape(rows, -1)
        return Decoded(values, scales, None if parts.minima is None else parts.minima.reshape(rows, -1))

    def _chunks(self) -> Iterator[GGUFTensor]:
        """Yield the rows in chunks whose decoded parts fit into the CPU's cache."""
        step = max(1, CHUNK_BYTES // max(1, self.stored.shape[1] * self.form.bytes))
        for start in range(0, self.shape[0], step):
            yield self.rows(start, start + step)

    def to_float32(self) -> np.ndarray:
        whole, start = np.empty((self.shape[0], self.stored.shape[1] * self.form.size), np.float32), 0
        for part in self._chunks():
            values, scales, minima = part._decoded()
            block = whole[start : start + len(values)].reshape(*scales.shape, self.form.group)
            np.subtract(values.reshape(block.shape), np.float32(self.form.middle), out=block)
            block *= scales[..., None]
            if minima is not None:
                block -= minima[..., None]
            start += len(values)
        return whole if self.across is None else whole[:, self.across.start : self.across.stop]

    def integers(self) -> Integers | None:
        """See `QuantizedTensor.integers`; a minimum is a zero point of minimum / scale, rounded to float32."""
        values, scales, minima = self._decoded()
        group, zeros = self.form.group, None
        if self.across is not None:
            values = values[:, self.across.start : self.across.stop]
            groups = slice(self.across.start // group, self.across.stop // group)
            scales, minima = scales[:, groups], None if minima is None else minima[:, groups]
        if minima is not None:
            # Without a scale all weights of the group are the same, -minimum.
            flat = scales == 0
            if flat.any():
                values = np.where(np.repeat(flat, group, axis=1), values.dtype.type(0), values)
                scales = np.where(flat, np.float32(1), scales)
            zeros = minima / scales
        return Integers(self.form.bits, group, values, scales, zeros)

    def count_nonfinite(self) -> int:
        """See `QuantizedTensor.count_nonfinite`; of whole blocks."""
        found = 0
        for part in self._chunks():
            _, *factors = part._decoded()
            found += sum(int(np.count_nonzero(~np.isfinite(factor))) for factor in factors if factor is not None)
            if self.stored.nbytes > RESIDENT_BYTES:  # smaller ones are about to be used
                part.release()
        return found

    def release(self) -> None:
        if self.order is None:
            release(self.stored)


def layout_of(form: Format) -> Layout:
    """Return the layout of weights of a format."""
    return Layout("integers", form.bits, form.group, form.minima)


def make_tensor(form: Format, stored: np.ndarray, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor of this shape whose bytes are `stored`, quantized or not; it is a matrix or a stack of them.

    Unquantized values that lie unaligned in the file are copied.
    """
    if form.decode is None:
        kind = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[form.dtype]
        array = stored.view(kind).reshape(shape)
        return HostTensor(array if array.flags.aligned else array.copy(), form.dtype)
    return GGUFTensor(form, stored.reshape(-1, shape[-1] // form.size, form.bytes))


def reorder(tensor: Tensor, order: np.ndarray) -> Tensor:
    """Return the rows of a tensor in this order; unquantized ones are copied."""
    if isinstance(tensor, GGUFTensor):
        return tensor.reordered(order)
    assert isinstance(tensor, HostTensor)
    return HostTensor(tensor.array[order], tensor.dtype)
