"""Tensors of a checkpoint on their way to the device: piece by piece through pinned memory, never a second copy."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from quire.checkpoint.tensor import HostTensor, Tensor

PIECE_BYTES = 16 << 20  # of a weight that are on their way at a time; there are two buffers of it
TORCH_OF = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}


class Staging:
    """Copies arrays to a device while the host reads the next ones.

    Files are mapped, and copying straight from pageable memory has the driver do the same with less; here the copy to
    pinned memory of one piece overlaps with the transfer of the one before.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: list[torch.Tensor] = []
        self._events: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._lists: dict[int, tuple[np.ndarray, torch.Tensor]] = {}

    def upload(self, array: np.ndarray, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return an array, at most PIECE_BYTES, on the device; its bits are of `dtype`, which numpy may not know.

        out: where to put it, of the same shape and any type; a new tensor if None.
        """
        if out is None:
            out = torch.empty(array.shape, dtype=dtype, device=self.device)
        if self.device.type != "cuda":
            out.copy_(torch.from_numpy(np.require(array, requirements=["C", "W"])).view(dtype))
            return out
        if not self._buffers:
            self._buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        turn, self._turn = self._turn, 1 - self._turn
        event = self._events[turn]
        if event is not None:
            event.synchronize()
        assert array.nbytes <= PIECE_BYTES, "pieces are cut by rows"
        held = self._buffers[turn][: array.nbytes]
        np.copyto(held.numpy().view(array.dtype).reshape(array.shape), array)
        source = held.view(dtype).view(array.shape)
        if out.dtype == dtype:
            out.copy_(source, non_blocking=True)
        else:
            out.copy_(source.to(self.device, non_blocking=True))
        event = self._events[turn] = torch.cuda.Event()
        event.record()
        return out

    def floats(self, part: Tensor, start: int, stop: int, out: torch.Tensor) -> None:
        """Write rows [start, stop) of a tensor, rounded to the type of `out`, into it."""
        repeated = getattr(part, "repeated", None)
        if repeated is not None:
            twice, first = repeated
            self._repeat(twice, first, start * math.prod(part.shape[1:]), out)
            return
        piece = part.rows(start, stop)
        if isinstance(piece, HostTensor) and piece.dtype in TORCH_OF:
            self.upload(piece.array, TORCH_OF[piece.dtype], out)
        else:
            self.upload(piece.to_float32(), torch.float32, out)
        piece.release()

    def _repeat(self, twice: np.ndarray, first: int, skipped: int, out: torch.Tensor) -> None:
        """Write elements [skipped, ...) of a tensor that repeats a list (see `checkpoint/weights.py`) into `out`."""
        if id(twice) not in self._lists:
            bits = torch.from_numpy(np.array(twice)).view(torch.bfloat16)
            self._lists[id(twice)] = twice, bits.to(self.device)
        held = self._lists[id(twice)][1]
        size, flat = len(twice) // 2, out.view(-1)
        place = (first + skipped) % size
        for start in range(0, flat.numel(), size):
            count = min(size, flat.numel() - start)
            flat[start : start + count].copy_(held[place : place + count])


def pieces(part: Tensor, item_bytes: int = 4) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) of the rows of a tensor, few enough at a time to fit a buffer at `item_bytes` an element."""
    width = max(1, math.prod(part.shape[1:])) * item_bytes
    step = max(1, PIECE_BYTES // width)
    for start in range(0, part.shape[0], step):
        yield start, min(start + step, part.shape[0])
