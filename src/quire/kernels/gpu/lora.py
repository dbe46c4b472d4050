"""LoRA adapters: slots on the device, and kernels that add the products of a step's rows with their adapters' factors.

A slot's matrices stay at the addresses where they were packed; kernels read these from a table, so that a CUDA graph
sees an exchanged adapter. Programs have rows of one slot, the n-th block of them in the order of slots, and find out
which from how many rows each slot has (as Punica's SGMV does). So a matrix is read once for all rows of a block, and
what bounds a decode step is latency: x @ A is split along K among programs, whose sums B's kernel adds up, in order.
"""

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
from quire.kernels.lora import LoRAChange, LoRARows

# Of an entry: address and rank of A, address and outputs of B, address and rows of what takes the weight's place.
FIELDS = 6
WIDTH = tl.constexpr(FIELDS)


@triton.jit
def _find_slot(starts, index, SLOTS: tl.constexpr, S: tl.constexpr, M: tl.constexpr):
    """Return whose rows block `index` has (SLOTS for nobody's), and where in the order they begin and end."""
    slots = tl.arange(0, S)
    begin = tl.load(starts + slots, slots < SLOTS, other=0).to(tl.int32)
    end = tl.load(starts + slots + 1, slots < SLOTS, other=0).to(tl.int32)
    blocks = (end - begin + M - 1) // M
    slot = tl.sum((tl.cumsum(blocks, axis=0) <= index).to(tl.int32), axis=0)
    before = tl.sum(tl.where(slots < slot, blocks, 0), axis=0)
    first = tl.sum(tl.where(slots == slot, begin, 0), axis=0) + (index - before) * M
    return tl.minimum(slot, SLOTS), first, tl.sum(tl.where(slots == slot, end, 0), axis=0)


@triton.jit
def _matrix(entry, FIELD: tl.constexpr, ACT: tl.constexpr):
    """Return the matrix whose address is in a field of an entry; they are aligned to 16 bytes."""
    return tl.multiple_of(tl.load(entry + FIELD).to(tl.pointer_type(ACT)), 16)


