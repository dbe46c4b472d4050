"""An op that only reads memory: how fast that goes is the limit of every other one."""

from __future__ import annotations

import numpy as np

from quire.kernels.cpu import simd
from quire.kernels.cpu.jit import op
from quire.kernels.cpu.pointers import f32_ptr

PIECE_FLOATS = 16384  # of an item


@op
def read_memory(args, first, last, scratch):
    """Add up pieces of 64 KiB of memory. args: memory, out."""
    memory, out = f32_ptr(args[0]), f32_ptr(args[1])
    sums = (simd.splat(np.float32(0)), simd.splat(np.float32(0)), simd.splat(np.float32(0)), simd.splat(np.float32(0)))
    a, b, c, d = sums
    for i in range(first * PIECE_FLOATS, last * PIECE_FLOATS, 64):
        a, b = simd.add(a, simd.load(memory, i)), simd.add(b, simd.load(memory, i + 16))
        c, d = simd.add(c, simd.load(memory, i + 32)), simd.add(d, simd.load(memory, i + 48))
    simd.store(out, first * 16, simd.add(simd.add(a, b), simd.add(c, d)))
