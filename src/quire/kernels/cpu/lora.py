"""LoRA on the CPU: rows of one step multiplied with the factors of as many adapters as there are.

Matrices are packed as weights are, [N/16][K][16], and stay where they were packed: a slot is an entry in a table of
addresses, so that exchanging an adapter moves nothing. An op walks (slot, part of the layer, columns, rows): it reads
each adapter's matrix once for all of its rows, and leaves slots without rows at once. What a row gets does not depend
on the others: its sums are two, over even and odd k, added at the end, however many rows are computed side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from quire.checkpoint.tensor import HostTensor
from quire.kernels.cpu.arrays import as_rows, row_step
from quire.kernels.cpu.formats import to_storage
from quire.kernels.cpu.jit import jit, op
from quire.kernels.cpu.pointers import bf16_ptr, f32_ptr, i64_ptr
from quire.kernels.cpu.rows import as_ids, copy_row
from quire.kernels.cpu.simd import add, load, load_lanes, multiply_add, splat, store_lanes
from quire.kernels.cpu.sizes import LANES
from quire.kernels.cpu.threads import Launcher, address_of
from quire.kernels.lora import LoRAChange, LoRARows

ROW_BLOCK = 64  # rows of an item
VECTORS = 8  # of sixteen columns, of an item that writes to a layer's output
# Of a table's entry: address of the matrix (0: none), its outputs and inputs, first column that is read and written.
FIELDS = 5


class Packed(NamedTuple):
    """A matrix in the kernels' layout, float32 or the bits of bfloat16: what comes out of it, and what goes in."""

    data: np.ndarray
    outputs: int
    inputs: int


class PackedLoRA(NamedTuple):
    """A `LoRAChange`, packed."""

    a: Packed | None
    b: Packed | None
    whole: Packed | None