@triton.jit(do_not_specialize=["tokens"])
def shrink_kernel(
    x, x_row, table, order, starts, inner, tokens, depth, a_row, share,
    PARTS: tl.constexpr, SLOTS: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr, ACT: tl.constexpr,
    M: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """inner[split, t, part, r] = x[t] times row r of A, over the split's `share` of K; inner [splits, T, PARTS, RANK].

    Programs: blocks of rows, PARTS * RANK / R, splits.
    """
    slot, first, end = _find_slot(starts, tl.program_id(0), SLOTS, S, M)
    if slot >= SLOTS:
        return
    ranks: tl.constexpr = RANK // R
    part, at = tl.program_id(1) // ranks, tl.program_id(1) % ranks * R
    entry = table + (slot * PARTS + part) * WIDTH
    rank = tl.load(entry + 1).to(tl.int32)
    if at >= rank:
        return
    lanes = first + tl.arange(0, M)
    real = lanes < end
    rows = tl.load(order + lanes, real, other=0)
    r, split = at + tl.arange(0, R), tl.program_id(2)
    a = _matrix(entry, 0, ACT) + r[None, :] * a_row
    total = tl.zeros([M, R], tl.float32)
    for start in range(split * share, tl.minimum(depth, (split + 1) * share), K):
        k = start + tl.arange(0, K)
        values = tl.load(x + (rows * x_row)[:, None] + k[None, :], real[:, None] & (k < depth)[None, :], other=0.0)
        factor = tl.load(a + k[:, None], (r < rank)[None, :] & (k < depth)[:, None], other=0.0)
        total = tl.dot(values.to(ACT), factor, total, input_precision="ieee")
    place = ((split.to(tl.int64) * tokens + rows) * PARTS + part) * RANK
    tl.store(inner + place[:, None] + r[None, :], total, real[:, None])


@triton.jit
def _inner_tile(
    inner, ids, a, rows, real, r, rank, tokens, part,
    PARTS: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, LOOKUP: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """Return what goes into B, [M, R]: the sums of `shrink_kernel`, or the rows of A that were looked up."""
    mask = real[:, None] & (r < rank)[None, :]
    if LOOKUP:
        return tl.load(
            a + (tl.load(ids + rows, real, other=0).to(tl.int64) * rank)[:, None] + r[None, :], mask, other=0.0
        )
    total = tl.zeros(mask.shape, tl.float32)
    for split in tl.static_range(SPLITS):
        place = ((rows + split * tokens) * PARTS + part) * RANK
        total += tl.load(inner + place[:, None] + r[None, :], mask, other=0.0)
    return total.to(ACT)


@triton.jit(do_not_specialize=["tokens"])
def expand_kernel(
    y, y_row, inner, ids, table, tiles, order, starts, tokens, width, w_row,
    PARTS: tl.constexpr, SLOTS: tl.constexpr, S: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr,
    LOOKUP: tl.constexpr, ALIGNED: tl.constexpr, ACT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """y[t, columns of a part] += inner[t, part] @ B.T; with LOOKUP, where a slot has a whole table, y[t] is its row.

    Programs: blocks of rows, tiles of columns; tiles int32 [*, 3]: part, column of the part, column of y. `width`:
    of a table's rows. ALIGNED: parts begin and end at multiples of 16, so that rows of zeros behind B do no harm.
    """
    slot, first, end = _find_slot(starts, tl.program_id(0), SLOTS, S, M)
    if slot >= SLOTS:
        return
    tile = tiles + tl.program_id(1) * 3
    part, column, target = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    entry = table + (slot * PARTS + part) * WIDTH
    rank = tl.multiple_of(tl.load(entry + 1).to(tl.int32), 16)
    outputs = width if LOOKUP else tl.load(entry + 3).to(tl.int32)
    if ALIGNED:
        outputs, target = (outputs + 15) // 16 * 16, tl.multiple_of(target, 16)
    whole = tl.load(entry + 4) if LOOKUP else rank.to(tl.int64) * 0
    if (rank == 0) & (whole == 0):
        return
    lanes = first + tl.arange(0, M)
    real = lanes < end
    rows = tl.load(order + lanes, real, other=0)
    n = tl.multiple_of(column, N) + tl.arange(0, N)
    a, b = _matrix(entry, 0, ACT), _matrix(entry, 2, ACT) + n[None, :] * rank
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, rank, R):
        r = start + tl.arange(0, R)
        given = _inner_tile(inner, ids, a, rows, real, r, rank, tokens, part, PARTS, RANK, SPLITS, LOOKUP, ACT)
        factor = tl.load(b + r[:, None], (r < rank)[:, None] & (n < outputs)[None, :], other=0.0)
        total = tl.dot(given, factor, total, input_precision="ieee")
    own = y + (rows * y_row)[:, None] + (target + tl.arange(0, N))[None, :]
    mask = real[:, None] & (n < outputs)[None, :]
    if LOOKUP:
        numbers = tl.load(ids + rows, real, other=0).to(tl.int64)
        from_table = _matrix(entry, 4, ACT) + (numbers * w_row)[:, None] + n[None, :]
        total += tl.load(from_table, mask & (whole != 0), other=0.0).to(tl.float32)
    total += tl.load(own, mask & (whole == 0), other=0.0).to(tl.float32)
    tl.store(own, total.to(y.dtype.element_ty), mask)


@triton.jit
def whole_kernel(
    y, y_row, x, x_row, table, tiles, order, starts, depth, w_row,
    PARTS: tl.constexpr, SLOTS: tl.constexpr, S: tl.constexpr, ACT: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """y[t, columns of a part] = W x[t] where a slot has a W for the part; programs and tiles as of `expand_kernel`."""
    slot, first, end = _find_slot(starts, tl.program_id(0), SLOTS, S, M)
    if slot >= SLOTS:
        return
    tile = tiles + tl.program_id(1) * 3
    part, column, target = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    entry = table + (slot * PARTS + part) * WIDTH
    outputs = tl.load(entry + 5).to(tl.int32)
    if column >= outputs:
        return
    lanes = first + tl.arange(0, M)
    real = lanes < end
    rows = tl.load(order + lanes, real, other=0)
    n = column + tl.arange(0, N)
    w = _matrix(entry, 4, ACT) + n.to(tl.int64)[None, :] * w_row
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, depth, K):
        k = start + tl.arange(0, K)
        values = tl.load(x + (rows * x_row)[:, None] + k[None, :], real[:, None] & (k < depth)[None, :], other=0.0)
        weights = tl.load(w + k[:, None], (n < outputs)[None, :] & (k < depth)[:, None], other=0.0)
        total = tl.dot(values.to(ACT), weights, total, input_precision="ieee")
    own = y + (rows * y_row)[:, None] + (target + tl.arange(0, N))[None, :]
    tl.store(own, total.to(y.dtype.element_ty), real[:, None] & (n < outputs)[None, :])


@triton.jit
def limit_kernel(x, x_row, limits, width, BLOCK: tl.constexpr):
    """x[r, limits[r] :] = -inf; programs: rows, blocks of columns."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    limit = tl.load(limits + row)
    if first + BLOCK <= limit:
        return
    columns = first + tl.arange(0, BLOCK)
    lowest = tl.full([BLOCK], float("-inf"), tl.float32).to(x.dtype.element_ty)
    tl.store(x + row * x_row + columns, lowest, (columns >= limit) & (columns < width))


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
        choice = self.backend.tuned_configs.get(
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
