"""Whole blocks of all layers, side by side in one buffer: gathered by one launch, and scattered by one.

Bound by memory: every byte is read once and written once, in accesses of 16 bytes a thread, four of them in flight. A
block of Llama-3.1-8B with 16 tokens is 2 MiB, 128 programs.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

CHUNK_BYTES = 16384  # that one program moves at most
FIELDS = 4  # of a row of the table of chunks
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
VECTOR_BYTES = 16


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
    """Gathers and scatters blocks whose bytes lie in `sides`: uint8 tensors [B, n], each contiguous.

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
