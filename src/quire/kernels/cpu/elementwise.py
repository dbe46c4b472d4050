"""Norms, activations and rotary embedding: ops whose rows have nothing to do with one another.

Arrays are flat and contiguous, `width` is the length of a row; a kernel cuts its rows into `chunks` parts.
"""

from __future__ import annotations

import math

import numpy as np
from numba import prange

from quire.kernels.cpu.activations import (  # noqa: F401
    GELU,
    GELU_TANH,
    QUICK_GELU,
    RELU,
    SILU,
    activate,
    zero,
)
from quire.kernels.cpu.jit import kernel, part, share
from quire.kernels.cpu.simd import (
    get,
    lane_sum,
    load,
    load_some,
    mul,
    multiply_add,
    put,
    splat,
    store,
    store_some,
)

# Norms


@part
def rms_norm_row(source, weight, out, at, width, eps):
    """One row of `rms_norm`: sixteen sums of squares, added as a tree at the end."""
    squares = zero()
    whole = width // 16 * 16
    for i in range(0, whole, 16):
        v = load(source, at + i)
        squares = multiply_add(v, v, squares)
    if whole < width:
        v = load_some(source, at + whole, width - whole)
        squares = multiply_add(v, v, squares)
    mean = lane_sum(squares) / np.float32(width)
    factor = splat(np.float32(1) / np.float32(math.sqrt(mean + np.float32(eps))))
    for i in range(0, whole, 16):
        store(out, at + i, mul(mul(load(source, at + i), factor), load(weight, i)))
    if whole < width:
        rest = width - whole
        v = mul(mul(load_some(source, at + whole, rest), factor), load_some(weight, whole, rest))
        store_some(out, at + whole, v, rest)


@part
def add_row(x, residual, at, width):
    """residual += x, for one row."""
    for i in range(width):
        put(residual, at + i, get(residual, at + i) + get(x, at + i))


@part
def rms_norm_rows(x, source, weight, out, width, eps, adds, chunk, chunks):
    """This chunk's rows of `rms_norm`."""
    first, last = share(source.shape[0] // width, chunk, chunks)
    for row in range(first, last):
        if adds:
            add_row(x, source, row * width, width)
        rms_norm_row(source, weight, out, row * width, width, eps)


@kernel
def rms_norm(x, source, weight, out, width, eps, adds, chunks):
    """out = rms_norm(source); `adds` = 1 first adds x to source in place. eps float64."""
    if chunks == 1:
        rms_norm_rows(x, source, weight, out, width, eps, adds, chunks - 1, chunks)
    else:
        for c in prange(chunks):
            rms_norm_rows(x, source, weight, out, width, eps, adds, np.int64(c), chunks)


@part
def layer_norm_row(x, weight, bias, out, at, width, eps):
    """One row of `layer_norm`, in float64: the mean first, then the variance around it."""
    mean = 0.0
    for i in range(width):
        mean += x[at + i]
    mean /= width
    variance = 0.0
    for i in range(width):
        variance += (x[at + i] - mean) ** 2
    factor = 1.0 / math.sqrt(variance / width + eps)
    for i in range(width):
        value = (x[at + i] - mean) * factor * weight[i]
        out[at + i] = value + bias[i] if bias.shape[0] > 0 else value


@part
def layer_norm_rows(x, weight, bias, out, width, eps, chunk, chunks):
    """This chunk's rows of `layer_norm`."""
    first, last = share(x.shape[0] // width, chunk, chunks)
    for row in range(first, last):
        layer_norm_row(x, weight, bias, out, row * width, width, eps)


@kernel
def layer_norm(x, weight, bias, out, width, eps, chunks):
    """out = layer_norm(x); an empty bias is none."""
    if chunks == 1:
        layer_norm_rows(x, weight, bias, out, width, eps, chunks - 1, chunks)
    else:
        for c in prange(chunks):
            layer_norm_rows(x, weight, bias, out, width, eps, np.int64(c), chunks)


# Activations


@part
def activation_rows(x, out, width, kind, gated, chunk, chunks):
    """This chunk's rows of `activation`."""
    first, last = share(out.shape[0] // width, chunk, chunks)
    stride = 2 * width if gated else width
    for row in range(first, last):
        source, target = row * stride, row * width
        for i in range(0, width, 16):
            rest = min(16, width - i)
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


@kernel
def activation(x, out, width, kind, gated, chunks):
    """out [T, width] = f(x); gated: x is [T, 2 * width] and the second half multiplies the result."""
    if chunks == 1:
        activation_rows(x, out, width, kind, gated, chunks - 1, chunks)
    else:
        for c in prange(chunks):
            activation_rows(x, out, width, kind, gated, np.int64(c), chunks)


# Rotary embedding


@part
def rotate_rows(positions, x, cos_sin, width, head_size, rotary, step, apart, chunk, chunks):
    """This chunk's rows of `rotary`: pair i of a head is elements i * step and i * step + apart."""
    first, last = share(positions.shape[0], chunk, chunks)
    half = rotary // 2
    for row in range(first, last):
        angles = positions[row] * rotary
        for head in range(row * width, (row + 1) * width, head_size):
            for i in range(half):
                cos, sin = get(cos_sin, angles + i), get(cos_sin, angles + half + i)
                at = head + i * step
                a, b = get(x, at), get(x, at + apart)
                put(x, at, a * cos - b * sin)
                put(x, at + apart, b * cos + a * sin)


@kernel
def rotary(positions, x, cos_sin, width, head_size, rotary_size, step, apart, chunks):
    """Rotate x [T, width] in place; see `rotate_rows` for step and apart."""
    if chunks == 1:
        rotate_rows(positions, x, cos_sin, width, head_size, rotary_size, step, apart, chunks - 1, chunks)
    else:
        for c in prange(chunks):
            rotate_rows(positions, x, cos_sin, width, head_size, rotary_size, step, apart, np.int64(c), chunks)
