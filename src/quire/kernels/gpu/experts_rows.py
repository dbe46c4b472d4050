"""Products of few tokens with their experts: every pair of a token and an expert by itself, without tensor cores.

At one token each weight of its experts is used once, so that the time is that of reading them: 75 MB a layer of
Qwen3-30B-A3B, 16 us at 4.8 TB/s. Programs have few columns (at 8 experts of 768 there are 384 of them, three on each of
132 multiprocessors), and read them in pieces of whole rows; sums stay spread over the threads until the end. The second
product goes through all experts of a token and adds them up itself, so that two launches are all it takes. With more
tokens experts are read once for each token that chose them, which costs while few of them meet.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.kernels.gpu.activations import gate_and_multiply


@triton.jit
def _load_rows(base, n, k, rows, depth, EVEN: tl.constexpr):
    """Return a tile of weights [BLOCK_N, BLOCK_K] of a matrix [rows, depth]; each is read once and not kept."""
    at = base + n[:, None].to(tl.int64) * depth + k[None, :]
    if EVEN:
        return tl.load(at, eviction_policy="evict_first").to(tl.float32)
    return tl.load(at, (n[:, None] < rows) & (k[None, :] < depth), other=0.0).to(tl.float32)


@triton.jit
def gated_rows(
    x, x_stride, ids, w, bias, out, inner, depth,
    TOP_K: tl.constexpr, KIND: tl.constexpr, BIASED: tl.constexpr, EVEN: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out[pair] = act(gate) * up of x[pair // TOP_K]; w is [E, 2 * inner, depth], programs [pairs, inner / N]."""
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(ids + pair)
    row = x + pair // TOP_K * x_stride
    n, lanes = tl.program_id(1) * N + tl.arange(0, N), tl.arange(0, K)
    base = w + expert * 2 * inner * depth
    gate, up = tl.zeros([N, K], tl.float32), tl.zeros([N, K], tl.float32)
    for start in tl.range(0, depth, K, num_stages=STAGES):
        k = start + lanes
        values = tl.load(row + k, k < depth, other=0.0).to(w.dtype.element_ty).to(tl.float32)[None, :]
        gate += values * _load_rows(base, n, k, inner, depth, EVEN)
        up += values * _load_rows(base + inner.to(tl.int64) * depth, n, k, inner, depth, EVEN)
    gates, ups, inside = tl.sum(gate, axis=1), tl.sum(up, axis=1), n < inner
    if BIASED:
        own = bias + expert * 2 * inner + n
        gates += tl.load(own, inside, other=0.0)
        ups += tl.load(own + inner, inside, other=0.0)
    tl.store(out + pair * inner + n, gate_and_multiply(gates, ups, KIND).to(out.dtype.element_ty), inside)


@triton.jit
def mixed_rows(
    h, ids, weights, w, bias, out, width, depth,
    TOP_K: tl.constexpr, BIASED: tl.constexpr, EVEN: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over j of weights[t, j] * down(h[t * TOP_K + j]); w [E, width, depth], programs [T, width / N]."""
    row = tl.program_id(0).to(tl.int64)
    n, lanes = tl.program_id(1) * N + tl.arange(0, N), tl.arange(0, K)
    steps, inside = tl.cdiv(depth, K), n < width
    total = tl.zeros([N, K], tl.float32)
    for step in tl.range(0, TOP_K * steps, num_stages=STAGES):
        pair, k = row * TOP_K + step // steps, step % steps * K + lanes
        expert, weight = tl.load(ids + pair), tl.load(weights + pair)
        values = tl.load(h + pair * depth + k, k < depth, other=0.0).to(tl.float32)
        own = _load_rows(w + expert * width * depth, n, k, width, depth, EVEN)
        total += weight * (values[None, :] * own)
    result = tl.sum(total, axis=1)
    if BIASED:
        for choice in tl.static_range(TOP_K):
            pair = row * TOP_K + choice
            own = bias + tl.load(ids + pair) * width + n
            result += tl.load(weights + pair) * tl.load(own, inside, other=0.0)
    tl.store(out + row * width + n, result.to(out.dtype.element_ty), inside)
