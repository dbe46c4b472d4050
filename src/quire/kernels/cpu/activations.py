"""Activation functions: `activate` for sixteen lanes, which other ops use as well, and the op for whole rows."""

from __future__ import annotations

import numpy as np

from quire.kernels.cpu.arrays import as_rows
from quire.kernels.cpu.jit import op, part
from quire.kernels.cpu.pointers import floats
from quire.kernels.cpu.simd import (
    add,
    div,
    exp,
    load,
    load_some,
    maximum,
    mul,
    multiply_add,
    splat,
    store,
    store_some,
    sub,
)
from quire.kernels.cpu.threads import Launcher

RELU, SILU, GELU, GELU_TANH, QUICK_GELU = range(5)
PIECE = 1024  # elements of a row that make one work item
COST = 16  # multiply-adds that take about as long as one activation


@part
def zero():
    """Sixteen zeros."""
    return splat(np.float32(0))


@part
def error_function(x):
    """erf(x) to 2e-7: Abramowitz and Stegun 7.1.26 on |x|, erf being odd."""
    size = maximum(x, sub(zero(), x))
    one = splat(np.float32(1))
    t = div(one, multiply_add(size, splat(np.float32(0.3275911)), one))
    series = splat(np.float32(1.061405429))
    series = multiply_add(series, t, splat(np.float32(-1.453152027)))
    series = multiply_add(series, t, splat(np.float32(1.421413741)))
    series = multiply_add(series, t, splat(np.float32(-0.284496736)))
    series = multiply_add(series, t, splat(np.float32(0.254829592)))
    tail = mul(mul(series, t), exp(sub(zero(), mul(size, size))))
    positive = sub(one, tail)
    sign = div(x, maximum(size, splat(np.float32(1e-30))))
    return mul(sign, positive)


@part
def activate(x, kind):
    """Apply one of the five activations; three of them are x * sigmoid(f(x))."""
    one = splat(np.float32(1))
    if kind == RELU:
        return maximum(x, zero())
    if kind == GELU:
        half = mul(x, splat(np.float32(0.5)))
        return multiply_add(half, error_function(mul(x, splat(np.float32(0.7071067811865476)))), half)
    argument = x
    if kind == GELU_TANH:  # 0.5 (1 + tanh u) is sigmoid(2u)
        cube = mul(mul(x, x), x)
        inner = multiply_add(cube, splat(np.float32(0.044715)), x)
        argument = mul(inner, splat(np.float32(1.5957691216057308)))
    elif kind == QUICK_GELU:
        argument = mul(x, splat(np.float32(1.702)))
    return div(x, add(one, exp(sub(zero(), argument))))


@op
def activate_rows(args, first, last, scratch):
    """Items are pieces of rows. x, elements between its rows, out, out's width, kind, gated, pieces of a row."""
    x, stride, out, width, kind = floats(args[0]), args[1], floats(args[2]), args[3], args[4]
    gated, pieces = args[5] != 0, args[6]
    for item in range(first, last):
        row, begin = item // pieces, item % pieces * PIECE
        source, target, stop = row * stride, row * width, min(begin + PIECE, width)
        for i in range(begin, stop, 16):
            rest = min(16, stop - i)
            if rest == 16:
                v = activate(load(x, source + i), kind)
                if gated:
                    v = mul(v, load(x, source + width + i))
                store(out, target + i, v)
            else:
                v = activate(load_some(x, source + i, rest), kind)
                if gated:
                    v = mul(v, load_some(x, source + width + i, rest))
                store_some(out, target + i, v, rest)


def activation(launcher: Launcher, x: np.ndarray, kind: int, gated: bool) -> np.ndarray:
    """Return f(x) for x [..., W]; gated: f(x[..., : W/2]) * x[..., W/2 :]. `kind` is RELU or one of its neighbours."""
    source, stride = as_rows(x if x.ndim == 2 else x.reshape(-1, x.shape[-1]))
    rows, width = source.shape[0], source.shape[1] // 2 if gated else source.shape[1]
    out = launcher.empty((*x.shape[:-1], width))
    pieces = max(1, -(-width // PIECE))
    items, work = rows * pieces, COST * rows * width
    launcher.emit(activate_rows, source, stride, out, width, kind, int(gated), pieces, items=items, work=work)
    return out
