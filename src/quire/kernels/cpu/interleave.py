"""Rows turned into the order in which tiles read them: of weights while loading, of activations before a product.

A tile reads one element (or pair, in 32 bits) of every row for each k: side by side they are one cache line. Row after
row they lie K apart, which, when K is a power of two, maps all of them to the same few cache sets.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from quire.kernels.cpu import sizes
from quire.kernels.cpu.jit import jit, op
from quire.kernels.cpu.pointers import ANY, INT, NOTHING, bf16_ptr, f32_ptr, intrinsic, u32_ptr
from quire.kernels.cpu.simd import I32, I32V, LANES, TILE_ROWS, _load, _to_bf16_pairs
from quire.kernels.cpu.sizes import DOT_ROWS

PACK_BYTES = DOT_ROWS * (4 * 32 + 4 * 16)  # of scratch that rounding a tile takes
ROW_GROUP = 64  # rows that one work item of a product computes, so that wide machines find enough items


def _zip(b, first, second, start):
    """Return first[start], second[start], first[start + 1], ... sixteen lanes in all."""
    lanes = [start + i // 2 + LANES * (i % 2) for i in range(LANES)]
    return b.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, LANES), lanes))


def _interleaved_lanes(b, rows):
    """Return a power of two of vectors interleaved: lane 0 of all, then lane 1 of all, and so on."""
    if len(rows) == 1:
        return rows
    even, odd = _interleaved_lanes(b, rows[0::2]), _interleaved_lanes(b, rows[1::2])
    return [_zip(b, *pair, start) for pair in zip(even, odd, strict=True) for start in (0, LANES // 2)]


def _interleave(rows, convert):
    """Make the intrinsic that interleaves 16 32-bit values of each of `rows` rows, or 32 floats as pairs."""

    @intrinsic(NOTHING, ANY, INT, INT, INT, ANY, INT)
    def interleave(b, source, at, step, last, target, to):
        index = at.type
        vectors = []
        for r in range(rows):
            row = b.select(b.icmp_signed("<", index(r), last), index(r), last)
            place = b.add(at, b.mul(row, step))
            if convert:
                low, high = (_load(b, "f32", source, b.add(place, index(shift))) for shift in (0, LANES))
                vectors.append(_to_bf16_pairs(b, low, high))
            else:
                value = b.load(b.bitcast(b.gep(source, [place]), I32V.as_pointer()))
                value.align = 2
                vectors.append(value)
        for r, vector in enumerate(_interleaved_lanes(b, vectors)):
            place = b.gep(target, [b.add(to, index(LANES * r))])
            b.store(vector, b.bitcast(place, I32V.as_pointer())).align = 4

    interleave.__doc__ = (
        f"target[to + k * {rows} + r] = value k < 16 of row min(r, last), which begins at source[at + r * step]."
    )
    return interleave


interleave_16 = _interleave(16, False)
pack_8, pack_4, pack_1 = (_interleave(rows, True) for rows in (8, 4, 1))


# Activations in bfloat16


tile_height = jit(sizes.tile_height)


@jit
def next_panel(at, next_vector, row, rows):
    """Return what to prefetch while a tile multiplies: the next 32 columns, half of them if there are more tiles.

    One row goes through the weights as fast as memory can, and with more than one group of rows they are read from
    the cache most of the time: there nothing is prefetched.
    """
    if rows == 1 or rows > ROW_GROUP:
        return at, at
    following = at + 2 * next_vector
    if rows <= 8:
        return following, following + next_vector
    half = following + row // 8 % 2 * next_vector
    return half, half


def gated_columns(ids: np.ndarray, outputs: int) -> np.ndarray:
    """Return where rows `ids` of a gated weight of `outputs` rows are stored: 16 of gate, 16 of up, and so on."""
    half = outputs // 2
    row = ids % half
    return row // 16 * 32 + ids // half * 16 + row % 16


@jit
def _pack_bf16_columns(x, at, step, last, height, target, to):
    """Round 32 elements of each row of a tile and interleave their pairs."""
    if height == 8:
        pack_8(x, at, step, last, target, to)
    elif height == 4:
        pack_4(x, at, step, last, target, to)
    else:
        pack_1(x, at, step, last, target, to)


@jit
def pack_bf16_tile(x, at, step, count, depth, packed, to, scratch):
    """Round the `count` <= 8 rows of a tile, from x[at] on, as [K/2][height][2]; `scratch`: PACK_BYTES."""
    height, pairs, whole = tile_height(count), (depth + 1) // 2, depth // 32 * 32
    rest, staged = f32_ptr(scratch), u32_ptr(scratch + 4 * DOT_ROWS * 32)
    for k in range(0, whole, 32):
        _pack_bf16_columns(x, at + k, step, count - 1, height, packed, to + k // 2 * height)
    if whole < depth:
        for r in range(count):
            for k in range(32):
                rest[r * 32 + k] = x[at + r * step + whole + k] if whole + k < depth else np.float32(0)
        _pack_bf16_columns(rest, 0, 32, count - 1, height, staged, 0)
        for i in range((pairs - whole // 2) * height):
            packed[to + whole // 2 * height + i] = staged[i]


@op
def pack_bf16_tiles(args, first, last, scratch):
    """Tiles of x float32 rounded to bfloat16, as [K/2][height][2] each. args: x, its row step, packed, rows, depth."""
    x, step, packed, rows, depth = f32_ptr(args[0]), args[1], u32_ptr(args[2]), args[3], args[4]
    for tile in range(first, last):
        row = tile * DOT_ROWS
        count = min(rows - row, DOT_ROWS)
        pack_bf16_tile(x, row * step, step, count, depth, packed, row * ((depth + 1) // 2), scratch)


# Activations in float32


@op
def interleave_tiles_f32(args, first, last, scratch):
    """Whole tiles of x float32 as [K][TILE_ROWS] each. args: x, its row step, packed, depth."""
    x, step, packed, depth = f32_ptr(args[0]), args[1], f32_ptr(args[2]), args[3]
    for tile in range(first, last):
        row = tile * TILE_ROWS
        for k in range(depth):
            for r in range(TILE_ROWS):
                packed[(row * depth) + k * TILE_ROWS + r] = x[(row + r) * step + k]


# Weights


@op
def interleave_weights_32(args, first, last, scratch):
    """Blocks of sixteen rows as [K][16] each, in 32 bits. args: source, row step, target, depth, block step, shift.

    Block i of the source becomes block i * step + shift of the target. The step between rows is in bytes, for mapped
    files; rows begin at multiples of two.
    """
    step, target, depth = args[1], u32_ptr(args[2]), args[3]
    whole = depth // LANES * LANES
    for block in range(first, last):
        start = args[0] + block * LANES * step
        to = (block * args[4] + args[5]) * depth * LANES
        for k in range(0, whole, LANES):
            interleave_16(bf16_ptr(start), 2 * k, step // 2, LANES - 1, target, to + k * LANES)
        for k in range(whole, depth):
            for r in range(LANES):
                low, high = bf16_ptr(start + r * step)[2 * k], bf16_ptr(start + r * step)[2 * k + 1]
                target[to + k * LANES + r] = np.uint32(low) | (np.uint32(high) << np.uint32(16))


@op
def interleave_weights_16(args, first, last, scratch):
    """Like `interleave_weights_32` for elements of 16 bits."""
    step, target, depth = args[1], bf16_ptr(args[2]), args[3]
    for block in range(first, last):
        start = args[0] + block * LANES * step
        to = (block * args[4] + args[5]) * depth * LANES
        for k in range(depth):
            for r in range(LANES):
                target[to + k * LANES + r] = bf16_ptr(start + r * step)[k]
