"""Paged attention on CPUs with bfloat16 dot products: the paired cache is read as it is stored.

Queries times the scale, and softmax weights, are rounded to bfloat16; scores, sums and their combination are float32.
int8 keys and values become bfloat16 exactly, their scales are multiplied into scores and weights.

An item takes some queries of one sequence and one KV head; its rows are those queries times the query heads that share
the KV head. For each segment of 128 positions it finds the addresses of keys and values and then goes through the rows
in groups of eight: scores, weights, weighted values, without leaving the first-level cache.
"""

from __future__ import annotations

import numpy as np

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
    VALUE_SCALES,
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
    softmax_pairs,
    start,
    visible_tiles,
)
from quire.kernels.cpu.jit import jit, op
from quire.kernels.cpu.pointers import bf16_ptr, f32_ptr, float64_from_bits, i8_ptr, i32_ptr, i64_ptr, u32_ptr
from quire.kernels.cpu.quantize import load_within
from quire.kernels.cpu.simd import LANES, load, mul, put, select_lanes, splat, store
from quire.kernels.cpu.simd_bf16 import (
    GROUP,
    HALF_PAIRS,
    SEGMENT,
    interleave_pairs,
    prefetch,
    score_tile,
    store_pairs,
    transpose_pairs,
    value_tile,
    widen_int8_pairs,
)

HALVES = SEGMENT // LANES
ELEMENT, PAIR = 2, 4  # bytes
FETCH_AHEAD = 64  # positions between int8 that are widened and those that are fetched: as long as memory takes


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
def block_of(table, position, block_size):
    """Return the block of a position and its place there."""
    return np.int64(table[position // block_size]), position % block_size


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
                if position + FETCH_AHEAD < high:
                    prefetch_half(args, table, head, position + FETCH_AHEAD)
                widen_half(args, table, head, position, keys[half], values[half])
            else:
                gather_half(args, table, head, position, low, high, keys[half], values[half])
    return np.int64(PAIR * LANES)


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
def item_buffers(scratch, rows, size):
    """Return the addresses of an item's buffers behind its state, for `attend_item`; the last is the end."""
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
    """Write the weighted values [rows][padded] of a group of rows, while the keys at `ahead` are fetched."""
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
        if record[SLOTS] > 0:
            slot = partial_address(args, record, head, segment, padded)
            maxes, totals, sums = partial_rows(slot, args[PARTIAL_ROWS], row, padded)
        score_group(layout, prefetch_next, u32_ptr(packed), row, rows, args[SIZE], first, last, f32_ptr(scores))
        mask_and_max(args, f32_ptr(scores), row, rows, base, first, last, state, scales[0], maxes)
        softmax_pairs(f32_ptr(scores), u32_ptr(weights), rows, first, last, scaled, scales[1], maxes, totals)
        weighted_values(layout, u32_ptr(weights), rows, padded, first, last, sums, ahead, ahead_step)
        if record[SLOTS] == 0:
            merge_segment(args, state, row, rows, base, maxes, totals, sums, padded, f32_ptr(group + 4 * 2 * LANES))


@jit
def attend_item(args, record, head, scratch):
    """Attention of an item's rows, or its parts for `merge`, for one KV head."""
    size, scaled = args[SIZE], args[KEY_SCALES] != 0
    padded, used = pad(size), record[COUNT] * (args[NUM_HEADS] // args[KV_HEADS])
    state, behind = row_state(scratch, args[ITEM_ROWS], padded)
    places = item_buffers(behind, args[ITEM_ROWS], size)
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
    if record[SLOTS] == 0:
        finish(args, record, head, state, used, padded)


@op
def attend_pairs(args, first, last, scratch):
    """Attention over a paired cache, bfloat16 or, with scales, int8: item i is record i // Hkv, KV head i % Hkv."""
    heads = args[KV_HEADS]
    for item in range(first, last):
        attend_item(args, i64_ptr(args[WORK] + 8 * RECORD * (item // heads)), item % heads, scratch)


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
        for d in range(0, padded, TILE):  # elements after the value become columns that nobody reads
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
def attend_latent_item(args, record, head, scratch):
    """Attention of an item's rows, or its parts for `merge`, for one group of heads."""
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
    if record[SLOTS] == 0:
        finish(args, record, head, state, used, padded)


@op
def attend_latent_pairs(args, first, last, scratch):
    """Attention over a bfloat16 latent cache: item i is record i // Hkv of the plan and group of heads i % Hkv."""
    heads = args[KV_HEADS]
    for item in range(first, last):
        attend_latent_item(args, i64_ptr(args[WORK] + 8 * RECORD * (item // heads)), item % heads, scratch)
