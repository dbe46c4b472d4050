"""Matrix products with packed weights: out = x @ weight.T (+ bias), one kernel per storage format.

A weight [N, K] is packed as [N/16][K][16]: sixteen output features lie side by side and go into the lanes of one
vector, so that an output is a plain sum over k, in order, whatever the number of rows. The blocking follows Goto and
van de Geijn (2008). N is padded to a multiple of 32 with zeros.

`linear_dot` is for CPUs that multiply pairs of bfloat16: there a bfloat16 weight is packed as [N/16][K/2][16][2], K
padded to an even number with a zero, and the rows of x are rounded to bfloat16 as well.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from quire.kernels.cpu.jit import kernel, part, share
from quire.kernels.cpu.simd import (
    TILE_ROWS,
    dot_four,
    dot_many,
    dot_one,
    get,
    load,
    put,
    store,
    tile_four,
    tile_many,
    tile_one,
)

COLUMNS = 32  # columns of a tile: two vectors
ROW_GROUP = 64  # rows that one work item computes, so that wide machines find enough items
DOT_ROWS = 8  # rows of the largest tile of `linear_dot`
SKEW = 16  # keeps rows that are read side by side out of the same cache sets


@part
def fill_bias(bias, column, out, at, stride, rows):
    """Start `rows` rows of a tile with the bias."""
    low, high = load(bias, column), load(bias, column + 16)
    for r in range(rows):
        store(out, at + r * stride, low)
        store(out, at + r * stride + 16, high)


@part
def product_item(w, bias, x, packed, out, rows, depth, item):
    """Compute 32 columns of up to ROW_GROUP rows: by full tiles from `packed`, then by fours and ones from `x`."""
    groups = (rows + ROW_GROUP - 1) // ROW_GROUP
    column, row = item // groups * COLUMNS, item % groups * ROW_GROUP
    last = min(row + ROW_GROUP, rows)
    stride = out.shape[0] // rows
    at, next_vector, resume = column * depth, 16 * depth, 0
    if bias.shape[0] > 0:
        fill_bias(bias, column, out, row * stride + column, stride, last - row)
        resume = 1
    while row + TILE_ROWS <= last:
        to = row * stride + column
        tile_many(w, at, 16, next_vector, packed, row * depth, TILE_ROWS, 1, depth, out, to, stride, resume)
        row += TILE_ROWS
    while row + 4 <= last:
        to = row * stride + column
        tile_four(w, at, 16, next_vector, x, row * depth, 1, depth, depth, out, to, stride, resume)
        row += 4
    while row < last:
        to = row * stride + column
        tile_one(w, at, 16, next_vector, x, row * depth, 1, depth, depth, out, to, stride, resume)
        row += 1


@part
def product(w, bias, x, packed, out, rows, depth, items, chunk, chunks):
    """Compute this chunk's share of the work items."""
    first, last = share(items, chunk, chunks)
    for item in range(first, last):
        product_item(w, bias, x, packed, out, rows, depth, item)


@kernel
def linear_float32(w, bias, x, packed, out, rows, depth, items, chunks):
    """x [M*K] times w (packed) -> out [M*N]. `packed` is x by `interleave_float32`; bias float32 [N] or empty."""
    if chunks == 1:
        product(w, bias, x, packed, out, rows, depth, items, chunks - 1, chunks)
    else:
        for c in prange(chunks):
            product(w, bias, x, packed, out, rows, depth, items, np.int64(c), chunks)


@kernel
def linear_bfloat16(w, bias, x, packed, out, rows, depth, items, chunks):
    """Like `linear_float32`, the bits of bfloat16 in w."""
    if chunks == 1:
        product(w, bias, x, packed, out, rows, depth, items, chunks - 1, chunks)
    else:
        for c in prange(chunks):
            product(w, bias, x, packed, out, rows, depth, items, np.int64(c), chunks)


@kernel
def linear_float16(w, bias, x, packed, out, rows, depth, items, chunks):
    """Like `linear_float32`, the bits of float16 in w."""
    if chunks == 1:
        product(w, bias, x, packed, out, rows, depth, items, chunks - 1, chunks)
    else:
        for c in prange(chunks):
            product(w, bias, x, packed, out, rows, depth, items, np.int64(c), chunks)


@part
def tile_height(rows):
    """Rows of the `linear_dot` tile that computes the next of `rows` rows; the tile may have more than are left."""
    return 8 if rows > 4 else 4 if rows > 1 else 1


def padded_rows(rows: int) -> int:
    """Return the rows of all tiles that `linear_dot` computes `rows` rows by; see `tile_height`."""
    whole = rows // DOT_ROWS * DOT_ROWS
    return whole if whole == rows else whole + tile_height.py_func(rows - whole)


