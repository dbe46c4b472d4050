"""Paged attention on CPUs: the ops that do work items, in float32 and in pairs of bfloat16. `attention.py` emits them.

The context is cut into segments of 128 positions, aligned to position 0. For each segment a row gets the largest score,
the sum of its weights relative to that score, and the values so weighted; segments are then merged into the row one
after the other (online softmax: Milakov & Gimelshein 2018; Dao et al. 2022, 2023). A row starts from its sink, if it
has one. Whether one item walks all segments of a row or several items leave partial results for `merge`, the arithmetic
and its order are the same, so a row's bits do not depend on how work is split, on other rows, or on threads. Positions
that a row does not see have weight zero, and segments it sees nothing of are not merged.

An item takes some queries of one sequence and one KV head; its rows are those queries times the query heads that share
the KV head. It goes through the rows in groups of eight.

- In float32, for every storage format and CPU: a tile of keys, and later one of values, is widened once for all rows of
  the item, and nothing is rounded.
- In pairs, on CPUs with bfloat16 dot products: the paired cache is read as it is stored. Queries times the scale, and
  softmax weights, are rounded to bfloat16; scores, sums and their combination are float32. int8 keys and values become
  bfloat16 exactly, their scales are multiplied into scores and weights.
"""

from __future__ import annotations

import numpy as np

from quire.kernels.cpu.activations import capped
from quire.kernels.cpu.jit import inline_jit, jit, op_of, ops_by_dtype
from quire.kernels.cpu.pointers import FORMATS, bf16_ptr, f32_ptr, float64_from_bits, i8_ptr, i32_ptr, i64_ptr, u32_ptr
from quire.kernels.cpu.quantize import load_within
from quire.kernels.cpu.simd import (
    HALF_PAIRS,
    LANES,
    TILE_ROWS,
    add,
    div,
    exp,
    get,
    interleave_pairs,
    lane_indices,
    load,
    maximum,
    mul,
    multiply_add,
    prefetch,
    put,
    reduce_max,
    reduce_sum,
    scale_add,
    score_tile,
    select_lanes,
    splat,
    store,
    store_lanes,
    store_pairs,
    store_weights,
    sub,
    tile_four,
    tile_many,
    tile_one,
    tile_two,
    transpose_pairs,
    transpose_tile,
    value_tile,
    widen_int8_pairs,
)
from quire.kernels.cpu.sizes import GROUP, RECORD, SEGMENT
from quire.kernels.cpu.team import offset

TILE = 32  # positions of a register tile
NEG_INF = np.float32(-np.inf)

# Arguments of `merge` and of the attend ops; strides in elements, see `attention.paged_attention`
Q, Q_STRIDE, OUT, KEYS, VALUES, KEY_SCALES, VALUE_SCALES, TABLES, TABLE_STRIDE, WORK, PARTIALS = range(11)
# OUT_SIZE: elements of a value. A latent cache has no VALUES: they are the first elements of the keys, and KV_HEADS is
# the number of groups into which the query heads are cut, that all share them.
NUM_HEADS, KV_HEADS, SIZE, OUT_SIZE, BLOCK_SIZE, BEHIND, AHEAD = range(11, 18)
SCALE, SOFTCAP, SINKS, SLOPES, PARTIAL_ROWS, ITEM_ROWS = range(18, 24)

# A record of the plan, int64: queries `row` .. of the step belong to sequence `sequence`, of `length` tokens, and stand
# at `position` ..; segments first .. last - 1. The partial result of a segment is number FIRST_PARTIAL + head *
# NUM_PARTIALS + segment; there are none if NUM_PARTIALS is 0.
SEQUENCE, ROW, COUNT, POSITION, FIRST, LAST, FIRST_PARTIAL, NUM_PARTIALS, COST, LENGTH = range(RECORD)


@jit
def after(address, size):
    """Return the next multiple of 64 after `size` bytes."""
    return address + (size + 63) // 64 * 64


@jit
def pad(size):
    """Return how many columns the sums of a head have: a multiple of 32."""
    return (size + 31) // 32 * 32


@jit
def row_state(scratch, rows, padded):
    """Return pointers to the state of `rows` rows, and the address behind it.

    Positions, and which a row sees first and last + 1, int64; slopes, largest scores, sums of weights (arrays that may
    be loaded 15 elements too far) and weighted values [rows][padded].
    """
    begins = after(scratch, 8 * rows)
    ends = after(begins, 8 * rows)
    slopes = after(ends, 8 * rows)
    largest = after(slopes, 4 * (rows + LANES))
    total = after(largest, 4 * (rows + LANES))
    sums = after(total, 4 * (rows + LANES))
    end = after(sums, 4 * rows * padded)
    seen = i64_ptr(scratch), i64_ptr(begins), i64_ptr(ends)
    return (seen, f32_ptr(slopes), f32_ptr(largest), f32_ptr(total), f32_ptr(sums)), end


@jit
def partial_size(rows, padded):
    """Return the size of a partial result, in float32: `rows` largest scores, sums of weights, and weighted values."""
    return 2 * (rows + LANES) + rows * padded


@jit
def partial_address(args, record, head, segment, padded):
    """Return the address of the partial result of a segment."""
    partial = record[FIRST_PARTIAL] + head * record[NUM_PARTIALS] + segment
    return args[PARTIALS] + 4 * partial * partial_size(args[PARTIAL_ROWS], padded)


@jit
def partial_pointers(partial, rows, row, padded):
    """Return pointers to the largest scores, sums and values of a partial result of `rows` rows, from row `row` on."""
    totals, values = partial + 4 * (rows + LANES), partial + 8 * (rows + LANES)
    return f32_ptr(partial + 4 * row), f32_ptr(totals + 4 * row), f32_ptr(values + 4 * row * padded)