@dataclass(slots=True)
class CPULoRASlots:
    """One layer's slots. Tables int64 [slots, parts, FIELDS]: x to factors' inner values, these to y, x to y.

    sizes: columns of y that belong to each part. widest: columns of the largest `whole` there may be, 0 for none.
    bfloat16: whether matrices are.
    """

    sizes: list[int]
    max_rank: int
    widest: int
    bfloat16: bool
    shrink: np.ndarray
    expand: np.ndarray
    whole: np.ndarray
    packed_parts: dict[tuple[int, int], PackedLoRA] = field(default_factory=dict)

    @property
    def rank_step(self) -> int:
        """Inner values of a part, with those that only fill the last vector."""
        return -(-self.max_rank // LANES) * LANES


@jit
def write(out, at, total, count, adding):
    """Put, or add, the first `count` lanes to out[at : at + count]."""
    if adding != 0:
        total = add(load_lanes(out, at, count), total)
    store_lanes(out, at, total, count)


@jit
def one_row(w, at, depth, x, x_at, out, to, count, adding):
    """Sixteen columns of one row: out[to : to + count] (+)= x[x_at : x_at + depth] times w."""
    even = odd = splat(np.float32(0))
    pairs = depth // 2 * 2
    for k in range(0, pairs, 2):
        even = multiply_add(load(w, at + 16 * k), splat(x[x_at + k]), even)
        odd = multiply_add(load(w, at + 16 * k + 16), splat(x[x_at + k + 1]), odd)
    if pairs < depth:
        even = multiply_add(load(w, at + 16 * pairs), splat(x[x_at + pairs]), even)
    write(out, to, add(even, odd), count, adding)


@jit
def four_rows(w, at, depth, x, x0, x1, x2, x3, out, to0, to1, to2, to3, count, adding):
    """Like `one_row`, four rows at a time."""
    even0 = odd0 = even1 = odd1 = even2 = odd2 = even3 = odd3 = splat(np.float32(0))
    pairs = depth // 2 * 2
    for k in range(0, pairs, 2):
        low, high = load(w, at + 16 * k), load(w, at + 16 * k + 16)
        even0 = multiply_add(low, splat(x[x0 + k]), even0)
        odd0 = multiply_add(high, splat(x[x0 + k + 1]), odd0)
        even1 = multiply_add(low, splat(x[x1 + k]), even1)
        odd1 = multiply_add(high, splat(x[x1 + k + 1]), odd1)
        even2 = multiply_add(low, splat(x[x2 + k]), even2)
        odd2 = multiply_add(high, splat(x[x2 + k + 1]), odd2)
        even3 = multiply_add(low, splat(x[x3 + k]), even3)
        odd3 = multiply_add(high, splat(x[x3 + k + 1]), odd3)
    if pairs < depth:
        low = load(w, at + 16 * pairs)
        even0 = multiply_add(low, splat(x[x0 + pairs]), even0)
        even1 = multiply_add(low, splat(x[x1 + pairs]), even1)
        even2 = multiply_add(low, splat(x[x2 + pairs]), even2)
        even3 = multiply_add(low, splat(x[x3 + pairs]), even3)
    write(out, to0, add(even0, odd0), count, adding)
    write(out, to1, add(even1, odd1), count, adding)
    write(out, to2, add(even2, odd2), count, adding)
    write(out, to3, add(even3, odd3), count, adding)


@jit
def multiply(w, outputs, depth, first_vector, stop_vector, x, x_at, x_step, out, to, step, order, begin, end, adding):
    """Rows order[begin:end] of x times vectors of columns of w."""
    for vector in range(first_vector, min(stop_vector, (outputs + 15) // 16)):
        at, column, count = vector * 16 * depth, to + 16 * vector, min(16, outputs - 16 * vector)
        i = begin
        while i + 4 <= end:
            r0, r1, r2, r3 = order[i], order[i + 1], order[i + 2], order[i + 3]
            source = x, x_at + r0 * x_step, x_at + r1 * x_step, x_at + r2 * x_step, x_at + r3 * x_step
            target = out, column + r0 * step, column + r1 * step, column + r2 * step, column + r3 * step
            four_rows(w, at, depth, *source, *target, count, adding)
            i += 4
        while i < end:
            row = order[i]
            one_row(w, at, depth, x, x_at + row * x_step, out, column + row * step, count, adding)
            i += 1


@op
def lora_product(args, first, last, scratch):
    """x times the matrices of a table. Items are slots in parts in chunks of vectors in blocks of rows.

    args: table, order, starts, x, its row step, out, its row step; slots, parts, chunks, vectors of a chunk; whether to
    add to out; whether matrices are bfloat16.
    """
    table, order, starts = i64_ptr(args[0]), i64_ptr(args[1]), i64_ptr(args[2])
    x, x_step, out, step = f32_ptr(args[3]), args[4], f32_ptr(args[5]), args[6]
    slots, parts, chunks, vectors, adding = args[7], args[8], args[9], args[10], args[11]
    for item in range(first, last):
        slot, rest = item % slots, item // slots
        begin = starts[slot] + rest // (parts * chunks) * ROW_BLOCK
        end = min(begin + ROW_BLOCK, starts[slot + 1])
        if begin >= end:
            continue
        entry = (slot * parts + rest % parts) * FIELDS
        address = table[entry]
        if address == 0:
            continue
        outputs, depth, x_at, to = table[entry + 1], table[entry + 2], table[entry + 3], table[entry + 4]
        low = rest // parts % chunks * vectors
        high = low + vectors
        if args[12] != 0:
            w = bf16_ptr(address)
            multiply(w, outputs, depth, low, high, x, x_at, x_step, out, to, step, order, begin, end, adding)
        else:
            v = f32_ptr(address)
            multiply(v, outputs, depth, low, high, x, x_at, x_step, out, to, step, order, begin, end, adding)


@op
def lora_rows(args, first, last, scratch):
    """Rows of the slots' matrices. Items are ids. args: table, slots of rows, ids, out, its row step, if bfloat16."""
    table, slots, ids, out, step = i64_ptr(args[0]), i64_ptr(args[1]), i64_ptr(args[2]), f32_ptr(args[3]), args[4]
    for item in range(first, last):
        slot = slots[item]
        if slot < 0:
            continue
        entry = slot * FIELDS
        address, width = table[entry], table[entry + 1]
        if address == 0:
            continue
        at, to = ids[item] * width, item * step
        if args[5] != 0:
            copy_row(bf16_ptr(address), at, out, to, width)
        else:
            copy_row(f32_ptr(address), at, out, to, width)


@op
def limit_row(args, first, last, scratch):
    """Items are rows. x, elements between its rows, their width, number of columns that each row keeps."""
    x, step, width, limits = f32_ptr(args[0]), args[1], args[2], i64_ptr(args[3])
    for row in range(first, last):
        for column in range(limits[row], width):
            x[row * step + column] = -np.float32(np.inf)


def _stored(matrix: np.ndarray, dtype: str) -> np.ndarray:
    """Return a flat copy of float32 values in a storage format: bfloat16, or float32 for all others."""
    flat = HostTensor(np.array(matrix, np.float32, order="C").reshape(-1), "float32")
    return to_storage(flat, "bfloat16" if dtype == "bfloat16" else "float32")


def _panels(matrix: np.ndarray, dtype: str) -> Packed:
    """Pack [N, K] as [N/16][K][16], N padded with zeros."""
    outputs, depth = matrix.shape
    padded = np.zeros((-(-outputs // LANES) * LANES, depth), np.float32)
    padded[:outputs] = matrix
    return Packed(_stored(padded.reshape(-1, LANES, depth).transpose(0, 2, 1), dtype), outputs, depth)


def _rows(matrix: np.ndarray, dtype: str) -> Packed:
    """Pack [N, K] row by row, for looking rows up: what comes out is K wide."""
    return Packed(_stored(matrix, dtype), matrix.shape[1], matrix.shape[0])


def pack(change: LoRAChange, dtype: str, *, lookup: bool) -> PackedLoRA:
    """Pack what an adapter changes, in bfloat16 or float32."""
    a, b, whole = change.a, change.b, change.whole
    if lookup:
        inner = None if a is None else _rows(a.T, dtype)
        table = None if whole is None else _rows(whole, dtype)
    else:
        inner = None if a is None else _panels(a, dtype)
        table = None if whole is None else _panels(whole, dtype)
    return PackedLoRA(inner, None if b is None else _panels(b, dtype), table)


def new_slots(num_slots: int, max_rank: int, sizes: Sequence[int], widest: int, dtype: str) -> CPULoRASlots:
    """Return empty slots, see `Backend.new_lora_slots`."""
    shrink, expand, whole = (np.zeros((num_slots, len(sizes), FIELDS), np.int64) for _ in range(3))
    return CPULoRASlots(list(sizes), max_rank, widest, dtype == "bfloat16", shrink, expand, whole)


def set_slot(slots: CPULoRASlots, slot: int, parts: Sequence[PackedLoRA | None]) -> None:
    """Put an adapter's changes into a slot, in the place of what was there."""
    column = 0
    for number, (size, packed) in enumerate(zip(slots.sizes, parts, strict=True)):
        inner = number * slots.rank_step
        for table in (slots.shrink, slots.expand, slots.whole):
            table[slot, number] = 0
        slots.packed_parts.pop((slot, number), None)
        if packed is not None:
            slots.packed_parts[slot, number] = packed
            _enter(slots.shrink[slot, number], packed.a, 0, inner)
            _enter(slots.expand[slot, number], packed.b, inner, column)
            _enter(slots.whole[slot, number], packed.whole, 0, column)
        column += size


def _enter(entry: np.ndarray, packed: Packed | None, source: int, target: int) -> None:
    if packed is not None:
        entry[:] = address_of(packed.data), packed.outputs, packed.inputs, source, target


def _product(
    launcher: Launcher,
    out: np.ndarray,
    x: np.ndarray,
    table: np.ndarray,
    rows: LoRARows,
    *,
    columns: int,
    work: int,
    bfloat16: bool,
    vectors: int = VECTORS,
    adding: bool = False,
) -> None:
    """Multiply rows of x with the matrices of a table, of at most so many columns, into columns of out."""
    source, x_step = as_rows(x)
    slots, parts, _ = table.shape
    chunks = -(-columns // (LANES * vectors))
    items = slots * parts * chunks * -(-x.shape[0] // ROW_BLOCK)
    args = (table, rows.order, rows.starts, source, x_step, out, row_step(out))
    launcher.emit(
        lora_product, *args, slots, parts, chunks, vectors, int(adding), int(bfloat16), items=items, work=work
    )


def lora(launcher: Launcher, y: np.ndarray, x: np.ndarray, slots: CPULoRASlots, rows: LoRARows) -> None:
    """Change y [T, N] in place by what the adapters of its rows make of x [T, K]; see `Backend.lora`."""
    bits, count, depth = slots.bfloat16, x.shape[0], x.shape[1]
    if count == 0:
        return
    if slots.widest:
        work = count * depth * slots.widest
        _product(launcher, y, x, slots.whole, rows, columns=slots.widest, work=work, bfloat16=bits)
    inner, step = _inner(launcher, count, slots), slots.rank_step
    work = inner.size * depth
    _product(launcher, inner, x, slots.shrink, rows, columns=step, work=work, bfloat16=bits, vectors=1)
    _expand(launcher, y, inner, slots, rows)


def lora_embedding(launcher: Launcher, y: np.ndarray, ids: np.ndarray, slots: CPULoRASlots, rows: LoRARows) -> None:
    """Change the looked-up rows y [T, K] of `ids` in place; see `Backend.lora_embedding`."""
    numbers, count = as_ids(launcher, ids), len(ids)
    if count == 0:
        return
    inner = _inner(launcher, count, slots)
    for table, out in ((slots.whole, y), (slots.shrink, inner)):
        args = (table, rows.slots, numbers, out, row_step(out), int(slots.bfloat16))
        launcher.emit(lora_rows, *args, items=count, work=count * out.shape[1])
    _expand(launcher, y, inner, slots, rows)


def _inner(launcher: Launcher, count: int, slots: CPULoRASlots) -> np.ndarray:
    """Return the inner values between the two factors; only what is written is read."""
    return launcher.empty((count, len(slots.sizes) * slots.rank_step))


def _expand(launcher: Launcher, y: np.ndarray, inner: np.ndarray, slots: CPULoRASlots, rows: LoRARows) -> None:
    columns, work = max(slots.sizes), inner.shape[0] * slots.max_rank * sum(slots.sizes)
    _product(launcher, y, inner, slots.expand, rows, columns=columns, work=work, bfloat16=slots.bfloat16, adding=True)


def limit_columns(launcher: Launcher, x: np.ndarray, limits: np.ndarray) -> None:
    """Set x[r, limits[r] :] to -inf, in place; see `Backend.limit_columns`."""
    rows, width = x.shape
    launcher.emit(limit_row, x, row_step(x), width, as_ids(launcher, limits), items=rows, work=rows)
