"""The gated delta rule token by token, as its definition says: for decoding, and where bits must not depend on steps.

A program has some columns of one head's matrix of one sequence, which are independent of the others, and keeps them in
registers from the first token to the last. With one token it is bound by memory: the matrices are read and written
once, 4 MB a sequence and layer with 32 heads of 128 by 128. Prompts are computed by `states_chunks.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.backend import AttentionMetadata

COLUMNS = 32  # of a matrix that one program has: 4 programs a head of 128, or 128 of a sequence with 32 heads


@triton.jit
def delta_scan_kernel(
    q, k, v, decay, beta, state, out, starts, seq_lens, state_rows,
    q_stride, k_stride, v_stride, decay_stride, beta_stride, heads, shared,
    SINGLE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr,
):  # fmt: skip
    """Program (block of columns, value head, sequence)."""
    column = tl.program_id(0) * VB + tl.arange(0, VB)
    head, s = tl.program_id(1), tl.program_id(2)
    keys = tl.load(seq_lens + s)
    first, count = s, 1
    if not SINGLE:
        first = tl.load(starts + s)
        count = tl.load(starts + s + 1) - first
    if keys <= 0 or count <= 0:
        return
    depth = tl.arange(0, KB)
    inside, deep = column < DV, depth < DK
    place = state + (tl.load(state_rows + s) * heads + head) * DK * DV + depth[:, None] * DV + column[None, :]
    whole = deep[:, None] & inside[None, :]
    matrix = tl.load(place, mask=whole & (keys > count), other=0)
    key_head = head // shared
    for token in range(count):
        row = (first + token).to(tl.int64)
        key = tl.load(k + row * k_stride + key_head * DK + depth, mask=deep, other=0).to(tl.float32)
        query = tl.load(q + row * q_stride + key_head * DK + depth, mask=deep, other=0).to(tl.float32)
        value = tl.load(v + row * v_stride + head * DV + column, mask=inside, other=0).to(tl.float32)
        gate = tl.load(beta + row * beta_stride + head).to(tl.float32)
        matrix *= tl.exp(tl.load(decay + row * decay_stride + head).to(tl.float32))
        change = (value - tl.sum(key[:, None] * matrix, 0)) * gate
        matrix += key[:, None] * change[None, :]
        found = tl.sum(query[:, None] * matrix, 0)
        tl.store(out + (row * heads + head) * DV + column, found.to(out.dtype.element_ty), mask=inside)
    tl.store(place, matrix, mask=whole)


def scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    metadata: AttentionMetadata,
    out: torch.Tensor,
) -> None:
    """See `Backend.gated_delta`; `out` [T, Hv*Dv] is contiguous."""
    _, heads, depth, width = state.shape
    columns = min(COLUMNS, triton.next_power_of_2(width))
    delta_scan_kernel[(triton.cdiv(width, columns), heads, metadata.seq_lens.shape[0])](
        q, k, v, decay, beta, state, out, metadata.cu_query_lens, metadata.seq_lens, metadata.state_rows,
        q.stride(0), k.stride(0), v.stride(0), decay.stride(0), beta.stride(0), heads, heads * depth // k.shape[1],
        SINGLE=metadata.single, DK=depth, DV=width, KB=triton.next_power_of_2(depth), VB=columns,
    )  # fmt: skip
