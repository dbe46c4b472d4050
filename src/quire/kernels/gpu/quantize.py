"""Rounding rows to 8 bits and a scale, on the device: inputs of products, and weights while they are packed.

The meaning is that of `kernels/reference/quantize.py`, to the bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.gpu.kernel_args import power_of_two, rows_of

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
def scale_of(size, sound, E4M3: tl.constexpr):
    """Return what to multiply rows with before rounding, and their scales, by their largest absolute values.

    sound: whether all of a row is finite; otherwise its scale is NaN, and it is all 0.
    """
    limit = tl.full(size.shape, 448.0 if E4M3 else 127.0, tl.float32)
    size = tl.where(size >= 7.52316384526264e-37, size, 0.0)  # 2^-120
    up = tl.where(size > 0, tl.div_rn(limit, tl.where(size > 0, size, 1.0)), 0.0)
    return tl.where(sound, up, 0.0), tl.where(sound, tl.div_rn(size, limit), float("nan"))


@triton.jit
def _load(x, order, k, inside):
    where = tl.load(order + k, mask=inside, other=0) if order is not None else k
    return tl.load(x + where, mask=inside, other=0).to(tl.float32)


@triton.jit
def quantize_rows_kernel(
    x, order, out, scales, K, depth, E4M3: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr
):
    """One program for each row of x [M, K]; out [M, depth] is 0 beyond K. AT_ONCE: BLOCK holds it. Bandwidth-bound."""
    row = tl.program_id(0).to(tl.int64)
    source = x.data + row * x.stride
    out += row * depth
    k = tl.arange(0, BLOCK)
    if AT_ONCE:
        values = _load(source, order, k, k < K)
        sizes = tl.abs(values)
        faults = (sizes < float("inf")).to(tl.int32) ^ 1
        sizes = tl.where(sizes < float("inf"), sizes, 0.0)
    else:
        sizes = tl.zeros([BLOCK], tl.float32)
        faults = tl.zeros([BLOCK], tl.int32)
        for start in range(0, K, BLOCK):
            size = tl.abs(_load(source, order, start + k, start + k < K))
            faults = faults | ((size < float("inf")).to(tl.int32) ^ 1)
            sizes = tl.maximum(sizes, tl.where(size < float("inf"), size, 0.0))
    factor, scale = scale_of(tl.max(sizes, axis=0), tl.max(faults, axis=0) == 0, E4M3)
    tl.store(scales + row, scale)
    if AT_ONCE:
        tl.store(out + k, round_block(values, factor, E4M3), mask=k < depth)
    else:
        for start in range(0, depth, BLOCK):
            values = _load(source, order, start + k, start + k < K)
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
        block = min(WHOLE, power_of_two(depth))
        options = {"num_warps": 4 if block <= 4096 else 8 if block < WHOLE else 16, "enable_fp_fusion": False}
        forms = e4m3, depth <= block, block
        quantize_rows_kernel[(rows,)](rows_of(x), order, out, scales, inputs, depth, *forms, **options)
    return out, scales
