"""Attention over a bfloat16 latent cache on CPUs that multiply pairs of bfloat16.

All heads of a token share one vector: the key, whose first elements are the value. Scores want pairs of its elements,
weighted values pairs of positions. For each segment an item makes both from the vectors as they lie, once for all its
rows, which are heads times queries; from there on everything is as in paged_pairs.py.
"""

from __future__ import annotations

import numpy as np

from quire.kernels.cpu.jit import op, part
from quire.kernels.cpu.paged_pairs import HALVES, PAIR, attend_groups, block_of, pack_queries, plan_group
from quire.kernels.cpu.paged_softmax import (
    BLOCK_SIZE,
    COUNT,
    FIRST,
    KEYS,
    KV_HEADS,
    LAST,
    NUM_HEADS,
    OUT_SIZE,
    RECORD,
    ROOM_ROWS,
    SEQUENCE,
    SIZE,
    SLOTS,
    TABLE_STRIDE,
    TABLES,
    TILE,
    WORK,
    after,
    extent,
    finish,
    make_room,
    pad,
    start,
)
from quire.kernels.cpu.paged_tiles import HALF_PAIRS, SEGMENT, turn_pairs, zip_rows
from quire.kernels.cpu.pointers import floats, ints, longs, uints, words
from quire.kernels.cpu.simd import LANES

ELEMENT = 2  # bytes


@part
def vector_at(args, table, position):
    """Return the address of the vector at a position."""
    block, offset = block_of(table, position, args[BLOCK_SIZE])
    return args[KEYS] + ELEMENT * (block * args[BLOCK_SIZE] + offset) * args[SIZE]


@part
def fill_half(args, table, position, low, high, zeros, rows, keys, values):
    """Write the vectors of 16 positions as keys [D/2][16] and values [8][padded], in pairs; `rows`: 16 int64.

    Positions outside low .. high are not read, for their blocks may be anyone's, and count as zeros.
    """
    size, padded = args[SIZE], pad(args[OUT_SIZE])
    for j in range(LANES):
        here = position + j
        rows[j] = vector_at(args, table, here) if low <= here < high else zeros
    for d in range(0, size, TILE):
        turn_pairs(rows, d, size - d, keys, d // 2 * LANES)
    for j in range(HALF_PAIRS):
        for d in range(0, padded, TILE):  # elements after the value become columns that nobody reads
            zip_rows(rows[2 * j] + ELEMENT * d, rows[2 * j + 1] + ELEMENT * d, values, j * padded + d)


@part
def fill_segment(args, table, base, low, high, zeros, rows, keys, values, soon):
    """Write the pairs of a segment at the addresses of its halves, and where the vectors of the next one lie."""
    first, last = max(0, low - base) // TILE, (min(SEGMENT, high - base) + TILE - 1) // TILE
    for half in range(2 * first, 2 * last):
        position = base + half * LANES
        fill_half(args, table, position, low, high, zeros, rows, uints(keys[half]), uints(values[half]))
    for half in range(HALVES):
        position = base + SEGMENT + half * LANES
        soon[half] = vector_at(args, table, position) if position < high else zeros


@part
def plan_room(scratch, rows, size, padded):
    """Return the addresses of an item's buffers behind its state; the last is the end."""
    halves = scratch
    vectors = after(halves, 8 * 3 * HALVES)
    zeros = after(vectors, 8 * LANES)
    keys = after(zeros, ELEMENT * (pad(size) + TILE))
    values = after(keys, ELEMENT * SEGMENT * pad(size))
    buffers = plan_group(after(values, ELEMENT * SEGMENT * padded), rows, size, padded)
    return halves, vectors, zeros, keys, values, buffers, buffers[-1]


@part
def attend_item(args, record, head, scratch):
    """Attention of an item's rows, or its parts for `merge`, for one group of heads."""
    size, padded = args[SIZE], pad(args[OUT_SIZE])
    used = record[COUNT] * (args[NUM_HEADS] // args[KV_HEADS])
    room, behind = make_room(scratch, args[ROOM_ROWS], padded)
    halves, vectors, zeros, key_pairs, value_pairs, buffers, _ = plan_room(behind, args[ROOM_ROWS], size, padded)
    keys, values, soon = longs(halves), longs(halves + 8 * HALVES), longs(halves + 16 * HALVES)
    table = ints(args[TABLES] + 4 * args[TABLE_STRIDE] * record[SEQUENCE])
    start(args, record, head, room, used, padded)
    pack_queries(args, record, head, used, uints(buffers[4]), uints(buffers[5]))
    for d in range(pad(size) + TILE):
        words(zeros)[d] = np.uint16(0)
    for half in range(HALVES):
        keys[half] = key_pairs + half * ELEMENT * LANES * pad(size)
        values[half] = value_pairs + half * ELEMENT * LANES * padded
    lies = keys, values, np.int64(PAIR * LANES), padded
    scales = floats(halves), floats(halves)  # there are none
    low, high = extent(room, used)
    for segment in range(record[FIRST], record[LAST]):
        fill_segment(args, table, segment * SEGMENT, low, high, zeros, longs(vectors), keys, values, soon)
        attend_groups(args, record, head, segment, used, room, buffers, scales, lies, soon, keys, np.int64(0))
    if record[SLOTS] == 0:
        finish(args, record, head, room, used, padded)


@op
def attend_latent_pairs(args, first, last, scratch):
    """Attention over a bfloat16 latent cache: item i is record i // Hkv of the plan and group of heads i % Hkv."""
    heads = args[KV_HEADS]
    for item in range(first, last):
        attend_item(args, longs(args[WORK] + 8 * RECORD * (item // heads)), item % heads, scratch)
