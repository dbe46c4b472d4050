"""Attention over a paged cache, one sequence at a time with a dense mask: the definition, not the fast way."""

from __future__ import annotations

import torch

from quire.kernels.backend import AttentionMetadata, AttentionParams


def visible(queries: torch.Tensor, keys: torch.Tensor, params: AttentionParams) -> torch.Tensor:
    """Return bool [L, P] from positions: which keys each query sees."""
    behind, ahead = params.reach
    distance = queries[:, None] - keys[None, :]
    return (distance <= behind) & (distance >= -ahead)


def attend(
    q: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_positions: torch.Tensor,
    params: AttentionParams,
) -> torch.Tensor:
    """Attention of one sequence: q [L, Hq, D], keys and values [P, Hkv, D], with their positions -> [L, Hq, D].

    Values may be of another size, as results then are.
    """
    mask = visible(positions, key_positions, params)
    group = params.num_heads // params.num_kv_heads
    out = q.new_empty((*q.shape[:2], values.shape[-1]))
    for head in range(params.num_heads):
        logits = params.scale * (q[:, head] @ keys[:, head // group].T)
        if params.softcap is not None:
            logits = params.softcap * torch.tanh(logits / params.softcap)
        if params.alibi_slopes is not None:
            logits = logits + params.alibi_slopes[head] * (key_positions[None, :] - positions[:, None])
        logits = logits.masked_fill(~mask, float("-inf"))
        if params.sinks is not None:
            sink = params.sinks[head].to(logits.dtype).expand(q.shape[0], 1)
            weights = torch.softmax(torch.cat([logits, sink], dim=1), dim=1)[:, :-1]
        else:
            weights = torch.softmax(logits, dim=1)
        out[:, head] = weights @ values[:, head // group]
    return out


def read(
    cache: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, params: AttentionParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values [P, Hkv, D] at `positions` [P] of a sequence with this block table.

    cache is [2, B, bs, Hkv, D], or [1, B, bs, 1, D] where values are the first elements of keys.
    """
    block_size = cache.shape[2]
    sides = cache[:, table[positions // block_size].long(), positions % block_size].double()
    return sides[0], sides[-1][..., : params.out_size]


def paged_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
    *,
    by_query: bool = False,
) -> torch.Tensor:
    """See `Backend.paged_attention`; `by_query`: each query by itself, with no more than the keys that it may see."""
    heads = q.reshape(q.shape[0], params.num_heads, params.head_size)
    out = heads.new_empty((*heads.shape[:2], params.out_size))
    behind, ahead = params.reach
    starts, lengths = metadata.cu_query_lens.tolist(), metadata.seq_lens.tolist()
    for s, length in enumerate(lengths):
        begin, end = starts[s], starts[s + 1]
        step = 1 if by_query else max(1, end - begin)
        for start in range(begin, end, step):
            stop = start + step
            first, last = length - (end - start), length - (end - stop)
            positions = torch.arange(first, last, device=q.device)
            # Keys before every query's window may be gone, their blocks given to someone else.
            seen = torch.arange(max(0, first - behind), min(length, last + ahead), device=q.device)
            keys, values = read(cache, metadata.block_tables[s], seen, params)
            part = attend(heads[start:stop].double(), positions, keys, values, seen, params)
            out[start:stop] = part.to(out.dtype)
    return out.reshape(q.shape[0], -1)
