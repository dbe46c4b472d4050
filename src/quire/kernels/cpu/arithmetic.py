"""Arithmetic of float32 arrays with broadcasting, and copies: what + - *, reshape and concat of arrays become."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.kernels.cpu.jit import jit, op
from quire.kernels.cpu.pointers import f32_ptr
from quire.kernels.cpu.simd import add, load_lanes, mul, splat, store_lanes, store_partial, sub
from quire.kernels.cpu.threads import Launcher, address_of

ADD, SUBTRACT, MULTIPLY, COPY = range(4)
DIMENSIONS = 3  # of an array, at most


@jit
def apply(kind, x, y):
    """Return x + y, x - y, x * y or x."""
    if kind == ADD:
        return add(x, y)
    if kind == SUBTRACT:
        return sub(x, y)
    if kind == MULTIPLY:
        return mul(x, y)
    return x


@jit
def lanes(x, at, step, count):
    """Return x[at], x[at + step], ... in the first `count` lanes; step is 0 or 1."""
    return splat(x[at]) if step == 0 else load_lanes(x, at, count)


@op
def combine_rows(args, first, last, scratch):
    """Items are rows of [A, B, N]. kind, B, N; then x, y and out: address and the three strides of each."""
    kind, inner, width = args[0], args[1], args[2]
    x, y, out = f32_ptr(args[3]), f32_ptr(args[7]), f32_ptr(args[11])
    x_step, y_step, out_step = args[6], args[10], args[14]
    plain = (x_step == 0 or x_step == 1) and (y_step == 0 or y_step == 1) and out_step == 1
    for item in range(first, last):
        a, b = item // inner, item % inner
        x_at, y_at, at = a * args[4] + b * args[5], a * args[8] + b * args[9], a * args[12] + b * args[13]
        if plain:
            for i in range(0, width, 16):
                n = min(16, width - i)
                v = apply(kind, lanes(x, x_at + x_step * i, x_step, n), lanes(y, y_at + y_step * i, y_step, n))
                store_lanes(out, at + i, v, n)
        else:
            for i in range(width):
                v = apply(kind, splat(x[x_at + x_step * i]), splat(y[y_at + y_step * i]))
                store_partial(out, at + out_step * i, v, 1)


def combine(launcher: Launcher, kind: int, x: Any, y: Any, out: np.ndarray | None = None) -> np.ndarray:
    """Return x + y, x - y or x * y (ADD, SUBTRACT, MULTIPLY), broadcast as numpy would, into `out` if given.

    Operands are float32 arrays of at most three dimensions, or numbers, which are rounded to float32. Raises TypeError
    for other arrays, ValueError for shapes that do not fit.
    """
    x, y = _operand(x), _operand(y)
    shape = np.broadcast_shapes(x.shape, y.shape)
    if out is None:
        out = launcher.empty(shape)
    elif out.shape != shape or out.dtype != np.float32:
        raise ValueError(f"arithmetic: {out.dtype} {out.shape} cannot take float32 {shape}")
    else:
        x, y = (_apart(launcher, operand, out) for operand in (x, y))
    _emit(launcher, kind, x, y, out)
    return out


def contiguous(launcher: Launcher, x: np.ndarray) -> np.ndarray:
    """Return float32 x with its elements side by side in memory: x itself where they are, else a copy."""
    return x if x.flags.c_contiguous else _copy(launcher, x)


def concat(launcher: Launcher, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Join float32 arrays [*, n_i] along the last axis."""
    out = launcher.empty((*arrays[0].shape[:-1], sum(array.shape[-1] for array in arrays)))
    start = 0
    for array in arrays:
        stop = start + array.shape[-1]
        part_of_out = (slice(None),) * (out.ndim - 1) + (slice(start, stop),)  # recorded arrays take no "..."
        _emit(launcher, COPY, _operand(array), None, out[part_of_out])
        start = stop
    return out


class Arithmetic:
    """The `arrays.Recorder` that emits instructions."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def combine(self, kind: int, x: Any, y: Any, out: np.ndarray | None) -> np.ndarray:
        return combine(self._launcher, kind, x, y, out)

    def contiguous(self, x: np.ndarray) -> np.ndarray:
        return contiguous(self._launcher, x)


def _operand(x: Any) -> np.ndarray:
    """Return a float32 array; numbers become arrays of no dimension."""
    if isinstance(x, np.ndarray) and x.ndim > 0:
        if x.dtype != np.float32:
            raise TypeError(f"arithmetic of recorded arrays takes float32 arrays and numbers, not {x.dtype} arrays")
        return x
    return np.array(x, np.float32)


def _copy(launcher: Launcher, x: np.ndarray) -> np.ndarray:
    out = launcher.empty(x.shape)
    _emit(launcher, COPY, _operand(x), None, out)
    return out


def _apart(launcher: Launcher, operand: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Return the operand, or a copy of it if writing `out` would change elements that are still to be read."""
    a, b = operand.view(np.ndarray), out.view(np.ndarray)
    if a.shape == b.shape and a.strides == b.strides and address_of(a) == address_of(b):
        return operand
    return _copy(launcher, operand) if np.shares_memory(a, b) else operand


def _emit(launcher: Launcher, kind: int, x: np.ndarray, y: np.ndarray | None, out: np.ndarray) -> None:
    if out.ndim > DIMENSIONS:
        raise ValueError(f"arithmetic: arrays have at most {DIMENSIONS} dimensions, not {out.ndim}")
    outer, inner, width = (1,) * (DIMENSIONS - out.ndim) + out.shape
    operands: list[Any] = []
    for operand in (x, x if y is None else y, out):
        operands += [operand, *_strides(operand, (outer, inner, width))]
    launcher.emit(combine_rows, kind, inner, width, *operands, items=outer * inner, work=4 * out.size)


def _strides(x: np.ndarray, shape: tuple[int, ...]) -> list[int]:
    """Return the strides of x, broadcast to `shape`, in elements."""
    strides = np.broadcast_to(x.view(np.ndarray), shape).strides
    return [stride // 4 if size > 1 else 1 for stride, size in zip(strides, shape, strict=True)]
