"""LoRA adapters: slots on the device, and kernels that add the products of a step's rows with their adapters' factors.

A slot's matrices stay at the addresses where they were packed; kernels read these from a table, so that a CUDA graph
sees an exchanged adapter. Programs have rows of one slot, the n-th block of them in the order of slots, and find out
which from how many rows each slot has (as Punica's SGMV does). So a matrix is read once for all rows of a block, and
what bounds a decode step is latency: x @ A is split along K among programs, whose sums B's kernel adds up, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from quire.kernels.gpu.arrays import ArrayOps
from quire.kernels.gpu.kernel_args import power_of_two, rows_of, whole_rows
from quire.kernels.gpu.linear import TL_TYPES
from quire.kernels.lora import LoRAChange, LoRARows

# Of an entry: address and rank of A, address and outputs of B, address and rows of what takes the weight's place.
FIELDS = 6
WIDTH = tl.constexpr(FIELDS)


class Form(NamedTuple):
    """What kernels are compiled for.

    parts: of the layer. slots: adapters, `padded` to a power of two. rank: the largest, padded. act: type of factors.
    M: rows of a block. N: columns of y of a program.
    aligned: parts begin and end at multiples of 16, so that rows of zeros behind B do no harm.
    """

    parts: int
    slots: int
    padded: int
    rank: int
    act: Any
    M: int
    N: int
    aligned: bool


@triton.jit
def _block(rows, FORM: tl.constexpr):
    """Return the slot of this program's block of rows (`slots` for none), its rows int64 [M], and which of them exist.

    rows: `LoRARows`.
    """
    index = tl.program_id(0)
    slots = tl.arange(0, FORM.padded)
    begin = tl.load(rows.starts + slots, slots < FORM.slots, other=0).to(tl.int32)
    end = tl.load(rows.starts + slots + 1, slots < FORM.slots, other=0).to(tl.int32)
    blocks = (end - begin + FORM.M - 1) // FORM.M
    slot = tl.sum((tl.cumsum(blocks, axis=0) <= index).to(tl.int32), axis=0)
    before = tl.sum(tl.where(slots < slot, blocks, 0), axis=0)
    lanes = tl.sum(tl.where(slots == slot, begin, 0), axis=0) + (index - before) * FORM.M + tl.arange(0, FORM.M)
    real = lanes < tl.sum(tl.where(slots == slot, end, 0), axis=0)
    return tl.minimum(slot, FORM.slots), tl.load(rows.order + lanes, real, other=0), real


@triton.jit
def _matrix(entry, FIELD: tl.constexpr, FORM: tl.constexpr):
    """Return the matrix whose address is in a field of an entry; they are aligned to 16 bytes."""
    return tl.multiple_of(tl.load(entry + FIELD).to(tl.pointer_type(FORM.act)), 16)


@triton.jit
def _product(x, rows, real, matrix, inside, begin, stop, depth, FORM: tl.constexpr, K: tl.constexpr):
    """Return x[rows] times rows of a matrix, float32 [M, N], over inputs begin .. stop of `depth`.

    matrix [1, N]: where its rows begin, of which those `inside` [N] exist.
    """
    M: tl.constexpr = FORM.M
    N: tl.constexpr = matrix.shape[1]
    total = tl.zeros([M, N], tl.float32)
    for start in range(begin, stop, K):
        k = start + tl.arange(0, K)
        values = tl.load(
            x.data + (rows * x.stride)[:, None] + k[None, :], real[:, None] & (k < depth)[None, :], other=0.0
        )
        factor = tl.load(matrix + k[:, None], inside[None, :] & (k < depth)[:, None], other=0.0)
        total = tl.dot(values.to(FORM.act), factor, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["tokens"])
def shrink_kernel(
    x, rows, table, inner, tokens, depth, a_row, share, FORM: tl.constexpr, R: tl.constexpr, K: tl.constexpr
):
    """inner[split, t, part, r] = x[t] times row r of A, over the split's `share` of K.

    x: `Rows`; rows: `LoRARows`; inner float32 [splits, T, parts, rank]. Grid: blocks of rows, parts * rank / R, splits.
    """
    slot, row, real = _block(rows, FORM)
    if slot >= FORM.slots:
        return
    ranks: tl.constexpr = FORM.rank // R
    part, at = tl.program_id(1) // ranks, tl.program_id(1) % ranks * R
    entry = table + (slot * FORM.parts + part) * WIDTH
    rank = tl.load(entry + 1).to(tl.int32)
    if at >= rank:
        return
    r, split = at + tl.arange(0, R), tl.program_id(2)
    a = _matrix(entry, 0, FORM) + r[None, :] * a_row
    stop = tl.minimum(depth, (split + 1) * share)
    total = _product(x, row, real, a, r < rank, split * share, stop, depth, FORM, K)
    place = ((split.to(tl.int64) * tokens + row) * FORM.parts + part) * FORM.rank
    tl.store(inner + place[:, None] + r[None, :], total, real[:, None])


@triton.jit
def _inner_tile(given, a, rows, real, r, rank, tokens, part, FORM: tl.constexpr, SPLITS: tl.constexpr):
    """Return what goes into B, [M, R]: the sums of `shrink_kernel`, or the rows of A that were looked up."""
    mask = real[:, None] & (r < rank)[None, :]
    if SPLITS == 0:
        numbers = tl.load(given + rows, real, other=0).to(tl.int64)
        return tl.load(a + (numbers * rank)[:, None] + r[None, :], mask, other=0.0)
    total = tl.zeros(mask.shape, tl.float32)
    for split in tl.static_range(SPLITS):
        place = ((rows + split * tokens) * FORM.parts + part) * FORM.rank
        total += tl.load(given + place[:, None] + r[None, :], mask, other=0.0)
    return total.to(FORM.act)


@triton.jit(do_not_specialize=["tokens"])
def expand_kernel(
    y, given, rows, table, tiles, tokens, width, w_row, FORM: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr
):
    """y[t, columns of a part] += inner[t, part] @ B.T; of a table, where a slot has a whole one, y[t] is its row.

    given: inner of `shrink_kernel` in SPLITS parts; if SPLITS is 0, ids to look up. width: of a table's rows.
    tiles int32 [*, 3]: part, column of the part, column of y. Grid: blocks of rows, tiles.
    """
    LOOKUP: tl.constexpr = SPLITS == 0
    slot, row, real = _block(rows, FORM)
    if slot >= FORM.slots:
        return
    tile = tiles + tl.program_id(1) * 3
    part, column, target = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    entry = table + (slot * FORM.parts + part) * WIDTH
    rank = tl.multiple_of(tl.load(entry + 1).to(tl.int32), 16)
    outputs = width if LOOKUP else tl.load(entry + 3).to(tl.int32)
    if FORM.aligned:
        outputs, target = (outputs + 15) // 16 * 16, tl.multiple_of(target, 16)
    whole = tl.load(entry + 4) if LOOKUP else rank.to(tl.int64) * 0
    if (rank == 0) & (whole == 0):
        return
    M: tl.constexpr = FORM.M
    N: tl.constexpr = FORM.N
    n = tl.multiple_of(column, N) + tl.arange(0, N)
    a, b = _matrix(entry, 0, FORM), _matrix(entry, 2, FORM) + n[None, :] * rank
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, rank, R):
        r = start + tl.arange(0, R)
        values = _inner_tile(given, a, row, real, r, rank, tokens, part, FORM, SPLITS)
        factor = tl.load(b + r[:, None], (r < rank)[:, None] & (n < outputs)[None, :], other=0.0)
        total = tl.dot(values, factor, total, input_precision="ieee")
    own = y.data + (row * y.stride)[:, None] + (target + tl.arange(0, N))[None, :]
    mask = real[:, None] & (n < outputs)[None, :]
    if LOOKUP:
        numbers = tl.load(given + row, real, other=0).to(tl.int64)
        from_table = _matrix(entry, 4, FORM) + (numbers * w_row)[:, None] + n[None, :]
        total += tl.load(from_table, mask & (whole != 0), other=0.0).to(tl.float32)
    total += tl.load(own, mask & (whole == 0), other=0.0).to(tl.float32)
    tl.store(own, total.to(y.data.dtype.element_ty), mask)


@triton.jit
def whole_kernel(y, x, rows, table, tiles, depth, w_row, FORM: tl.constexpr, K: tl.constexpr):
    """y[t, columns of a part] = W x[t] where a slot has a W for the part; grid and tiles as of `expand_kernel`."""
    slot, row, real = _block(rows, FORM)
    if slot >= FORM.slots:
        return
    tile = tiles + tl.program_id(1) * 3
    part, column, target = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    entry = table + (slot * FORM.parts + part) * WIDTH
    outputs = tl.load(entry + 5).to(tl.int32)
    if column >= outputs:
        return
    n = column + tl.arange(0, FORM.N)
    w = _matrix(entry, 4, FORM) + n.to(tl.int64)[None, :] * w_row
    total = _product(x, row, real, w, n < outputs, 0, depth, depth, FORM, K)
    own = y.data + (row * y.stride)[:, None] + (target + tl.arange(0, FORM.N))[None, :]
    tl.store(own, total.to(y.data.dtype.element_ty), real[:, None] & (n < outputs)[None, :])


@triton.jit
def limit_kernel(x, limits, width, BLOCK: tl.constexpr):
    """x[r, limits[r] :] = -inf; programs: rows, blocks of columns."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    limit = tl.load(limits + row)
    if first + BLOCK <= limit:
        return
    columns = first + tl.arange(0, BLOCK)
    lowest = tl.full([BLOCK], float("-inf"), tl.float32).to(x.data.dtype.element_ty)
    tl.store(x.data + row * x.stride + columns, lowest, (columns >= limit) & (columns < width))


