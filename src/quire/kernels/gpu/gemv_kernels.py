"""Products of up to four rows with a weight of any kind: every byte of the weight is read once, at full bandwidth.

A program has BN rows of the weight. Its threads each take 16 bytes of every one of them, decode them in registers,
multiply them with the inputs and add up by chunk, so that a group's scale is applied once for a chunk. What bounds
it is device memory: a program of four warps has 8 KiB in flight, a multiprocessor several programs; so there are many
programs rather than wide ones, and K is never split. At most 3 to 5 instructions a weight leave room below the limit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.gpu.activations import gate_and_multiply
from quire.kernels.gpu.linear_codes import byte_value, e4m3_value, nibble_value
from quire.kernels.gpu.pdl import fetch_ahead, launch_dependents, wait_for_dependencies


@triton.jit
def _inputs(x, k, K, EVEN: tl.constexpr, X_CODES: tl.constexpr, NATIVE: tl.constexpr):
    """Return inputs [NCH, V] as float32, 0 beyond K."""
    values = tl.load(x + k) if EVEN else tl.load(x + k, mask=k < K, other=0)
    return e4m3_value(values, NATIVE) if X_CODES else values.to(tl.float32)


@triton.jit
def _stored(w, place, stop, EVEN: tl.constexpr):
    """Return what is stored, which no other program needs and L1 should keep the inputs instead of."""
    if EVEN:
        return tl.load(w + place, eviction_policy="evict_first")
    return tl.load(w + place, mask=place < stop, other=0, eviction_policy="evict_first")


@triton.jit
def _dots(
    x, k, K, low, high, low_scale, high_scale, shift,
    KIND: tl.constexpr, G: tl.constexpr, SHIFTED: tl.constexpr, EVEN: tl.constexpr, X_CODES: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Return [BN, NCH]: for each chunk the dot product of one row of x with each row of the weight, with scales."""
    nibbles: tl.constexpr = KIND == 2 or KIND == 5
    split: tl.constexpr = nibbles and G % 32 != 0
    first = _inputs(x, k, K, EVEN, X_CODES, NATIVE)
    total = tl.sum(low * first[None, :, :], axis=2)
    if nibbles:
        second = _inputs(x, k + 16, K, EVEN, X_CODES, NATIVE)
        upper = tl.sum(high * second[None, :, :], axis=2)
        if split:
            return total * low_scale + upper * high_scale
        total += upper
        if SHIFTED:
            total -= shift * (tl.sum(first, axis=1) + tl.sum(second, axis=1))[None, :]
    elif SHIFTED:
        total -= shift * tl.sum(first, axis=1)[None, :]
    return total * low_scale if G > 0 else total


