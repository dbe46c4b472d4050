"""The paged KV cache and attention over it.

A cache holds keys as [B][Hkv][D][bs] and values as [B][Hkv][bs][D] (flat arrays here): for one element of the head,
the keys of a block lie side by side, so that a vector holds sixteen keys and a dot product needs no sum over lanes.

A work item is a few consecutive queries of one sequence and one KV head; its rows are those queries times the query
heads that share the KV head. It walks the context in tiles of 32 positions, aligned to position 0, with an online
softmax (Milakov & Gimelshein 2018; Dao et al. 2022). Tiles that a row does not see leave it untouched, so a row's
result depends on its own context alone, bit for bit.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from quire.kernels.cpu.jit import kernel, part, share
from quire.kernels.cpu.simd import (
    TILE_ROWS,
    add,
    div,
    exp,
    get,
    keep_lanes,
    lane_indices,
    lane_max,
    lane_sum,
    load,
    maximum,
    mul,
    multiply_add,
    put,
    splat,
    store,
    sub,
    tile_four,
    tile_many,
    tile_two,
)

TILE = 32  # positions handled at once: two vectors of scores
ROWS = 32  # query rows an item aims for
NEG_INF = np.float32(-np.inf)


# Writing


@part
def write_rows(k, v, keys, values, slots, heads, size, block_size, chunk, chunks):
    """Store this chunk's share of the tokens."""
    first, last = share(slots.shape[0], chunk, chunks)
    for t in range(first, last):
        block, offset = slots[t] // block_size, slots[t] % block_size
        for h in range(heads):
            source = (t * heads + h) * size
            base = (block * heads + h) * size * block_size
            for d in range(size):
                put(keys, base + d * block_size + offset, get(k, source + d))
            for d in range(size):
                put(values, base + offset * size + d, get(v, source + d))


@kernel
def write_float32(k, v, keys, values, slots, heads, size, block_size, chunks):
    """Store k, v [T*Hkv*D] at slots int64 [T]."""
    if chunks == 1:
        write_rows(k, v, keys, values, slots, heads, size, block_size, chunks - 1, chunks)
    else:
        for c in prange(chunks):
            write_rows(k, v, keys, values, slots, heads, size, block_size, np.int64(c), chunks)


@kernel
def write_bfloat16(k, v, keys, values, slots, heads, size, block_size, chunks):
    """Like `write_float32`, rounding to bfloat16."""
    if chunks == 1:
        write_rows(k, v, keys, values, slots, heads, size, block_size, chunks - 1, chunks)
    else:
        for c in prange(chunks):
            write_rows(k, v, keys, values, slots, heads, size, block_size, np.int64(c), chunks)


@kernel
def write_float16(k, v, keys, values, slots, heads, size, block_size, chunks):
    """Like `write_float32`, rounding to float16."""
    if chunks == 1:
        write_rows(k, v, keys, values, slots, heads, size, block_size, chunks - 1, chunks)
    else:
        for c in prange(chunks):
            write_rows(k, v, keys, values, slots, heads, size, block_size, np.int64(c), chunks)


# Reading tiles. Positions outside low..high are not read, for their blocks may be anyone's, and count as zeros.


