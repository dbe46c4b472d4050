"""The gated delta rule in chunks of tokens, so that prompts are products of matrices (Yang et al. 2024, section 3.3).

With g the running sum of decays in a chunk, S the matrix before it, and row r of K, Q, V and U of its r-th token, where
k_r u_r^T is what that token adds to the matrix, the definition says

    u_r = beta_r (v_r - e^(g_r) S^T k_r - sum over i < r of e^(g_r - g_i) (k_r . k_i) u_i)
    o_r = e^(g_r) S^T q_r + sum over i <= r of e^(g_r - g_i) (q_r . k_i) u_i

so U = (I + A)^-1 diag(beta) (V - diag(e^g) K S) with A strictly lower triangular. What does not need S, the inverse and
the weights of the second line, is computed for all chunks at once; then a program for some columns of a matrix goes
from chunk to chunk. The inverse is found row by row: products of powers of A would be fewer steps, but where keys
repeat themselves the powers grow beyond all bounds and cancel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.backend import AttentionMetadata

CHUNK = 64
COLUMNS = 32  # of a matrix that one program takes from chunk to chunk
SEQUENCES = 256  # that are looked at at least, so that no kernel is compiled for each number of them


@triton.jit
def _product(x, y):
    """x @ y, as good as in float32, of y in float32 and x in any type.

    Where x has 16 bits, so has each of two numbers that y is the sum of, but for a part in 2^17 or less.
    """
    if x.dtype == tl.float32:
        return tl.dot(x, y, input_precision="tf32x3")
    high = y.to(x.dtype)
    return tl.dot(x, (y - high.to(tl.float32)).to(x.dtype), tl.dot(x, high))


@triton.jit(do_not_specialize=["num_sequences"])
def prepare_kernel(
    q, k, decay, beta, inverses, weights, sums, starts, ends,
    q_stride, k_stride, decay_stride, beta_stride, num_sequences, heads, shared,
    DK: tl.constexpr, KB: tl.constexpr, C: tl.constexpr, SB: tl.constexpr,
):  # fmt: skip
    """Program (chunk, value head): (I + A)^-1 diag(beta) and the weights of outputs, [C, C] each; g and what is left of
    it to the chunk's end, [2, C].

    Sums of decays are long, and differences of them may be short: these would have the rounding of those.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    index = tl.arange(0, SB)
    before = (tl.load(ends + index, mask=index < num_sequences, other=2147483647) <= chunk).to(tl.int32)
    s = tl.sum(before, 0)
    if s >= num_sequences:
        return
    earlier = 0
    if s > 0:
        earlier = tl.load(ends + s - 1)
    place = tl.arange(0, C)
    row = tl.load(starts + s) + (chunk - earlier) * C + place
    valid = row < tl.load(starts + s + 1)
    row = row.to(tl.int64)
    depth = tl.arange(0, KB)
    mask = valid[:, None] & (depth < DK)[None, :]
    column = head // shared * DK + depth
    keys = tl.load(k + row[:, None] * k_stride + column[None, :], mask=mask, other=0)
    queries = tl.load(q + row[:, None] * q_stride + column[None, :], mask=mask, other=0)
    gate = tl.load(beta + row * beta_stride + head, mask=valid, other=0).to(tl.float32)
    decays = tl.load(decay + row * decay_stride + head, mask=valid, other=0).to(tl.float64)
    exact = tl.cumsum(decays, 0)
    total = exact.to(tl.float32)
    rest = (exact - total.to(tl.float64)).to(tl.float32)
    between = (total[:, None] - total[None, :]) + (rest[:, None] - rest[None, :])
    fade = tl.exp(tl.minimum(between, 0.0))  # above the diagonal it is not used

    lower = place[:, None] > place[None, :]
    step = tl.where(lower, tl.dot(keys, tl.trans(keys), input_precision="tf32x3") * fade * -gate[:, None], 0.0)
    solved = tl.zeros([C, C], tl.float32)  # the inverse without its diagonal of ones
    for i in range(1, C):
        here = place[:, None] == i
        taken = tl.sum(tl.where(here, step, 0.0), 0)
        solved = tl.where(here, (taken + tl.sum(taken[:, None] * solved, 0))[None, :], solved)
    solved += (place[:, None] == place[None, :]).to(tl.float32)

    seen = tl.dot(queries, tl.trans(keys), input_precision="tf32x3") * fade
    seen = tl.where(place[:, None] >= place[None, :], seen, 0.0)
    slot = chunk.to(tl.int64) * heads + head
    square = slot * C * C + place[:, None] * C + place[None, :]
    tl.store(inverses + square, solved * gate[None, :])
    tl.store(weights + square, seen.to(weights.dtype.element_ty))
    tl.store(sums + slot * 2 * C + place, total)
    tl.store(sums + (slot * 2 + 1) * C + place, (tl.sum(decays, 0) - exact).to(tl.float32))


