"""Float rows to integers: activations as the integer tiles read them, and weights packed straight from a checkpoint.

One rule for all: a row's (or group's) largest size becomes the largest integer, values round to the nearest, ties to
even; what is smaller than SMALLEST counts as 0, and a row with a number that is not finite has a NaN scale.

Weights lie as uint32 of four bytes or eight nibbles, [N/16][K/4 or K/8][16]; see `IntLinear`.
"""

from __future__ import annotations

import numpy as np

from quire.kernels.cpu.interleave import tile_height
from quire.kernels.cpu.jit import jit, op, ops_by_dtype
from quire.kernels.cpu.pointers import f16_ptr, f32_ptr, i32_ptr, i64_ptr, u32_ptr
from quire.kernels.cpu.simd import (
    abs_bits,
    add_i32,
    clamp_i32,
    float_from_bits,
    get,
    load,
    load_partial,
    max_i32,
    maximum,
    put,
    reduce_add_i32,
    reduce_max,
    reduce_max_i32,
    scale_to_i32,
    splat,
    splat_i32,
    store_u4x8,
    store_u8x4,
    sub,
)
from quire.kernels.cpu.sizes import DOT_ROWS

SMALLEST = np.float32(2.0**-120)  # the inverse of what is smaller might be infinite
INFINITY_BITS = 0x7F800000
LIMIT = 127


@jit
def load_within(x, at, i, width):
    """Return x[at + i : at + i + 16], 0 from `width` on."""
    if i + 16 <= width:
        return load(x, at + i)
    if i < width:
        return load_partial(x, at + i, width - i)
    return splat(np.float32(0))


@jit
def row_size(x, at, width):
    """Return the largest |x| of a row; NaN if any is not finite, 0 below SMALLEST."""
    sizes = splat_i32(0)
    for i in range(0, width, 16):
        sizes = max_i32(sizes, abs_bits(load_within(x, at, i, width)))
    bits = reduce_max_i32(sizes)
    if bits >= INFINITY_BITS:
        return np.float32(np.nan)
    size = float_from_bits(bits)
    return size if size >= SMALLEST else np.float32(0)


@jit
def steps_per(size):
    """Return how many integer steps 1.0 is where `size` is LIMIT steps; 0 where there is no telling."""
    return np.float32(LIMIT) / size if size > 0 else np.float32(0)


# Activations


