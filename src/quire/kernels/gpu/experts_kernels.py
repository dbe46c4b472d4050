"""Kernels of mixtures of experts with float weights: sorting pairs by expert, both products, and the weighted sum.

Few tokens: every pair of a token and an expert is computed by itself, without tensor cores. At one token each weight of
its experts is used once, so that the time is that of reading them: 75 MB a layer of Qwen3-30B-A3B, 16 us at 4.8 TB/s.
Programs have few columns (at 8 experts of 768 there are 384 of them, three on each of 132 multiprocessors) and read
them in pieces of whole rows. The second product goes through all experts of a token and adds them up itself, so that
two launches are all it takes.

Many tokens: rows in blocks by expert, matrices on tensor cores (grouped GEMM). A program has a block of rows of one
expert and some columns. Blocks of one expert follow each other, so that they find its weights in the L2 cache. With 128
rows an expert and more it is bound by the matrix unit: 256 operations for each byte of a weight.

Pairs are sorted by a counting sort in one launch, stable, without atomics and without the host: every expert has a
program, which counts all pairs, so knows where its own begin, and writes their numbers there. A program reads all ids
twice, from the L2 cache: 16384 pairs are 128 KB, for 128 experts 34 MB at 5 TB/s or so, next to products of 0.3 ms.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.kernels.gpu.activations import gate_and_multiply
from quire.kernels.gpu.tuned_configs import KernelConfig

FEW, MANY = 512, 4096  # pairs that a program looks at together
NO_EXPERT = -1


class Blocks(NamedTuple):
    """Pairs by expert: pair t * k + j is choice j of token t.

    pairs: int32 [blocks * size], each expert's pairs in order, filled up to a multiple of `size` with the number of all
    pairs. experts: int32 [blocks], whose a block is; -1 for blocks that nobody needed.
    """

    pairs: torch.Tensor
    experts: torch.Tensor
    size: int


def most_blocks(pairs: int, experts: int, size: int) -> int:
    """Return how many blocks pairs can need: each expert with any has one that may be nearly empty."""
    return (pairs + min(pairs, experts) * (size - 1)) // size


@triton.jit
def _count(ids, pairs, BINS: tl.constexpr, CHUNK: tl.constexpr):
    """Return how many of the pairs each expert has, int32 [BINS]."""
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, pairs, CHUNK):
        at = start + tl.arange(0, CHUNK)
        some = tl.load(ids + at, at < pairs, other=0).to(tl.int32)
        counts += tl.histogram(some, BINS, mask=at < pairs)
    return counts


@triton.jit(do_not_specialize=["num_blocks"])
def _sort_pairs(
    ids, pairs, out, owners, num_blocks, EXPERTS: tl.constexpr, BINS: tl.constexpr, SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    counts = _count(ids, pairs, BINS, CHUNK)
    bins = tl.arange(0, BINS)
    blocks = (counts + SIZE - 1) // SIZE
    first = tl.sum(tl.where(bins < expert, blocks, 0), axis=0)
    own = tl.sum(tl.where(bins == expert, blocks, 0), axis=0)
    used = tl.sum(blocks, axis=0)
    at = first * SIZE
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        mine = (tl.load(ids + pair, pair < pairs, other=-1).to(tl.int32) == expert).to(tl.int32)
        tl.store(out + at + tl.cumsum(mine, axis=0) - 1, pair, mine > 0)
        at += tl.sum(mine, axis=0)
    lanes = tl.arange(0, SIZE)
    tl.store(out + at + lanes, pairs + lanes * 0, at + lanes < (first + own) * SIZE)
    for start in range(first, first + own, SIZE):
        tl.store(owners + start + lanes, expert + lanes * 0, start + lanes < first + own)
    if expert == EXPERTS - 1:
        for start in range(used, num_blocks, SIZE):
            tl.store(owners + start + lanes, lanes * 0 - 1, start + lanes < num_blocks)


def sort_pairs(ids: torch.Tensor, num_experts: int, size: int) -> Blocks:
    """Sort the pairs of ids int64 [T, k], contiguous, into blocks of `size`, a power of two; T is at least 1."""
    pairs = ids.numel()
    blocks = most_blocks(pairs, num_experts, size)
    out = torch.empty(blocks * size, dtype=torch.int32, device=ids.device)
    owners = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    few = pairs <= FEW
    _sort_pairs[(num_experts,)](
        ids, pairs, out, owners, blocks, EXPERTS=num_experts, BINS=triton.next_power_of_2(num_experts), SIZE=size,
        CHUNK=FEW if few else MANY, num_warps=4 if few else 8,
    )  # fmt: skip
    return Blocks(out, owners, size)


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


def weighted_sum(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return sum over j of weights[t, j] * y[t * k + j], added up in float32 and in order: y [T * k, N] -> [T, N]."""
    tokens, top_k = weights.shape
    width = y.shape[1]
    out = torch.empty((tokens, width), dtype=y.dtype, device=y.device)
    block = min(COLUMNS, triton.next_power_of_2(width))
    _mix[(tokens, triton.cdiv(width, block))](y, weights, out, width, TOP_K=top_k, BLOCK=block, num_warps=4)
    return out


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


TOGETHER = 8  # blocks of rows that are computed with the same columns, one after the other


@triton.jit
def _tile(index, num_blocks, num_tiles, TOGETHER: tl.constexpr):
    """Return the block of rows, and the tile of columns, of program `index`."""
    span = TOGETHER * num_tiles
    first = index // span * TOGETHER
    width = tl.minimum(num_blocks - first, TOGETHER)
    return first + index % span % width, index % span // width


