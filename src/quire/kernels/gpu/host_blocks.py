"""`GPUHostBlocks`: blocks on their way between a GPU and pinned host memory, beside the model's steps.

The caches themselves are touched in one lane only, the one that the model runs in: blocks going out are gathered there
into a buffer on the device, blocks coming in are scattered there from another. So a block is copied out after the steps
that wrote it and before it is used again, and is there before the step that reads it, however many steps the host is
ahead. Gathering runs at the speed of the device's memory, some microseconds for what takes a thousand on PCIe. From the
buffers, two other lanes move blocks to and from the host, at the full speed of their copy engines, one copy for each
run of neighbouring slots, and take no multiprocessor from the model. What remains to be ordered by marks is this:

- a half of a buffer is filled again only when it was emptied;
- a slot is read only when what was written to it is there. (It is written only when those that read it have done so:
  the lane of the model has waited for them, before it gathers what is to be written.)

Steps wait only if more is to go out at once than the buffer holds, for the rest of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch

from quire.kernels.gpu.lanes import Lane, Lanes, Mark
from quire.kernels.gpu.pinned import PinnedPool

BUFFER_BYTES = 128 * 2**20  # of the device, for each way
HALVES = 2
MOST_MARKS = 64  # kept before those that are passed are looked for


class Mover(Protocol):
    """See `BlockMover`."""

    row_bytes: int

    def gather(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy blocks into rows."""

    def scatter(self, rows: torch.Tensor, ids: torch.Tensor) -> None:
        """Copy rows into blocks."""


class _Buffer:
    """Rows on the device, in two halves that are used in turn; `free` says when each was emptied last."""

    def __init__(self, rows: int, row_bytes: int, device: torch.device) -> None:
        self.halves = [torch.empty((rows, row_bytes), dtype=torch.uint8, device=device) for _ in range(HALVES)]
        self.free: list[Mark | None] = [None] * HALVES
        self.next = 0


class _Writes:
    """When each slot was written last: marks of one lane by number, which are passed in their order."""

    def __init__(self, lanes: Lanes, num_slots: int) -> None:
        self._lanes = lanes
        self._last = np.zeros(num_slots, np.int64)  # 0: nobody
        self._marks: dict[int, Mark] = {}
        self._count = 0

    def note(self, slots: np.ndarray, mark: Mark) -> None:
        """Say that slots are written until a mark."""
        self._count += 1
        self._last[slots] = self._count
        self._marks[self._count] = mark
        if len(self._marks) > MOST_MARKS:
            for number in list(self._marks):
                if not self._lanes.passed(self._marks[number]):
                    break
                del self._marks[number]

    def of(self, slots: np.ndarray) -> Mark | None:
        """Return the mark after which these slots are written; None if that is so already."""
        return self._marks.get(int(self._last[slots].max(initial=0)))


