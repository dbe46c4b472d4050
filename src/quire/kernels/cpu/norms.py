"""Root-mean-square norm and layer norm. A row may hold several pieces (heads), each normalised by itself."""

from __future__ import annotations

import math

import numpy as np

from quire.kernels.cpu.arrays import as_rows
from quire.kernels.cpu.jit import jit, op
from quire.kernels.cpu.pointers import f32_ptr, float64_from_bits
from quire.kernels.cpu.simd import (
    add,
    load,
    load_lanes,
    load_partial,
    mul,
    multiply_add,
    reduce_sum,
    select_lanes,
    splat,
    store_lanes,
    sub,
)
from quire.kernels.cpu.threads import Launcher


@jit
def inverse_root(total, width, eps):
    """Return 1 / sqrt(total / width + eps) in every lane."""
    mean = total / np.float32(width)
    return splat(np.float32(1) / np.float32(math.sqrt(mean + eps)))


# Root-mean-square norm


@jit
def sum_of_squares(x, at, width):
    """Add up the squares of x[at : at + width]: sixteen sums, added as a tree at the end."""
    squares = splat(np.float32(0))
    whole = width // 16 * 16
    for i in range(at, at + whole, 16):
        v = load(x, i)
        squares = multiply_add(v, v, squares)
    if whole < width:
        v = load_partial(x, at + whole, width - whole)
        squares = multiply_add(v, v, squares)
    return reduce_sum(squares)


@jit
def add_row(x, x_at, residual, at, width):
    """residual[at : at + width] += x[x_at : x_at + width]."""
    for i in range(0, width, 16):
        count = min(16, width - i)
        v = add(load_lanes(residual, at + i, count), load_lanes(x, x_at + i, count))
        store_lanes(residual, at + i, v, count)


@jit
def scale_row(x, at, factor, weight, out, out_at, width):
    """Write x[at : at + width] * factor * weight to out."""
    for i in range(0, width, 16):
        count = min(16, width - i)
        v = mul(mul(load_lanes(x, at + i, count), factor), load_lanes(weight, i, count))
        store_lanes(out, out_at + i, v, count)


@op
def rms_norm_rows(args, first, last, scratch):
    """Items are rows. x, residual or 0, weight, out; elements between rows of x and residual; width, pieces; eps.

    With a residual x is first added to it, and its norm is what comes out.
    """
    x, residual, weight, out = f32_ptr(args[0]), f32_ptr(args[1]), f32_ptr(args[2]), f32_ptr(args[3])
    stride, width, pieces, eps = args[4], args[6], args[7], np.float32(float64_from_bits(args[8]))
    source, step = x, stride
    if args[1] != 0:
        source, step = residual, args[5]
    for row in range(first, last):
        if args[1] != 0:
            add_row(x, row * stride, residual, row * step, width * pieces)
        for piece in range(pieces):
            at = row * step + piece * width
            factor = inverse_root(sum_of_squares(source, at, width), width, eps)
            scale_row(source, at, factor, weight, out, (row * pieces + piece) * width, width)


