"""The inputs of a step on their way to the device: one copy of one buffer, and one kernel that puts all in its place.

Everything travels as int32, packed without gaps: of block tables only the columns that are used. The kernel writes it
where graphs read it, in the type it has there, and fills what is padded. Before the numbers lie, for each segment,
eight int64 that say where it goes. Bound by nothing but the two launches: some ten kB a step cross the bus.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

_HEAD = 8  # int64 of a segment, see `PackedStager.put`
_MOST = 32  # segments of a step
_BLOCK = 1024
_BUFFERS = 3  # on the host: one is filled while others are on their way


@triton.jit
def _unpack(heads, numbers, HEAD: tl.constexpr, BLOCK: tl.constexpr):
    """Program (segment, j) puts the j-th BLOCK of a segment's places where they belong."""
    head = heads + tl.program_id(0) * HEAD
    address, source = tl.load(head), tl.load(head + 1)
    rows, columns, count = tl.load(head + 2), tl.load(head + 3), tl.load(head + 4)
    stride, fill, wide = tl.load(head + 5), tl.load(head + 6), tl.load(head + 7)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    row, column = at // count, at % count
    inside = row < rows
    values = tl.load(numbers + source + row * columns + column, mask=inside & (column < columns), other=0)
    values = tl.where(column < columns, values.to(tl.int64), fill)
    place = row * stride + column
    tl.store(address.to(tl.pointer_type(tl.int64)) + place, values, mask=inside & (wide == 1))
    tl.store(address.to(tl.pointer_type(tl.int32)) + place, values.to(tl.int32), mask=inside & (wide == 0))


class _Buffer:
    """A pinned buffer that the device copies from; it may be filled again once `wait` has returned."""

    def __init__(self, words: int, on_gpu: bool) -> None:
        self.tensor = torch.empty(words, dtype=torch.int32, pin_memory=on_gpu)
        self.words: np.ndarray = self.tensor.numpy()
        self.heads: np.ndarray = self.words[: 2 * _HEAD * _MOST].view(np.int64).reshape(_MOST, _HEAD)
        self._copied: Any = torch.cuda.Event() if on_gpu else None
        self._used = False

    def wait(self) -> None:
        """Wait for the last copy from this buffer."""
        if self._used and self._copied is not None:
            self._copied.synchronize()

    def note(self) -> None:
        """Record an event after a copy from this buffer."""
        self._used = True
        if self._copied is not None:
            self._copied.record()


class PackedStager:
    """A `Stager` for a GPU; see the module docstring. `send` waits for nothing but a copy of three steps ago."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._size = 2 * _HEAD * _MOST + 4096
        self._buffers = [self._new_buffer() for _ in range(_BUFFERS)]
        self._landing = torch.empty(self._size, dtype=torch.int32, device=device)
        self._turn = 0
        self._begin()

    def _new_buffer(self) -> _Buffer:
        return _Buffer(self._size, self._on_gpu)

    def _begin(self) -> None:
        self._buffer = self._buffers[self._turn]
        self._waited = False
        self._segments, self._end, self._longest = 0, 2 * _HEAD * _MOST, 0

    def put(self, target: torch.Tensor, values: np.ndarray, count: int | None = None, fill: int = 0) -> None:
        """See `Stager.put`; `target` is of int32 or int64, its last axis contiguous, of at most three axes."""
        if values.ndim == 3:
            for group in range(len(values)):
                self.put(target[group], values[group], count, fill)
            return
        columns = values.shape[-1]
        rows, stride = (values.shape[0], target.stride(0)) if values.ndim == 2 else (1, 0)
        count = columns if count is None else max(count, columns)
        if rows * count == 0:
            return
        size, start = rows * columns, self._end
        if not self._waited:
            self._buffer.wait()
            self._waited = True
        if start + size > len(self._buffer.words):
            self._grow(start + size)
        self._buffer.words[start : start + size].reshape(values.shape)[...] = values
        self._buffer.heads[self._segments] = (
            target.data_ptr(),
            start - 2 * _HEAD * _MOST,
            rows,
            columns,
            count,
            stride,
            fill,
            target.dtype == torch.int64,
        )
        self._segments += 1
        self._end = start + size
        self._longest = max(self._longest, rows * count)

    def _grow(self, needed: int) -> None:
        """Replace the buffer being filled by a larger one; the others grow when they are filled next."""
        self._size = max(self._size, triton.next_power_of_2(needed))
        larger = self._new_buffer()
        larger.words[: self._end] = self._buffer.words[: self._end]
        self._buffers[self._turn] = self._buffer = larger

    def send(self) -> None:
        if self._segments == 0:
            return
        if len(self._landing) < self._end:
            self._landing = torch.empty(self._size, dtype=torch.int32, device=self._device)
        packed = self._landing[: self._end]
        packed.copy_(self._buffer.tensor[: self._end], non_blocking=True)
        self._buffer.note()
        first = 2 * _HEAD * _MOST
        grid = (self._segments, triton.cdiv(self._longest, _BLOCK))
        _unpack[grid](packed[:first].view(torch.int64), packed[first:], HEAD=_HEAD, BLOCK=_BLOCK)
        self._turn = (self._turn + 1) % _BUFFERS
        self._begin()