@part
def round_rows(x, packed, rows, depth, chunk, chunks):
    """Round this chunk's share of the tiles of x [M][K] to bfloat16, as [K/2][height][2] each; missing ones are 0."""
    pairs = (depth + 1) // 2
    first, last = share((rows + DOT_ROWS - 1) // DOT_ROWS, chunk, chunks)
    stride = pairs + SKEW
    rounded = np.zeros(DOT_ROWS * stride, np.uint32)
    halves = rounded.view(np.uint16)
    for tile in range(first, last):
        row = tile * DOT_ROWS
        count = min(rows - row, DOT_ROWS)
        height = tile_height(count)
        for r in range(count):
            for k in range(depth):
                put(halves, 2 * r * stride + k, get(x, (row + r) * depth + k))
        for r in range(count, height):
            rounded[r * stride : r * stride + pairs] = 0
        for k in range(pairs):
            for r in range(height):
                packed[row * pairs + k * height + r] = rounded[r * stride + k]


@part
def dot_item(w, bias, packed, out, rows, depth, item):
    """Compute 32 columns of up to ROW_GROUP rows; `out` has room for the whole of the last tile."""
    groups = (rows + ROW_GROUP - 1) // ROW_GROUP
    column, row = item // groups * COLUMNS, item % groups * ROW_GROUP
    last = min(row + ROW_GROUP, rows)
    pairs = (depth + 1) // 2
    stride = w.shape[0] // (2 * pairs)
    at, next_vector, resume = column * 2 * pairs, 32 * pairs, 0
    while row < last:
        height, to = tile_height(last - row), row * stride + column
        if bias.shape[0] > 0:
            fill_bias(bias, column, out, to, stride, height)
            resume = 1
        if height == 8:
            dot_many(w, at, next_vector, packed, row * pairs, pairs, out, to, stride, resume)
        elif height == 4:
            dot_four(w, at, next_vector, packed, row * pairs, pairs, out, to, stride, resume)
        else:
            dot_one(w, at, next_vector, packed, row * pairs, pairs, out, to, stride, resume)
        row += height


@part
def dots(w, bias, packed, out, rows, depth, items, chunk, chunks):
    """Compute this chunk's share of the work items."""
    first, last = share(items, chunk, chunks)
    for item in range(first, last):
        dot_item(w, bias, packed, out, rows, depth, item)


@kernel
def linear_dot(w, bias, x, packed, out, rows, depth, items, chunks):
    """x [M*K] times w (packed in pairs), both bfloat16 -> out [at least M rows of N], accumulated in float32.

    `packed` uint32 is room for x in pairs, and like `out` it holds whole tiles, see `tile_height`.
    """
    if chunks == 1:
        round_rows(x, packed, rows, depth, chunks - 1, chunks)
        dots(w, bias, packed, out, rows, depth, items, chunks - 1, chunks)
    else:
        if rows <= DOT_ROWS:
            round_rows(x, packed, rows, depth, 0, 1)
        else:
            for c in prange(chunks):
                round_rows(x, packed, rows, depth, np.int64(c), chunks)
        for c in prange(chunks):
            dots(w, bias, packed, out, rows, depth, items, np.int64(c), chunks)


@part
def interleave(source, target, width, depth, blocks, at, chunk, chunks):
    """target[at + (block * depth + k) * width + r] = source[(block * width + r) * depth + k]."""
    first, last = share(blocks, chunk, chunks)
    for block in range(first, last):
        for k in range(depth):
            for r in range(width):
                target[at + (block * depth + k) * width + r] = source[(block * width + r) * depth + k]


@kernel
def interleave_float32(source, target, width, depth, blocks, at, chunks):
    """Turn rows [blocks * width][depth] into [blocks][depth][width]: of weights, or of the activations of a tile.

    The tile reads one x of every row for each k: side by side they are one cache line. Row after row they lie K
    apart, which, when K is a power of two, maps all of them to the same few cache sets.
    """
    if chunks == 1:
        interleave(source, target, width, depth, blocks, at, chunks - 1, chunks)
    else:
        for c in prange(chunks):
            interleave(source, target, width, depth, blocks, at, np.int64(c), chunks)


@kernel
def interleave_16(source, target, width, depth, blocks, at, chunks):
    """Like `interleave_float32` for uint16 elements."""
    if chunks == 1:
        interleave(source, target, width, depth, blocks, at, chunks - 1, chunks)
    else:
        for c in prange(chunks):
            interleave(source, target, width, depth, blocks, at, np.int64(c), chunks)
