"""What the numbers of a packed weight mean, for Triton kernels: decoding them, and looking up whole rows.

How weights lie in memory is said by `linear_weights.py`; products are in `gemv_kernels.py` and `gemm_kernels.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

KINDS = {"float": 0, "int8": 1, "int4": 2, "e4m3": 3, "e5m2": 4, "table": 5}
"""How an element is stored: as a float, or as a byte or a nibble of this meaning."""


class Weight(NamedTuple):
    """The tensors of a `GPULinear`, None where it has none, and the elements from row to row of `data` and groups.

    Of experts every tensor has a first axis of all experts, and rows are counted through.
    """

    data: Any
    row_scales: Any
    group_scales: Any
    zeros: Any
    table: Any
    bias: Any
    order: Any
    row: Any
    group_row: Any


class Inputs(NamedTuple):
    """Rows of x [M, K], `row` elements apart; with `scales` float32 [M] they are int8 or codes of E4M3."""

    data: Any
    scales: Any
    row: Any


@triton.jit
def e4m3_value(codes, NATIVE: tl.constexpr):
    """Return the values of uint8 codes of E4M3, float32; NaNs were found when the weight was packed.

    NATIVE: the chip has an instruction for it. Otherwise the seven bits become the upper ones of a float32, whose
    exponent counts from 127 instead of 7; subnormals of both formats follow the same rule, so that they fit too.
    """
    if NATIVE:
        value = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        wide = codes.to(tl.int32)
        bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return value


@triton.jit
def byte_value(codes, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """Return floats or bytes as float32, without scales and zeros; codes of E5M2 are the upper half of a float16."""
    if KIND == 3:
        return e4m3_value(codes, NATIVE)
    elif KIND == 4:
        return (codes.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return codes.to(tl.float32)


@triton.jit
def nibble_value(nibbles, table, KIND: tl.constexpr):
    """Return nibbles, int32, as float32: 128 more than an integer's value, or a table's entry.

    Put into the fraction of 128.0 an integer is a float without a conversion; 128 is subtracted from the product.
    """
    if KIND == 2:
        return ((nibbles << 16) | 0x43000000).to(tl.float32, bitcast=True)
    else:
        return tl.load(table + nibbles)


@triton.jit
def rows_kernel(ids, w, out, K, KIND: tl.constexpr, G: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr):
    """out[t] = row ids[t] of a `Weight`, decoded; a program has BLOCK columns of one row. Bound by bandwidth."""
    t = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + t).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < K
    if KIND == 2 or KIND == 5:
        stored = tl.load(w.data + row * w.row + k // 32 * 16 + k % 16, mask=inside, other=0).to(tl.int32)
        values = nibble_value((stored >> (k % 32 // 16 * 4)) & 15, w.table, KIND)
    else:
        values = byte_value(tl.load(w.data + row * w.row + k, mask=inside, other=0), KIND, NATIVE)
    if w.zeros is not None:
        values -= tl.load(w.zeros + row * w.group_row + k // G, mask=inside, other=0).to(tl.float32)
        if KIND == 2:
            values -= 128.0
    elif KIND == 2:
        values -= 136.0
    if G > 0:
        values *= tl.load(w.group_scales + row * w.group_row + k // G, mask=inside, other=0).to(tl.float32)
    if w.row_scales is not None:
        values *= tl.load(w.row_scales + row)
    tl.store(out + t * K + k, values.to(out.dtype.element_ty), mask=inside)
