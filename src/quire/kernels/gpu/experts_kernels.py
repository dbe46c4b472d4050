"""Kernels of mixtures of experts: sorting pairs by expert, products with float and quantized weights, weighted sums.

Few tokens: every pair of a token and an expert is computed by itself, without tensor cores. At one token each weight of
its experts is used once, so that the time is that of reading them: 75 MB a layer of Qwen3-30B-A3B, 16 us at 4.8 TB/s.
Programs have few columns (at 8 experts of 768 there are 384 of them, three on each of 132 multiprocessors) and read
them in pieces of whole rows. The second product goes through all experts of a token and adds them up itself, so that
two launches are all it takes.

Many tokens: rows in blocks by expert, matrices on tensor cores (grouped GEMM). A program has a block of rows of one
expert and some columns. Blocks of one expert follow each other, so that they find its weights in the L2 cache. With 128
rows an expert and more it is bound by the matrix unit: 256 operations for each byte of a weight. Quantized weights are
multiplied so for any number of tokens, decoded as in `gemm_kernels.py`: few rows are bound by reading them, 128 rows an
expert and more by decoding. Inputs are rounded once for each token, before they are brought together.

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
from quire.kernels.gpu.gemm_kernels import grouped_tile, multiply_tile
from quire.kernels.gpu.kernel_args import power_of_two

FEW, MANY = 512, 4096  # pairs that a program looks at together
TOGETHER = 8  # blocks of rows that go through all columns together, see `grouped_tile`


class Blocks(NamedTuple):
    """Pairs by expert: pair t * k + j is choice j of token t.

    pairs: int32 [blocks * size], each expert's pairs in order, filled up to a multiple of `size` with the number of all
    pairs. experts: int32 [blocks], the expert of each block; -1 for blocks that are not used.
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
def _sort_pairs(ids, pairs, out, owners, num_blocks, BINS: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """Program (expert): write its pairs and its blocks, see `Blocks`; the last one marks the blocks not needed."""
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
    if expert == tl.num_programs(0) - 1:
        for start in range(used, num_blocks, SIZE):
            tl.store(owners + start + lanes, lanes * 0 - 1, start + lanes < num_blocks)


def sort_pairs(ids: torch.Tensor, num_experts: int, size: int) -> Blocks:
    """Sort the pairs of ids int64 [T, k], contiguous, into blocks of `size`, a power of two; T is at least 1."""
    pairs = ids.numel()
    blocks = most_blocks(pairs, num_experts, size)
    out = torch.empty(blocks * size, dtype=torch.int32, device=ids.device)
    owners = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    chunk, warps = (FEW, 4) if pairs <= FEW else (MANY, 8)
    bins = power_of_two(num_experts)
    _sort_pairs[(num_experts,)](ids, pairs, out, owners, blocks, bins, size, chunk, num_warps=warps)
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
    block = min(COLUMNS, power_of_two(width))
    _mix[(tokens, -(-width // block))](y, weights, out, width, TOP_K=top_k, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _load_rows(base, n, k, rows, depth, EVEN: tl.constexpr):
    """Return a tile of weights [BLOCK_N, BLOCK_K] of a matrix [rows, depth]; each is read once and not kept."""
    at = base + n[:, None].to(tl.int64) * depth + k[None, :]
    if EVEN:
        return tl.load(at, eviction_policy="evict_first").to(tl.float32)
    return tl.load(at, (n[:, None] < rows) & (k[None, :] < depth), other=0.0).to(tl.float32)


class ExpertGemv(NamedTuple):
    """What products of single pairs are compiled for: N rows of a weight and K of its columns, in so many stages.

    top_k: experts of a token. even: N and K divide the matrix. activation_id: of the first product.
    """

    top_k: int
    even: bool
    N: int
    K: int
    stages: int
    activation_id: int = 0


@triton.jit
def gated_rows(x, ids, w, bias, out, inner, depth, FORM: tl.constexpr):
    """out[pair] = act(gate) * up of x[pair // top_k]: w is [E, 2 * inner, depth]. Grid: pairs, blocks of `inner`."""
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.load(ids + pair)
    row = x.data + pair // FORM.top_k * x.stride
    n, lanes = tl.program_id(1) * FORM.N + tl.arange(0, FORM.N), tl.arange(0, FORM.K)
    base = w + expert * 2 * inner * depth
    N: tl.constexpr = FORM.N
    K: tl.constexpr = FORM.K
    gate = tl.zeros([N, K], tl.float32)
    up = gate
    for start in tl.range(0, depth, FORM.K, num_stages=FORM.stages):
        k = start + lanes
        values = tl.load(row + k, k < depth, other=0.0).to(w.dtype.element_ty).to(tl.float32)[None, :]
        gate += values * _load_rows(base, n, k, inner, depth, FORM.even)
        up += values * _load_rows(base + inner.to(tl.int64) * depth, n, k, inner, depth, FORM.even)
    gates, ups, inside = tl.sum(gate, axis=1), tl.sum(up, axis=1), n < inner
    if bias is not None:
        own = bias + expert * 2 * inner + n
        gates += tl.load(own, inside, other=0.0)
        ups += tl.load(own + inner, inside, other=0.0)
    tl.store(out + pair * inner + n, gate_and_multiply(gates, ups, FORM.activation_id).to(out.dtype.element_ty), inside)


@triton.jit
def mixed_rows(h, ids, weights, w, bias, out, width, depth, FORM: tl.constexpr):
    """out[t] = sum over j of weights[t, j] * down(h[t * top_k + j]). w [E, width, depth]; grid: T, width / N."""
    row = tl.program_id(0).to(tl.int64)
    n, lanes = tl.program_id(1) * FORM.N + tl.arange(0, FORM.N), tl.arange(0, FORM.K)
    steps, inside = tl.cdiv(depth, FORM.K), n < width
    N: tl.constexpr = FORM.N
    K: tl.constexpr = FORM.K
    total = tl.zeros([N, K], tl.float32)
    for step in tl.range(0, FORM.top_k * steps, num_stages=FORM.stages):
        pair, k = row * FORM.top_k + step // steps, step % steps * FORM.K + lanes
        expert, weight = tl.load(ids + pair), tl.load(weights + pair)
        values = tl.load(h + pair * depth + k, k < depth, other=0.0).to(tl.float32)
        own = _load_rows(w + expert * width * depth, n, k, width, depth, FORM.even)
        total += weight * (values[None, :] * own)
    result = tl.sum(total, axis=1)
    if bias is not None:
        TOP_K: tl.constexpr = FORM.top_k
        for choice in tl.static_range(TOP_K):
            pair = row * TOP_K + choice
            own = bias + tl.load(ids + pair) * width + n
            result += tl.load(weights + pair) * tl.load(own, inside, other=0.0)
    tl.store(out + row * width + n, result.to(out.dtype.element_ty), inside)


class GroupedGemm(NamedTuple):
    """What grouped products are compiled for.

    divisor: pairs of a row of x. activation_id: of a gated product, or 0. even: BN and BK divide the matrix. BM, BN,
    BK: rows of x, rows of the weight, and inputs of a tile. GROUP: see `grouped_tile`.
    """

    divisor: int
    activation_id: int
    even: bool
    BM: int
    BN: int
    BK: int
    GROUP: int = TOGETHER


@triton.jit
def _load_weight(base, n, k, rows, depth, EVEN: tl.constexpr):
    """Return a tile of weights transposed, [BK, BN], of a matrix [rows, depth]."""
    at = base + n[None, :].to(tl.int64) * depth + k[:, None]
    if EVEN:
        return tl.load(at)
    return tl.load(at, (n[None, :] < rows) & (k[:, None] < depth), other=0.0)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def grouped_gemm_kernel(x, w, bias, blocks, out, num_pairs, num_blocks, N, depth, FORM: tl.constexpr):
    """out[pair] = w[expert] @ x[pair // divisor] + bias for the pairs of a block; gated, act(gate) * up of two such.

    x: `Rows`. w [E, N, depth], bias float32 [E, N] or None; gated they have 2 N rows. blocks: pairs and owners of
    `Blocks`. out [pairs, N].
    """
    pairs, owners = blocks
    block, tile = grouped_tile(tl.program_id(0), num_blocks, tl.cdiv(N, FORM.BN), FORM.GROUP)
    expert = tl.load(owners + block)
    if expert < 0:
        return
    pair = tl.load(pairs + block * FORM.BM + tl.arange(0, FORM.BM))
    real = pair < num_pairs
    rows = x.data + (pair // FORM.divisor).to(tl.int64)[:, None] * x.stride
    n, lanes = tile * FORM.BN + tl.arange(0, FORM.BN), tl.arange(0, FORM.BK)
    matrices: tl.constexpr = 2 if FORM.activation_id > 0 else 1
    base = w + expert.to(tl.int64) * matrices * N * depth
    BM: tl.constexpr = FORM.BM
    BN: tl.constexpr = FORM.BN
    total = tl.zeros([BM, BN], tl.float32)
    up = total
    for start in range(0, depth, FORM.BK):
        k = start + lanes
        mask = real[:, None] if FORM.even else real[:, None] & (k < depth)[None, :]
        values = tl.load(rows + k[None, :], mask, other=0.0).to(w.dtype.element_ty)
        total = tl.dot(values, _load_weight(base, n, k, N, depth, FORM.even), total, input_precision="ieee")
        if FORM.activation_id > 0:
            w_up = _load_weight(base + N.to(tl.int64) * depth, n, k, N, depth, FORM.even)
            up = tl.dot(values, w_up, up, input_precision="ieee")
    inside = n < N
    if bias is not None:
        own = bias + expert * matrices * N + n
        total += tl.load(own, inside, other=0.0)[None, :]
        if FORM.activation_id > 0:
            up += tl.load(own + N, inside, other=0.0)[None, :]
    if FORM.activation_id > 0:
        total = gate_and_multiply(total, up, FORM.activation_id)
    at = out + pair.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, total.to(out.dtype.element_ty), real[:, None] & inside[None, :])


@triton.jit
def _products(x, row, expert, w, own, K, inputs, factor, FORM: tl.constexpr):
    """Return float32 [BN, BM]: rows `own` of the stack times rows of x, with scales and bias."""
    order = w.order + expert * inputs if w.order is not None else None
    table = w.table + expert * 16 if w.table is not None else None
    acc = multiply_tile(x.data, row.to(tl.int64) * x.row, order, w, table, own, K, inputs, FORM)
    result = acc.to(tl.float32) * factor
    if w.row_scales is not None:
        result *= tl.load(w.row_scales + own)[:, None]
    if w.bias is not None:
        result += tl.load(w.bias + own)[:, None]
    return result


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def coded_kernel(
    x,
    w,
    blocks,
    out,
    num_pairs,
    num_blocks,
    N,
    K,
    inputs,
    ACTIVATION_ID: tl.constexpr,
    TOP_K: tl.constexpr,
    FORM: tl.constexpr,
):
    """out[pair] = w[expert] @ x[pair // TOP_K] for pairs of a block; gated, w has 2 N rows, gate's and up's.

    x: `Inputs` of K elements a row. w: `Weight` of all experts, of `inputs` columns. blocks: pairs, owners.
    """
    block, tile = grouped_tile(tl.program_id(0), num_blocks, tl.cdiv(N, FORM.BN), FORM.GROUP)
    pairs, owners = blocks
    expert = tl.load(owners + block).to(tl.int64)
    if expert < 0:
        return
    matrices: tl.constexpr = 2 if ACTIVATION_ID > 0 else 1
    n = tile * FORM.BN + tl.arange(0, FORM.BN)
    own = expert * matrices * N + tl.minimum(n, N - 1)
    pair = tl.load(pairs + block * FORM.BM + tl.arange(0, FORM.BM))
    row = tl.minimum(pair, num_pairs - 1) // TOP_K
    factor = tl.load(x.scales + row)[None, :] if x.scales is not None else 1.0
    result = _products(x, row, expert, w, own, K, inputs, factor, FORM)
    if ACTIVATION_ID > 0:
        up = _products(x, row, expert, w, own + N, K, inputs, factor, FORM)
        result = gate_and_multiply(result, up, ACTIVATION_ID)
    where = out + pair.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(where, tl.trans(result).to(out.dtype.element_ty), (pair < num_pairs)[:, None] & (n < N)[None, :])