@jit
def start(args, record, head, state, used, padded):
    """Fill the state of the item's rows; row r is query r // group and head r % group of those sharing the KV head."""
    (positions, begins, ends), slopes, largest, total, sums = state
    group = args[NUM_HEADS] // args[KV_HEADS]
    for row in range(used):
        h = head * group + row % group
        position = record[POSITION] + row // group
        positions[row], begins[row] = position, first_visible(position, args[BEHIND])
        ends[row] = end_visible(position, args[AHEAD], record[LENGTH])
        slopes[row] = f32_ptr(args[SLOPES])[h] if args[SLOPES] != 0 else np.float32(0)
        largest[row] = f32_ptr(args[SINKS])[h] if args[SINKS] != 0 else NEG_INF
        total[row] = np.float32(1) if args[SINKS] != 0 else np.float32(0)
    for d in range(0, used * padded, LANES):
        store(sums, d, splat(np.float32(0)))


@jit
def first_visible(position, behind):
    """Return the first position that the query at `position` sees."""
    return max(0, position - behind)


@jit
def end_visible(position, ahead, length):
    """Return one more than the last position that the query at `position` sees."""
    return min(length, position + ahead + 1)


@jit
def visible_tiles(state, row, rows, base):
    """Return the first and last + 1 of the segment's tiles that some of the rows see."""
    (_, begins, ends), _, _, _, _ = state
    low, high = begins[row], ends[row + rows - 1]
    first = max(0, low - base) // TILE
    last = (min(SEGMENT, high - base) + TILE - 1) // TILE
    return first, last


@jit
def extent(state, used):
    """Return the first and last + 1 position that some row of the item sees."""
    (_, begins, ends), _, _, _, _ = state
    return begins[0], ends[used - 1]