@part
def load_keys(keys, table, base, low, high, head, heads, size, block_size, tile):
    """tile[d * 32 + j] = element d of the key at position base + j."""
    if block_size % 16 == 0:
        for half in (0, 16):
            position = base + half
            if position >= high or position + 16 <= low:
                for d in range(size):
                    store(tile, d * TILE + half, splat(np.float32(0)))
                continue
            block, offset = np.int64(table[position // block_size]), position % block_size
            at = (block * heads + head) * size * block_size + offset
            whole = low <= position and position + 16 <= high
            for d in range(size):
                v = load(keys, at + d * block_size)
                store(tile, d * TILE + half, v if whole else keep_lanes(v, low - position, high - position, 0.0))
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


@part
def load_values(values, table, base, low, high, head, heads, size, padded, block_size, tile):
    """tile[j * padded + d] = element d of the value at position base + j; columns from `size` on stay as they are."""
    for j in range(TILE):
        position = base + j
        if low <= position < high:
            block, offset = np.int64(table[position // block_size]), position % block_size
            at = ((block * heads + head) * block_size + offset) * size
            whole = size // 16 * 16
            for d in range(0, whole, 16):
                store(tile, j * padded + d, load(values, at + d))
            for d in range(whole, size):
                tile[j * padded + d] = get(values, at + d)
        else:
            for d in range(0, padded, 16):
                store(tile, j * padded + d, splat(np.float32(0)))


# One item


@part
def tanh(x):
    """tanh in every lane, as 1 - 2 / (e^2x + 1): absolute error 1e-7."""
    one = splat(np.float32(1))
    return sub(one, div(splat(np.float32(2)), add(exp(add(x, x)), one)))


@part
def shape_scores(v, first, softcap, slope, low, high):
    """Apply softcap and ALiBi to sixteen scores, which stand at positions first.. relative to the query; mask them."""
    if softcap > 0:
        cap = splat(np.float32(softcap))
        v = mul(cap, tanh(div(v, cap)))
    if slope != 0:
        v = multiply_add(splat(slope), add(lane_indices(), splat(np.float32(first))), v)
    return keep_lanes(v, low - first, high - first, NEG_INF)


@part
def softmax_row(scores, at, base, position, window, softcap, slope, row, largest, total):
    """Turn 32 scores into weights relative to the largest score so far; return what to scale the old sums by."""
    first = base - position  # distances to the query: the keys seen are those from 1 - window to 0
    low = np.int64(1 - window) if window > 0 else np.int64(-position)
    if first > 0 or first + TILE <= low:
        store(scores, at, splat(np.float32(0)))
        store(scores, at + 16, splat(np.float32(0)))
        return np.float32(1)
    v0 = shape_scores(load(scores, at), first, softcap, slope, low, np.int64(1))
    v1 = shape_scores(load(scores, at + 16), first + 16, softcap, slope, low, np.int64(1))
    old = largest[row]
    new = max(old, lane_max(maximum(v0, v1)))
    v0, v1 = exp(sub(v0, splat(new))), exp(sub(v1, splat(new)))
    store(scores, at, v0)
    store(scores, at + 16, v1)
    scale = np.float32(1) if new == old else lane_max(exp(splat(old - new)))
    largest[row] = new
    total[row] = total[row] * scale + lane_sum(add(v0, v1))
    return scale


@part
def score_tile(q, keys, scores, rows, size):
    """scores [rows][32] = q [rows][D] times the key tile [D][32]."""
    row = 0
    while row + TILE_ROWS <= rows:
        tile_many(keys, 0, TILE, 16, q, row * size, 1, size, size, scores, row * TILE, TILE, 0)
        row += TILE_ROWS
    while row + 4 <= rows:
        tile_four(keys, 0, TILE, 16, q, row * size, 1, size, size, scores, row * TILE, TILE, 0)
        row += 4
    while row < rows:
        tile_two(keys, 0, TILE, 16, q, row * size, 1, size, size, scores, row * TILE, TILE, 0)
        row += 2


@part
def add_values(scores, values, sums, rows, padded):
    """sums [rows][padded] += weights [rows][32] times the value tile [32][padded]."""
    for column in range(0, padded, 32):
        row = 0
        while row + TILE_ROWS <= rows:
            to = row * padded + column
            tile_many(values, column, padded, 16, scores, row * TILE, 1, TILE, TILE, sums, to, padded, 1)
            row += TILE_ROWS
        while row + 4 <= rows:
            to = row * padded + column
            tile_four(values, column, padded, 16, scores, row * TILE, 1, TILE, TILE, sums, to, padded, 1)
            row += 4
        while row < rows:
            to = row * padded + column
            tile_two(values, column, padded, 16, scores, row * TILE, 1, TILE, TILE, sums, to, padded, 1)
            row += 2


@part
def start_item(q, query, head, sizes, scale, sinks, state, used, rows):
    """Fill the item's rows: queries times the scale, empty sums; a sink is a score seen before any key."""
    q_rows, sums, largest, total = state
    num_heads, _, size, padded, group = sizes
    for row in range(rows):
        largest[row], total[row] = NEG_INF, np.float32(0)
        for d in range(padded):
            sums[row * padded + d] = np.float32(0)
        if row < used:
            h = head * group + row % group
            at = ((query + row // group) * num_heads + h) * size
            for d in range(size):
                q_rows[row * size + d] = q[at + d] * np.float32(scale)
            if sinks.shape[0] > 0:
                largest[row], total[row] = sinks[h], np.float32(1)
        else:
            for d in range(size):
                q_rows[row * size + d] = np.float32(0)


@part
def finish_item(out, query, head, sizes, state, used):
    """Divide the sums by their weights and write them out."""
    _, sums, _, total = state
    num_heads, _, size, padded, group = sizes
    for row in range(used):
        at = ((query + row // group) * num_heads + head * group + row % group) * size
        for d in range(size):
            out[at + d] = sums[row * padded + d] / total[row]


@part
def attend_item(q, out, keys, values, table, query, position, count, head, sizes, options, extras, state, tiles):
    """Attention of `count` queries from row `query` of q, the first at `position`, for one KV head."""
    _, heads, size, padded, group = sizes
    block_size, scale, window, softcap = options
    sinks, slopes = extras
    q_rows, sums, largest, total = state
    key_tile, value_tile, scores = tiles
    used = count * group
    rows = (used + 1) // 2 * 2
    start_item(q, query, head, sizes, scale, sinks, state, used, rows)
    low, high = max(0, position - window + 1) if window > 0 else 0, position + count
    for base in range(low // TILE * TILE, high, TILE):
        load_keys(keys, table, base, low, high, head, heads, size, block_size, key_tile)
        load_values(values, table, base, low, high, head, heads, size, padded, block_size, value_tile)
        score_tile(q_rows, key_tile, scores, rows, size)
        for row in range(used):
            slope = slopes[head * group + row % group] if slopes.shape[0] > 0 else np.float32(0)
            at = row * TILE
            factor = softmax_row(scores, at, base, position + row // group, window, softcap, slope, row, largest, total)
            if factor != 1:
                for d in range(row * padded, (row + 1) * padded, 16):
                    store(sums, d, mul(load(sums, d), splat(factor)))
        add_values(scores, value_tile, sums, rows, padded)
    finish_item(out, query, head, sizes, state, used)


@part
def attend(q, out, keys, values, starts, lengths, tables, sizes, factors, sinks, slopes, chunk, chunks):
    """Every chunks-th item from number `chunk`: dealt out in turn, for a late query costs more than an early one."""
    num_heads, heads, size, block_size, window = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]
    group = num_heads // heads
    padded = (size + 31) // 32 * 32
    shape, options = (num_heads, heads, size, padded, group), (block_size, factors[0], window, factors[1])
    extras = (sinks, slopes)
    queries = max(1, ROWS // group)
    rows = (queries * group + 1) // 2 * 2
    q_rows, sums = np.empty(rows * size, np.float32), np.empty(rows * padded, np.float32)
    state = (q_rows, sums, np.empty(rows, np.float32), np.empty(rows, np.float32))
    key_tile, value_tile = np.empty(size * TILE, np.float32), np.zeros(TILE * padded, np.float32)
    tiles = (key_tile, value_tile, np.zeros(rows * TILE, np.float32))
    number = 0
    for s in range(lengths.shape[0]):
        begin, end = np.int64(starts[s]), np.int64(starts[s + 1])
        before, table = np.int64(lengths[s]) - (end - begin), tables[s]
        for query in range(begin, end, queries):
            count, at = min(queries, end - query), before + query - begin
            for head in range(heads):
                if number % chunks == chunk:
                    attend_item(
                        q, out, keys, values, table, query, at, count, head, shape, options, extras, state, tiles
                    )
                number += 1


@kernel
def attend_float32(q, out, keys, values, starts, lengths, tables, sizes, factors, sinks, slopes, chunks):
    """Attention of all tokens of a step, see `Backend.paged_attention`.

    sizes int64: query heads, KV heads, head size, block size, window or 0. factors float64: scale, softcap or 0.
    Empty sinks or slopes are none.
    """
    if chunks == 1:
        attend(q, out, keys, values, starts, lengths, tables, sizes, factors, sinks, slopes, chunks - 1, chunks)
    else:
        for c in prange(chunks):
            attend(q, out, keys, values, starts, lengths, tables, sizes, factors, sinks, slopes, np.int64(c), chunks)


@kernel
def attend_bfloat16(q, out, keys, values, starts, lengths, tables, sizes, factors, sinks, slopes, chunks):
    """Like `attend_float32`, the cache in bfloat16."""
    if chunks == 1:
        attend(q, out, keys, values, starts, lengths, tables, sizes, factors, sinks, slopes, chunks - 1, chunks)
    else:
        for c in prange(chunks):
            attend(q, out, keys, values, starts, lengths, tables, sizes, factors, sinks, slopes, np.int64(c), chunks)


@kernel
def attend_float16(q, out, keys, values, starts, lengths, tables, sizes, factors, sinks, slopes, chunks):
    """Like `attend_float32`, the cache in float16."""
    if chunks == 1:
        attend(q, out, keys, values, starts, lengths, tables, sizes, factors, sinks, slopes, chunks - 1, chunks)
    else:
        for c in prange(chunks):
            attend(q, out, keys, values, starts, lengths, tables, sizes, factors, sinks, slopes, np.int64(c), chunks)
