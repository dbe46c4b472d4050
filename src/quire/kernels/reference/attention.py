"""Attention over a paged cache, one sequence at a time with a dense mask: the definition, not the fast way."""

from __future__ import annotations

import torch

from quire.kernels.backend import AttentionMetadata, AttentionParams


def visible(query_positions: torch.Tensor, num_keys: int, window: int | None) -> torch.Tensor:
    """Return bool [L, num_keys]: causal, and within the sliding window if there is one."""
    keys = torch.arange(num_keys, device=query_positions.device)
    distance = query_positions[:, None] - keys[None, :]
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: int, params: AttentionParams
) -> torch.Tensor:
    """Attention of one sequence: q [L, Hq, D] at positions first.., keys and values [P, Hkv, D] -> [L, Hq, D]."""
    positions = torch.arange(first, first + q.shape[0], device=q.device)
    mask = visible(positions, keys.shape[0], params.sliding_window)
    group = params.num_heads // params.num_kv_heads
    out = torch.empty_like(q)
    for head in range(params.num_heads):
        logits = params.scale * (q[:, head] @ keys[:, head // group].T)
        if params.softcap is not None:
            logits = params.softcap * torch.tanh(logits / params.softcap)
        if params.alibi_slopes is not None:
            key_positions = torch.arange(keys.shape[0], device=q.device)
            logits = logits + params.alibi_slopes[head] * (key_positions[None, :] - positions[:, None])
        logits = logits.masked_fill(~mask, float("-inf"))
        if params.sinks is not None:
            sink = params.sinks[head].to(logits.dtype).expand(q.shape[0], 1)
            weights = torch.softmax(torch.cat([logits, sink], dim=1), dim=1)[:, :-1]
        else:
            weights = torch.softmax(logits, dim=1)
        out[:, head] = weights @ values[:, head // group]
    return out


def paged_attention(
    q: torch.Tensor, cache: torch.Tensor, metadata: AttentionMetadata, params: AttentionParams, compute: torch.dtype
) -> torch.Tensor:
    """See `Backend.paged_attention`; cache is [2, B, bs, Hkv, D], the arithmetic is done in dtype `compute`."""
    block_size = cache.shape[2]
    heads = q.reshape(q.shape[0], params.num_heads, params.head_size)
    out = torch.empty_like(heads)
    starts, lengths = metadata.cu_query_lens.tolist(), metadata.seq_lens.tolist()
    for s, length in enumerate(lengths):
        start, stop = starts[s], starts[s + 1]
        blocks = metadata.block_tables[s, : -(-length // block_size)].long()
        keys, values = cache[:, blocks].flatten(1, 2)[:, :length].to(compute)
        first = length - (stop - start)
        out[start:stop] = attend(heads[start:stop].to(compute), keys, values, first, params).to(out.dtype)
    return out.reshape(q.shape[0], -1)