@jit
def block_of(table, position, block_size):
    """Return the block of a position and its place there."""
    return np.int64(table[position // block_size]), position % block_size


@jit
def load_scales(args, table, head, base, low, high, key_scales, value_scales):
    """Write the scales of a segment's keys and values, zeros outside low .. high."""
    block_size, heads = args[BLOCK_SIZE], args[KV_HEADS]
    keys, values, zero = f32_ptr(args[KEY_SCALES]), f32_ptr(args[VALUE_SCALES]), np.float32(0)
    for half in range(0, SEGMENT, LANES):
        position = base + half
        if position >= high or position + LANES <= low:
            store(key_scales, half, splat(zero))
            store(value_scales, half, splat(zero))
        elif block_size % LANES == 0:
            block, offset = block_of(table, position, block_size)
            at, first, last = (block * heads + head) * block_size + offset, low - position, high - position
            store(key_scales, half, select_lanes(load(keys, at), first, last, zero))
            store(value_scales, half, select_lanes(load(values, at), first, last, zero))
        else:
            for j in range(half, half + LANES):
                key_scales[j], value_scales[j] = zero, zero
                if low <= base + j < high:
                    block, offset = block_of(table, base + j, block_size)
                    at = (block * heads + head) * block_size + offset
                    key_scales[j], value_scales[j] = keys[at], values[at]


# Scores to weights


@jit
def shape_scores(v, softcap, slope, distance, low, high):
    """Apply softcap and ALiBi to sixteen scores of keys `distance` .. after the query; keep positions low .. high."""
    if softcap > 0:
        v = capped(v, splat(np.float32(softcap)))
    if slope != 0:
        v = multiply_add(splat(slope), add(lane_indices(), splat(np.float32(distance))), v)
    return select_lanes(v, low - distance, high - distance, NEG_INF)


@jit
def mask_and_max(args, scores, row, rows, base, first, last, state, key_scales, maxes):
    """Finish the scores [rows][SEGMENT] in tiles first .. last - 1; write each row's largest to `maxes`."""
    (positions, begins, ends), slopes, _, _, _ = state
    softcap, scaled = float64_from_bits(args[SOFTCAP]), args[KEY_SCALES] != 0
    shaped = scaled or softcap > 0 or args[SLOPES] != 0
    for r in range(rows):
        position, slope = positions[row + r], slopes[row + r]
        low, high = begins[row + r], ends[row + r]
        most = splat(NEG_INF)
        for tile in range(first, last):
            at, here = r * SEGMENT + tile * TILE, base + tile * TILE
            v0, v1 = load(scores, at), load(scores, at + LANES)
            if shaped or here < low or here + TILE > high:
                if scaled:
                    v0 = mul(v0, load(key_scales, tile * TILE))
                    v1 = mul(v1, load(key_scales, tile * TILE + LANES))
                away = here - position
                v0 = shape_scores(v0, softcap, slope, away, low - position, high - position)
                v1 = shape_scores(v1, softcap, slope, away + LANES, low - position, high - position)
                store(scores, at, v0)
                store(scores, at + LANES, v1)
            most = maximum(most, maximum(v0, v1))
        maxes[r] = reduce_max(most)


@jit
def softmax_pairs(scores, weights, rows, first, last, scaled, value_scales, maxes, totals):
    """Turn scores into bfloat16 weights, relative to the row's largest; `totals` are sums of the rounded ones.

    With int8 values their scales are multiplied into the weights, after those were added, unrounded, to the sums.
    """
    for r in range(rows):
        most, total = splat(maxes[r]), splat(np.float32(0))
        for tile in range(first, last):
            at = r * SEGMENT + tile * TILE
            v0, v1 = exp(sub(load(scores, at), most)), exp(sub(load(scores, at + LANES), most))
            if scaled:
                total = add(total, add(v0, v1))
                v0 = mul(v0, load(value_scales, tile * TILE))
                v1 = mul(v1, load(value_scales, tile * TILE + LANES))
                store_pairs(weights, at // 2, v0, v1)
            else:
                total = store_weights(weights, at // 2, v0, v1, total)
        totals[r] = reduce_sum(total)


@jit
def softmax_floats(scores, rows, first, last, scaled, value_scales, maxes, totals):
    """Turn scores into weights in place, relative to the row's largest; see `softmax_pairs` for the scales."""
    for r in range(rows):
        most, total = splat(maxes[r]), splat(np.float32(0))
        for tile in range(first, last):
            at = r * SEGMENT + tile * TILE
            v0, v1 = exp(sub(load(scores, at), most)), exp(sub(load(scores, at + LANES), most))
            total = add(total, add(v0, v1))
            if scaled:
                v0 = mul(v0, load(value_scales, tile * TILE))
                v1 = mul(v1, load(value_scales, tile * TILE + LANES))
            store(scores, at, v0)
            store(scores, at + LANES, v1)
        totals[r] = reduce_sum(total)


# Segments to rows


@jit
def merge_segment(args, state, row, rows, base, maxes, totals, values, padded, work):
    """Merge the segment that starts at `base` into `rows` <= 8 rows; `work`: 48 floats of scratch."""
    (_, begins, ends), _, largest, total, sums = state
    old, seen = load(largest, row), load(maxes, 0)
    new = maximum(old, seen)
    store(work, 0, exp(sub(old, new)))
    store(work, LANES, exp(sub(seen, new)))
    store(work, 2 * LANES, new)
    for r in range(rows):
        if ends[row + r] <= base or begins[row + r] >= base + SEGMENT:
            continue
        before, now, to = work[r], work[LANES + r], (row + r) * padded
        largest[row + r] = work[2 * LANES + r]
        total[row + r] = total[row + r] * before + totals[r] * now
        for d in range(0, padded, LANES):
            store(sums, to + d, scale_add(load(sums, to + d), before, load(values, r * padded + d), now))


@jit
def finish(args, record, head, state, used, padded):
    """Divide the rows' weighted values by their weights and write them out."""
    _, _, _, total, sums = state
    num_heads, size, out = args[NUM_HEADS], args[OUT_SIZE], f32_ptr(args[OUT])
    group = num_heads // args[KV_HEADS]
    for row in range(used):
        at = ((record[ROW] + row // group) * num_heads + head * group + row % group) * size
        whole = splat(total[row])
        for d in range(0, size, LANES):
            store_lanes(out, at + d, div(load(sums, row * padded + d), whole), min(LANES, size - d))


@jit
def merge_item(args, record, head, scratch):
    """Merge the partial results of some rows, for one KV head."""
    padded = pad(args[OUT_SIZE])
    used = record[COUNT] * (args[NUM_HEADS] // args[KV_HEADS])
    state, work = row_state(scratch, args[PARTIAL_ROWS], padded)
    start(args, record, head, state, used, padded)
    for segment in range(record[FIRST], record[LAST]):
        partial = partial_address(args, record, head, segment, padded)
        for row in range(0, used, GROUP):
            maxes, totals, values = partial_pointers(partial, args[PARTIAL_ROWS], row, padded)
            rows = min(GROUP, used - row)
            merge_segment(args, state, row, rows, segment * SEGMENT, maxes, totals, values, padded, f32_ptr(work))
    finish(args, record, head, state, used, padded)


def _op_of_items(name, work):
    """Return the op whose item i is record i // Hkv of the plan and KV head, or group of heads, i % Hkv."""

    @jit
    def items(args, first, last, scratch):
        heads = args[KV_HEADS]
        for item in range(first, last):
            work(args, i64_ptr(args[WORK] + 8 * RECORD * (item // heads)), item % heads, scratch)

    return op_of(name, items)


merge = _op_of_items("merge", merge_item)


# Items in float32


@jit
def copy_queries(args, record, head, used, q_rows):
    """q_rows [rows][D] = queries times the scale."""
    size, q, scale = args[SIZE], f32_ptr(args[Q]), np.float32(float64_from_bits(args[SCALE]))
    group = args[NUM_HEADS] // args[KV_HEADS]
    for row in range(used):
        at = (record[ROW] + row // group) * args[Q_STRIDE] + (head * group + row % group) * size
        for d in range(size):
            q_rows[row * size + d] = q[at + d] * scale


# Reading tiles. Positions outside low..high are not read, for their blocks may be anyone's, and count as zeros.


@jit
def load_keys(args, keys, table, head, base, low, high, tile):
    """tile[d * 32 + j] = element d of the key at position base + j."""
    size, block_size, heads = args[SIZE], args[BLOCK_SIZE], args[KV_HEADS]
    if block_size % LANES == 0:
        for half in (0, LANES):
            position = base + half
            if position >= high or position + LANES <= low:
                for d in range(size):
                    store(tile, d * TILE + half, splat(np.float32(0)))
                continue
            block, offset = block_of(table, position, block_size)
            at = (block * heads + head) * size * block_size + offset
            whole = low <= position and position + LANES <= high
            for d in range(size):
                v = load(keys, at + d * block_size)
                store(tile, d * TILE + half, v if whole else select_lanes(v, low - position, high - position, 0.0))
    else:
        for j in range(TILE):
            position = base + j
            inside = low <= position < high
            block, offset = 0, position % block_size
            if inside:
                block = np.int64(table[position // block_size])
            at = (block * heads + head) * size * block_size + offset
            for d in range(size):
                tile[d * TILE + j] = get(keys, at + d * block_size) if inside else np.float32(0)


@jit
def load_values(args, values, table, head, heads, step, size, base, low, high, padded, tile):
    """tile[j * padded + d] = element d of the value at position base + j; columns from `size` on are anything.

    The cache has `heads` heads of `step` elements.
    """
    block_size = args[BLOCK_SIZE]
    for j in range(TILE):
        position = base + j
        if low <= position < high:
            block, offset = block_of(table, position, block_size)
            at = ((block * heads + head) * block_size + offset) * step
            whole = size // LANES * LANES
            for d in range(0, whole, LANES):
                store(tile, j * padded + d, load(values, at + d))
            for d in range(whole, size):
                tile[j * padded + d] = get(values, at + d)
        else:
            for d in range(0, padded, LANES):
                store(tile, j * padded + d, splat(np.float32(0)))


@jit
def load_latent_keys(args, latents, table, base, low, high, rows, tile):
    """Like `load_keys` from a latent cache; `rows` [32][pad(D)] is scratch."""
    size = args[SIZE]
    padded, whole = pad(size), size // LANES * LANES
    load_values(args, latents, table, 0, 1, size, size, base, low, high, padded, rows)
    for half in (0, LANES):
        for d in range(0, whole, LANES):
            transpose_tile(rows, half * padded + d, padded, tile, d * TILE + half, TILE)
        for d in range(whole, size):
            for j in range(half, half + LANES):
                tile[d * TILE + j] = rows[j * padded + d]


# Products, for a group of up to 8 rows; an element's bits do not depend on the height of the register tile


@jit
def product(w, w_at, w_step, x, x_at, x_next, depth, out, out_at, out_next, rows, add):
    """out [rows][32] = x [rows][depth] times w [depth][32], added to what is there if `add` is not 0."""
    row = 0
    while row + TILE_ROWS <= rows:
        x_row, to = x_at + row * x_next, out_at + row * out_next
        tile_many(w, w_at, w_step, LANES, x, x_row, 1, x_next, depth, out, to, out_next, add)
        row += TILE_ROWS
    if row + 4 <= rows:
        x_row, to = x_at + row * x_next, out_at + row * out_next
        tile_four(w, w_at, w_step, LANES, x, x_row, 1, x_next, depth, out, to, out_next, add)
        row += 4
    if row + 2 <= rows:
        x_row, to = x_at + row * x_next, out_at + row * out_next
        tile_two(w, w_at, w_step, LANES, x, x_row, 1, x_next, depth, out, to, out_next, add)
        row += 2
    if row < rows:
        x_row, to = x_at + row * x_next, out_at + row * out_next
        tile_one(w, w_at, w_step, LANES, x, x_row, 1, x_next, depth, out, to, out_next, add)


@jit
def score_rows(args, state, used, base, tile, q_rows, key_tile, scores):
    """Write the scores [rows][SEGMENT] of one tile for the groups that see some of it."""
    size = args[SIZE]
    for row in range(0, used, GROUP):
        rows = min(GROUP, used - row)
        first, last = visible_tiles(state, row, rows, base)
        if first <= tile < last:
            to = row * SEGMENT + tile * TILE
            product(key_tile, 0, TILE, q_rows, row * size, size, size, scores, to, SEGMENT, rows, 0)


@jit
def add_values(args, state, used, base, tile, scores, value_tile, sums, padded):
    """sums [rows][padded] += weights of one tile times its values, for the groups that see some of it."""
    for row in range(0, used, GROUP):
        rows = min(GROUP, used - row)
        first, last = visible_tiles(state, row, rows, base)
        if first <= tile < last:
            at, again = row * SEGMENT + tile * TILE, 1 if tile > first else 0
            for column in range(0, padded, TILE):
                to = row * padded + column
                product(value_tile, column, padded, scores, at, SEGMENT, TILE, sums, to, padded, rows, again)


# Items


@jit
def float_buffers(scratch, rows, size):
    """Return the addresses of an item's buffers behind its state: see `attend_floats`; the last is the end."""
    padded = pad(size)
    scales = scratch
    group = after(scales, 4 * 2 * SEGMENT)
    maxes = after(group, 4 * 3 * LANES)
    totals = after(maxes, 4 * (rows + LANES))
    part_values = after(totals, 4 * (rows + LANES))
    scores = after(part_values, 4 * rows * padded)
    q_rows = after(scores, 4 * rows * SEGMENT)
    key_tile = after(q_rows, 4 * rows * size)
    value_tile = after(key_tile, 4 * TILE * size)
    end = after(value_tile, 4 * TILE * padded)
    return scales, group, maxes, totals, part_values, scores, q_rows, key_tile, value_tile, end


@inline_jit
def attend_segment(args, keys, values, table, head, base, low, high, used, state, places, maxes, totals, sums):
    """Write largest scores, sums of weights and weighted values of a segment for all rows that see some of it.

    `values` None says, while this is compiled, that `keys` is a latent cache.
    """
    size, scaled = args[OUT_SIZE], args[KEY_SCALES] != 0
    padded = pad(size)
    key_scales, value_scales, scores = f32_ptr(places[0]), f32_ptr(places[0] + 4 * SEGMENT), f32_ptr(places[5])
    first, last = max(0, low - base) // TILE, (min(SEGMENT, high - base) + TILE - 1) // TILE
    if scaled:
        load_scales(args, table, head, base, low, high, key_scales, value_scales)
    for tile in range(first, last):
        here = base + tile * TILE
        if values is None:
            load_latent_keys(args, keys, table, here, low, high, f32_ptr(places[8]), f32_ptr(places[7]))
        else:
            load_keys(args, keys, table, head, here, low, high, f32_ptr(places[7]))
        score_rows(args, state, used, base, tile, f32_ptr(places[6]), f32_ptr(places[7]), scores)
    for row in range(0, used, GROUP):
        rows = min(GROUP, used - row)
        begin, end = visible_tiles(state, row, rows, base)
        if begin < end:
            group_scores = f32_ptr(places[5] + 4 * row * SEGMENT)
            group_maxes, group_totals = offset(maxes, row), offset(totals, row)
            mask_and_max(args, group_scores, row, rows, base, begin, end, state, key_scales, group_maxes)
            softmax_floats(group_scores, rows, begin, end, scaled, value_scales, group_maxes, group_totals)
    for tile in range(first, last):
        here, to = base + tile * TILE, f32_ptr(places[8])
        if values is None:
            load_values(args, keys, table, 0, 1, args[SIZE], size, here, low, high, padded, to)
        else:
            load_values(args, values, table, head, args[KV_HEADS], size, size, here, low, high, padded, to)
        add_values(args, state, used, base, tile, scores, f32_ptr(places[8]), sums, padded)


@inline_jit
def attend_floats(args, keys, values, record, head, scratch):
    """Attention of an item's rows, or its partial results for `merge`, for one KV head."""
    size = args[SIZE]
    padded, used = pad(args[OUT_SIZE]), record[COUNT] * (args[NUM_HEADS] // args[KV_HEADS])
    state, behind = row_state(scratch, args[ITEM_ROWS], padded)
    places = float_buffers(behind, args[ITEM_ROWS], size)
    table = i32_ptr(args[TABLES] + 4 * args[TABLE_STRIDE] * record[SEQUENCE])
    start(args, record, head, state, used, padded)
    copy_queries(args, record, head, used, f32_ptr(places[6]))
    low, high = extent(state, used)
    for segment in range(record[FIRST], record[LAST]):
        base = segment * SEGMENT
        maxes, totals, sums = f32_ptr(places[2]), f32_ptr(places[3]), f32_ptr(places[4])
        if record[NUM_PARTIALS] > 0:
            maxes, totals, sums = partial_pointers(
                partial_address(args, record, head, segment, padded), args[PARTIAL_ROWS], 0, padded
            )
        attend_segment(args, keys, values, table, head, base, low, high, used, state, places, maxes, totals, sums)
        if record[NUM_PARTIALS] == 0:
            for row in range(0, used, GROUP):
                rows = min(GROUP, used - row)
                begin, end = visible_tiles(state, row, rows, base)
                if begin < end:
                    part_values, work = offset(sums, row * padded), f32_ptr(places[1])
                    merge_segment(
                        args, state, row, rows, base, offset(maxes, row), offset(totals, row), part_values, padded, work
                    )
    if record[NUM_PARTIALS] == 0:
        finish(args, record, head, state, used, padded)


@inline_jit
def attend(elements, args, first, last, scratch):
    """Do some items: item i is record i // Hkv of the plan and KV head i % Hkv."""
    heads, keys, values = args[KV_HEADS], elements(args[KEYS]), elements(args[VALUES])
    for item in range(first, last):
        attend_floats(args, keys, values, i64_ptr(args[WORK] + 8 * RECORD * (item // heads)), item % heads, scratch)


@inline_jit
def attend_latent(elements, args, first, last, scratch):
    """Like `attend` for a latent cache."""
    heads, latents = args[KV_HEADS], elements(args[KEYS])
    for item in range(first, last):
        attend_floats(args, latents, None, i64_ptr(args[WORK] + 8 * RECORD * (item // heads)), item % heads, scratch)


ATTEND = ops_by_dtype("attend", attend, FORMATS)
ATTEND_LATENT = ops_by_dtype("attend_latent", attend_latent)


# Items in pairs of bfloat16

HALVES = SEGMENT // LANES
ELEMENT, PAIR = 2, 4  # bytes
PREFETCH_AHEAD = 64  # positions between int8 that are widened and those that are prefetched: as long as memory takes


@jit
def pack_queries(args, record, head, used, packed, line):
    """Round queries times the scale; eight rows at a time lie as uint32 [D/2][rows]. `line`: a row's scratch.

    An odd size has a last pair whose second half is zero.
    """
    size, q = args[SIZE], f32_ptr(args[Q])
    pairs = (size + 1) // 2
    group = args[NUM_HEADS] // args[KV_HEADS]
    scale = splat(np.float32(float64_from_bits(args[SCALE])))
    for row in range(used):
        at = (record[ROW] + row // group) * args[Q_STRIDE] + (head * group + row % group) * size
        for d in range(0, size, TILE):
            v0, v1 = load_within(q, at, d, size), load_within(q, at, d + LANES, size)
            store_pairs(line, d // 2, mul(v0, scale), mul(v1, scale))
        first = row // GROUP * GROUP
        rows, to = min(GROUP, used - first), first * pairs + row - first
        for pair in range(pairs):
            packed[to + pair * rows] = line[pair]


# Where the keys and values of a segment lie: one address for 16 positions, for keys and for values. Positions outside
# low .. high are not read as values, for their blocks may be anyone's: there weights are zero, and zero times a NaN is
# not. As keys anything may be read, for their scores are masked.


@jit
def inside_mask(position, low, high):
    """Return ones in the halves of a pair of positions that lie in low .. high."""
    lower = np.uint32(0xFFFF) if low <= position < high else np.uint32(0)
    upper = np.uint32(0xFFFF0000) if low <= position + 1 < high else np.uint32(0)
    return np.uint32(lower | upper)


@jit
def copy_values(args, table, head, position, low, high, copy):
    """Copy the values of 16 positions as [8][D] pairs, zeros outside low .. high."""
    size, block_size = args[SIZE], args[BLOCK_SIZE]
    for j in range(HALF_PAIRS):
        mask = inside_mask(position + 2 * j, low, high)
        to = j * size
        if mask == 0:
            for d in range(size):
                copy[to + d] = np.uint32(0)
        else:
            block, offset = block_of(table, position + 2 * j, block_size)
            at = (block * args[KV_HEADS] + head) * block_size // 2 * size + offset // 2 * size
            source = u32_ptr(args[VALUES] + PAIR * at)
            for d in range(size):
                copy[to + d] = source[d] & mask


@jit
def copy_keys(args, table, head, position, low, high, copy):
    """Copy the keys of 16 positions as [D/2][16] pairs; those outside low .. high stay what they are."""
    size, block_size = args[SIZE], args[BLOCK_SIZE]
    for j in range(max(0, low - position), min(LANES, high - position)):
        block, offset = block_of(table, position + j, block_size)
        source = u32_ptr(args[KEYS] + PAIR * ((block * args[KV_HEADS] + head) * (size // 2) * block_size + offset))
        for pair in range(size // 2):
            copy[pair * LANES + j] = source[pair * block_size]


@jit
def locate_halves(args, table, head, base, low, high, keys, values, copies, zeros):
    """Write the addresses of a bfloat16 segment and of the keys after it; return the step between pairs of keys.

    `copies` [HALVES][16 * D] elements of keys, then of values, for what cannot be read in place.
    """
    size, block_size = args[SIZE], args[BLOCK_SIZE]
    direct = block_size % LANES == 0
    extent = 2 * LANES * size
    for half in range(HALVES):
        position = base + half * LANES
        keys[half], values[half] = args[KEYS], zeros
        if position >= high or position + LANES <= low:
            if not direct:
                keys[half] = copies + half * extent
            continue
        whole = position >= low and position + LANES <= high
        if direct:
            block, offset = block_of(table, position, block_size)
            start = PAIR * ((block * args[KV_HEADS] + head) * (size // 2) * block_size)
            keys[half] = args[KEYS] + start + PAIR * offset
            values[half] = args[VALUES] + start + PAIR * (offset // 2 * size)
        else:
            keys[half] = copies + half * extent
            copy_keys(args, table, head, position, low, high, u32_ptr(keys[half]))
        if not (direct and whole):
            values[half] = copies + (HALVES + half) * extent
            copy_values(args, table, head, position, low, high, u32_ptr(values[half]))
    for half in range(HALVES, 2 * HALVES):
        position = base + half * LANES
        keys[half] = keys[half - HALVES]
        if direct and position < high:
            block, offset = block_of(table, position, block_size)
            keys[half] = args[KEYS] + PAIR * ((block * args[KV_HEADS] + head) * (size // 2) * block_size + offset)
    return PAIR * block_size if direct else PAIR * LANES


@jit
def prefetch_half(args, table, head, position):
    """Start loading int8 keys and values of 16 positions of one block."""
    block, offset = block_of(table, position, args[BLOCK_SIZE])
    size = args[SIZE]
    at = (block * args[KV_HEADS] + head) * size * args[BLOCK_SIZE]
    for pair in range(0, size // 2, max(1, TILE // args[BLOCK_SIZE])):
        prefetch(args[KEYS] + at + 2 * (pair * args[BLOCK_SIZE] + offset))
    for line in range(0, LANES * size, 64):
        prefetch(args[VALUES] + at + offset * size + line)


@jit
def widen_half(args, table, head, position, keys, values):
    """Turn int8 keys and values of 16 positions of one block into bfloat16 pairs, at addresses."""
    size, block_size = args[SIZE], args[BLOCK_SIZE]
    key_octets, value_octets, key_pairs, value_pairs = octets_of(args, keys, values)
    block, offset = block_of(table, position, block_size)
    at = (block * args[KV_HEADS] + head) * size * block_size
    for pair in range(size // 2):
        widen_int8_pairs(key_octets, at + 2 * (pair * block_size + offset), key_pairs, pair * LANES)
    for d in range(0, HALF_PAIRS * size, LANES):
        widen_int8_pairs(value_octets, at + offset * size + 2 * d, value_pairs, d)


@jit
def octets_of(args, keys, values):
    """Return the int8 cache and the pairs at two addresses as pointers."""
    return i8_ptr(args[KEYS]), i8_ptr(args[VALUES]), u32_ptr(keys), u32_ptr(values)


@jit
def gather_half(args, table, head, position, low, high, keys, values):
    """Like `widen_half` where 16 positions lie in several blocks; those outside low .. high are not read."""
    size, block_size, heads, elements = args[SIZE], args[BLOCK_SIZE], args[KV_HEADS], bf16_ptr(keys)
    key_octets, value_octets, _, value_pairs = octets_of(args, keys, values)
    for j in range(max(0, low - position), min(LANES, high - position)):
        block, offset = block_of(table, position + j, block_size)
        at = (block * heads + head) * size * block_size + 2 * offset
        for d in range(size):
            value = key_octets[at + d // 2 * 2 * block_size + d % 2]
            put(elements, d // 2 * 2 * LANES + 2 * j + d % 2, np.float32(value))
    for j in range(HALF_PAIRS):
        here = position + 2 * j
        if here >= high or here + 2 <= low:
            for d in range(size):
                value_pairs[j * size + d] = np.uint32(0)
            continue
        block, offset = block_of(table, here, block_size)
        at = (block * heads + head) * size * block_size + offset * size
        for d in range(0, size, LANES):  # what is written too far is the start of the next pair's row
            widen_int8_pairs(value_octets, at + 2 * d, value_pairs, j * size + d)


@jit
def widen_halves(args, table, head, base, low, high, keys, values, copies, zeros):
    """Like `locate_halves` for int8: everything in low .. high is copied.

    Values outside may be copied as well: no int8 is a NaN, and their scales are taken to be zero.
    """
    extent, direct = 2 * LANES * args[SIZE], args[BLOCK_SIZE] % LANES == 0
    for half in range(HALVES):
        position = base + half * LANES
        keys[half], keys[HALVES + half], values[half] = copies + half * extent, copies, zeros
        if position < high and position + LANES > low:
            values[half] = copies + (HALVES + half) * extent
            if direct:
                if position + PREFETCH_AHEAD < high:
                    prefetch_half(args, table, head, position + PREFETCH_AHEAD)
                widen_half(args, table, head, position, keys[half], values[half])
            else:
                gather_half(args, table, head, position, low, high, keys[half], values[half])
    return np.int64(PAIR * LANES)


# Items


@jit
def plan_group(address, rows, size, padded):
    """Return the addresses of what a group of rows needs, and of the queries, from `address` on; the last is the end.

    Largest scores, sums and what `merge_segment` needs; scores; weights; weighted values; queries; a line of these.
    """
    scores = after(address, 4 * 5 * LANES)
    weights = after(scores, 4 * GROUP * SEGMENT)
    part_values = after(weights, 2 * GROUP * SEGMENT)
    packed = after(part_values, 4 * GROUP * padded)
    line = after(packed, 2 * rows * pad(size))
    end = after(line, 2 * pad(size))
    return address, scores, weights, part_values, packed, line, end


@jit
def pair_buffers(scratch, rows, size):
    """Return the addresses of an item's buffers behind its state, for `attend_paired`; the last is the end."""
    keys = scratch
    values = after(keys, 8 * 2 * HALVES)
    scales = after(values, 8 * HALVES)
    group = after(scales, 4 * 2 * SEGMENT)
    buffers = plan_group(group, rows, size, pad(size))
    zeros = buffers[-1]
    copies = after(zeros, 4 * (HALF_PAIRS * size + TILE))
    end = after(copies, 2 * 2 * SEGMENT * size + 4 * TILE)
    return keys, values, scales, buffers, zeros, copies, end


@jit
def score_group(layout, prefetch_next, packed, row, rows, size, first, last, scores):
    """Write the scores [rows][SEGMENT] of a group of rows, from row `row` of the item on, in some tiles."""
    keys, _, step, _ = layout
    pairs = (size + 1) // 2
    for tile in range(first, last):
        half = 2 * tile
        ahead, ahead_too = prefetch_next[half], prefetch_next[half + 1]
        operands = rows, keys[half], keys[half + 1], step, packed, row * pairs, pairs
        score_tile(*operands, scores, tile * TILE, ahead, ahead_too)


@jit
def weighted_values(layout, weights, rows, padded, first, last, out, ahead, step):
    """Write the weighted values [rows][padded] of a group of rows, while the keys at `ahead` are prefetched."""
    _, values, _, width = layout
    for column in range(0, padded, TILE):
        value_tile(
            rows, values, 2 * first, 2 * last, PAIR * width, PAIR * column, weights, out, column, padded, ahead, step
        )


@jit
def attend_groups(args, record, head, segment, used, state, buffers, scales, layout, prefetch_next, ahead, ahead_step):
    """Attention of all rows to a segment, group by group: merged into the rows, or left as a partial result.

    `layout`: addresses of the halves of keys and of values, bytes between pairs of keys, columns of values.
    `prefetch_next` is prefetched while scores are computed, `ahead` while values are added up; see `score_tile` and
    `value_tile`.
    """
    group, scores, weights, part_values, packed = buffers[:5]
    base, scaled, padded = segment * SEGMENT, args[KEY_SCALES] != 0, pad(args[OUT_SIZE])
    for row in range(0, used, GROUP):
        rows = min(GROUP, used - row)
        first, last = visible_tiles(state, row, rows, base)
        if first >= last:
            continue
        maxes, totals, sums = f32_ptr(group), f32_ptr(group + 4 * LANES), f32_ptr(part_values)
        if record[NUM_PARTIALS] > 0:
            partial = partial_address(args, record, head, segment, padded)
            maxes, totals, sums = partial_pointers(partial, args[PARTIAL_ROWS], row, padded)
        score_group(layout, prefetch_next, u32_ptr(packed), row, rows, args[SIZE], first, last, f32_ptr(scores))
        mask_and_max(args, f32_ptr(scores), row, rows, base, first, last, state, scales[0], maxes)
        softmax_pairs(f32_ptr(scores), u32_ptr(weights), rows, first, last, scaled, scales[1], maxes, totals)
        weighted_values(layout, u32_ptr(weights), rows, padded, first, last, sums, ahead, ahead_step)
        if record[NUM_PARTIALS] == 0:
            merge_segment(args, state, row, rows, base, maxes, totals, sums, padded, f32_ptr(group + 4 * 2 * LANES))


@jit
def attend_paired(args, record, head, scratch):
    """Attention of an item's rows, or its partial results for `merge`, for one KV head."""
    size, scaled = args[SIZE], args[KEY_SCALES] != 0
    padded, used = pad(size), record[COUNT] * (args[NUM_HEADS] // args[KV_HEADS])
    state, behind = row_state(scratch, args[ITEM_ROWS], padded)
    places = pair_buffers(behind, args[ITEM_ROWS], size)
    keys, values, buffers = i64_ptr(places[0]), i64_ptr(places[1]), places[3]
    scales, zeros, copies = (f32_ptr(places[2]), f32_ptr(places[2] + 4 * SEGMENT)), places[4], places[5]
    table = i32_ptr(args[TABLES] + 4 * args[TABLE_STRIDE] * record[SEQUENCE])
    start(args, record, head, state, used, padded)
    pack_queries(args, record, head, used, u32_ptr(buffers[4]), u32_ptr(buffers[5]))
    for d in range(HALF_PAIRS * size + TILE):
        u32_ptr(zeros)[d] = np.uint32(0)
    low, high = extent(state, used)
    ahead = i64_ptr(places[0] + 8 * HALVES)
    for segment in range(record[FIRST], record[LAST]):
        base = segment * SEGMENT
        if scaled:
            step = widen_halves(args, table, head, base, low, high, keys, values, copies, zeros)
            load_scales(args, table, head, base, low, high, scales[0], scales[1])
        else:
            step = locate_halves(args, table, head, base, low, high, keys, values, copies, zeros)
        layout = keys, values, step, size
        attend_groups(args, record, head, segment, used, state, buffers, scales, layout, values, ahead, step)
    if record[NUM_PARTIALS] == 0:
        finish(args, record, head, state, used, padded)


attend_pairs = _op_of_items("attend_pairs", attend_paired)


# Latent caches (MLA): all heads of a token share one vector, the key, whose first elements are the value. Scores take
# pairs of its elements, weighted values pairs of positions. For each segment an item makes both from the vectors, once
# for all its rows, which are heads times queries.


@jit
def vector_at(args, table, position):
    """Return the address of the vector at a position."""
    block, offset = block_of(table, position, args[BLOCK_SIZE])
    return args[KEYS] + ELEMENT * (block * args[BLOCK_SIZE] + offset) * args[SIZE]


@jit
def pack_half(args, table, position, low, high, zeros, rows, keys, values):
    """Write the vectors of 16 positions as keys [D/2][16] and values [8][padded], in pairs; `rows`: 16 int64.

    Positions outside low .. high are not read, for their blocks may be anyone's, and count as zeros.
    """
    size, padded = args[SIZE], pad(args[OUT_SIZE])
    for j in range(LANES):
        here = position + j
        rows[j] = vector_at(args, table, here) if low <= here < high else zeros
    for d in range(0, size, TILE):
        transpose_pairs(rows, d, size - d, keys, d // 2 * LANES)
    for j in range(HALF_PAIRS):
        for d in range(0, padded, TILE):  # elements after the value become columns that are not read
            interleave_pairs(rows[2 * j] + ELEMENT * d, rows[2 * j + 1] + ELEMENT * d, values, j * padded + d)


@jit
def pack_segment(args, table, base, low, high, zeros, rows, keys, values, prefetch_next):
    """Write the pairs of a segment at the addresses of its halves, and where the vectors of the next one lie."""
    first, last = max(0, low - base) // TILE, (min(SEGMENT, high - base) + TILE - 1) // TILE
    for half in range(2 * first, 2 * last):
        position = base + half * LANES
        pack_half(args, table, position, low, high, zeros, rows, u32_ptr(keys[half]), u32_ptr(values[half]))
    for half in range(HALVES):
        position = base + SEGMENT + half * LANES
        prefetch_next[half] = vector_at(args, table, position) if position < high else zeros


@jit
def latent_buffers(scratch, rows, size, padded):
    """Return the addresses of an item's buffers behind its state; the last is the end."""
    halves = scratch
    vectors = after(halves, 8 * 3 * HALVES)
    zeros = after(vectors, 8 * LANES)
    keys = after(zeros, ELEMENT * (pad(size) + TILE))
    values = after(keys, ELEMENT * SEGMENT * pad(size))
    buffers = plan_group(after(values, ELEMENT * SEGMENT * padded), rows, size, padded)
    return halves, vectors, zeros, keys, values, buffers, buffers[-1]


@jit
def attend_latent_paired(args, record, head, scratch):
    """Attention of an item's rows, or its partial results for `merge`, for one group of heads."""
    size, padded = args[SIZE], pad(args[OUT_SIZE])
    used = record[COUNT] * (args[NUM_HEADS] // args[KV_HEADS])
    state, behind = row_state(scratch, args[ITEM_ROWS], padded)
    halves, vectors, zeros, key_pairs, value_pairs, buffers, _ = latent_buffers(behind, args[ITEM_ROWS], size, padded)
    keys, values, prefetch_next = i64_ptr(halves), i64_ptr(halves + 8 * HALVES), i64_ptr(halves + 16 * HALVES)
    table = i32_ptr(args[TABLES] + 4 * args[TABLE_STRIDE] * record[SEQUENCE])
    start(args, record, head, state, used, padded)
    pack_queries(args, record, head, used, u32_ptr(buffers[4]), u32_ptr(buffers[5]))
    for d in range(pad(size) + TILE):
        bf16_ptr(zeros)[d] = np.uint16(0)
    for half in range(HALVES):
        keys[half] = key_pairs + half * ELEMENT * LANES * pad(size)
        values[half] = value_pairs + half * ELEMENT * LANES * padded
    layout = keys, values, np.int64(PAIR * LANES), padded
    scales = f32_ptr(halves), f32_ptr(halves)  # there are none
    low, high = extent(state, used)
    for segment in range(record[FIRST], record[LAST]):
        pack_segment(args, table, segment * SEGMENT, low, high, zeros, i64_ptr(vectors), keys, values, prefetch_next)
        attend_groups(
            args, record, head, segment, used, state, buffers, scales, layout, prefetch_next, keys, np.int64(0)
        )
    if record[NUM_PARTIALS] == 0:
        finish(args, record, head, state, used, padded)


attend_latent_pairs = _op_of_items("attend_latent_pairs", attend_latent_paired)