@jit
def quantize_row(x, at, width, depth, group, offset, packed, to, starts, starts_at, height):
    """Quantize one row into its place of a tile and return its scale."""
    size = row_size(x, at, width)
    factor = steps_per(size)
    for g in range(depth // group):
        sums = splat_i32(0)
        for i in range(g * group, (g + 1) * group, 16):
            q = scale_to_i32(load_within(x, at, i, width), factor)
            sums = add_i32(sums, q)
            store_u8x4(packed, to + i // 4 * height, height, q)
        starts[starts_at + g * height] = -offset * reduce_add_i32(sums)
    return size / np.float32(LIMIT)


@op
def quantize_tiles(args, first, last, scratch):
    """x, row stride, rows, width, depth, group, offset, packed, starts, scales, order or 0: one item is one tile.

    x float32 [M, width] -> packed uint32 [M/height][depth/4][height], starts int32 [M/height][depth/group][height] of
    -offset times the sum of the group's integers, scales float32 [M], all in whole tiles; missing rows are 0. With an
    order, int64 [width], k of a row is its number order[k].
    """
    x, stride, rows, width, depth, group = f32_ptr(args[0]), args[1], args[2], args[3], args[4], args[5]
    offset, packed, starts, scales = args[6], u32_ptr(args[7]), i32_ptr(args[8]), f32_ptr(args[9])
    groups, order, ordered = depth // group, i64_ptr(args[10]), f32_ptr(scratch)
    for tile in range(first, last):
        row = tile * DOT_ROWS
        count = min(rows - row, DOT_ROWS)
        height = tile_height(count)
        for r in range(height):
            to, starts_at = row * depth // 4 + r, row * groups + r
            # A missing row is one of width 0.
            length, at, source = (width, (row + r) * stride, x) if r < count else (0, 0, x)
            if args[10] != 0:
                for k in range(length):
                    ordered[k] = x[at + order[k]]
                at, source = 0, ordered
            scales[row + r] = quantize_row(
                source, at, length, depth, group, offset, packed, to, starts, starts_at, height
            )


@op
def interleave_tiles(args, first, last, scratch):
    """x, row stride, rows, width, depth, packed: one item is one tile of [depth][height] float32, 0 where x ends."""
    x, stride, rows, width, depth, packed = f32_ptr(args[0]), args[1], args[2], args[3], args[4], f32_ptr(args[5])
    for tile in range(first, last):
        row = tile * DOT_ROWS
        count = min(rows - row, DOT_ROWS)
        height = tile_height(count)
        for r in range(height):
            length = width if r < count else 0
            for k in range(depth):
                value = x[(row + r) * stride + k] if k < length else np.float32(0)
                packed[row * depth + k * height + r] = value


# Weights


@jit
def column_of(row, first, half):
    """Return the packed column of a weight's row: in order from `first` on, or every other sixteen."""
    return first + row if half < 0 else row // 16 * 32 + half * 16 + row % 16


@jit
def pack_int8(elements, args, first, last, scratch):
    """Source, row stride, width, depth, data, scales, first column, half: one item is one row; see `column_of`."""
    x = elements(args[0])
    stride, width, depth, data, scales = args[1], args[2], args[3], u32_ptr(args[4]), f32_ptr(args[5])
    for row in range(first, last):
        column = column_of(row, args[6], args[7])
        size = row_size(x, row * stride, width)
        factor = steps_per(size)
        at = column // 16 * (depth // 4) * 16 + column % 16
        for i in range(0, depth, 16):
            q = scale_to_i32(load_within(x, row * stride, i, width), factor)
            store_u8x4(data, at + i // 4 * 16, 16, add_i32(q, splat_i32(128)))
        scales[column] = size / np.float32(LIMIT)


@jit
def group_scales(x, at, width, group, groups, found):
    """Write every group's scale, its largest number over -8, to `found`; return the largest scale's size.

    The number that is largest in size becomes -8 steps: the range of four bits has one more there than above 0.
    """
    most = np.float32(0)
    for g in range(groups):
        high, low = splat(np.float32(0)), splat(np.float32(0))
        for i in range(g * group, (g + 1) * group, 16):
            v = load_within(x, at, i, width)
            high, low = maximum(high, v), maximum(low, sub(splat(np.float32(0)), v))
        above, below = reduce_max(high), reduce_max(low)
        scale = above / np.float32(-8) if above >= below else below / np.float32(8)
        found[g] = scale
        most = max(most, abs(scale))
    return most


@jit
def pack_int4(elements, args, first, last, scratch):
    """Source, row stride, width, depth, data, scales, first column, half, group, group scales; see `column_of`."""
    x = elements(args[0])
    stride, width, depth, data, scales = args[1], args[2], args[3], u32_ptr(args[4]), f32_ptr(args[5])
    group, relative, found = args[8], f16_ptr(args[9]), f32_ptr(scratch)
    groups = depth // group
    for row in range(first, last):
        column, source = column_of(row, args[6], args[7]), row * stride
        size = row_size(x, source, width)
        most = group_scales(x, source, width, group, groups, found) if size > 0 else np.float32(0)
        if most < SMALLEST:
            most = np.float32(0)
        at = column // 16 * (depth // 8) * 16 + column % 16
        for g in range(groups):
            place = (column // 16 * groups + g) * 16 + column % 16
            put(relative, place, found[g] / most if most > 0 else np.float32(0))
            scale = get(relative, place) * most
            factor = np.float32(1) / scale if abs(scale) >= SMALLEST else np.float32(0)
            for i in range(g * group, (g + 1) * group, 16):
                q = scale_to_i32(load_within(x, source, i, width), factor)
                store_u4x8(data, at + i // 8 * 16, 16, clamp_i32(add_i32(q, splat_i32(8)), 0, 15))
        scales[column] = most if size == size else size


PACK = {8: ops_by_dtype("pack_int8", pack_int8), 4: ops_by_dtype("pack_int4", pack_int4)}
