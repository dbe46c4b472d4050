"""Products of each head with a matrix of its own: what brings queries to the latent cache, and its values back.

A matrix [B, A] lies as [B/32][A][32] in a storage dtype, one head after the other. An item is one head, 32 columns of
its result, and up to 64 tokens. Sums are float32, over A in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.checkpoint.tensor import Tensor
from quire.kernels.cpu.arrays import as_rows
from quire.kernels.cpu.formats import COLUMNS, STORAGE, to_storage
from quire.kernels.cpu.jit import Op, op, part
from quire.kernels.cpu.paged_floats import product
from quire.kernels.cpu.pointers import floats, halves, words
from quire.kernels.cpu.threads import Launcher

TOKENS = 64  # of an item: its part of the matrix is read once for them

# Arguments of the ops; the stride in elements
X, X_STRIDE, WEIGHT, OUT, H_TOKENS, HEADS, INPUTS, OUTPUTS, CHUNKS = range(9)


@dataclass(frozen=True, slots=True)
class CPUHeads:
    """A packed matrix for each of `heads` heads, flat as the module docstring says."""

    data: np.ndarray
    heads: int
    outputs: int
    inputs: int


@part
def multiply(args, weight, item, scratch):
    """Do one item: token chunks run fastest, then columns, then heads."""
    heads, inputs, outputs, tokens = args[HEADS], args[INPUTS], args[OUTPUTS], args[H_TOKENS]
    x, out, stage = floats(args[X]), floats(args[OUT]), floats(scratch)
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


@op
def heads_float32(args, first, last, scratch):
    """Multiply with float32 matrices."""
    for item in range(first, last):
        multiply(args, floats(args[WEIGHT]), item, scratch)


@op
def heads_bfloat16(args, first, last, scratch):
    """Multiply with bfloat16 matrices."""
    for item in range(first, last):
        multiply(args, words(args[WEIGHT]), item, scratch)


@op
def heads_float16(args, first, last, scratch):
    """Multiply with float16 matrices."""
    for item in range(first, last):
        multiply(args, halves(args[WEIGHT]), item, scratch)


MULTIPLY: dict[np.dtype, Op] = {
    np.dtype(np.float32): heads_float32,
    np.dtype(np.uint16): heads_bfloat16,
    np.dtype(np.int16): heads_float16,
}


def pack_heads(launcher: Launcher, matrices: Sequence[Tensor], dtype: str) -> CPUHeads:
    """Pack a matrix [B, A] for each head, see `Backend.pack_heads`."""
    outputs, inputs = matrices[0].shape
    tiles = -(-outputs // COLUMNS)
    data = launcher.weights.empty(len(matrices) * tiles * COLUMNS * inputs, STORAGE[dtype])
    places = data.reshape(len(matrices), tiles, inputs, COLUMNS)
    stage = np.zeros((tiles * COLUMNS, inputs), STORAGE[dtype])
    for place, matrix in zip(places, matrices, strict=True):
        assert matrix.shape == (outputs, inputs)
        stage[:outputs] = to_storage(matrix, dtype)
        place[...] = stage.reshape(tiles, COLUMNS, inputs).transpose(0, 2, 1)
    return CPUHeads(data, len(matrices), outputs, inputs)


def head_linear(launcher: Launcher, x: np.ndarray, weight: CPUHeads) -> np.ndarray:
    """Emit the products of x [T*H, A], rows anywhere -> [T*H, B], see `Backend.head_linear`."""
    if x.shape[1] != weight.inputs or x.shape[0] % weight.heads:
        raise ValueError(f"head_linear: x is {x.shape}, there are {weight.heads} heads with {weight.inputs} inputs")
    x, stride = as_rows(x)
    out = launcher.empty((x.shape[0], weight.outputs))
    tokens, chunks = x.shape[0] // weight.heads, -(-x.shape[0] // weight.heads // TOKENS)
    sizes = (tokens, weight.heads, weight.inputs, weight.outputs, chunks)
    items = weight.heads * -(-weight.outputs // COLUMNS) * chunks
    work = x.shape[0] * weight.inputs * weight.outputs
    launcher.emit(MULTIPLY[weight.data.dtype], x, stride, weight.data, out, *sizes, items=items, work=work)
    return out
