"""Products of up to four rows with a weight of any kind: every byte of the weight is read once, at full bandwidth.

A program has BN rows of the weight. Its threads each take 16 bytes of every one of them, decode them in registers,
multiply them with the inputs and add up by chunk, so that a group's scale is applied once for a chunk. Device memory
is the bound: a program of four warps has 8 KiB in flight, a multiprocessor several programs; so there are many
programs rather than wide ones, and K is never split. At most 3 to 5 instructions a weight leave room below the limit.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from quire.kernels.gpu.activations import gate_and_multiply
from quire.kernels.gpu.linear_codes import byte_value, e4m3_value, nibble_value
from quire.kernels.gpu.pdl import fetch_ahead, launch_dependents, wait_for_dependencies


class Gemv(NamedTuple):
    """What a product is compiled for.

    rows: of x. kind, group, x_codes, native: as in `Gemm`. activation_id: of gated products, or 0.
    BN: rows of the weight of a program. NCH: chunks of 16 bytes that it reads at a time. V: elements of 16 bytes.
    even: no chunk passes the end of K. pdl: see `pdl.py`; `pieces` of each row are fetched to L2 then while the kernel
        before is at work.
    """

    rows: int
    kind: int
    group: int
    x_codes: bool
    activation_id: int
    native: bool
    even: bool
    BN: int
    NCH: int
    V: int
    pdl: bool
    pieces: int


@triton.jit
def _inputs(x, k, K, FORM: tl.constexpr):
    """Return inputs [NCH, V] as float32, 0 beyond K."""
    values = tl.load(x + k) if FORM.even else tl.load(x + k, mask=k < K, other=0)
    return e4m3_value(values, FORM.native) if FORM.x_codes else values.to(tl.float32)


@triton.jit
def _stored(w, n, place, FORM: tl.constexpr):
    """Return what is stored of rows n; no other program needs it, so L1 should keep the inputs instead."""
    at = w.data + n[:, None, None] * w.row + place[None, :, :]
    if FORM.even:
        return tl.load(at, eviction_policy="evict_first")
    return tl.load(at, mask=(place < w.row)[None, :, :], other=0, eviction_policy="evict_first")


@triton.jit
def _dots(x, k, K, low, high, low_scale, high_scale, shift, SHIFTED: tl.constexpr, FORM: tl.constexpr):
    """Return [BN, NCH]: for each chunk the dot product of one row of x with each row of the weight, with scales."""
    nibbles: tl.constexpr = FORM.kind == 2 or FORM.kind == 5
    first = _inputs(x, k, K, FORM)
    total = tl.sum(low * first[None, :, :], axis=2)
    if nibbles:
        second = _inputs(x, k + 16, K, FORM)
        upper = tl.sum(high * second[None, :, :], axis=2)
        if FORM.group % 32 != 0:
            return total * low_scale + upper * high_scale
        total += upper
        if SHIFTED:
            total -= shift * (tl.sum(first, axis=1) + tl.sum(second, axis=1))[None, :]
    elif SHIFTED:
        total -= shift * tl.sum(first, axis=1)[None, :]
    return total * low_scale if FORM.group > 0 else total


@triton.jit
def _group_values(values, w, n, chunk, K, FORM: tl.constexpr):
    """Return the value of each chunk's group of rows n, float32 [BN, NCH]; `chunk` is a chunk's first input."""
    at = values + n[:, None] * w.group_row + (chunk // FORM.group)[None, :]
    return tl.load(at, mask=(chunk < K)[None, :], other=0).to(tl.float32)


@triton.jit
def _add_products(sums, x, w, n, start, K, FORM: tl.constexpr):
    """Return `sums`, [BN, NCH] for each row of x, with the products with NCH chunks of rows n of the weight added."""
    nibbles: tl.constexpr = FORM.kind == 2 or FORM.kind == 5
    wide: tl.constexpr = 32 if nibbles else FORM.V
    chunk = start + tl.arange(0, FORM.NCH) * wide
    k = chunk[:, None] + tl.arange(0, FORM.V)[None, :]
    if nibbles:
        place = (start // 2 + tl.arange(0, FORM.NCH) * 16)[:, None] + tl.arange(0, FORM.V)[None, :]
        stored = _stored(w, n, place, FORM).to(tl.int32)
        low = nibble_value(stored & 15, w.table, FORM.kind)
        high = nibble_value(stored >> 4, w.table, FORM.kind)
    else:
        low = byte_value(_stored(w, n, k, FORM), FORM.kind, FORM.native)
        high = low
    low_scale = 1.0
    high_scale = 1.0
    shift = 136.0
    if FORM.group > 0:
        low_scale = _group_values(w.group_scales, w, n, chunk, K, FORM)
        if nibbles and FORM.group % 32 != 0:
            high_scale = _group_values(w.group_scales, w, n, chunk + 16, K, FORM)
        if w.zeros is not None:
            shift = _group_values(w.zeros, w, n, chunk, K, FORM)
            if FORM.kind == 2:
                shift += 128.0
    SHIFTED: tl.constexpr = FORM.kind == 2 or w.zeros is not None
    ROWS: tl.constexpr = FORM.rows
    added = ()
    for row in tl.static_range(ROWS):
        dots = _dots(x.data + row * x.row, k, K, low, high, low_scale, high_scale, shift, SHIFTED, FORM)
        added += (sums[row] + dots,)  # type: ignore[assignment]
    return added


@triton.jit
def _finish(acc, scale, bias, n, N):
    """Return the products of one row [BN]."""
    total = tl.sum(acc, axis=1) * scale
    if bias is not None:
        total += tl.load(bias + n, mask=n < N, other=0)
    return total


@triton.jit
def gemv_kernel(x, w, out, N, K, FORM: tl.constexpr):
    """out [rows, N] = x [rows, K] @ w [N, K].T; gated, w has 2 N rows, gate's and up's, and out is act(gate) * up.

    x: `Inputs`. w: `Weight`. out: `Rows`. Grid: blocks of BN of the N columns.
    """
    launch_dependents(FORM.pdl)
    n = tl.program_id(0) * FORM.BN + tl.arange(0, FORM.BN)
    own = tl.minimum(n, N - 1).to(tl.int64)
    if FORM.pdl:
        fetch_ahead(w.data + own * w.row, FORM.pieces)
        if FORM.activation_id > 0:
            fetch_ahead(w.data + (own + N) * w.row, FORM.pieces)
    wait_for_dependencies(FORM.pdl)
    BN: tl.constexpr = FORM.BN
    NCH: tl.constexpr = FORM.NCH
    zeros = tl.zeros([BN, NCH], tl.float32)
    ROWS: tl.constexpr = FORM.rows
    sums = ()
    for _ in tl.static_range(ROWS):
        sums += (zeros,)  # type: ignore[assignment]
    up_sums = sums
    wide: tl.constexpr = 32 if FORM.kind == 2 or FORM.kind == 5 else FORM.V
    for start in range(0, K, FORM.NCH * wide):
        sums = _add_products(sums, x, w, own, start, K, FORM)
        if FORM.activation_id > 0:
            up_sums = _add_products(up_sums, x, w, own + N, start, K, FORM)
    scale = tl.load(w.row_scales + own) if w.row_scales is not None else 1.0
    up_scale = tl.load(w.row_scales + own + N) if w.row_scales is not None and FORM.activation_id > 0 else scale
    for row in tl.static_range(ROWS):
        factor = tl.load(x.scales + row) if x.scales is not None else 1.0
        result = _finish(sums[row], scale * factor, w.bias, n, N)
        if FORM.activation_id > 0:
            up_bias = w.bias + N if w.bias is not None else None
            result = gate_and_multiply(
                result, _finish(up_sums[row], up_scale * factor, up_bias, n, N), FORM.activation_id
            )
        tl.store(out.data + row * out.stride + n, result.to(out.data.dtype.element_ty), mask=n < N)
