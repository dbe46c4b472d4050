"""Per-head matrix products: the absorbed projections of MLA, from queries to the latent space and back to values.

A matrix [B, A] is stored as [B/32][A][32] in a storage dtype, one head after the other. An item is one head, 32 columns
of its result, and up to 64 tokens. Sums are float32, over A in order.

On CPUs with bfloat16 dot products it is stored as [B/32][A/2][32][2], A padded to an even number with a zero, and the
rows of x are rounded to bfloat16 too, by each item for itself; an item has 128 columns to do so less often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.checkpoint.tensor import Tensor
from quire.kernels.cpu.arrays import as_rows
from quire.kernels.cpu.attention_kernels import product
from quire.kernels.cpu.formats import COLUMNS, STORAGE, to_storage
from quire.kernels.cpu.interleave import PACK_BYTES, pack_bf16_tile, tile_height
from quire.kernels.cpu.jit import Op, jit, op, ops_by_dtype
from quire.kernels.cpu.pointers import bf16_ptr, f32_ptr, u32_ptr
from quire.kernels.cpu.simd import LANES, panel_four, panel_many, panel_one
from quire.kernels.cpu.sizes import DOT_ROWS, SCRATCH_BYTES
from quire.kernels.cpu.threads import Launcher

TOKENS = 64  # of an item: its part of the matrix is read once for them
WIDTH = 128  # columns of an item of pairs
STAGE_BYTES = 4 * DOT_ROWS * COLUMNS  # of a tile that is not written as a whole

# Arguments of the ops; the stride in elements
X, X_STRIDE, WEIGHT, OUT, H_TOKENS, HEADS, INPUTS, OUTPUTS, CHUNKS = range(9)


@dataclass(frozen=True, slots=True)
class CPUHeads:
    """A packed matrix for each of `heads` heads, flat, in the layout of the module docstring; `paired`: in pairs."""

    data: np.ndarray
    heads: int
    outputs: int
    inputs: int
    paired: bool = False

    @property
    def op(self) -> Op:
        """The op that multiplies with these matrices."""
        return heads_pairs if self.paired else MULTIPLY[self.data.dtype]


@jit
def multiply(args, weight, item, scratch):
    """Do one item of `multiply_floats`."""
    heads, inputs, outputs, tokens = args[HEADS], args[INPUTS], args[OUTPUTS], args[H_TOKENS]
    x, out, stage = f32_ptr(args[X]), f32_ptr(args[OUT]), f32_ptr(scratch)
    tiles = (outputs + COLUMNS - 1) // COLUMNS
    first, tile = item % args[CHUNKS] * TOKENS, item // args[CHUNKS]
    head, column = tile // tiles, tile % tiles * COLUMNS
    rows, w_at = min(TOKENS, tokens - first), tile * inputs * COLUMNS
    x_at, x_next = (first * heads + head) * args[X_STRIDE], heads * args[X_STRIDE]
    to, out_next = (first * heads + head) * outputs + column, heads * outputs
    if column + COLUMNS <= outputs:
        product(weight, w_at, COLUMNS, x, x_at, x_next, inputs, out, to, out_next, rows, 0)
        return
    product(weight, w_at, COLUMNS, x, x_at, x_next, inputs, stage, 0, COLUMNS, rows, 0)
    for row in range(rows):
        for c in range(outputs - column):
            out[to + row * out_next + c] = stage[row * COLUMNS + c]


@jit
def multiply_floats(elements, args, first, last, scratch):
    """Multiply with float matrices. Of the items token chunks run fastest, then columns, then heads."""
    for item in range(first, last):
        multiply(args, elements(args[WEIGHT]), item, scratch)


MULTIPLY = ops_by_dtype("heads", multiply_floats)


# Pairs of bfloat16


@jit
def dot_tile(weight, at, pairs, packed, row, rows, out, to, out_next):
    """Multiply a tile of `rows` rounded rows with 32 columns; it writes `tile_height(rows)` rows."""
    beside, x_at, height = 2 * LANES, row * pairs, tile_height(rows)
    if height == 8:
        panel_many(weight, at, beside, packed, x_at, pairs, out, to, out_next, 0, at, at)
    elif height == 4:
        panel_four(weight, at, beside, packed, x_at, pairs, out, to, out_next, 0, at, at)
    else:
        panel_one(weight, at, beside, packed, x_at, pairs, out, to, out_next, 0, at, at)


@jit
def multiply_pairs(args, item, scratch):
    """Do one item: token chunks run fastest, then groups of columns, then heads."""
    heads, inputs, outputs, tokens = args[HEADS], args[INPUTS], args[OUTPUTS], args[H_TOKENS]
    weight, out = bf16_ptr(args[WEIGHT]), f32_ptr(args[OUT])
    stage, packed = f32_ptr(scratch), u32_ptr(scratch + STAGE_BYTES)
    pairs, groups, tiles = (inputs + 1) // 2, (outputs + WIDTH - 1) // WIDTH, (outputs + COLUMNS - 1) // COLUMNS
    first, place = item % args[CHUNKS] * TOKENS, item // args[CHUNKS]
    head, begin = place // groups, place % groups * WIDTH
    rows, x_next = min(TOKENS, tokens - first), heads * args[X_STRIDE]
    room = scratch + STAGE_BYTES + 4 * TOKENS * pairs
    for row in range(0, rows, DOT_ROWS):
        x_at = ((first + row) * heads + head) * args[X_STRIDE]
        pack_bf16_tile(f32_ptr(args[X]), x_at, x_next, min(DOT_ROWS, rows - row), inputs, packed, row * pairs, room)
    for column in range(begin, min(begin + WIDTH, outputs), COLUMNS):
        w_at = (head * tiles * COLUMNS + column) * 2 * pairs
        for row in range(0, rows, DOT_ROWS):
            count = min(DOT_ROWS, rows - row)
            to, out_next = ((first + row) * heads + head) * outputs + column, heads * outputs
            if tile_height(count) == count and column + COLUMNS <= outputs:
                dot_tile(weight, w_at, pairs, packed, row, count, out, to, out_next)
                continue
            dot_tile(weight, w_at, pairs, packed, row, count, stage, 0, COLUMNS)
            for r in range(count):
                for c in range(min(COLUMNS, outputs - column)):
                    out[to + r * out_next + c] = stage[r * COLUMNS + c]


@op
def heads_pairs(args, first, last, scratch):
    """Multiply rounded rows with bfloat16 matrices that lie in pairs."""
    for item in range(first, last):
        multiply_pairs(args, item, scratch)


def pack_heads(launcher: Launcher, matrices: Sequence[Tensor], dtype: str, paired: bool = False) -> CPUHeads:
    """Pack a matrix [B, A] for each head, see `Backend.pack_heads`; `paired` is for bfloat16."""
    outputs, inputs = matrices[0].shape
    padded, depth = -(-outputs // COLUMNS) * COLUMNS, inputs + inputs % 2 if paired else inputs
    data = launcher.weights.empty(len(matrices) * padded * depth, STORAGE[dtype])
    step = 2 if paired else 1
    places = data.reshape(len(matrices), padded // COLUMNS, depth // step, COLUMNS, step)
    stage = np.zeros((padded, depth), STORAGE[dtype])
    for place, matrix in zip(places, matrices, strict=True):
        assert matrix.shape == (outputs, inputs)
        stage[:outputs, :inputs] = to_storage(matrix, dtype)
        place[...] = stage.reshape(-1, COLUMNS, depth // step, step).transpose(0, 2, 1, 3)
    return CPUHeads(data, len(matrices), outputs, inputs, paired)


def head_linear(launcher: Launcher, x: np.ndarray, weight: CPUHeads) -> np.ndarray:
    """Emit the products of x [T*H, A], rows anywhere -> [T*H, B], see `Backend.head_linear`."""
    if x.shape[1] != weight.inputs or x.shape[0] % weight.heads:
        raise ValueError(f"head_linear: x is {x.shape}, there are {weight.heads} heads with {weight.inputs} inputs")
    x, stride = as_rows(x)
    out = launcher.empty((x.shape[0], weight.outputs))
    tokens, chunks = x.shape[0] // weight.heads, -(-x.shape[0] // weight.heads // TOKENS)
    sizes = (tokens, weight.heads, weight.inputs, weight.outputs, chunks)
    items = weight.heads * -(-weight.outputs // (WIDTH if weight.paired else COLUMNS)) * chunks
    work = x.shape[0] * weight.inputs * weight.outputs
    assert STAGE_BYTES + 2 * TOKENS * (weight.inputs + 1) + PACK_BYTES <= SCRATCH_BYTES, f"{weight.inputs} inputs"
    launcher.emit(weight.op, x, stride, weight.data, out, *sizes, items=items, work=work)
    return out
