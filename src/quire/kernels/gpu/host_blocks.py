"""KV blocks on their way between a GPU and pinned host memory, overlapped with the model's steps.

`GPUHostBlocks` is the pool with the copies, `PinnedPool` its memory, `BlockMover` the kernel that gathers and scatters.

The caches are touched in one stream only, the one that the model runs in: blocks to be stored are gathered there into a
buffer on the device, blocks that were loaded are scattered there from another. So a block is copied out after the steps
that wrote it and before it is used again, and is there before the step that reads it, however many steps the host is
ahead. Gathering runs at the speed of the device's memory, some microseconds for what takes a thousand on PCIe. Two
other streams move blocks between the buffers and the host, at the full speed of their copy engines, one copy for each
run of neighbouring blocks, and take no multiprocessor from the model. Events order what remains:

- a half of a buffer is filled again only when it was emptied;
- a block of the pool is read only when what was written to it is there. (It is written only when those that read it
  have done so: the model's stream has waited for them before it gathers what is to be written.)

Steps wait only if more is to go out at once than the buffer holds, for the rest of it.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from quire.kernels.gpu.streams import Event, Stream, Streams
from quire.kernels.host_blocks import new_pool

logger = logging.getLogger(__name__)

BUFFER_BYTES = 128 * 2**20  # of the device, for each way
HALVES = 2
MAX_EVENTS = 64  # kept before those that are reached are looked for
CHUNK_BYTES = 16384  # that one program moves at most
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
VECTOR_BYTES = 16
PIECE_BYTES = 256 * 2**20  # pinning one takes some 50 ms

Register = Callable[[int, int], int]  # address, bytes -> 0 or the number of an error
Unregister = Callable[[int], int]


@triton.jit
def move_blocks(
    chunks, ids, rows, row_bytes, GATHER: tl.constexpr, WORD: tl.constexpr, SIZE: tl.constexpr, ALIGNED: tl.constexpr
):
    """Move chunk program_id(1) of block ids[program_id(0)] into row program_id(0) of `rows`, or back.

    `chunks` int64 [C, 4]: address of the chunk in block 0, bytes from block to block, its place in a row, its bytes.
    WORD bytes are moved at a time, by SIZE threads' worth of words; ALIGNED: all addresses are multiples of 16.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = tl.load(chunks + chunk * 4)
    step = tl.load(chunks + chunk * 4 + 1)
    place = tl.load(chunks + chunk * 4 + 2)
    nbytes = tl.load(chunks + chunk * 4 + 3)
    address = first + tl.load(ids + row) * step
    at = (row * row_bytes + place) // WORD
    count = nbytes // WORD
    if ALIGNED:  # so that two words go at once
        at = tl.multiple_of(at, 2)
        count = tl.multiple_of(count, 2)
    block = address.to(rows.dtype)
    if ALIGNED:
        block = tl.multiple_of(block, 16)
    buffer = rows + at
    words = tl.arange(0, SIZE)
    mask = words < count
    if GATHER:
        tl.store(buffer + words, tl.load(block + words, mask=mask), mask=mask)
    else:
        tl.store(block + words, tl.load(buffer + words, mask=mask), mask=mask)


