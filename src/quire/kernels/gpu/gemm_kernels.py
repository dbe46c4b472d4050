"""Products of many rows with a weight of any kind, and with one matrix for each head.

A tile of the result is computed as its transpose, weight @ x.T: on Hopper the left side of a product may be in
registers, where weights are decoded, and the right one may be as narrow as a few rows of x. Sums go by K from its
start, in steps of BK, never split, so that with tiles chosen by the weight alone a row's bits are its own. With many
rows this is bound by the matrix units, with few by reading the weight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from quire.kernels.gpu.linear_codes import byte_value, e4m3_value, nibble_value


class Gemm(NamedTuple):
    """What a product is compiled for.

    kind, group: the weight's, see `linear_codes.py`. x_codes: inputs are codes of E4M3.
    direct: the elements of both sides are multiplied as they are (floats, int8 with int8, E4M3 with E4M3); otherwise
        they are converted to `act` first. native: see `e4m3_value`. even: BK divides K.
    BM, BN, BK: rows of x, rows of the weight, and inputs of a tile. GROUP: see `grouped_tile`.
    """

    kind: int
    group: int
    x_codes: bool
    direct: bool
    native: bool
    even: bool
    act: Any
    BM: int
    BN: int
    BK: int
    GROUP: int


@triton.jit
def grouped_tile(pid, rows, columns, GROUP: tl.constexpr):
    """Return row and column of tile `pid` among rows * columns: GROUP rows go through all columns together.

    Programs that run side by side so share tiles of both sides in L2 (Triton's matmul tutorial, "grouped ordering").
    """
    first = pid // (GROUP * columns) * GROUP
    height = tl.minimum(rows - first, GROUP)
    inside = pid % (GROUP * columns)
    return first + inside % height, inside // height


@triton.jit
def _group_values(values, base, k0, K, lead, FORM: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """Return a value of each group for a tile [BN, WIDTH], whose runs of 16 columns are STEP inputs apart.

    `lead`: the input of its first column, counted from k0. A tile within one group gets [BN, 1].
    """
    if FORM.group % FORM.BK == 0:
        result = tl.load(values + base[:, None] + k0 // FORM.group).to(tl.float32)
    else:
        runs: tl.constexpr = WIDTH // 16
        k = k0 + lead + tl.arange(0, runs) * STEP
        at = values + base[:, None] + (k // FORM.group)[None, :]
        found = tl.load(at, mask=(k < K)[None, :], other=0).to(tl.float32)
        spread = tl.broadcast_to(found[:, :, None], (found.shape[0], runs, 16))
        result = tl.reshape(spread, (found.shape[0], WIDTH))
    return result


@triton.jit
def _dequantize(values, w, base, k0, K, lead, FORM: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """Return float32 values [BN, WIDTH] less their zeros, times their groups' scales; see `_group_values`."""
    if w.zeros is not None:
        values -= _group_values(w.zeros, base, k0, K, lead, FORM, WIDTH, STEP)
        if FORM.kind == 2:
            values -= 128.0
    elif FORM.kind == 2:
        values -= 136.0
    if FORM.group > 0:
        values *= _group_values(w.group_scales, base, k0, K, lead, FORM, WIDTH, STEP)
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
def _input_tile(x, rows, order, k, K, FORM: tl.constexpr):
    """Return x[rows, k]; with `order` int32 [K], the inputs that columns k of the weight belong to."""
    if order is not None:
        column = tl.load(order + k, k < K, other=0)
        return tl.load(x + rows[:, None] + column[None, :], (k < K)[None, :], other=0)
    return _tile(x, rows, k, K, FORM.even)


@triton.jit
def _operand(x, FORM: tl.constexpr):
    """Return inputs in the type that they are multiplied in; integers and E4M3 are exact in all of them."""
    return e4m3_value(x, FORM.native).to(FORM.act) if FORM.x_codes else x.to(FORM.act)


@triton.jit
def multiply_tile(x, rows, order, w, table, n, K, inputs, FORM: tl.constexpr):
    """Return rows n of a weight times rows of x, [BN, BM] float32 or int32, before the scales of rows.

    Args:
        x, rows: where inputs are, and the offset of each row, int64 [BM]. order: see `_input_tile`.
        w: a `Weight`. table: of its codes. n: int64 [BN]. K: its columns, some of which may be padding beyond `inputs`.
    """
    columns, base = n * w.row, n * w.group_row
    nibbles: tl.constexpr = FORM.kind == 2 or FORM.kind == 5
    WIDTH: tl.constexpr = FORM.BK // 2 if nibbles else FORM.BK
    BM: tl.constexpr = FORM.BM
    BN: tl.constexpr = FORM.BN
    acc = tl.zeros([BN, BM], tl.int32 if FORM.direct and FORM.kind == 1 else tl.float32)
    at = tl.arange(0, WIDTH)
    for k0 in range(0, K, FORM.BK):
        if nibbles:
            k = k0 + at // 16 * 32 + at % 16
            stored = _tile(w.data, columns, k0 // 2 + at, w.row, FORM.even).to(tl.int32)
            low = nibble_value(stored & 15, table, FORM.kind)
            low = _dequantize(low, w, base, k0, K, 0, FORM, WIDTH, 32)
            first = _operand(_input_tile(x, rows, order, k, inputs, FORM), FORM)
            acc = tl.dot(low.to(FORM.act), tl.trans(first), acc, input_precision="ieee")
            high = nibble_value(stored >> 4, table, FORM.kind)
            high = _dequantize(high, w, base, k0, K, 16, FORM, WIDTH, 32)
            second = _operand(_input_tile(x, rows, order, k + 16, inputs, FORM), FORM)
            acc = tl.dot(high.to(FORM.act), tl.trans(second), acc, input_precision="ieee")
        else:
            k = k0 + at
            given = _input_tile(x, rows, order, k, inputs, FORM)
            stored = _tile(w.data, columns, k, w.row, FORM.even)
            if FORM.direct and FORM.kind == 1:
                acc += tl.dot(stored, tl.trans(given), out_dtype=tl.int32)
            elif FORM.direct and FORM.kind == 3:
                left, right = stored.to(tl.float8e4nv, bitcast=True), given.to(tl.float8e4nv, bitcast=True)
                acc = tl.dot(left, tl.trans(right), acc, max_num_imprecise_acc=128)
            elif FORM.direct:
                acc = tl.dot(stored, tl.trans(given), acc, input_precision="ieee")
            else:
                values = byte_value(stored, FORM.kind, FORM.native)
                values = _dequantize(values, w, base, k0, K, 0, FORM, WIDTH, 16)
                acc = tl.dot(values.to(FORM.act), tl.trans(_operand(given, FORM)), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["M"])
def gemm_kernel(x, w, out, M, N, K, heads, FORM: tl.constexpr):
    """out [M, N] = x [M, K] @ w [N, K].T with scales and bias. Grid: tiles, heads.

    x: `Inputs`. w: `Weight`. out: `Rows`. heads: elements from head to head of x, rows of w, elements of out; or None.
    """
    tile_m, tile_n = grouped_tile(tl.program_id(0), tl.cdiv(M, FORM.BM), tl.cdiv(N, FORM.BN), FORM.GROUP)
    m, n = tile_m * FORM.BM + tl.arange(0, FORM.BM), tile_n * FORM.BN + tl.arange(0, FORM.BN)
    row, own = tl.minimum(m, M - 1), tl.minimum(n, N - 1).to(tl.int64)
    x_data, out_data = x.data, out.data
    if heads is not None:
        head = tl.program_id(1).to(tl.int64)
        x_data += head * heads[0]
        own += head * heads[1]
        out_data += head * heads[2]
    acc = multiply_tile(x_data, row.to(tl.int64) * x.row, None, w, w.table, own, K, K, FORM)
    result = tl.trans(acc.to(tl.float32))
    if w.row_scales is not None:
        result *= tl.load(w.row_scales + own)[None, :]
    if x.scales is not None:
        result *= tl.load(x.scales + row)[:, None]
    if w.bias is not None:
        result += tl.load(w.bias + own)[None, :]
    where = out_data + m.to(tl.int64)[:, None] * out.stride + n[None, :]
    tl.store(where, result.to(out.data.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
