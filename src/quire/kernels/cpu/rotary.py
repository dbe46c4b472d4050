"""Rotary position embedding (Su et al. 2021), of queries and keys in one instruction."""

from __future__ import annotations

import numpy as np

from quire.kernels.cpu.arrays import as_rows
from quire.kernels.cpu.jit import jit, op
from quire.kernels.cpu.pointers import f32_ptr, i64_ptr
from quire.kernels.cpu.rows import as_ids
from quire.kernels.cpu.simd import add, load_lanes, mul, store_lanes, sub
from quire.kernels.cpu.threads import Launcher


@jit
def rotate_halves(x, at, angles, angles_at, half):
    """Rotate one head whose pairs are elements i and i + half; angles holds `half` cosines, then the sines."""
    for i in range(0, half, 16):
        count = min(16, half - i)
        cos, sin = load_lanes(angles, angles_at + i, count), load_lanes(angles, angles_at + half + i, count)
        a, b = load_lanes(x, at + i, count), load_lanes(x, at + half + i, count)
        store_lanes(x, at + i, sub(mul(a, cos), mul(b, sin)), count)
        store_lanes(x, at + half + i, add(mul(b, cos), mul(a, sin)), count)


@jit
def rotate_neighbours(x, at, angles, angles_at, half):
    """Rotate one head whose pairs are elements 2 i and 2 i + 1."""
    for i in range(half):
        cos, sin = angles[angles_at + i], angles[angles_at + half + i]
        a, b = x[at + 2 * i], x[at + 2 * i + 1]
        x[at + 2 * i] = a * cos - b * sin
        x[at + 2 * i + 1] = b * cos + a * sin


@jit
def rotate_heads(x, at, heads, head_size, angles, angles_at, half, interleaved):
    """Rotate all heads of one row."""
    for head in range(heads):
        if interleaved:
            rotate_neighbours(x, at + head * head_size, angles, angles_at, half)
        else:
            rotate_halves(x, at + head * head_size, angles, angles_at, half)


@op
def rotate_rows(args, first, last, scratch):
    """Items are rows. positions; q, elements between its rows, its heads; the same of k; table; sizes.

    Sizes: of a head, of its rotated part, which is also that of a row of the table; then whether interleaved.
    """
    positions, q, k, angles = i64_ptr(args[0]), f32_ptr(args[1]), f32_ptr(args[4]), f32_ptr(args[7])
    head_size, rotated, interleaved = args[8], args[9], args[10] != 0
    for row in range(first, last):
        angles_at = positions[row] * rotated
        rotate_heads(q, row * args[2], args[3], head_size, angles, angles_at, rotated // 2, interleaved)
        rotate_heads(k, row * args[5], args[6], head_size, angles, angles_at, rotated // 2, interleaved)


def rotary(
    launcher: Launcher,
    positions: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    cos_sin: np.ndarray,
    head_size: int,
    interleaved: bool,
) -> None:
    """Rotate q [T, Hq * D] and k [T, Hkv * D] in place, rows anywhere; see `Backend.rotary_embedding`."""
    (q_rows, q_step), (k_rows, k_step) = as_rows(q), as_rows(k)
    assert cos_sin.dtype == np.float32, "cos_sin is a float32 table"
    assert cos_sin.flags.c_contiguous, "cos_sin is a contiguous table"
    heads = q_rows, q_step, q.shape[1] // head_size, k_rows, k_step, k.shape[1] // head_size
    table = cos_sin, head_size, cos_sin.shape[1], int(interleaved)
    args = as_ids(launcher, positions), *heads, *table
    launcher.emit(rotate_rows, *args, items=q.shape[0], work=4 * (q.size + k.size))
    for given, rows in ((q, q_rows), (k, k_rows)):
        if rows is not given:
            given[...] = rows
