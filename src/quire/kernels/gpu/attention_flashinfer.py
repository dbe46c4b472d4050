"""Attention by FlashInfer's kernels, where that package is installed and a step is not recorded.

Never run on a GPU so far: it is written after the package's documentation, for `--attention-backend flashinfer` only.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np
import torch

from quire.errors import ConfigError
from quire.kernels.backend import AttentionMetadata, AttentionParams
from quire.kernels.gpu.cache import KVCache

WORKSPACE_BYTES = 256 << 20
FLOATS = (torch.float16, torch.bfloat16)


class FlashInfer:
    """The package, and the memory that it works in."""

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
        """Whether this is a case for it: lengths known to the host, 16-bit floats, neither sinks nor slopes."""
        plain = params.sinks is None and params.alibi_slopes is None and params.causal
        return plain and metadata.lengths is not None and cache.data.dtype in FLOATS

    def attend(
        self, q: torch.Tensor, cache: KVCache, metadata: AttentionMetadata, params: AttentionParams
    ) -> torch.Tensor:
        """Its plan is made once a step for all layers of one kind in one group."""
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
