"""Products of many rows with a weight of any kind, and with one matrix for each head.

A tile of the result is computed as its transpose, weight @ x.T: on Hopper the left side of a product may be in
registers, where weights are decoded, and the right one may be as narrow as a few rows of x. Sums go by K from its
start, in steps of BK, never split, so that with tiles chosen by the weight alone a row's bits are its own. With many
rows this is bound by the matrix units, with few by reading the weight; programs are numbered so that those that run
together share tiles of both sides in L2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.gpu.linear_codes import byte_value, e4m3_value, nibble_value


@triton.jit
def _place(M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Return which tile this program computes: GROUP tiles of rows of x take turns before the weight moves on."""
    pid = tl.program_id(0)
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = pid // (GROUP * columns) * GROUP
    height = tl.minimum(rows - first, GROUP)
    inside = pid % (GROUP * columns)
    return first + inside % height, inside // height


@triton.jit
def _scales(values, base, k0, K, lead, G: tl.constexpr, BK: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """Return a value of each group for a tile [BN, WIDTH], whose runs of 16 columns are STEP inputs apart.

    `lead`: the input of its first column, counted from k0. A tile within one group gets [BN, 1].
    """
    if G % BK == 0:
        result = tl.load(values + base[:, None] + k0 // G).to(tl.float32)
    else:
        runs: tl.constexpr = WIDTH // 16
        k = k0 + lead + tl.arange(0, runs) * STEP
        found = tl.load(values + base[:, None] + (k // G)[None, :], mask=(k < K)[None, :], other=0).to(tl.float32)
        spread = tl.broadcast_to(found[:, :, None], (found.shape[0], runs, 16))
        result = tl.reshape(spread, (found.shape[0], WIDTH))
    return result


@triton.jit
def decoded(
    values, group_scales, zeros, base, k0, K, lead,
    KIND: tl.constexpr, G: tl.constexpr, HAS_ZEROS: tl.constexpr, BK: tl.constexpr, WIDTH: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Return float32 values [BN, WIDTH] less their zeros, times their groups' scales."""
    if HAS_ZEROS:
        values -= _scales(zeros, base, k0, K, lead, G, BK, WIDTH, STEP)
        if KIND == 2:
            values -= 128.0
    elif KIND == 2:
        values -= 136.0
    if G > 0:
        values *= _scales(group_scales, base, k0, K, lead, G, BK, WIDTH, STEP)
    return values


@triton.jit
def _tile(x, rows, k, K, EVEN: tl.constexpr):
    """Return x[rows, k], 0 beyond K."""
    if EVEN:
        values = tl.load(x + rows[:, None] + k[None, :])
    else:
        values = tl.load(x + rows[:, None] + k[None, :], mask=(k < K)[None, :], other=0)
    return values


@triton.jit
def operand(x, X_CODES: tl.constexpr, NATIVE: tl.constexpr, ACT: tl.constexpr):
    """Return inputs in the type that they are multiplied in; integers and E4M3 are exact in all of them."""
    return e4m3_value(x, NATIVE).to(ACT) if X_CODES else x.to(ACT)


@triton.jit
def _result(
    acc, x_scales, row_scales, bias, m, n, X_SCALED: tl.constexpr, ROW_SCALED: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Return float32 [BM, BN] of sums [BN, BM], with scales of the rows m of x and n of the weight, and the bias."""
    result = tl.trans(acc.to(tl.float32))
    if ROW_SCALED:
        result *= tl.load(row_scales + n)[None, :]
    if X_SCALED:
        result *= tl.load(x_scales + m)[:, None]
    if HAS_BIAS:
        result += tl.load(bias + n)[None, :]
    return result


@triton.jit(do_not_specialize=["M"])
def gemm_kernel(
    x, w, x_scales, row_scales, group_scales, zeros, table, bias, out, M, N, K, x_row, w_row, g_row, out_row, x_head,
    w_head, out_head,
    KIND: tl.constexpr, G: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, X_SCALED: tl.constexpr,
    X_CODES: tl.constexpr, ROW_SCALED: tl.constexpr, DIRECT: tl.constexpr, NATIVE: tl.constexpr, EVEN: tl.constexpr,
    ACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out [M, N] = x [M, K] @ w [N, K].T, for head `program_id(1)` of both.

    DIRECT: the elements of both sides are multiplied as they are (floats, int8 with int8, E4M3 with E4M3). Otherwise
    they are turned into ACT first. X_SCALED, X_CODES: as in `gemv_kernels.py`. EVEN: BK divides K.
    """
    head = tl.program_id(1).to(tl.int64)
    tile_m, tile_n = _place(M, N, BM, BN, GROUP)
    m, n = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN)
    x += head * x_head
    w += head * w_head
    rows = tl.minimum(m, M - 1).to(tl.int64) * x_row
    safe = tl.minimum(n, N - 1).to(tl.int64)
    columns, base = safe * w_row, safe * g_row
    nibbles: tl.constexpr = KIND == 2 or KIND == 5
    WIDTH: tl.constexpr = BK // 2 if nibbles else BK
    acc = tl.zeros([BN, BM], tl.int32 if DIRECT and KIND == 1 else tl.float32)
    at = tl.arange(0, WIDTH)
    for k0 in range(0, K, BK):
        if nibbles:
            place = k0 // 2 + at
            k = k0 + at // 16 * 32 + at % 16
            stored = _tile(w, columns, place, w_row, EVEN).to(tl.int32)
            low = nibble_value(stored & 15, table, KIND)
            low = decoded(low, group_scales, zeros, base, k0, K, 0, KIND, G, HAS_ZEROS, BK, WIDTH, 32)
            first = operand(_tile(x, rows, k, K, EVEN), X_CODES, NATIVE, ACT)
            acc = tl.dot(low.to(ACT), tl.trans(first), acc, input_precision="ieee")
            high = nibble_value(stored >> 4, table, KIND)
            high = decoded(high, group_scales, zeros, base, k0, K, 16, KIND, G, HAS_ZEROS, BK, WIDTH, 32)
            second = operand(_tile(x, rows, k + 16, K, EVEN), X_CODES, NATIVE, ACT)
            acc = tl.dot(high.to(ACT), tl.trans(second), acc, input_precision="ieee")
        else:
            k = k0 + at
            inputs = _tile(x, rows, k, K, EVEN)
            stored = _tile(w, columns, k, w_row, EVEN)
            if DIRECT and KIND == 1:
                acc += tl.dot(stored, tl.trans(inputs), out_dtype=tl.int32)
            elif DIRECT and KIND == 3:
                left = stored.to(tl.float8e4nv, bitcast=True)
                right = inputs.to(tl.float8e4nv, bitcast=True)
                acc = tl.dot(left, tl.trans(right), acc, max_num_imprecise_acc=128)
            elif DIRECT:
                acc = tl.dot(stored, tl.trans(inputs), acc, input_precision="ieee")
            else:
                values = byte_value(stored, KIND, NATIVE)
                values = decoded(values, group_scales, zeros, base, k0, K, 0, KIND, G, HAS_ZEROS, BK, WIDTH, 16)
                right = operand(inputs, X_CODES, NATIVE, ACT)
                acc = tl.dot(values.to(ACT), tl.trans(right), acc, input_precision="ieee")
    result = _result(acc, x_scales, row_scales, bias, tl.minimum(m, M - 1), safe, X_SCALED, ROW_SCALED, HAS_BIAS)
    where = out + head * out_head + m.to(tl.int64)[:, None] * out_row + n[None, :]
    tl.store(where, result.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