UNIT = 16  # what ranks and the elements between rows are padded to: bytes for aligned loads, and a product's depth
COLUMNS = 64  # of y that one program writes
LIMIT_COLUMNS = 1024
MAX_SPLITS = 8  # of K among programs
MANY = 256  # rows of a step from which on its blocks are large


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
    """One layer's slots: table int64 [slots, parts, FIELDS], which graphs read; `adapters` keeps what it points to.

    sizes: columns of y of each part. tiles: int32 [*, 3], pieces of parts: part, column of it, column of y. rank: the
    largest, padded. widest: see `Backend.new_lora_slots`.
    """

    sizes: list[int]
    rank: int
    widest: int
    table: torch.Tensor
    tiles: torch.Tensor
    adapters: dict[int, list[PackedLoRA | None]] = field(default_factory=dict)

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
        return min(64, power_of_two(self.rank))


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
        rank = _up(rank, min(64, power_of_two(rank)))
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
        slots.adapters[slot] = list(parts)

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
            _Step(self, slots, rows, len(ids)).expand(y, ids, 0)

    def limit_columns(self, x: torch.Tensor, limits: torch.Tensor) -> None:
        rows, width = x.shape
        if rows:
            grid = rows, -(-width // LIMIT_COLUMNS)
            limit_kernel[grid](whole_rows(x), limits, width, BLOCK=LIMIT_COLUMNS, num_warps=4)


class _Step:
    """The launches for one layer's rows of a step."""

    def __init__(self, backend: ArrayOps, slots: LoRASlots, rows: LoRARows, tokens: int) -> None:
        self.backend, self.slots, self.rows, self.tokens = backend, slots, rows, tokens
        self.wide = backend.act is torch.float32
        self.many = tokens >= MANY and not backend.batch_invariant
        size, number = 64 if self.many and not self.wide else 16, slots.num_slots
        self.blocks = (tokens + min(tokens, number) * (size - 1)) // size
        sizes = len(slots.sizes), number, power_of_two(number), slots.rank
        self.form = Form(*sizes, TL_TYPES[backend.act], size, COLUMNS, slots.aligned)

    def splits(self, depth: int) -> int:
        """Return among how many programs K is split, so that a step of few rows has many."""
        most = max(1, min(MAX_SPLITS, depth // 256))
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
        default = {"BK": 32 if self.wide else 64 if self.many else 128, "num_stages": 4}
        key = f"m{self.form.M}_r{slots.rank_tile}"
        choice = self.backend.tuned_configs.get("lora_shrink", key, default)
        share = _up(-(-depth // splits), choice["BK"])
        options = {"num_warps": 4, "num_stages": choice["num_stages"]}
        sizes = self.tokens, depth, _up(depth), share
        shrink_kernel[(self.blocks, parts * rank // slots.rank_tile, splits)](
            rows_of(x), self.rows, slots.table, inner, *sizes, self.form, slots.rank_tile, choice["BK"], **options
        )

    def expand(self, y: torch.Tensor, given: torch.Tensor, splits: int) -> None:
        """Add what the second factors make of `given`: inner values of so many splits; for 0, ids to look up."""
        slots, rank = self.slots, min(self.slots.rank_tile, 32)
        sizes = self.tokens, slots.sizes[0], _up(slots.sizes[0])
        options = {"num_warps": 4, "num_stages": 2}
        expand_kernel[(self.blocks, slots.tiles.shape[0])](
            whole_rows(y), given, self.rows, slots.table, slots.tiles, *sizes, self.form, rank, splits, **options
        )

    def replace(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """Compute the products of rows whose slot has a matrix in place of the layer's."""
        slots, depth, k = self.slots, x.shape[1], 32 if self.wide else 128
        options = {"num_warps": 4, "num_stages": 4}
        whole_kernel[(self.blocks, slots.tiles.shape[0])](
            whole_rows(y), rows_of(x), self.rows, slots.table, slots.tiles, depth, _up(depth), self.form, k, **options
        )
