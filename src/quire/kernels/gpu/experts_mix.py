"""The sum over a token's experts of what each made of it, where they wrote it down one by one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS = 1024  # of a program that adds up


@triton.jit
def _mix(y, weights, out, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < width
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = row * TOP_K + choice
        total += tl.load(weights + pair) * tl.load(y + pair * width + columns, real, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, total.to(out.dtype.element_ty), real)


def mix(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return sum over j of weights[t, j] * y[t * k + j], added up in float32 and in order: y [T * k, N] -> [T, N]."""
    tokens, top_k = weights.shape
    width = y.shape[1]
    out = torch.empty((tokens, width), dtype=y.dtype, device=y.device)
    block = min(COLUMNS, triton.next_power_of_2(width))
    _mix[(tokens, triton.cdiv(width, block))](y, weights, out, width, TOP_K=top_k, BLOCK=block, num_warps=4)
    return out
