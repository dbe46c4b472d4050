"""What every path of paged attention shares: the rows of an item, softmax weights of a segment, and folding segments.

The context is cut into segments of 128 positions, aligned to position 0. For each segment a row gets the largest score,
the sum of its weights relative to that score, and the values so weighted; segments are then folded into the row one
after the other (Milakov & Gimelshein 2018; Dao et al. 2022, 2023). A sink is what the row starts from. Whether one item
walks all segments of a row or several items leave their parts for `merge`, the arithmetic and its order are the same,
so a row's bits do not depend on how work is split, on other rows, or on threads. Positions that a row does not see have
weight zero, and segments it sees nothing of are not folded.
"""

from __future__ import annotations

import numpy as np

from quire.kernels.cpu.activations import capped
from quire.kernels.cpu.jit import jit, op
from quire.kernels.cpu.pointers import f32_ptr, float64_from_bits, i64_ptr
from quire.kernels.cpu.simd import (
    LANES,
    add,
    div,
    exp,
    lane_indices,
    load,
    maximum,
    mul,
    multiply_add,
    reduce_max,
    reduce_sum,
    select_lanes,
    splat,
    store,
    store_partial,
    sub,
)
from quire.kernels.cpu.simd_bf16 import GROUP, SEGMENT, scale_add, store_pairs, store_weights

TILE = 32  # positions of a register tile
NEG_INF = np.float32(-np.inf)

# Arguments of `merge` and of the attend ops; strides in elements, see `attention.paged_attention`
Q, Q_STRIDE, OUT, KEYS, VALUES, KEY_SCALES, VALUE_SCALES, TABLES, TABLE_STRIDE, WORK, PARTIALS = range(11)
# OUT_SIZE: elements of a value. A latent cache has no VALUES: they are the first elements of the keys, and KV_HEADS is
# the number of groups into which the query heads are cut, that all share them.
NUM_HEADS, KV_HEADS, SIZE, OUT_SIZE, BLOCK_SIZE, BEHIND, AHEAD = range(11, 18)
SCALE, SOFTCAP, SINKS, SLOPES, PARTIAL_ROWS, ITEM_ROWS = range(18, 24)

# A record of the plan, int64: queries `row` .. of the step belong to sequence `sequence`, of `length` tokens, and stand
# at `position` ..; segments first .. last - 1. Parts go to slot `slot` + head * slots + segment; `slots` 0 is none.
SEQUENCE, ROW, COUNT, POSITION, FIRST, LAST, SLOT, SLOTS, COST, LENGTH, RECORD = range(11)


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
    """Elements of a slot: largest scores, sums of weights, and weighted values of one segment for `rows` rows."""
    return 2 * (rows + LANES) + rows * padded


@jit
def partial_address(args, record, head, segment, padded):
    """Return the address of the slot for a segment."""
    slot = record[SLOT] + head * record[SLOTS] + segment
    return args[PARTIALS] + 4 * slot * partial_size(args[PARTIAL_ROWS], padded)


@jit
def partial_rows(slot, rows, row, padded):
    """Return pointers to the largest scores, sums and values in a slot for `rows` rows, from its row `row` on."""
    totals, values = slot + 4 * (rows + LANES), slot + 8 * (rows + LANES)
    return f32_ptr(slot + 4 * row), f32_ptr(totals + 4 * row), f32_ptr(values + 4 * row * padded)


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
    """Fold the segment that starts at `base` into `rows` <= 8 rows; `work`: 48 floats of scratch."""
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
            v = div(load(sums, row * padded + d), whole)
            if d + LANES <= size:
                store(out, at + d, v)
            else:
                store_partial(out, at + d, v, size - d)


@jit
def merge_item(args, record, head, scratch):
    """Fold the parts of some rows, for one KV head."""
    padded = pad(args[OUT_SIZE])
    used = record[COUNT] * (args[NUM_HEADS] // args[KV_HEADS])
    state, work = row_state(scratch, args[PARTIAL_ROWS], padded)
    start(args, record, head, state, used, padded)
    for segment in range(record[FIRST], record[LAST]):
        slot = partial_address(args, record, head, segment, padded)
        for row in range(0, used, GROUP):
            maxes, totals, values = partial_rows(slot, args[PARTIAL_ROWS], row, padded)
            rows = min(GROUP, used - row)
            merge_segment(args, state, row, rows, segment * SEGMENT, maxes, totals, values, padded, f32_ptr(work))
    finish(args, record, head, state, used, padded)


@op
def merge(args, first, last, scratch):
    """Fold the parts that attend ops left: item i is record i // Hkv of the merges, KV head i % Hkv."""
    heads = args[KV_HEADS]
    for item in range(first, last):
        merge_item(args, i64_ptr(args[WORK] + 8 * RECORD * (item // heads)), item % heads, scratch)
