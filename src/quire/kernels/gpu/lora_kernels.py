"""Kernels of LoRA adapters: rows of a step times the factors of as many adapters as there are.

A slot's matrices stay where they were packed; kernels read their addresses from a table, so that a recording finds
whatever lies in a slot by then. Programs have rows of one slot, the n-th block of them in the order of slots, and find
out which from how many rows each slot has. So a matrix is read once for all rows of a block, and what bounds a decode
step is latency: x @ A is split along K among programs, whose sums B's kernel adds up, in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
