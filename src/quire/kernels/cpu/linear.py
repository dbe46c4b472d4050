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
from quire.kernels.cpu.jit import jit, op_of, ops_by_dtype
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

# Arguments of all ops of float weights and of codes: the weight, its bias or 0, out, elements between its rows, number
# of rows, id of the gate's activation or NO_ACTIVATION. Then come those of the two groups below; codes have more.
WEIGHT, BIAS, OUT, OUT_STEP, ARG_ROWS, ACTIVATION_ID = range(6)
X, X_STEP, X_TILES, DEPTH = range(6, 10)  # x float32, elements between its rows, its whole tiles packed, its columns
X_PAIRS, PAIRS = range(6, 8)  # x as tiles of pairs of bfloat16, pairs of a row


@jit
def fill_bias(args, column, out, at, stride, rows):
    """Start `rows` rows of a tile with the bias, if there is one."""
    if args[BIAS] != 0:
        bias = f32_ptr(args[BIAS])
        low, high = load(bias, column), load(bias, column + 16)
        for r in range(rows):
            store(out, at + r * stride, low)
            store(out, at + r * stride + 16, high)


@jit
def finish_gated(tile, out, at, stride, rows, activation_id):
    """Write activation(gate) * up of a tile [rows][32] to out."""
    for r in range(rows):
        left, right = load(tile, r * COLUMNS), load(tile, r * COLUMNS + 16)
        store(out, at + r * stride, gated(left, right, activation_id))


@jit
def item_range(item, rows):
    """Return the first column, the first row and the last row + 1 of an item: 32 columns of up to ROW_GROUP rows."""
    groups = (rows + ROW_GROUP - 1) // ROW_GROUP
    column, row = item // groups * COLUMNS, item % groups * ROW_GROUP
    return column, row, min(row + ROW_GROUP, rows)


def product_items(multiply):
    """Return the body of an op that does items with multiply(w, args, column, start, stop, out, to, step, scratch).

    `multiply` writes the products of rows start .. stop - 1 with 32 columns, from `column` on, plus the bias, to
    out[to + (row - start) * step]. Of a gated weight that is a tile at the start of the scratch memory.
    """

    @jit
    def items(elements, args, first, last, scratch):
        out, stride, activation_id, tile = f32_ptr(args[OUT]), args[OUT_STEP], args[ACTIVATION_ID], f32_ptr(scratch)
        for item in range(first, last):
            column, start, stop = item_range(item, args[ARG_ROWS])
            target, to, step = out, start * stride + column, stride
            if activation_id >= 0:
                target, to, step = tile, 0, COLUMNS
            multiply(elements(args[WEIGHT]), args, column, start, stop, target, to, step, scratch)
            if activation_id >= 0:
                finish_gated(tile, out, start * stride + column // 2, stride, stop - start, activation_id)

    return items


@jit
def multiply_rows(w, at, next_vector, args, k, count, start, stop, out, to, step, resume):
    """Multiply elements k .. k + count - 1 of rows with 32 columns of float weights that begin at w[at].

    Whole tiles are read packed, then four rows or one at a time from x itself. `resume`: whether sums start from `out`.
    """
    x, x_step, tiles, depth = f32_ptr(args[X]), args[X_STEP], f32_ptr(args[X_TILES]), args[DEPTH]
    row = start
    while row + TILE_ROWS <= stop:
        place, x_at = to + (row - start) * step, row * depth + k * TILE_ROWS
        tile_many(w, at, 16, next_vector, tiles, x_at, TILE_ROWS, 1, count, out, place, step, resume)
        row += TILE_ROWS
    while row + 4 <= stop:
        place, x_at = to + (row - start) * step, row * x_step + k
        tile_four(w, at, 16, next_vector, x, x_at, 1, x_step, count, out, place, step, resume)
        row += 4
    while row < stop:
        place, x_at = to + (row - start) * step, row * x_step + k
        tile_one(w, at, 16, next_vector, x, x_at, 1, x_step, count, out, place, step, resume)
        row += 1


@jit
def multiply_floats(w, args, column, start, stop, out, to, step, scratch):
    """Do an item in float32, see `product_items`."""
    depth = args[DEPTH]
    fill_bias(args, column, out, to, step, stop - start)
    resume = np.int64(args[BIAS] != 0)
    multiply_rows(w, column * depth, 16 * depth, args, 0, depth, start, stop, out, to, step, resume)


@jit
def multiply_pairs(w, args, column, start, stop, out, to, step, scratch):
    """Do an item in pairs of bfloat16, see `product_items`."""
    x, pairs, rows = u32_ptr(args[X_PAIRS]), args[PAIRS], args[ARG_ROWS]
    at, next_vector, row = column * 2 * pairs, 32 * pairs, start
    resume = np.int64(args[BIAS] != 0)
    while row < stop:
        height, place = tile_height(rows - row), to + (row - start) * step
        ahead, ahead_too = next_panel(at, next_vector, row, rows)
        fill_bias(args, column, out, place, step, height)
        if height == 8:
            dot_many(w, at, next_vector, x, row * pairs, pairs, out, place, step, resume, ahead, ahead_too)
        elif height == 4:
            dot_four(w, at, next_vector, x, row * pairs, pairs, out, place, step, resume, ahead, ahead_too)
        else:
            dot_one(w, at, next_vector, x, row * pairs, pairs, out, place, step, resume, ahead, ahead_too)
        row += height


FLOAT_OPS = ops_by_dtype("linear", product_items(multiply_floats))
linear_pairs = op_of("linear_pairs", product_items(multiply_pairs), bf16_ptr)
