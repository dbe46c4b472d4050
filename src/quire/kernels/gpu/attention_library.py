"""Attention by libraries: of whole prompts by PyTorch, and by FlashInfer with `--attention-backend flashinfer`.

PyTorch computes sequences that begin in this step, whose keys and values are all at hand: the cache is not read. Which
of its kernels it takes is its own choice with `--attention-backend torch`; otherwise it is FlashAttention's, for those
alone need neither memory for all pairs of tokens, nor, as cuDNN's do, a new plan for each length of a prompt.

FlashInfer serves eager steps where the package is installed. Never run on a GPU so far: it is written after the
package's documentation, for `--attention-backend flashinfer` only.
"""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from quire.errors import ConfigError
from quire.kernels.backend import AttentionMetadata, AttentionParams
from quire.kernels.gpu.cache import KVCache

Prompt = tuple[int, int, int]  # first row, tokens, and how many prompts of the same length follow one another

MAX_HEAD = 256  # elements of a head that FlashAttention has room for
FLASH = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]  # the latter where PyTorch was built without the former


def has_flash(act: torch.dtype, params: AttentionParams) -> bool:
    """Whether FlashAttention computes heads of this size and type."""
    return act.itemsize == 2 and params.head_size <= MAX_HEAD and params.head_size % 8 == 0


def whole_prompts(metadata: AttentionMetadata, params: AttentionParams, least: int) -> list[Prompt]:
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


WORKSPACE_BYTES = 256 << 20
FLOATS = (torch.float16, torch.bfloat16)


class FlashInfer:
    """The FlashInfer package and its workspace."""

    def __init__(self, package: Any, device: torch.device) -> None:
        self._package = package
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    @classmethod
    def load(cls, device: torch.device) -> FlashInfer:
        """Import the package.

        Raises:
            ConfigError: it is not installed.
        """
        if importlib.util.find_spec("flashinfer") is None:
            raise ConfigError(
                "attention_backend 'flashinfer' needs FlashInfer, which is not installed: "
                "pip install flashinfer-python",
                param="attention_backend",
            )
        return cls(importlib.import_module("flashinfer"), device)

    def can(self, cache: KVCache, metadata: AttentionMetadata, params: AttentionParams) -> bool:
        """Whether FlashInfer supports a call: lengths known to the host, 16-bit floats, neither sinks nor slopes."""
        plain = params.sinks is None and params.alibi_slopes is None and params.causal
        return plain and metadata.lengths is not None and cache.data.dtype in FLOATS

    def attend(
        self, q: torch.Tensor, cache: KVCache, metadata: AttentionMetadata, params: AttentionParams
    ) -> torch.Tensor:
        """The plan is computed once per step for all layers of one kind in one group."""
        key = (
            "flashinfer",
            params.num_heads,
            params.sliding_window,
            params.softcap,
            params.scale,
            id(metadata.block_tables),
        )
        wrapper = metadata.plans.get(key)
        if wrapper is None:
            wrapper = metadata.plans[key] = self._planned(cache, metadata, params, q.dtype)
        found = wrapper.run(q.view(q.shape[0], params.num_heads, params.head_size), cache.data)
        return found.view(q.shape[0], -1)

    def _planned(self, cache: KVCache, metadata: AttentionMetadata, params: AttentionParams, dtype: torch.dtype) -> Any:
        assert metadata.lengths is not None
        queries, lengths = metadata.lengths
        size, device = cache.block_size, metadata.block_tables.device
        counts = -(-lengths // size)
        starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
        blocks = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        rows = np.repeat(np.arange(len(counts)), counts)
        columns = np.arange(blocks[-1]) - blocks[rows]
        chosen = metadata.block_tables[torch.from_numpy(rows).to(device), torch.from_numpy(columns).to(device)]
        last = (lengths - (counts - 1) * size).astype(np.int32)
        wrapper = self._package.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
        wrapper.plan(
            torch.from_numpy(starts).to(device),
            torch.from_numpy(blocks).to(device),
            chosen.int(),
            torch.from_numpy(last).to(device),
            params.num_heads,
            params.num_kv_heads,
            params.head_size,
            size,
            causal=True,
            sm_scale=params.scale,
            window_left=-1 if params.sliding_window is None else params.sliding_window - 1,
            logits_soft_cap=params.softcap,
            q_data_type=dtype,
            kv_data_type=cache.data.dtype,
        )
        return wrapper
