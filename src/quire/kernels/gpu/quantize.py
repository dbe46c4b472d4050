"""Rounding rows to 8 bits and a scale, on the device: inputs of products, and weights while they are packed.

The meaning is that of `kernels/reference/quantize.py`, to the bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

WHOLE = 16384  # numbers of a row that one program holds; longer rows are read twice


@triton.jit
def encode_e4m3(x):
    """Return the E4M3 codes, uint8, nearest to x, a float32 block of sizes up to 448; ties go to even ones.

    Written with integers, since older chips have no instruction for it, and it costs less than reading x does.
    """
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    # Below 2^-6 steps are 2^-9; at 1.5 * 2^23 the steps of a float32 are 1.
    small = (size * 512.0 + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    code = tl.where(size < 0.015625, small, normal)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def round_block(x, factor, E4M3: tl.constexpr):
    """Return x * factor, rounded: int8, or codes of E4M3; 0 for what is not finite.

    The product is rounded before the sum: kernels with this are compiled without fused operations.
    """
    scaled = tl.where(tl.abs(x) < float("inf"), x, 0.0) * factor
    if E4M3:
        result = encode_e4m3(tl.minimum(tl.maximum(scaled, -448.0), 448.0))
    else:
        result = ((scaled + 12582912.0) - 12582912.0).to(tl.int8)
    return result


@triton.jit
def _load(x, order, k, inside, ORDERED: tl.constexpr):
    where = tl.load(order + k, mask=inside, other=0) if ORDERED else k
    return tl.load(x + where, mask=inside, other=0).to(tl.float32)


@triton.jit
def quantize_rows_kernel(
    x,
    order,
    out,
    scales,
    x_row,
    K,
    depth,
    E4M3: tl.constexpr,
    ORDERED: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each row of x [M, K]; out [M, depth] is 0 beyond K. AT_ONCE: BLOCK holds it. Bandwidth-bound."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_row
    out += row * depth
    limit: tl.constexpr = 448.0 if E4M3 else 127.0
    k = tl.arange(0, BLOCK)
    if AT_ONCE:
        values = _load(x, order, k, k < K, ORDERED)
        size = tl.abs(values)
        bad = tl.max((size < float("inf")).to(tl.int32) ^ 1, axis=0)
        most = tl.max(tl.where(size < float("inf"), size, 0.0), axis=0)
    else:
        sizes = tl.zeros([BLOCK], tl.float32)
        faults = tl.zeros([BLOCK], tl.int32)
        for start in range(0, K, BLOCK):
            size = tl.abs(_load(x, order, start + k, start + k < K, ORDERED))
            faults = faults | ((size < float("inf")).to(tl.int32) ^ 1)
            sizes = tl.maximum(sizes, tl.where(size < float("inf"), size, 0.0))
        bad = tl.max(faults, axis=0)
        most = tl.max(sizes, axis=0)
    most = tl.where(most >= 7.52316384526264e-37, most, 0.0)  # 2^-120
    factor = tl.where((most > 0) & (bad == 0), tl.math.div_rn(limit, tl.where(most > 0, most, 1.0)), 0.0)
    tl.store(scales + row, tl.where(bad > 0, float("nan"), tl.math.div_rn(most, limit)))
    if AT_ONCE:
        tl.store(out + k, round_block(values, factor, E4M3), mask=k < depth)
    else:
        for start in range(0, depth, BLOCK):
            values = _load(x, order, start + k, start + k < K, ORDERED)
            tl.store(out + start + k, round_block(values, factor, E4M3), mask=start + k < depth)


def quantize_rows(
    x: torch.Tensor,
    *,
    e4m3: bool = False,
    order: torch.Tensor | None = None,
    depth: int = 0,
    out: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round the rows of x [M, K] -> int8, or uint8 codes of E4M3, [M, depth], and float32 scales [M].

    Args:
        x: any float type; elements of a row side by side. order: int32 [K], column k is taken from order[k].
        depth: columns of the result, zeros beyond K; 0 for K. out, scales: where to write, if given; contiguous.
    """
    rows, inputs = x.shape
    depth = depth or inputs
    if out is None:
        out = torch.empty((rows, depth), dtype=torch.uint8 if e4m3 else torch.int8, device=x.device)
    if scales is None:
        scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        block = min(WHOLE, triton.next_power_of_2(depth))
        warps = 4 if block <= 4096 else 8 if block < WHOLE else 16
        quantize_rows_kernel[(rows,)](
            x, x if order is None else order, out, scales, x.stride(0), inputs, depth,
            E4M3=e4m3, ORDERED=order is not None, AT_ONCE=depth <= block, BLOCK=block,
            num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return out, scales
