"""Ops that multiply with packed float weights: out = x @ weight.T (+ bias), one per storage format.

A weight [N, K] is packed as [N/16][K][16]: sixteen output features lie side by side and go into the lanes of one
vector, so that an output is a plain sum over k, in order, whatever the number of rows. The blocking follows Goto and
van de Geijn (2008). N is padded to a multiple of 32 with zeros.

`linear_pairs` is for CPUs that multiply pairs of bfloat16: there a bfloat16 weight is packed as [N/16][K/2][16][2], K
padded to an even number with a zero, and the rows of x are rounded to bfloat16 as well.

In a gated weight the vectors of sixteen features alternate between gate and up, and what comes out is
activation(gate) * up. products.py emits these ops; those of integers are in linear_int.py.
"""

from __future__ import annotations

import numpy as np

from quire.kernels.cpu.activations import gated
from quire.kernels.cpu.formats import COLUMNS
from quire.kernels.cpu.interleave import ROW_GROUP, next_panel, tile_height
from quire.kernels.cpu.jit import jit, op, ops_by_dtype
from quire.kernels.cpu.pointers import bf16_ptr, f32_ptr, u32_ptr
from quire.kernels.cpu.simd import (
    TILE_ROWS,
    dot_four,
    dot_many,
    dot_one,
    load,
    store,
    tile_four,
    tile_many,
    tile_one,
)

NO_GATE = -1


@jit
def fill_bias(bias, column, out, at, stride, rows):
    """Start `rows` rows of a tile with the bias."""
    low, high = load(bias, column), load(bias, column + 16)
    for r in range(rows):
        store(out, at + r * stride, low)
        store(out, at + r * stride + 16, high)


@jit
def finish_gated(tile, out, at, stride, rows, kind):
    """Write activation(gate) * up of a tile [rows][32] to out."""
    for r in range(rows):
        left, right = load(tile, r * COLUMNS), load(tile, r * COLUMNS + 16)
        store(out, at + r * stride, gated(left, right, kind))


@jit
def item_range(item, groups, rows):
    """Return column, first row and last row + 1 of an item."""
    column, row = item // groups * COLUMNS, item % groups * ROW_GROUP
    return column, row, min(row + ROW_GROUP, rows)


@jit
def linear_floats(elements, args, first, last, scratch):
    """x times w in float32: full tiles from the packed rows, then fours and ones from x itself.

    args: w, bias or 0, x, its row step, packed x, out, its row step, rows, depth, gate's kind or -1.
    """
    w = elements(args[0])
    x, x_step, packed, out, stride = f32_ptr(args[2]), args[3], f32_ptr(args[4]), f32_ptr(args[5]), args[6]
    rows, depth, kind = args[7], args[8], args[9]
    groups = (rows + ROW_GROUP - 1) // ROW_GROUP
    tile = f32_ptr(scratch)
    for item in range(first, last):
        column, start, stop = item_range(item, groups, rows)
        at, next_vector, row = column * depth, 16 * depth, start
        target, to, step = out, start * stride + column, stride
        if kind >= 0:
            target, to, step = tile, 0, COLUMNS
        if args[1] != 0:
            fill_bias(f32_ptr(args[1]), column, target, to, step, stop - start)
        resume = np.int64(args[1] != 0)
        while row + TILE_ROWS <= stop:
            place = to + (row - start) * step
            tile_many(w, at, 16, next_vector, packed, row * depth, TILE_ROWS, 1, depth, target, place, step, resume)
            row += TILE_ROWS
        while row + 4 <= stop:
            place = to + (row - start) * step
            tile_four(w, at, 16, next_vector, x, row * x_step, 1, x_step, depth, target, place, step, resume)
            row += 4
        while row < stop:
            place = to + (row - start) * step
            tile_one(w, at, 16, next_vector, x, row * x_step, 1, x_step, depth, target, place, step, resume)
            row += 1
        if kind >= 0:
            finish_gated(tile, out, start * stride + column // 2, stride, stop - start, kind)


@op
def linear_pairs(args, first, last, scratch):
    """x times w, both bfloat16. args: w, bias or 0, rounded x, out, its row step, rows, pairs, gate's kind or -1."""
    w, packed, out, stride = bf16_ptr(args[0]), u32_ptr(args[2]), f32_ptr(args[3]), args[4]
    rows, pairs, kind = args[5], args[6], args[7]
    groups = (rows + ROW_GROUP - 1) // ROW_GROUP
    tile = f32_ptr(scratch)
    resume = np.int64(args[1] != 0)
    for item in range(first, last):
        column, start, stop = item_range(item, groups, rows)
        at, next_vector, row = column * 2 * pairs, 32 * pairs, start
        target, to, step = out, start * stride + column, stride
        if kind >= 0:
            target, to, step = tile, 0, COLUMNS
        while row < stop:
            height, place = tile_height(rows - row), to + (row - start) * step
            ahead, ahead_too = next_panel(at, next_vector, row, rows)
            if args[1] != 0:
                fill_bias(f32_ptr(args[1]), column, target, place, step, height)
            if height == 8:
                dot_many(w, at, next_vector, packed, row * pairs, pairs, target, place, step, resume, ahead, ahead_too)
            elif height == 4:
                dot_four(w, at, next_vector, packed, row * pairs, pairs, target, place, step, resume, ahead, ahead_too)
            else:
                dot_one(w, at, next_vector, packed, row * pairs, pairs, target, place, step, resume, ahead, ahead_too)
            row += height
        if kind >= 0:
            finish_gated(tile, out, start * stride + column // 2, stride, stop - start, kind)


FLOAT_OPS = ops_by_dtype("linear", linear_floats)
