"""Norms of rows and of pieces of rows, in one pass: a row stays in registers between its sum and its result.

Bound by memory: a row is read once and written once. Which rows share a program depends on their width alone, so that a
row's bits never depend on how many there are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.gpu.pdl import launch_dependents, wait_for_dependencies

ELEMENTS = 1024  # of several narrow pieces that one program norms
PER_THREAD = 16  # elements: two loads of 16 bytes of a 16-bit type


@triton.jit(do_not_specialize=["count"])
def rms_norm_kernel(
    x, residual, weight, out, x_stride, residual_stride, pieces, count, eps,
    ADD: tl.constexpr, WIDTH: tl.constexpr, WB: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm ROWS of all `count` pieces, of which a row of x has `pieces`; with ADD of residual + x, which is kept."""
    launch_dependents(PDL)
    piece = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WB)
    row, start = (piece // pieces).to(tl.int64), (piece % pieces) * WIDTH
    mask = (piece < count)[:, None] & (columns < WIDTH)[None, :]
    scales = tl.load(weight + columns, mask=columns < WIDTH, other=0)
    wait_for_dependencies(PDL)
    values = tl.load(x + (row * x_stride + start)[:, None] + columns[None, :], mask=mask, other=0).to(tl.float32)
    if ADD:
        places = residual + (row * residual_stride + start)[:, None] + columns[None, :]
        values += tl.load(places, mask=mask, other=0).to(tl.float32)
        kept = values.to(residual.dtype.element_ty)
        tl.store(places, kept, mask=mask)
        values = kept.to(tl.float32)  # the norm is that of what the next layer will find
    factor = tl.rsqrt(tl.sum(values * values, 1) / WIDTH + eps)
    made = values * factor[:, None] * scales[None, :]
    target = out + piece.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    tl.store(target, made.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count"])
def layer_norm_kernel(
    x, weight, bias, out, x_stride, pieces, count, eps,
    BIASED: tl.constexpr, WIDTH: tl.constexpr, WB: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """As `rms_norm_kernel`, around the mean; the squares are those of what is left of the mean."""
    piece = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WB)
    inside = columns < WIDTH
    row, start = (piece // pieces).to(tl.int64), (piece % pieces) * WIDTH
    mask = (piece < count)[:, None] & inside[None, :]
    scales = tl.load(weight + columns, mask=inside, other=0)
    values = tl.load(x + (row * x_stride + start)[:, None] + columns[None, :], mask=mask, other=0).to(tl.float32)
    # The mean is taken twice, the second time of what the first left: values may be close together and far from 0.
    values = tl.where(inside[None, :], values - (tl.sum(values, 1) / WIDTH)[:, None], 0.0)
    values = tl.where(inside[None, :], values - (tl.sum(values, 1) / WIDTH)[:, None], 0.0)
    factor = tl.rsqrt(tl.sum(values * values, 1) / WIDTH + eps)
    made = values * factor[:, None] * scales[None, :]
    if BIASED:
        made += tl.load(bias + columns, mask=inside, other=0)[None, :]
    target = out + piece.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    tl.store(target, made.to(out.dtype.element_ty), mask=mask)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., N] as [T, N], whose rows may be apart but are whole; a view where that is possible."""
    x = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _shape(width: int) -> tuple[int, int, int]:
    """Return how wide a piece is when padded, how many a program norms, and with how many warps."""
    padded = triton.next_power_of_2(width)
    rows = max(1, ELEMENTS // padded)
    return padded, rows, min(16, max(1, rows * padded // (32 * PER_THREAD)))


def rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """Return the RMS norm in `dtype` of each piece of x [..., n * W], weight [W]; or of residual + x, kept in residual.

    Rows of both may be apart. pdl: the launch may overlap, see `pdl.py`.
    """
    source, width = as_rows(x), weight.shape[0]
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    pieces = source.shape[1] // width
    if source.shape[1] != pieces * width:
        raise ValueError(f"norm: rows of {source.shape[1]} elements cannot be cut into pieces of {width}")
    count = source.shape[0] * pieces
    if count == 0:
        return out
    target = source
    if residual is not None:
        assert residual.ndim == 2 and residual.stride(1) == 1, "what is changed in place has whole rows"
        target = residual
    padded, rows, warps = _shape(width)
    rms_norm_kernel[(triton.cdiv(count, rows),)](
        source, target, weight, out, source.stride(0), target.stride(0), pieces, count, eps,
        ADD=residual is not None, WIDTH=width, WB=padded, ROWS=rows, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, dtype: torch.dtype
) -> torch.Tensor:
    """Return (x - mean) / sqrt(var + eps) * weight + bias in `dtype` over the last axis of x [..., W]."""
    source, width = as_rows(x), weight.shape[0]
    if source.shape[1] != width:
        raise ValueError(f"layer norm: rows have {source.shape[1]} elements, the weight has {width}")
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if source.shape[0] == 0:
        return out
    padded, rows, warps = _shape(width)
    layer_norm_kernel[(triton.cdiv(source.shape[0], rows),)](
        source, weight, weight if bias is None else bias, out, source.stride(0), 1, source.shape[0], eps,
        BIASED=bias is not None, WIDTH=width, WB=padded, ROWS=rows, num_warps=warps,
    )  # fmt: skip
    return out