def rms_norm(launcher: Launcher, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Return piece / sqrt(mean(piece^2) + eps) * weight for x [..., n * W], weight [W] (Zhang & Sennrich 2019)."""
    source, stride = as_rows(x if x.ndim == 2 else x.reshape(-1, x.shape[-1]))
    out = launcher.empty(x.shape)
    sizes = stride, 0, *_pieces(source, weight)
    launcher.emit(
        rms_norm_rows, source, None, weight, out, *sizes, float(eps), items=source.shape[0], work=5 * source.size
    )
    return out


def add_rms_norm(launcher: Launcher, x: np.ndarray, residual: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """In place residual += x; return rms_norm(residual). Both [T, n * W], rows anywhere."""
    (source, stride), (target, step) = as_rows(x), as_rows(residual)
    out = launcher.empty(residual.shape)
    sizes = stride, step, *_pieces(target, weight)
    launcher.emit(
        rms_norm_rows, source, target, weight, out, *sizes, float(eps), items=source.shape[0], work=7 * source.size
    )
    if target is not residual:
        residual[...] = target
    return out


def _pieces(x: np.ndarray, weight: np.ndarray) -> tuple[int, int]:
    """Return the width of a piece of x [T, n * W], and how many a row has."""
    width = weight.size
    if not width or x.shape[1] % width:
        raise ValueError(f"norm: rows of {x.shape[1]} elements cannot be cut into pieces of {width}")
    return width, x.shape[1] // width


# Layer norm


@jit
def shifted_sum(x, at, width, shift):
    """Add up x - shift over x[at : at + width], in sixteen sums."""
    total = splat(np.float32(0))
    whole = width // 16 * 16
    for i in range(at, at + whole, 16):
        total = add(total, sub(load(x, i), shift))
    if whole < width:
        rest = width - whole
        v = sub(load_partial(x, at + whole, rest), shift)
        total = add(total, select_lanes(v, 0, rest, np.float32(0)))
    return reduce_sum(total)


@jit
def shifted_squares(x, at, width, shift, rest_shift):
    """Add up (x - shift - rest_shift)^2 over x[at : at + width], in sixteen sums."""
    total = splat(np.float32(0))
    whole = width // 16 * 16
    for i in range(at, at + whole, 16):
        v = sub(sub(load(x, i), shift), rest_shift)
        total = multiply_add(v, v, total)
    if whole < width:
        rest = width - whole
        v = sub(sub(load_partial(x, at + whole, rest), shift), rest_shift)
        v = select_lanes(v, 0, rest, np.float32(0))
        total = multiply_add(v, v, total)
    return reduce_sum(total)


@jit
def affine(v, factor, weight, bias, i, count, biased):
    """Return v * factor * weight[i : i + count] (+ bias); count <= 16."""
    v = mul(mul(v, factor), load_lanes(weight, i, count))
    return add(v, load_lanes(bias, i, count)) if biased else v


@op
def layer_norm_rows(args, first, last, scratch):
    """Items are rows. x, weight, bias or 0, out; elements between rows of x; width, pieces; eps.

    The mean is taken twice, the second time of what is left after the first: that makes it as good as if it were
    summed in float64, and subtracting both parts one after the other loses nothing where values are close together.
    """
    x, weight, bias, out = f32_ptr(args[0]), f32_ptr(args[1]), f32_ptr(args[2]), f32_ptr(args[3])
    stride, width, pieces, eps = args[4], args[5], args[6], np.float32(float64_from_bits(args[7]))
    biased, count, none = args[2] != 0, np.float32(width), splat(np.float32(0))
    for item in range(first * pieces, last * pieces):
        at, target = item // pieces * stride + item % pieces * width, item * width
        mean = splat(shifted_sum(x, at, width, none) / count)
        more = splat(shifted_sum(x, at, width, mean) / count)
        factor = inverse_root(shifted_squares(x, at, width, mean, more), width, eps)
        for i in range(0, width, 16):
            rest = min(16, width - i)
            v = sub(sub(load_lanes(x, at + i, rest), mean), more)
            store_lanes(out, target + i, affine(v, factor, weight, bias, i, rest, biased), rest)


def layer_norm(
    launcher: Launcher, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, eps: float
) -> np.ndarray:
    """Return (piece - mean) / sqrt(variance + eps) * weight + bias for x [..., n * W] (Ba et al. 2016)."""
    source, stride = as_rows(x if x.ndim == 2 else x.reshape(-1, x.shape[-1]))
    out = launcher.empty(x.shape)
    sizes = stride, *_pieces(source, weight)
    launcher.emit(
        layer_norm_rows, source, weight, bias, out, *sizes, float(eps), items=source.shape[0], work=10 * source.size
    )
    return out
