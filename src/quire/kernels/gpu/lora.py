"""LoRA adapters: slots on the device, and what they add to the products of a step. Kernels are in `lora_kernels.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from quire.kernels.gpu.arrays import ArrayOps
from quire.kernels.gpu.lora_kernels import FIELDS, expand_kernel, limit_kernel, shrink_kernel, whole_kernel
from quire.kernels.lora import LoRAChange, LoRARows

UNIT = 16  # what ranks and the elements between rows are padded to: bytes for aligned loads, and a product's depth
COLUMNS = 64  # of y that one program writes
LIMIT_COLUMNS = 1024
MOST_SPLITS = 8  # of K among programs
MANY = 256  # rows of a step from which on its blocks are large
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def _up(number: int, unit: int = UNIT) -> int:
    return -(-number // unit) * unit


@dataclass(frozen=True, slots=True)
class PackedLoRA:
    """A `LoRAChange` on the device in `act`, padded with zeros: R is the rank, a multiple of UNIT, as row sizes are.

    a [R, K], of a table its transpose [rows, R]; b [N, R], of which `outputs` rows are no padding; whole [rows, K].
    """

    a: torch.Tensor | None
    b: torch.Tensor | None
    outputs: int
    whole: torch.Tensor | None

    @property
    def entry(self) -> list[int]:
        """What the table of a slot says of it."""
        a = 0 if self.a is None else self.a.data_ptr()
        b, rank = (0, 0) if self.b is None else (self.b.data_ptr(), self.b.shape[1])
        whole, rows = (0, 0) if self.whole is None else (self.whole.data_ptr(), self.whole.shape[0])
        return [a, rank, b, self.outputs, whole, rows]


@dataclass(slots=True, eq=False)
class LoRASlots:
    """One layer's slots: table int64 [slots, parts, FIELDS], which recordings read; `held` keeps what it points to.

    sizes: columns of y of each part. tiles: int32 [*, 3], pieces of parts: part, column of it, column of y. rank: the
    largest, padded. inputs: splits, tokens and so on go by the layer's own.
    """

    sizes: list[int]
    rank: int
    widest: int
    table: torch.Tensor
    tiles: torch.Tensor
    held: dict[int, list[PackedLoRA | None]] = field(default_factory=dict)

    @property
    def num_slots(self) -> int:
        """How many adapters there may be in one step."""
        return self.table.shape[0]

    @property
    def aligned(self) -> bool:
        """Whether parts begin and end where vectors do."""
        return all(size % UNIT == 0 for size in self.sizes)

    @property
    def rank_tile(self) -> int:
        """Inner values that are computed together."""
        return min(64, triton.next_power_of_2(self.rank))


def column_tiles(sizes: Sequence[int]) -> np.ndarray:
    """Return the tiles of a layer, see `LoRASlots`."""
    tiles, first = [], 0
    for part, size in enumerate(sizes):
        tiles += [(part, column, first + column) for column in range(0, size, COLUMNS)]
        first += size
    return np.array(tiles, np.int32)


class LoRAOps(ArrayOps):
    """LoRA adapters."""

    def new_lora_slots(self, num_slots: int, max_rank: int, sizes: Sequence[int], widest: int = 0) -> Any:
        """Return `LoRASlots`."""
        table = self.zeros((num_slots, len(sizes), FIELDS), "int64")
        rank = _up(max_rank)
        rank = _up(rank, min(64, triton.next_power_of_2(rank)))
        return LoRASlots(list(sizes), rank, widest, table, self.from_numpy(column_tiles(sizes)))

    def pack_lora(self, change: LoRAChange, *, lookup: bool = False) -> Any:
        """Return a `PackedLoRA`."""
        a = change.a if change.a is None or not lookup else change.a.T
        rank = _up(change.rank)
        return PackedLoRA(
            None if a is None else self._padded(a, len(a) if lookup else rank),
            None if change.b is None else self._padded(change.b, _up(len(change.b))),
            0 if change.b is None else len(change.b),
            None if change.whole is None else self._padded(change.whole, len(change.whole)),
        )

    def _padded(self, matrix: np.ndarray, rows: int) -> torch.Tensor:
        """Return a float32 matrix on the device, with zeros below and beside it."""
        padded = torch.zeros((rows, _up(matrix.shape[1])), dtype=self.act)
        padded[: len(matrix), : matrix.shape[1]] = torch.from_numpy(np.require(matrix, np.float32, ["C", "A", "W"]))
        return padded.to(self.device)

    def set_lora(self, slots: Any, slot: int, parts: Sequence[Any]) -> None:
        """A few numbers of a table change, in the order of what the stream has to do."""
        entries = np.array([[0] * FIELDS if part is None else part.entry for part in parts], np.int64)
        self.assign(slots.table[slot], entries)
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device)
            for tensor in (t for part in parts if part is not None for t in (part.a, part.b, part.whole)):
                if tensor is not None:
                    tensor.record_stream(stream)  # was allocated by a thread with another one, perhaps
        slots.held[slot] = list(parts)

    def lora(self, y: torch.Tensor, x: torch.Tensor, slots: Any, rows: LoRARows) -> None:
        tokens, depth = x.shape
        if tokens == 0:
            return
        x = x if x.stride(1) == 1 else x.contiguous()
        step = _Step(self, slots, rows, tokens)
        if slots.widest:
            step.replace(y, x)
        splits = step.splits(depth)
        inner = torch.empty((splits, tokens, len(slots.sizes), slots.rank), dtype=torch.float32, device=x.device)
        step.shrink(x, inner)
        step.expand(y, inner, splits)

    def lora_embedding(self, y: torch.Tensor, ids: torch.Tensor, slots: Any, rows: LoRARows) -> None:
        if len(ids):
            _Step(self, slots, rows, len(ids)).expand(y, ids, 1, lookup=True)

    def limit_columns(self, x: torch.Tensor, limits: torch.Tensor) -> None:
        rows, width = x.shape
        assert x.stride(1) == 1, "rows to be changed in place"
        if rows:
            grid = rows, triton.cdiv(width, LIMIT_COLUMNS)
            limit_kernel[grid](x, x.stride(0), limits, width, BLOCK=LIMIT_COLUMNS, num_warps=4)


class _Step:
    """The launches for one layer's rows of a step."""

    def __init__(self, backend: ArrayOps, slots: LoRASlots, rows: LoRARows, tokens: int) -> None:
        self.backend, self.slots, self.rows, self.tokens = backend, slots, rows, tokens
        self.act: Any = TYPES[backend.act]
        number = slots.num_slots
        self.many = tokens >= MANY and not backend.batch_invariant
        self.size = 64 if self.many and backend.act is not torch.float32 else 16
        self.blocks = (tokens + min(tokens, number) * (self.size - 1)) // self.size

    @cached_property
    def shared(self) -> dict[str, Any]:
        """What all kernels are told at compile time."""
        number = self.slots.num_slots
        return {
            "PARTS": len(self.slots.sizes), "SLOTS": number, "S": triton.next_power_of_2(number), "ACT": self.act,
            "M": self.size, "num_warps": 4,
        }  # fmt: skip

    def splits(self, depth: int) -> int:
        """Return among how many programs K is split, so that a step of few rows has many."""
        most = max(1, min(MOST_SPLITS, depth // 256))
        if self.backend.batch_invariant:
            return most
        programs = self.blocks * len(self.slots.sizes) * (self.slots.rank // self.slots.rank_tile)
        splits = 1
        while 2 * splits <= most and 2 * splits * programs <= 2 * self.backend.num_sms:
            splits *= 2
        return splits

    def shrink(self, x: torch.Tensor, inner: torch.Tensor) -> None:
        """Compute x @ A.T of all parts."""
        slots, (splits, _, parts, rank), depth = self.slots, inner.shape, x.shape[1]
        wide = self.backend.act is torch.float32
        choice = self.backend.choices.choose(
            "lora_shrink",
            f"m{self.size}_r{slots.rank_tile}",
            {"k": 32 if wide else 64 if self.many else 128, "stages": 4},
        )
        k = choice["k"]
        share = _up(triton.cdiv(depth, splits), k)
        shrink_kernel[(self.blocks, parts * rank // slots.rank_tile, splits)](
            x, x.stride(0), slots.table, self.rows.order, self.rows.starts, inner, self.tokens, depth, _up(depth),
            share, RANK=rank, R=slots.rank_tile, K=k, num_stages=choice["stages"], **self.shared,
        )  # fmt: skip

    def expand(self, y: torch.Tensor, given: torch.Tensor, splits: int, *, lookup: bool = False) -> None:
        """Add what the second factors make of `given`: what lies between the factors, or ids to look up."""
        assert y.stride(1) == 1, "rows to be changed in place"
        slots = self.slots
        expand_kernel[(self.blocks, slots.tiles.shape[0])](
            y, y.stride(0), given, given, slots.table, slots.tiles, self.rows.order, self.rows.starts, self.tokens,
            slots.sizes[0], _up(slots.sizes[0]), RANK=slots.rank, SPLITS=splits, LOOKUP=lookup, N=COLUMNS,
            ALIGNED=slots.aligned, R=min(slots.rank_tile, 32), num_stages=2, **self.shared,
        )  # fmt: skip

    def replace(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """Compute the products of rows whose slot has a matrix in place of the layer's."""
        assert y.stride(1) == 1, "rows to be changed in place"
        slots, depth = self.slots, x.shape[1]
        wide = self.backend.act is torch.float32
        whole_kernel[(self.blocks, slots.tiles.shape[0])](
            y, y.stride(0), x, x.stride(0), slots.table, slots.tiles, self.rows.order, self.rows.starts, depth,
            _up(depth), N=COLUMNS, K=32 if wide else 128, num_stages=4, **self.shared,
        )  # fmt: skip
