"""Activation functions: `activate` for sixteen lanes, which other ops use as well, and ops for whole rows."""

from __future__ import annotations

import numpy as np

from quire.kernels.cpu.arrays import as_rows, row_step
from quire.kernels.cpu.jit import jit, op
from quire.kernels.cpu.pointers import f32_ptr, float64_from_bits
from quire.kernels.cpu.simd import (
    add,
    div,
    exp,
    load_lanes,
    maximum,
    mul,
    multiply_add,
    splat,
    store_lanes,
    sub,
)
from quire.kernels.cpu.threads import Launcher

RELU, SILU, GELU, GELU_TANH, QUICK_GELU, RELU2, SIGMOID, SWIGLU_OAI, SOFTPLUS = range(9)
ACTIVATIONS = {
    "relu": RELU,
    "silu": SILU,
    "gelu": GELU,
    "gelu_tanh": GELU_TANH,
    "quick_gelu": QUICK_GELU,
    "sigmoid": SIGMOID,
    "softplus": SOFTPLUS,
    "relu2": RELU2,
}
GATED_ACTIVATIONS = {**ACTIVATIONS, "swiglu_oai": SWIGLU_OAI}
NO_ACTIVATION = -1  # in place of an id, where there may be none
PIECE = 1024  # elements of a row that make one work item
COST = 16  # multiply-adds that take about as long as one activation


@jit
def zero():
    """Sixteen zeros."""
    return splat(np.float32(0))


@jit
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


@jit
def tanh(x):
    """tanh in every lane, as 1 - 2 / (e^2x + 1): absolute error 1e-7."""
    one = splat(np.float32(1))
    return sub(one, div(splat(np.float32(2)), add(exp(add(x, x)), one)))


@jit
def capped(x, cap):
    """cap * tanh(x / cap) in every lane."""
    return mul(cap, tanh(div(x, cap)))


@jit
def softplus(x):
    """log(1 + e^x), as max(x, 0) + log(1 + y) with y = e^-|x|.

    The logarithm is 2 atanh(z) with z = y / (2 + y), at most a third; its series to z^15 has a remainder of 2e-9.
    """
    one, two = splat(np.float32(1)), splat(np.float32(2))
    y = exp(sub(zero(), maximum(x, sub(zero(), x))))
    z = div(y, add(two, y))
    square = mul(z, z)
    series = splat(np.float32(1 / 15))
    series = multiply_add(series, square, splat(np.float32(1 / 13)))
    series = multiply_add(series, square, splat(np.float32(1 / 11)))
    series = multiply_add(series, square, splat(np.float32(1 / 9)))
    series = multiply_add(series, square, splat(np.float32(1 / 7)))
    series = multiply_add(series, square, splat(np.float32(1 / 5)))
    series = multiply_add(series, square, splat(np.float32(1 / 3)))
    series = multiply_add(series, square, one)
    return add(maximum(x, zero()), mul(mul(two, z), series))


@jit
def activate(x, activation_id):
    """Apply one of the activations but SWIGLU_OAI; three of them are x * sigmoid(f(x))."""
    one = splat(np.float32(1))
    if activation_id in (RELU, RELU2):
        positive = maximum(x, zero())
        return positive if activation_id == RELU else mul(positive, positive)
    if activation_id == SOFTPLUS:
        return softplus(x)
    if activation_id == GELU:
        half = mul(x, splat(np.float32(0.5)))
        return multiply_add(half, error_function(mul(x, splat(np.float32(0.7071067811865476)))), half)
    argument = x
    if activation_id == GELU_TANH:  # 0.5 (1 + tanh u) is sigmoid(2u)
        cube = mul(mul(x, x), x)
        inner = multiply_add(cube, splat(np.float32(0.044715)), x)
        argument = mul(inner, splat(np.float32(1.5957691216057308)))
    elif activation_id == QUICK_GELU:
        argument = mul(x, splat(np.float32(1.702)))
    return div(one if activation_id == SIGMOID else x, add(one, exp(sub(zero(), argument))))


@jit
def gated(x, up, activation_id):
    """Return activation(x) * up; for SWIGLU_OAI (GPT-OSS) (up + 1) * x * sigmoid(1.702 x), x at most 7, |up| too."""
    if activation_id == SWIGLU_OAI:
        limit, one = splat(np.float32(7)), splat(np.float32(1))
        least = sub(zero(), limit)
        x = sub(zero(), maximum(sub(zero(), x), least))
        up = sub(zero(), maximum(sub(zero(), maximum(up, least)), least))
        return mul(add(up, one), activate(x, QUICK_GELU))
    return mul(activate(x, activation_id), up)


@op
def activate_rows(args, first, last, scratch):
    """Items are pieces of rows. x, elements between its rows, out, its width, activation, gated, pieces of a row."""
    x, stride, out, width, activation_id = f32_ptr(args[0]), args[1], f32_ptr(args[2]), args[3], args[4]
    halves, pieces = args[5] != 0, args[6]
    for item in range(first, last):
        row, begin = item // pieces, item % pieces * PIECE
        source, target, stop = row * stride, row * width, min(begin + PIECE, width)
        for i in range(begin, stop, 16):
            count = min(16, stop - i)
            v = load_lanes(x, source + i, count)
            if halves:
                v = gated(v, load_lanes(x, source + width + i, count), activation_id)
            else:
                v = activate(v, activation_id)
            store_lanes(out, target + i, v, count)


def pieces_of(width: int) -> int:
    """Return the number of work items of a row."""
    return max(1, -(-width // PIECE))


def activation(launcher: Launcher, x: np.ndarray, activation: str) -> np.ndarray:
    """Return f(x) for x [..., W]."""
    return _activate(launcher, x, ACTIVATIONS[activation], x.shape[-1], gated=False)


def gated_activation(launcher: Launcher, x: np.ndarray, activation: str) -> np.ndarray:
    """Return f(x[..., : W/2]) * x[..., W/2 :] for x [..., W]; `activation` is one of GATED_ACTIVATIONS."""
    return _activate(launcher, x, GATED_ACTIVATIONS[activation], x.shape[-1] // 2, gated=True)


def _activate(launcher: Launcher, x: np.ndarray, activation_id: int, width: int, *, gated: bool) -> np.ndarray:
    source, stride = as_rows(x if x.ndim == 2 else x.reshape(-1, x.shape[-1]))
    rows, pieces = source.shape[0], pieces_of(width)
    out = launcher.empty((*x.shape[:-1], width))
    items, work = rows * pieces, COST * rows * width
    launcher.emit(activate_rows, source, stride, out, width, activation_id, int(gated), pieces, items=items, work=work)
    return out


@op
def softcap_rows(args, first, last, scratch):
    """Items are pieces of rows. x, elements between its rows, width, cap, pieces of a row."""
    x, stride, width, pieces = f32_ptr(args[0]), args[1], args[2], args[4]
    cap = splat(np.float32(float64_from_bits(args[3])))
    for item in range(first, last):
        start, begin = item // pieces * stride, item % pieces * PIECE
        for i in range(begin, min(begin + PIECE, width), 16):
            count = min(16, width - i)
            store_lanes(x, start + i, capped(load_lanes(x, start + i, count), cap), count)


def softcap(launcher: Launcher, x: np.ndarray, cap: float) -> None:
    """Set x [T, W] to cap * tanh(x / cap), in place."""
    stride = row_step(x)
    rows, width = x.shape
    pieces = pieces_of(width)
    launcher.emit(softcap_rows, x, stride, width, float(cap), pieces, items=rows * pieces, work=COST * rows * width)
