"""Paged attention in float32, for every storage format and CPU: tiles of the cache are widened, then multiplied.

Like attention_bf16.py, except that a tile of keys, and later one of values, is widened once for all rows of the item,
and nothing is rounded.
"""

from __future__ import annotations

import numpy as np

from quire.kernels.cpu.attention_bf16 import block_of, load_scales
from quire.kernels.cpu.attention_softmax import (
    BLOCK_SIZE,
    COUNT,
    FIRST,
    ITEM_ROWS,
    KEY_SCALES,
    KEYS,
    KV_HEADS,
    LAST,
    NUM_HEADS,
    OUT_SIZE,
    PARTIAL_ROWS,
    Q_STRIDE,
    RECORD,
    ROW,
    SCALE,
    SEQUENCE,
    SIZE,
    SLOTS,
    TABLE_STRIDE,
    TABLES,
    TILE,
    VALUES,
    WORK,
    Q,
    after,
    extent,
    finish,
    mask_and_max,
    merge_segment,
    pad,
    partial_address,
    partial_rows,
    row_state,
    softmax_floats,
    start,
    visible_tiles,
)
from quire.kernels.cpu.jit import jit, ops_by_dtype
from quire.kernels.cpu.pointers import FORMATS, f32_ptr, float64_from_bits, i32_ptr, i64_ptr
from quire.kernels.cpu.simd import (
    LANES,
    TILE_ROWS,
    get,
    load,
    select_lanes,
    splat,
    store,
    tile_four,
    tile_many,
    tile_one,
    tile_two,
)
from quire.kernels.cpu.simd_bf16 import GROUP, SEGMENT, transpose_tile
from quire.kernels.cpu.team import offset


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
def item_buffers(scratch, rows, size):
    """Return the addresses of an item's buffers behind its state: see `attend_item`; the last is the end."""
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


@jit
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


@jit
def attend_item(args, keys, values, record, head, scratch):
    """Attention of an item's rows, or its parts for `merge`, for one KV head."""
    size = args[SIZE]
    padded, used = pad(args[OUT_SIZE]), record[COUNT] * (args[NUM_HEADS] // args[KV_HEADS])
    state, behind = row_state(scratch, args[ITEM_ROWS], padded)
    places = item_buffers(behind, args[ITEM_ROWS], size)
    table = i32_ptr(args[TABLES] + 4 * args[TABLE_STRIDE] * record[SEQUENCE])
    start(args, record, head, state, used, padded)
    copy_queries(args, record, head, used, f32_ptr(places[6]))
    low, high = extent(state, used)
    for segment in range(record[FIRST], record[LAST]):
        base = segment * SEGMENT
        maxes, totals, sums = f32_ptr(places[2]), f32_ptr(places[3]), f32_ptr(places[4])
        if record[SLOTS] > 0:
            maxes, totals, sums = partial_rows(
                partial_address(args, record, head, segment, padded), args[PARTIAL_ROWS], 0, padded
            )
        attend_segment(args, keys, values, table, head, base, low, high, used, state, places, maxes, totals, sums)
        if record[SLOTS] == 0:
            for row in range(0, used, GROUP):
                rows = min(GROUP, used - row)
                begin, end = visible_tiles(state, row, rows, base)
                if begin < end:
                    part_values, work = offset(sums, row * padded), f32_ptr(places[1])
                    merge_segment(
                        args, state, row, rows, base, offset(maxes, row), offset(totals, row), part_values, padded, work
                    )
    if record[SLOTS] == 0:
        finish(args, record, head, state, used, padded)


@jit
def attend(elements, args, first, last, scratch):
    """Do some items: item i is record i // Hkv of the plan and KV head i % Hkv."""
    heads, keys, values = args[KV_HEADS], elements(args[KEYS]), elements(args[VALUES])
    for item in range(first, last):
        attend_item(args, keys, values, i64_ptr(args[WORK] + 8 * RECORD * (item // heads)), item % heads, scratch)


@jit
def attend_latent(elements, args, first, last, scratch):
    """Like `attend` for a latent cache."""
    heads, latents = args[KV_HEADS], elements(args[KEYS])
    for item in range(first, last):
        attend_item(args, latents, None, i64_ptr(args[WORK] + 8 * RECORD * (item // heads)), item % heads, scratch)


ATTEND = ops_by_dtype("attend", attend, FORMATS)
ATTEND_LATENT = ops_by_dtype("attend_latent", attend_latent)