@triton.jit
def _load_weight(base, n, k, rows, depth, stride, EVEN: tl.constexpr):
    """Return a tile of weights transposed, [BLOCK_K, BLOCK_N], of a matrix [rows, depth]."""
    at = base + n[None, :].to(tl.int64) * stride + k[:, None]
    if EVEN:
        return tl.load(at)
    return tl.load(at, (n[None, :] < rows) & (k[:, None] < depth), other=0.0)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _gated_blocks(
    x, x_stride, w, bias, pairs, owners, out, num_pairs, num_blocks, inner, depth,
    TOP_K: tl.constexpr, KIND: tl.constexpr, BIASED: tl.constexpr, EVEN: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """out[pair] = act(gate) * up of x[pair // TOP_K] for the pairs of a block; w is [E, 2 * inner, depth]."""
    block, tile = _tile(tl.program_id(0), num_blocks, tl.cdiv(inner, N), TOGETHER)
    expert = tl.load(owners + block)
    if expert < 0:
        return
    pair = tl.load(pairs + block * M + tl.arange(0, M))
    real = pair < num_pairs
    rows = x + (pair // TOP_K).to(tl.int64)[:, None] * x_stride
    n, lanes = tile * N + tl.arange(0, N), tl.arange(0, K)
    base = w + expert.to(tl.int64) * 2 * inner * depth
    gate, up = tl.zeros([M, N], tl.float32), tl.zeros([M, N], tl.float32)
    for start in range(0, depth, K):
        k = start + lanes
        mask = real[:, None] if EVEN else real[:, None] & (k < depth)[None, :]
        values = tl.load(rows + k[None, :], mask, other=0.0).to(w.dtype.element_ty)
        gate = tl.dot(values, _load_weight(base, n, k, inner, depth, depth, EVEN), gate, input_precision="ieee")
        w_up = _load_weight(base + inner.to(tl.int64) * depth, n, k, inner, depth, depth, EVEN)
        up = tl.dot(values, w_up, up, input_precision="ieee")
    inside = n < inner
    if BIASED:
        own = bias + expert * 2 * inner + n
        gate += tl.load(own, inside, other=0.0)[None, :]
        up += tl.load(own + inner, inside, other=0.0)[None, :]
    result = gate_and_multiply(gate, up, KIND).to(out.dtype.element_ty)
    tl.store(out + pair.to(tl.int64)[:, None] * inner + n[None, :], result, real[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _down_blocks(
    h, w, bias, pairs, owners, out, num_pairs, num_blocks, width, depth,
    BIASED: tl.constexpr, EVEN: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """out[pair] = down(h[pair]) for the pairs of a block; w is [E, width, depth]."""
    block, tile = _tile(tl.program_id(0), num_blocks, tl.cdiv(width, N), TOGETHER)
    expert = tl.load(owners + block)
    if expert < 0:
        return
    pair = tl.load(pairs + block * M + tl.arange(0, M))
    real = pair < num_pairs
    rows = h + pair.to(tl.int64)[:, None] * depth
    n, lanes = tile * N + tl.arange(0, N), tl.arange(0, K)
    base = w + expert.to(tl.int64) * width * depth
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, depth, K):
        k = start + lanes
        mask = real[:, None] if EVEN else real[:, None] & (k < depth)[None, :]
        values = tl.load(rows + k[None, :], mask, other=0.0)
        total = tl.dot(values, _load_weight(base, n, k, width, depth, depth, EVEN), total, input_precision="ieee")
    inside = n < width
    if BIASED:
        total += tl.load(bias + expert * width + n, inside, other=0.0)[None, :]
    result = total.to(out.dtype.element_ty)
    tl.store(out + pair.to(tl.int64)[:, None] * width + n[None, :], result, real[:, None] & inside[None, :])


def gated(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    blocks: Blocks,
    top_k: int,
    kind: int,
    tiles: KernelConfig,
) -> torch.Tensor:
    """Return act(gate) * up of each pair, [T * top_k, I]: x [T, H], w [E, 2 * I, H], bias [E, 2 * I] or None."""
    pairs, inner, depth = x.shape[0] * top_k, w.shape[1] // 2, w.shape[2]
    out = torch.empty((pairs, inner), dtype=w.dtype, device=x.device)
    n, k = tiles["n"], tiles["k"]
    num_blocks = blocks.experts.shape[0]
    _gated_blocks[(num_blocks * triton.cdiv(inner, n),)](
        x, x.stride(0), w, bias, blocks.pairs, blocks.experts, out, pairs, num_blocks, inner, depth, TOP_K=top_k,
        KIND=kind, BIASED=bias is not None, EVEN=inner % n == 0 and depth % k == 0, M=blocks.size, N=n, K=k,
        TOGETHER=TOGETHER, num_warps=tiles["warps"], num_stages=tiles["stages"],
    )  # fmt: skip
    return out


def down(
    h: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, blocks: Blocks, tiles: KernelConfig
) -> torch.Tensor:
    """Return each pair's h [T * k, I] times its expert's matrix, [T * k, H]: w [E, H, I], bias [E, H] or None."""
    pairs, width, depth = h.shape[0], w.shape[1], w.shape[2]
    out = torch.empty((pairs, width), dtype=w.dtype, device=h.device)
    n, k = tiles["n"], tiles["k"]
    num_blocks = blocks.experts.shape[0]
    _down_blocks[(num_blocks * triton.cdiv(width, n),)](
        h, w, bias, blocks.pairs, blocks.experts, out, pairs, num_blocks, width, depth, BIASED=bias is not None,
        EVEN=width % n == 0 and depth % k == 0, M=blocks.size, N=n, K=k, TOGETHER=TOGETHER,
        num_warps=tiles["warps"], num_stages=tiles["stages"],
    )  # fmt: skip
    return out