class BlockMover:
    """Gathers and scatters blocks whose bytes lie in `sides`, uint8 tensors [B, n], each contiguous, in one launch.

    Bound by memory: every byte is read once and written once, in accesses of 16 bytes a thread, four of them in flight.
    A block of Llama-3.1-8B with 16 tokens is 2 MiB, 128 programs.

    A row of a buffer has the bytes of all sides of one block, in this order: `row_bytes` of them.
    """

    def __init__(self, sides: Sequence[torch.Tensor]) -> None:
        self._sides = list(sides)  # whose memory the addresses are of
        chunks: list[list[int]] = []
        place = 0
        for side in sides:
            assert side.dtype is torch.uint8 and side.stride(1) == 1
            first, nbytes = side.data_ptr(), side.shape[1]
            for start in range(0, nbytes, CHUNK_BYTES):
                chunks.append([first + start, side.stride(0), place + start, min(CHUNK_BYTES, nbytes - start)])
            place += nbytes
        self.row_bytes = place
        unit = math.gcd(VECTOR_BYTES, place, *(value for chunk in chunks for value in chunk))
        self._aligned = unit == VECTOR_BYTES
        self._word = min(unit, 8)
        longest = max((chunk[3] for chunk in chunks), default=1)
        self._size = max(16, 1 << (-(-longest // self._word) - 1).bit_length())
        self._num_chunks = len(chunks)
        device = sides[0].device if sides else torch.device("cpu")
        self._chunks = torch.tensor(chunks, dtype=torch.int64).to(device)

    def gather(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy blocks int64 [n] into the first n of `rows`, uint8 [at least n, row_bytes], contiguous."""
        self._move(ids, rows, gather=True)

    def scatter(self, rows: torch.Tensor, ids: torch.Tensor) -> None:
        """Copy the first n of `rows` into blocks int64 [n], none named twice."""
        self._move(ids, rows, gather=False)

    def _move(self, ids: torch.Tensor, rows: torch.Tensor, *, gather: bool) -> None:
        if not len(ids) or not self._num_chunks:
            return
        assert rows.data_ptr() % VECTOR_BYTES == 0 and rows.is_contiguous()
        words = rows.view(WORDS[self._word])
        move_blocks[(len(ids), self._num_chunks)](
            self._chunks, ids, words, self.row_bytes, gather, self._word, self._size, self._aligned, num_warps=8
        )


class PinnedPool:
    """Host memory for blocks [num_blocks, block_nbytes], in pieces of whole blocks that no copy may cross.

    A thread pins piece after piece, so that start-up does not wait for gigabytes of it. Copy engines read and write
    pinned memory by themselves; copies to and from a piece that is not pinned (yet) run in the calling thread.

    Args:
        register, unregister: pin memory and let it go; None where there is no device.

    Raises:
        ConfigError: the system does not promise so much memory.
    """

    def __init__(
        self, num_blocks: int, block_nbytes: int, register: Register | None, unregister: Unregister | None
    ) -> None:
        self.rows = max(1, PIECE_BYTES // max(1, block_nbytes))  # of a piece
        sizes = [min(self.rows, num_blocks - first) for first in range(0, num_blocks, self.rows)]
        # Each has pages of its own, for a page cannot be pinned twice.
        self._pieces = [new_pool(size, block_nbytes) for size in sizes]
        self.pieces = [torch.from_numpy(piece) for piece in self._pieces]
        self._register, self._unregister = register, unregister
        self._pinned: list[np.ndarray] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._pin, name="quire-pinning", daemon=True)
        if register is not None and self._pieces:
            self._thread.start()

    def _pin(self) -> None:
        assert self._register is not None
        for piece in self._pieces:
            if self._closing.is_set():
                return
            error = self._register(piece.ctypes.data, piece.nbytes)
            if error:
                logger.warning(
                    "the host's pool could not be pinned (CUDA error %d, after %d of %d pieces): copies to and from it "
                    "are slower; `ulimit -l` and --swap-space say how much there may be",
                    error,
                    len(self._pinned),
                    len(self._pieces),
                )
                return
            self._pinned.append(piece)

    def wait(self) -> None:
        """Return when as much is pinned as can be."""
        if self._thread.ident is not None:
            self._thread.join()

    def close(self) -> None:
        """Let go of the memory, which nothing copies any more. Once more is no error."""
        self._closing.set()
        self.wait()
        for piece in self._pinned:
            if self._unregister is not None:
                self._unregister(piece.ctypes.data)
        self._pinned, self._pieces, self.pieces = [], [], []


def cuda_register(device: torch.device) -> tuple[Register, Unregister]:
    """Return what pins memory and lets it go for a device."""
    runtime = torch.cuda.cudart()

    def register(address: int, nbytes: int) -> int:
        with torch.cuda.device(device):  # a thread begins with the first device
            return int(runtime.cudaHostRegister(address, nbytes, 0))

    def unregister(address: int) -> int:
        return int(runtime.cudaHostUnregister(address))

    return register, unregister


class _Buffer:
    """Rows on the device, in two halves that are used in turn; `free` says when each was emptied last."""

    def __init__(self, rows: int, row_bytes: int, device: torch.device) -> None:
        self.halves = [torch.empty((rows, row_bytes), dtype=torch.uint8, device=device) for _ in range(HALVES)]
        self.free: list[Event | None] = [None] * HALVES
        self.next = 0


class _Writes:
    """When each block of the pool was written last: events of one stream by number, in their order."""

    def __init__(self, streams: Streams, num_blocks: int) -> None:
        self._streams = streams
        self._last = np.zeros(num_blocks, np.int64)  # 0: never
        self._events: dict[int, Event] = {}
        self._count = 0

    def note(self, host_block_ids: np.ndarray, event: Event) -> None:
        """Say that blocks are written once `event` is reached."""
        self._count += 1
        self._last[host_block_ids] = self._count
        self._events[self._count] = event
        if len(self._events) > MAX_EVENTS:
            for number in list(self._events):
                if not self._streams.query(self._events[number]):
                    break
                del self._events[number]

    def of(self, host_block_ids: np.ndarray) -> Event | None:
        """Return the event after which these blocks are written; None if that is so already."""
        return self._events.get(int(self._last[host_block_ids].max(initial=0)))


class GPUHostBlocks:
    """See `HostBlocks`.

    Args:
        mover: gathers and scatters blocks. upload: takes ids int64 numpy [n] to the device, in the stream of the model.
        streams: of the device. pool: the host's memory; from now on this object's, which closes it.
        device: where the buffers are. buffer_bytes: of each.
    """

    def __init__(
        self,
        mover: BlockMover,
        upload: Callable[[np.ndarray], torch.Tensor],
        streams: Streams,
        pool: PinnedPool,
        num_blocks: int,
        device: torch.device,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self.block_nbytes = mover.row_bytes
        self._mover, self._upload, self._streams, self._pool, self._device = mover, upload, streams, pool, device
        self._rows = max(1, buffer_bytes // HALVES // max(1, self.block_nbytes))  # of half a buffer
        self._buffers: dict[Stream, _Buffer] = {}
        self._written = _Writes(streams, num_blocks)
        self._closed = False
        if num_blocks:  # now, so that who measures memory sees them
            self._buffer(Stream.D2H)
            self._buffer(Stream.H2D)

    def copy_out(self, block_ids: np.ndarray, host_block_ids: np.ndarray) -> None:
        for first in range(0, len(block_ids), self._rows):
            part = host_block_ids[first : first + self._rows]
            half, rows = self._gather(block_ids[first : first + self._rows])
            for piece, places in self._runs(part):
                self._copy(Stream.D2H, piece, rows[places])
            event = self._streams.record(Stream.D2H)
            self._buffer(Stream.D2H).free[half] = event
            self._written.note(part, event)

    def copy_in(self, host_block_ids: np.ndarray, block_ids: np.ndarray) -> None:
        for first in range(0, len(block_ids), self._rows):
            part = host_block_ids[first : first + self._rows]
            half, rows = self._next_half(Stream.H2D, Stream.H2D)
            writer = self._written.of(part)
            if writer is not None:
                self._streams.wait(Stream.H2D, writer)
            for piece, places in self._runs(part):
                self._copy(Stream.H2D, rows[places], piece)
            self._scatter(half, rows, block_ids[first : first + self._rows])

    def read(self, block_ids: np.ndarray) -> Callable[[], np.ndarray]:
        host, event = self._streams.buffer(len(block_ids), self.block_nbytes), None
        for first in range(0, len(block_ids), self._rows):
            part = block_ids[first : first + self._rows]
            half, rows = self._gather(part)
            self._copy(Stream.D2H, host[first : first + len(part)], rows[: len(part)])
            event = self._streams.record(Stream.D2H)
            self._buffer(Stream.D2H).free[half] = event

        def wait() -> np.ndarray:
            if event is not None:
                self._streams.synchronize(event)
            return host.numpy()

        return wait

    def write(self, block_ids: np.ndarray, data: np.ndarray) -> None:
        host = self._streams.buffer(len(block_ids), self.block_nbytes)
        host.numpy()[:] = data
        for first in range(0, len(block_ids), self._rows):
            part = block_ids[first : first + self._rows]
            half, rows = self._next_half(Stream.H2D, Stream.H2D)
            self._copy(Stream.H2D, rows[: len(part)], host[first : first + len(part)])
            self._scatter(half, rows, part)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for stream in (Stream.D2H, Stream.H2D, Stream.COMPUTE):
            self._streams.synchronize(self._streams.record(stream))
        self._pool.close()
        self._buffers.clear()

    def _buffer(self, stream: Stream) -> _Buffer:
        if stream not in self._buffers:
            self._buffers[stream] = _Buffer(self._rows, self.block_nbytes, self._device)
        return self._buffers[stream]

    def _next_half(self, way: Stream, filling: Stream) -> tuple[int, torch.Tensor]:
        """Return half of the buffer of a way; what stream `filling` is given from now on finds it empty."""
        buffer = self._buffer(way)
        half, buffer.next = buffer.next, (buffer.next + 1) % HALVES
        free = buffer.free[half]
        if free is not None:
            self._streams.wait(filling, free)
        return half, buffer.halves[half]

    def _gather(self, block_ids: np.ndarray) -> tuple[int, torch.Tensor]:
        """Gather blocks, at most half a buffer of them, for what the stream D2H is given from now on."""
        half, rows = self._next_half(Stream.D2H, Stream.COMPUTE)
        ids = np.array(block_ids, np.int64)
        self._streams.run(Stream.COMPUTE, lambda: self._mover.gather(self._upload(ids), rows))
        self._streams.wait(Stream.D2H, self._streams.record(Stream.COMPUTE))
        return half, rows

    def _scatter(self, half: int, rows: torch.Tensor, block_ids: np.ndarray) -> None:
        """Scatter what the stream H2D was given to copy."""
        ids = np.array(block_ids, np.int64)
        self._streams.wait(Stream.COMPUTE, self._streams.record(Stream.H2D))
        self._streams.run(Stream.COMPUTE, lambda: self._mover.scatter(rows, self._upload(ids)))
        self._buffer(Stream.H2D).free[half] = self._streams.record(Stream.COMPUTE)

    def _copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        self._streams.run(stream, lambda: target.copy_(source, non_blocking=True))

    def _runs(self, host_block_ids: np.ndarray) -> Iterator[tuple[torch.Tensor, slice]]:
        """Yield runs of neighbouring blocks of one piece of the pool, with their places among `host_block_ids`."""
        size, start = self._pool.rows, 0
        cuts = np.flatnonzero((np.diff(host_block_ids) != 1) | (host_block_ids[1:] % size == 0)) + 1
        for stop in [*cuts.tolist(), len(host_block_ids)]:
            piece, first = divmod(int(host_block_ids[start]), size)
            yield self._pool.pieces[piece][first : first + stop - start], slice(start, stop)
            start = stop