@triton.jit
def _four(
    x, x_row, k, K, w, n, start, w_row, g_row, group_scales, zeros, table, a0, a1, a2, a3,
    ROWS: tl.constexpr, KIND: tl.constexpr, G: tl.constexpr, HAS_ZEROS: tl.constexpr, EVEN: tl.constexpr,
    X_CODES: tl.constexpr, NATIVE: tl.constexpr, NCH: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Add to a0 ... a3 [BN, NCH], for ROWS rows of x, the products with NCH chunks of rows n of the weight."""
    nibbles: tl.constexpr = KIND == 2 or KIND == 5
    wide: tl.constexpr = 32 if nibbles else V
    shifted: tl.constexpr = KIND == 2 or HAS_ZEROS
    chunk = start + tl.arange(0, NCH) * wide
    if nibbles:
        place = (start // 2 + tl.arange(0, NCH) * 16)[:, None] + tl.arange(0, V)[None, :]
        stored = _stored(w + n[:, None, None] * w_row, place[None, :, :], w_row, EVEN).to(tl.int32)
        low = nibble_value(stored & 15, table, KIND)
        high = nibble_value(stored >> 4, table, KIND)
    else:
        low = byte_value(_stored(w + n[:, None, None] * w_row, k[None, :, :], w_row, EVEN), KIND, NATIVE)
        high = low
    low_scale = 1.0
    high_scale = 1.0
    shift = 136.0
    if G > 0:
        base = n[:, None] * g_row
        known = (chunk < K)[None, :]
        low_scale = tl.load(group_scales + base + (chunk // G)[None, :], mask=known, other=0).to(tl.float32)
        if nibbles and G % 32 != 0:
            known = (chunk + 16 < K)[None, :]
            high_scale = tl.load(group_scales + base + ((chunk + 16) // G)[None, :], mask=known, other=0).to(tl.float32)
        if HAS_ZEROS:
            known = (chunk < K)[None, :]
            shift = tl.load(zeros + base + (chunk // G)[None, :], mask=known, other=0).to(tl.float32)
            if KIND == 2:
                shift += 128.0
    a0 += _dots(x, k, K, low, high, low_scale, high_scale, shift, KIND, G, shifted, EVEN, X_CODES, NATIVE)
    if ROWS > 1:
        a1 += _dots(x + x_row, k, K, low, high, low_scale, high_scale, shift, KIND, G, shifted, EVEN, X_CODES, NATIVE)
    if ROWS > 2:
        x += 2 * x_row
        a2 += _dots(x, k, K, low, high, low_scale, high_scale, shift, KIND, G, shifted, EVEN, X_CODES, NATIVE)
    if ROWS > 3:
        x += x_row
        a3 += _dots(x, k, K, low, high, low_scale, high_scale, shift, KIND, G, shifted, EVEN, X_CODES, NATIVE)
    return a0, a1, a2, a3


@triton.jit
def _finish(acc, scale, bias, n, N, HAS_BIAS: tl.constexpr):
    """Return the products of one row [BN]."""
    total = tl.sum(acc, axis=1) * scale
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0)
    return total


@triton.jit
def _row(
    t, out, out_row, gate, up, scale, up_scale, x_scales, bias, n, N,
    HAS_BIAS: tl.constexpr, X_SCALED: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Store row t of the result."""
    if X_SCALED:
        factor = tl.load(x_scales + t)
        scale *= factor
        up_scale *= factor
    result = _finish(gate, scale, bias, n, N, HAS_BIAS)
    if GATE > 0:
        result = gate_and_multiply(result, _finish(up, up_scale, bias + N, n, N, HAS_BIAS), GATE)
    tl.store(out + t * out_row + n, result.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def gemv_kernel(
    x, w, x_scales, row_scales, group_scales, zeros, table, bias, out, N, K, x_row, w_row, g_row, out_row,
    ROWS: tl.constexpr, KIND: tl.constexpr, G: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr,
    X_SCALED: tl.constexpr, X_CODES: tl.constexpr, ROW_SCALED: tl.constexpr, GATE: tl.constexpr, NATIVE: tl.constexpr,
    EVEN: tl.constexpr, BN: tl.constexpr, NCH: tl.constexpr, V: tl.constexpr, PDL: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """out [ROWS, N] = x [ROWS, K] @ w [N, K].T; if GATE, w has 2 N rows and their halves go through an activation.

    KIND, G: of the weight, see `linear_codes.py`. V: elements of 16 bytes. NCH: chunks of 16 bytes read at a time.
    X_SCALED: x is int8, or with X_CODES codes of E4M3, with a scale for each row. EVEN: no chunk passes the end of K.
    PDL: see `pdl.py`; PIECES of each row are on their way to L2 then while the kernel before is at work.
    """
    launch_dependents(PDL)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    safe = tl.minimum(n, N - 1).to(tl.int64)
    if PDL:
        fetch_ahead(w + safe * w_row, PIECES)
        if GATE > 0:
            fetch_ahead(w + (safe + N) * w_row, PIECES)
    wait_for_dependencies(PDL)
    a0 = tl.zeros([BN, NCH], tl.float32)
    a1, a2, a3 = a0, a0, a0
    u0, u1, u2, u3 = a0, a0, a0, a0
    wide: tl.constexpr = 32 if KIND == 2 or KIND == 5 else V
    for start in range(0, K, NCH * wide):
        k = (start + tl.arange(0, NCH) * wide)[:, None] + tl.arange(0, V)[None, :]
        a0, a1, a2, a3 = _four(
            x, x_row, k, K, w, safe, start, w_row, g_row, group_scales, zeros, table,
            a0, a1, a2, a3, ROWS, KIND, G, HAS_ZEROS, EVEN, X_CODES, NATIVE, NCH, V,
        )  # fmt: skip
        if GATE > 0:
            u0, u1, u2, u3 = _four(
                x, x_row, k, K, w, safe + N, start, w_row, g_row, group_scales, zeros, table,
                u0, u1, u2, u3, ROWS, KIND, G, HAS_ZEROS, EVEN, X_CODES, NATIVE, NCH, V,
            )  # fmt: skip
    scale = tl.load(row_scales + safe) if ROW_SCALED else 1.0
    up_scale = tl.load(row_scales + safe + N) if ROW_SCALED and GATE > 0 else scale
    _row(0, out, out_row, a0, u0, scale, up_scale, x_scales, bias, n, N, HAS_BIAS, X_SCALED, GATE)
    if ROWS > 1:
        _row(1, out, out_row, a1, u1, scale, up_scale, x_scales, bias, n, N, HAS_BIAS, X_SCALED, GATE)
    if ROWS > 2:
        _row(2, out, out_row, a2, u2, scale, up_scale, x_scales, bias, n, N, HAS_BIAS, X_SCALED, GATE)
    if ROWS > 3:
        _row(3, out, out_row, a3, u3, scale, up_scale, x_scales, bias, n, N, HAS_BIAS, X_SCALED, GATE)