@triton.jit
def advance_kernel(
    q, k, v, state, out, inverses, weights, sums, starts, seq_lens, state_rows, ends,
    q_stride, k_stride, v_stride, heads, shared,
    DK: tl.constexpr, DV: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Program (block of columns, value head, sequence): outputs of all its chunks, and the matrix after them."""
    column = tl.program_id(0) * VB + tl.arange(0, VB)
    head, s = tl.program_id(1), tl.program_id(2)
    first, stop = tl.load(starts + s), tl.load(starts + s + 1)
    if stop <= first:
        return
    chunk = 0
    if s > 0:
        chunk = tl.load(ends + s - 1)
    depth, place = tl.arange(0, KB), tl.arange(0, C)
    inside, deep = column < DV, depth < DK
    matrix_place = state + (tl.load(state_rows + s) * heads + head) * DK * DV + depth[:, None] * DV + column[None, :]
    whole = deep[:, None] & inside[None, :]
    matrix = tl.load(matrix_place, mask=whole & (tl.load(seq_lens + s) > stop - first), other=0)
    key_column = head // shared * DK + depth
    square = place[:, None] * C + place[None, :]
    for begin in range(first, stop, C):
        row = (begin + place).to(tl.int64)
        valid = row < stop
        mask = valid[:, None] & deep[None, :]
        keys = tl.load(k + row[:, None] * k_stride + key_column[None, :], mask=mask, other=0)
        queries = tl.load(q + row[:, None] * q_stride + key_column[None, :], mask=mask, other=0)
        value_mask = valid[:, None] & inside[None, :]
        values = tl.load(v + row[:, None] * v_stride + (head * DV + column)[None, :], mask=value_mask, other=0)
        slot = chunk.to(tl.int64) * heads + head  # type: ignore[attr-defined]  # a number of Triton
        inverse = tl.load(inverses + slot * C * C + square)
        weight = tl.load(weights + slot * C * C + square)
        total = tl.load(sums + slot * 2 * C + place)
        last = tl.load(sums + slot * 2 * C + C - 1)  # tokens that are not there do not decay
        left = tl.load(sums + (slot * 2 + 1) * C + place)
        grown = tl.exp(total)[:, None]
        missing = values.to(tl.float32) - grown * _product(keys, matrix)
        high = inverse.to(keys.dtype)
        added = _product(high, missing)
        if keys.dtype != tl.float32:
            added += tl.dot((inverse - high.to(tl.float32)).to(keys.dtype), missing.to(keys.dtype))
        found = grown * _product(queries, matrix) + _product(weight, added)
        target = out + (row * heads + head)[:, None] * DV + column[None, :]
        tl.store(target, found.to(out.dtype.element_ty), mask=value_mask)
        faded = added * tl.exp(left)[:, None]
        matrix = matrix * tl.exp(last) + _product(tl.trans(keys), faded)
        chunk += 1
    tl.store(matrix_place, matrix, mask=whole)


def _chunk_ends(metadata: AttentionMetadata) -> torch.Tensor:
    """Return how many chunks each sequence has together with those before it, int32 [S], worked out once a step."""
    ends = metadata.plans.get("chunks")
    if ends is None:
        lengths = metadata.cu_query_lens.diff()
        ends = lengths.add_(CHUNK - 1).div_(CHUNK, rounding_mode="floor").cumsum(0, dtype=torch.int32)
        metadata.plans["chunks"] = ends
    return ends


def advance(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    metadata: AttentionMetadata,
    out: torch.Tensor,
) -> None:
    """See `Backend.gated_delta`; `out` [T, Hv*Dv] is contiguous. Products have the precision of float32."""
    _, heads, depth, width = state.shape
    sequences, shared = metadata.seq_lens.shape[0], heads * depth // k.shape[1]
    ends, most = _chunk_ends(metadata), triton.cdiv(q.shape[0], CHUNK) + sequences
    inverses = torch.empty((most, heads, CHUNK, CHUNK), dtype=torch.float32, device=q.device)
    weights = torch.empty_like(inverses, dtype=q.dtype)  # these only matter to outputs
    sums = torch.empty((most, heads, 2, CHUNK), dtype=torch.float32, device=q.device)
    padded = max(16, triton.next_power_of_2(depth))
    columns = min(COLUMNS, max(16, triton.next_power_of_2(width)))
    prepare_kernel[(most, heads)](
        q, k, decay, beta, inverses, weights, sums, metadata.cu_query_lens, ends,
        q.stride(0), k.stride(0), decay.stride(0), beta.stride(0), sequences, heads, shared,
        DK=depth, KB=padded, C=CHUNK, SB=max(SEQUENCES, triton.next_power_of_2(sequences)), num_warps=8,
    )  # fmt: skip
    advance_kernel[(triton.cdiv(width, columns), heads, sequences)](
        q, k, v, state, out, inverses, weights, sums,
        metadata.cu_query_lens, metadata.seq_lens, metadata.state_rows, ends,
        q.stride(0), k.stride(0), v.stride(0), heads, shared,
        DK=depth, DV=width, KB=padded, VB=columns, C=CHUNK, num_warps=4, num_stages=2,
    )  # fmt: skip
