"""Weights of a GGUF file in one of its quantized formats, sliced without being read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from quire.checkpoint.gguf.blocks import Decoded, Format
from quire.checkpoint.mapped import RESIDENT_BYTES, release
from quire.checkpoint.tensor import HostTensor, Integers, Layout, QuantizedTensor, Tensor, fits_groups

CHUNK_BYTES = 1 << 22  # of blocks that are taken apart in one go


@dataclass(frozen=True)
class GGUFTensor(QuantizedTensor):
    """Rows and whole blocks of a stored matrix.

    Attributes:
        stored: uint8 [rows, blocks, bytes of a block], a view of the file.
        order: int64, which rows of `stored` these are, in order; None for all.
    """

    form: Format
    stored: np.ndarray
    order: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K]."""
        rows = len(self.stored) if self.order is None else len(self.order)
        return rows, self.stored.shape[1] * self.form.size

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
        """See `QuantizedTensor.columns`; plain numbers if that splits a block."""
        size = self.form.size
        if (start, stop) == (0, self.shape[1]):
            return self
        first, last = start // size, -(-stop // size)
        part = replace(self, stored=self.stored[:, first:last])
        if start % size == 0 and stop % size == 0:
            return part
        if fits_groups(self.layout, start, stop):
            return _Within(part, start - first * size, stop - first * size)
        return HostTensor(part.to_float32()[:, start - first * size : stop - first * size], "float32")

    def decoded(self) -> Decoded:
        """Return all blocks taken apart, each part [N, ...]."""
        stored = self.stored if self.order is None else self.stored[self.order]
        assert self.form.decode is not None
        parts = self.form.decode(stored.reshape(-1, self.form.bytes))
        rows = self.shape[0]
        values, scales = parts.values.reshape(rows, -1), parts.scales.reshape(rows, -1)
        return Decoded(values, scales, None if parts.minima is None else parts.minima.reshape(rows, -1))

    def to_float32(self) -> np.ndarray:
        out = np.empty(self.shape, np.float32)
        step = max(1, CHUNK_BYTES // max(1, self.stored.shape[1] * self.form.bytes))
        for start in range(0, self.shape[0], step):
            values, scales, minima = self.rows(start, start + step).decoded()
            block = out[start : start + step].reshape(*scales.shape, self.form.group)
            np.subtract(values.reshape(block.shape), np.float32(self.form.middle), out=block)
            block *= scales[..., None]
            if minima is not None:
                block -= minima[..., None]
        return out

    def integers(self) -> Integers | None:
        """See `QuantizedTensor.integers`; a minimum is a zero point of minimum / scale, rounded to float32."""
        values, scales, minima = self.decoded()
        zeros = None
        if minima is not None:
            # Without a scale all weights of the group are the same, -minimum.
            flat = scales == 0
            if flat.any():
                groups = values.reshape(*scales.shape, self.form.group)
                groups[flat] = 0
                scales = np.where(flat, np.float32(1), scales)
            zeros = minima / scales
        return Integers(self.form.bits, self.form.group, values, scales, zeros)

    def count_nonfinite(self) -> int:
        found, step = 0, max(1, CHUNK_BYTES // max(1, self.stored.shape[1] * self.form.bytes))
        for start in range(0, self.shape[0], step):
            part = self.rows(start, start + step)
            _, scales, minima = part.decoded()
            found += int(np.count_nonzero(~np.isfinite(scales)))
            if minima is not None:
                found += int(np.count_nonzero(~np.isfinite(minima)))
            if self.stored.nbytes > RESIDENT_BYTES:  # smaller ones are about to be used
                part.release()
        return found

    def release(self) -> None:
        if self.order is None:
            release(self.stored)


@dataclass(frozen=True)
class _Within(QuantizedTensor):
    """Columns of a matrix that begin or end inside a block, but not inside a group."""

    whole: GGUFTensor
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K]."""
        return self.whole.shape[0], self.stop - self.start

    @property
    def layout(self) -> Layout | None:
        return self.whole.layout

    def rows(self, start: int, stop: int) -> _Within:
        return replace(self, whole=self.whole.rows(start, stop))

    def columns(self, start: int, stop: int) -> Tensor:
        return self.whole.columns(self.start + start, self.start + stop)

    def to_float32(self) -> np.ndarray:
        return self.whole.to_float32()[:, self.start : self.stop]

    def integers(self) -> Integers | None:
        found = self.whole.integers()
        assert found is not None
        first, last = self.start // found.group, self.stop // found.group
        zeros = None if found.zeros is None else found.zeros[:, first:last]
        values = found.values[:, self.start : self.stop]
        return found._replace(values=values, scales=found.scales[:, first:last], zeros=zeros)

    def count_nonfinite(self) -> int:
        """See `QuantizedTensor.count_nonfinite`; of the whole."""
        return self.whole.count_nonfinite()


def layout_of(form: Format) -> Layout:
    """Return the layout of weights of a format."""
    return Layout("integers", form.bits, form.group, form.minima)


def make_tensor(form: Format, stored: np.ndarray, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor of this shape whose bytes are `stored`, plain or not; the last two sizes make matrices.

    Plain numbers that lie unaligned in the file are copied.
    """
    if form.decode is None:
        kind = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[form.dtype]
        array = stored.view(kind).reshape(shape)
        return HostTensor(array if array.flags.aligned else array.copy(), form.dtype)
    return GGUFTensor(form, stored.reshape(-1, shape[-1] // form.size, form.bytes))


def reorder(tensor: Tensor, order: np.ndarray) -> Tensor:
    """Return the rows of a tensor in this order; plain numbers are copied."""
    if isinstance(tensor, GGUFTensor):
        return tensor.reordered(order)
    assert isinstance(tensor, HostTensor)
    return HostTensor(tensor.array[order], tensor.dtype)
