"""Products of many tokens with their experts: rows in blocks by expert (`experts_sort.py`), matrices on tensor cores.

A program has a block of rows of one expert and some columns. Blocks of one expert follow each other, so that they find
its weights in the L2 cache; where a block is all that an expert has, its weights are read once, and their bytes are
what a step takes. With 128 rows an expert and more it is the matrix unit: 256 operations for each byte of a weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.gpu.activations import gate_and_multiply
from quire.kernels.gpu.choices import Choice
from quire.kernels.gpu.experts_sort import Blocks

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
    tiles: Choice,
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


def down(h: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, blocks: Blocks, tiles: Choice) -> torch.Tensor:
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
