"""Rows found by number: of an array, and of a packed embedding table. The numbers are read when the op runs."""

from __future__ import annotations

import numpy as np

from quire.kernels.cpu.arrays import as_rows
from quire.kernels.cpu.jit import jit, op, ops_by_dtype
from quire.kernels.cpu.pointers import f32_ptr, i64_ptr
from quire.kernels.cpu.simd import get, load_lanes, store_lanes
from quire.kernels.cpu.sizes import LANES
from quire.kernels.cpu.threads import Launcher


def as_ids(launcher: Launcher, ids: np.ndarray) -> np.ndarray:
    """Return ids as contiguous int64. While recording they must be that already: a copy would not follow changes."""
    if ids.dtype == np.int64 and ids.flags.carray:
        return ids
    if launcher.recording:
        raise TypeError(f"while recording, ids and positions are contiguous int64, not {ids.dtype} {ids.strides}")
    return np.require(ids, np.int64, ["C", "A"])


@jit
def copy_row(x, at, out, to, width):
    """out[to : to + width] = x[at : at + width], widened to float32."""
    for i in range(0, width, LANES):
        count = min(LANES, width - i)
        store_lanes(out, to + i, load_lanes(x, at + i, count), count)


@op
def copy_rows(args, first, last, scratch):
    """Items are ids. ids, x, elements between its rows, out, width."""
    ids, x, stride, out, width = i64_ptr(args[0]), f32_ptr(args[1]), args[2], f32_ptr(args[3]), args[4]
    for row in range(first, last):
        copy_row(x, ids[row] * stride, out, row * width, width)


def take_rows(launcher: Launcher, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return x[ids]: rows of x [R, W] float32, ids int64 [n] -> [n, W]."""
    source, stride = as_rows(x)
    out = launcher.empty((len(ids), x.shape[1]))
    rows = as_ids(launcher, ids)
    launcher.emit(copy_rows, rows, source, stride, out, x.shape[1], items=len(ids), work=3 * out.size)
    return out


@jit
def embed(elements, args, first, last, scratch):
    """Items are ids. table, ids, out, width of a row, its width as stored, neighbours of a row that lie together."""
    table, ids, out = elements(args[0]), i64_ptr(args[1]), f32_ptr(args[2])
    width, depth, together = args[3], args[4], args[5]
    step = LANES * together
    for item in range(first, last):
        row, target = ids[item], item * width
        at = row // LANES * LANES * depth + row % LANES * together
        for k in range(0, width, together):
            for j in range(k, min(k + together, width)):
                out[target + j] = get(table, at + (j - k))
            at += step


EMBED = ops_by_dtype("embed", embed)


def embedding(
    launcher: Launcher, ids: np.ndarray, data: np.ndarray, width: int, depth: int, paired: bool
) -> np.ndarray:
    """Return rows `ids` [T] of a packed table [N, width] as float32 [T, width].

    `data` is in a storage dtype, [N/16][depth][16], or [N/16][depth/2][16][2] if `paired`.
    """
    out = launcher.empty((len(ids), width))
    numbers = as_ids(launcher, ids)
    sizes = width, depth, 2 if paired else 1
    launcher.emit(EMBED[data.dtype], data, numbers, out, *sizes, items=len(ids), work=8 * out.size)
    return out


@op
def shift_ids(args, first, last, scratch):
    """Items are ids. ids, first row, number of rows, out: ids of the rows, 0 for others."""
    ids, start, number, out = i64_ptr(args[0]), args[1], args[2], i64_ptr(args[3])
    for item in range(first, last):
        local = ids[item] - start
        out[item] = local if local >= 0 and local < number else 0


def local_ids(launcher: Launcher, ids: np.ndarray, first_row: int, number: int) -> np.ndarray:
    """Return ids int64 [T] relative to a part of a table, 0 for those of other parts; see `Backend.embedding`."""
    out = launcher.empty((len(ids),), np.int64)
    launcher.emit(shift_ids, as_ids(launcher, ids), first_row, number, out, items=len(ids), work=len(ids))
    return out


@op
def zero_rows(args, first, last, scratch):
    """Items are ids. ids, first row, number of rows, x, width: rows of x whose id is in another part become 0."""
    ids, start, number, x, width = i64_ptr(args[0]), args[1], args[2], f32_ptr(args[3]), args[4]
    for item in range(first, last):
        local = ids[item] - start
        if local < 0 or local >= number:
            for k in range(width):
                x[item * width + k] = np.float32(0)


def zero_other_rows(launcher: Launcher, x: np.ndarray, ids: np.ndarray, first_row: int, number: int) -> np.ndarray:
    """Return x [T, width], in which rows whose id is in another part of the table are now 0."""
    numbers = as_ids(launcher, ids)
    launcher.emit(zero_rows, numbers, first_row, number, x, x.shape[1], items=len(ids), work=x.size)
    return x