class GPUHostBlocks:
    """See `HostBlocks`.

    Args:
        mover: gathers and scatters blocks. upload: takes ids int64 numpy [n] to the device, in the lane of the model.
        lanes: of the device. pool: the host's memory; from now on this object's, which closes it.
        device: where the buffers are. buffer_bytes: of each.
    """

    def __init__(
        self,
        mover: Mover,
        upload: Callable[[np.ndarray], torch.Tensor],
        lanes: Lanes,
        pool: PinnedPool,
        num_blocks: int,
        device: torch.device,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self.block_nbytes = mover.row_bytes
        self._mover, self._upload, self._lanes, self._pool, self._device = mover, upload, lanes, pool, device
        self._rows = max(1, buffer_bytes // HALVES // max(1, self.block_nbytes))  # of half a buffer
        self._buffers: dict[Lane, _Buffer] = {}
        self._written = _Writes(lanes, num_blocks)
        self._closed = False
        if num_blocks:  # now, so that who measures memory sees them
            self._buffer(Lane.OUT)
            self._buffer(Lane.IN)

    def copy_out(self, block_ids: np.ndarray, slots: np.ndarray) -> None:
        """See `HostBlocks.copy_out`."""
        for first in range(0, len(block_ids), self._rows):
            part = slots[first : first + self._rows]
            half, rows = self._gather(block_ids[first : first + self._rows])
            for piece, places in self._runs(part):
                self._copy(Lane.OUT, piece, rows[places])
            mark = self._lanes.mark(Lane.OUT)
            self._buffer(Lane.OUT).free[half] = mark
            self._written.note(part, mark)

    def copy_in(self, slots: np.ndarray, block_ids: np.ndarray) -> None:
        """See `HostBlocks.copy_in`."""
        for first in range(0, len(block_ids), self._rows):
            part = slots[first : first + self._rows]
            half, rows = self._next_half(Lane.IN, Lane.IN)
            writer = self._written.of(part)
            if writer is not None:
                self._lanes.wait(Lane.IN, writer)
            for piece, places in self._runs(part):
                self._copy(Lane.IN, rows[places], piece)
            self._scatter(half, rows, block_ids[first : first + self._rows])

    def read(self, block_ids: np.ndarray) -> Callable[[], np.ndarray]:
        """See `HostBlocks.read`."""
        host, mark = self._lanes.buffer(len(block_ids), self.block_nbytes), None
        for first in range(0, len(block_ids), self._rows):
            part = block_ids[first : first + self._rows]
            half, rows = self._gather(part)
            self._copy(Lane.OUT, host[first : first + len(part)], rows[: len(part)])
            mark = self._lanes.mark(Lane.OUT)
            self._buffer(Lane.OUT).free[half] = mark

        def wait() -> np.ndarray:
            if mark is not None:
                self._lanes.join(mark)
            return host.numpy()

        return wait

    def write(self, block_ids: np.ndarray, data: np.ndarray) -> None:
        """See `HostBlocks.write`."""
        host = self._lanes.buffer(len(block_ids), self.block_nbytes)
        host.numpy()[:] = data
        for first in range(0, len(block_ids), self._rows):
            part = block_ids[first : first + self._rows]
            half, rows = self._next_half(Lane.IN, Lane.IN)
            self._copy(Lane.IN, rows[: len(part)], host[first : first + len(part)])
            self._scatter(half, rows, part)

    def close(self) -> None:
        """See `HostBlocks.close`."""
        if self._closed:
            return
        self._closed = True
        for lane in (Lane.OUT, Lane.IN, Lane.COMPUTE):
            self._lanes.join(self._lanes.mark(lane))
        self._pool.close()
        self._buffers.clear()

    def _buffer(self, lane: Lane) -> _Buffer:
        if lane not in self._buffers:
            self._buffers[lane] = _Buffer(self._rows, self.block_nbytes, self._device)
        return self._buffers[lane]

    def _next_half(self, way: Lane, filling: Lane) -> tuple[int, torch.Tensor]:
        """Return half of the buffer of a way; what lane `filling` is given from now on finds it empty."""
        buffer = self._buffer(way)
        half, buffer.next = buffer.next, (buffer.next + 1) % HALVES
        free = buffer.free[half]
        if free is not None:
            self._lanes.wait(filling, free)
        return half, buffer.halves[half]

    def _gather(self, block_ids: np.ndarray) -> tuple[int, torch.Tensor]:
        """Gather blocks, at most half a buffer of them, for what the lane OUT is given from now on."""
        half, rows = self._next_half(Lane.OUT, Lane.COMPUTE)
        ids = np.array(block_ids, np.int64)
        self._lanes.run(Lane.COMPUTE, lambda: self._mover.gather(self._upload(ids), rows))
        self._lanes.wait(Lane.OUT, self._lanes.mark(Lane.COMPUTE))
        return half, rows

    def _scatter(self, half: int, rows: torch.Tensor, block_ids: np.ndarray) -> None:
        """Scatter what the lane IN was given to copy."""
        ids = np.array(block_ids, np.int64)
        self._lanes.wait(Lane.COMPUTE, self._lanes.mark(Lane.IN))
        self._lanes.run(Lane.COMPUTE, lambda: self._mover.scatter(rows, self._upload(ids)))
        self._buffer(Lane.IN).free[half] = self._lanes.mark(Lane.COMPUTE)

    def _copy(self, lane: Lane, target: torch.Tensor, source: torch.Tensor) -> None:
        self._lanes.run(lane, lambda: target.copy_(source, non_blocking=True))

    def _runs(self, slots: np.ndarray) -> Iterator[tuple[torch.Tensor, slice]]:
        """Yield runs of neighbouring slots of one piece of the pool, with their places among `slots`."""
        size, start = self._pool.rows, 0
        cuts = np.flatnonzero((np.diff(slots) != 1) | (slots[1:] % size == 0)) + 1
        for stop in [*cuts.tolist(), len(slots)]:
            piece, first = divmod(int(slots[start]), size)
            yield self._pool.pieces[piece][first : first + stop - start], slice(start, stop)
            start = stop
