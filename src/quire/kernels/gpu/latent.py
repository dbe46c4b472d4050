"""Attention over a latent cache, of prompts, chunks and single tokens (DeepSeek-V2, section 2.1, in the latent space).

The kernels are in `latent_kernels.py`; which caches come here is decided in `attention.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton

from quire.kernels.backend import AttentionMetadata, AttentionParams
from quire.kernels.gpu.arrays import ArrayOps
from quire.kernels.gpu.cache import KVCache
from quire.kernels.gpu.choices import Choice
from quire.kernels.gpu.latent_kernels import join_kernel, latent_attention_kernel, plan_kernel

SEQUENCES = 256  # that a plan has room for at least, so that no kernel is compiled for each number of them


@dataclass(frozen=True, slots=True)
class _Plan:
    """How the rows and keys of a step are shared out, see `plan_kernel`.

    shares: int32 on the device. padded: sequences, rounded up to a power of two. pieces, tiles, slots: the most there
    can be of pieces, of tiles that have several pieces, and of pieces of such.
    """

    shares: torch.Tensor
    padded: int
    pieces: int
    tiles: int
    slots: int


def _choice(backend: ArrayOps, params: AttentionParams, single: bool, scaled: bool) -> Choice:
    """Return rows of a tile, keys of a block, and how a piece is computed.

    Tiles of 64 rows are what Hopper multiplies at least; with fewer heads a token alone fills no more than 16 or 32,
    and decoding is bound by memory anyway. A program has its multiprocessor for itself: its sums alone are 128 kB of
    registers at 64 rows, so that enough keys must be on their way at a time. Two of five stages are spent on the block
    table, without which keys are not found.
    """
    rows = 64
    if single and not backend.batch_invariant:
        rows = 16 if params.num_heads <= 16 else 32 if params.num_heads <= 32 else 64
    default = {"rows": rows, "keys": 32 if rows == 64 else 64, "stages": 5, "warps": 8, "waves": 1, "least": 2}
    if scaled:  # keys of 8 bits take registers on their way to 16
        rows = min(rows, 32)
        default = {**default, "rows": rows, "keys": 64}
    if backend.act == torch.float32:
        return {**default, "rows": 16, "keys": 16, "stages": 1}
    if backend.capability < (9, 0):
        default = {**default, "rows": min(rows, 32), "keys": 32}
    if backend.batch_invariant:
        return default
    key = f"{'decode' if single else 'mixed'} {params.num_heads}{' fp8' if scaled else ''}"
    return backend.choices.choose("latent_attention", key, default)


def _plan(
    backend: ArrayOps, tokens: int, metadata: AttentionMetadata, params: AttentionParams, choice: Choice
) -> _Plan:
    """Return the plan of a step for layers of this kind; it is computed once, on the device."""
    key = "latent", params.num_heads, choice["rows"], choice["keys"]
    found = metadata.plans.get(key)
    if found is not None:
        return found
    sequences, heads, rows = metadata.seq_lens.shape[0], params.num_heads, choice["rows"]
    most_tiles = (
        sequences * triton.cdiv(heads, rows) if metadata.single else triton.cdiv(tokens * heads, rows) + sequences
    )
    target = backend.num_sms * choice["waves"]
    # With as many tiles as programs there is nothing to gain; and results must not depend on the batch if so asked.
    split = not backend.batch_invariant and most_tiles < 4 * target
    padded = max(SEQUENCES, triton.next_power_of_2(sequences))
    shares = torch.empty(3 * padded + 1, dtype=torch.int32, device=metadata.seq_lens.device)
    plan_kernel[(1,)](
        metadata.cu_query_lens, metadata.seq_lens, shares, sequences, heads, target, choice["least"],
        SINGLE=metadata.single, SPLIT=split, BM=rows, BN=choice["keys"], SB=padded,
    )  # fmt: skip
    # A tile with several pieces has at least one whole share of the keys, so that these are at most twice the target.
    plan = _Plan(
        shares, padded, most_tiles + (target if split else 0), target if split else 0, 2 * target if split else 0
    )
    metadata.plans[key] = plan
    return plan


def latent_attention(
    backend: ArrayOps, q: torch.Tensor, cache: KVCache, metadata: AttentionMetadata, params: AttentionParams
) -> torch.Tensor:
    """See `Backend.paged_attention`, where `params.value_size` is given: q [T, Hq * D] -> [T, Hq * value_size].

    A token's D elements are read once for all heads of a tile. Decoding with few heads is bound by that; with 128 heads
    it computes 240 operations for each byte, which is near the balance of an H200, and prompts are bound by computing.
    """
    assert params.value_size is not None, "this is for latent caches"
    assert params.causal and params.sliding_window is None and params.softcap is None, "plain causal attention only"
    assert params.sinks is None and params.alibi_slopes is None, "plain causal attention only"
    tokens, heads, value, size = q.shape[0], params.num_heads, params.value_size, params.head_size
    out = torch.empty((tokens, heads * value), dtype=backend.act, device=q.device)
    if tokens == 0:
        return out
    if q.dtype != backend.act or q.stride(1) != 1:
        q = q.to(backend.act).contiguous()
    choice = _choice(backend, params, metadata.single, cache.scales is not None)
    plan = _plan(backend, tokens, metadata, params, choice)
    data, rows = cache.data, choice["rows"]
    block_size, split = data.shape[3], plan.slots > 0
    parts = torch.empty((plan.slots, rows, value), dtype=torch.float32, device=q.device) if split else out
    logs = torch.empty((plan.slots, rows), dtype=torch.float32, device=q.device) if split else out
    padded = max(16, triton.next_power_of_2(value))
    latent_attention_kernel[(plan.pieces,)](
        q, data, cache.scales_or_data, out, parts, logs,
        metadata.block_tables, metadata.cu_query_lens, metadata.seq_lens, plan.shares,
        q.stride(0), metadata.block_tables.stride(0), data.stride(0), metadata.seq_lens.shape[0], heads,
        params.scale * math.log2(math.e),
        SINGLE=metadata.single, SPLIT=split, SCALED=cache.scales is not None, R=value, P=size - value, RB=padded,
        PB=max(16, triton.next_power_of_2(size - value)), BS=block_size, BM=rows, BN=choice["keys"], SB=plan.padded,
        PRECISION="ieee", STAGES=choice["stages"], num_warps=choice["warps"],
    )  # fmt: skip
    if split:
        join_kernel[(plan.tiles, rows)](
            parts, logs, out, metadata.cu_query_lens, metadata.seq_lens, plan.shares, metadata.seq_lens.shape[0], heads,
            SINGLE=metadata.single, R=value, RB=padded, BM=rows, BN=choice["keys"], SB=plan.padded, AT_ONCE=8,
        )  # fmt: skip
    return out
