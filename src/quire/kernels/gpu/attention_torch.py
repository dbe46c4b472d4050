"""Attention of whole prompts by PyTorch's own kernels.

Only for sequences that begin in this step, whose keys and values are all at hand: the cache is not read. Which kernels
PyTorch takes is its own choice where it was asked for by name. Otherwise it is FlashAttention's, for those alone need
neither memory for all pairs of tokens, nor, as cuDNN's do, a plan that is made anew for each length of a prompt.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from quire.kernels.backend import AttentionMetadata, AttentionParams

Prompt = tuple[
    int, int, int
]  # its first row, its tokens, and how many prompts of the same length lie one after another

MOST_HEAD = 256  # elements of a head that FlashAttention has room for
FLASH = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]  # the latter where PyTorch was built without the former


def has_flash(act: torch.dtype, params: AttentionParams) -> bool:
    """Whether FlashAttention computes heads of this size and type."""
    return act.itemsize == 2 and params.head_size <= MOST_HEAD and params.head_size % 8 == 0


def plain_prompts(metadata: AttentionMetadata, params: AttentionParams, least: int) -> list[Prompt]:
    """Return the prompts of at least `least` tokens that begin in this step, none if attention is anything but plain.

    Neighbours of the same length are computed together.
    """
    extras = params.sliding_window, params.softcap, params.sinks, params.alibi_slopes
    if metadata.lengths is None or any(extra is not None for extra in extras):
        return []
    key = "whole prompts", least
    found: list[Prompt] | None = metadata.plans.get(key)
    if found is None:
        found, start = [], 0
        for queries, length in zip(metadata.lengths.query_lens.tolist(), metadata.lengths.seq_lens.tolist()):
            if queries == length and queries >= least:
                first, tokens, count = found[-1] if found else (0, 0, 0)
                if tokens == queries and first + tokens * count == start:
                    found[-1] = first, tokens, count + 1
                else:
                    found.append((start, queries, 1))
            start += queries
        metadata.plans[key] = found
    return found


def attend_prompts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    prompts: list[Prompt],
    params: AttentionParams,
    *,
    flash: bool = False,
) -> None:
    """Write attention of q [T, Hq * D] over k and v [T, Hkv * D], for the rows of these prompts, into out, like q.

    flash: by FlashAttention, see `has_flash`, whatever PyTorch would choose.
    """
    heads, kv_heads, size = params.num_heads, params.num_kv_heads, params.head_size
    for start, tokens, count in prompts:
        own = slice(start, start + tokens * count)
        own_q = q[own].view(count, tokens, heads, size).transpose(1, 2)
        own_k, own_v = (x[own].view(count, tokens, kv_heads, size).transpose(1, 2) for x in (k, v))
        with sdpa_kernel(FLASH) if flash else nullcontext():
            found = F.scaled_dot_product_attention(
                own_q, own_k, own_v, is_causal=params.causal, scale=params.scale, enable_gqa=heads != kv_heads
            )
        out[own].view(count, tokens, heads, size).copy_(found.transpose(1, 2))
