"""Paged attention: which kernel computes which part of a step.

Single tokens are bound by reading keys and values once: 2 * Hkv * D elements for each token of the context. Prompts are
bound by multiplying matrices: 4 * Hq * D operations for each pair of a query and a key that it sees. The kernels are in
`attention_kernels.py`; what they are launched with is decided in `attention_plan.py`.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

from quire.kernels.backend import AttentionMetadata, AttentionParams
from quire.kernels.gpu.arrays import ArrayOps
from quire.kernels.gpu.attention_kernels import Layer, attention_kernel, join_kernel
from quire.kernels.gpu.attention_library import FlashInfer, attend_prompts, has_flash, whole_prompts
from quire.kernels.gpu.attention_plan import Launch, decode_launch, launches, prompt_launch
from quire.kernels.gpu.cache import KVCache
from quire.kernels.gpu.graphs import splitting_op
from quire.kernels.gpu.latent import latent_attention

logger = logging.getLogger(__name__)

LOG2E = math.log2(math.e)
JOINED_AT_ONCE = 8  # shares of keys that the joining kernel loads together
# Tokens from which on a prompt that begins in a step is given to PyTorch's kernels, by `attention_backend`.
FROM_TOKENS = {"auto": 512, "torch": 16}


class AttentionOps(ArrayOps):
    """Attention."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        asked, interpreted = self.attention_backend, self.device.type != "cuda"
        self._torch_from = 0 if self.batch_invariant or (asked == "auto" and interpreted) else FROM_TOKENS.get(asked, 0)
        self._flashinfer = FlashInfer.load(self.device) if asked == "flashinfer" else None
        logger.info("attention: %s", self._describe_attention())

    def _describe_attention(self) -> str:
        if self._flashinfer is not None:
            return "FlashInfer's kernels in steps that are not recorded, Triton's for what these lack (as asked)"
        if self._torch_from:
            why = "as asked" if self.attention_backend == "torch" else "the default on a GPU"
            return f"PyTorch's kernels for prompts of {self._torch_from} tokens or more that begin in a step, " + (
                f"Triton's for everything else ({why})"
            )
        if self.batch_invariant:
            return "Triton's kernels (results must not depend on the batch)"
        return f"Triton's kernels ({'as asked' if self.attention_backend == 'triton' else 'there is no GPU'})"

    @splitting_op(lambda self, q, cache, metadata, params, fresh=None: (q.shape[0], params.num_heads * params.out_size))
    def paged_attention(
        self,
        q: torch.Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
        params: AttentionParams,
        fresh: tuple[torch.Tensor, torch.Tensor] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`out` is what recordings in pieces want written."""
        if params.value_size is not None:
            return latent_attention(self, q, cache, metadata, params)
        if self._flashinfer is not None and self._flashinfer.can(cache, metadata, params):
            return self._flashinfer.attend(q.to(self.act), cache, metadata, params)
        if out is None:
            out = torch.empty((q.shape[0], params.num_heads * params.head_size), dtype=self.act, device=q.device)
        tokens, sequences = q.shape[0], metadata.seq_lens.shape[0]
        if tokens == 0 or sequences == 0:
            return out
        if q.stride(1) != 1:
            q = q.contiguous()
        torch_from = 0
        auto = self.attention_backend == "auto"
        if self._torch_from and fresh is not None and (not auto or has_flash(self.act, params)):
            prompts = whole_prompts(metadata, params, self._torch_from) if cache.stored == 0 else []
            if prompts:
                k, v = (x.to(self.act) for x in fresh)
                attend_prompts(q.to(self.act), k, v, out, prompts, params, flash=auto)
                torch_from = self._torch_from
        decode, prompt = decode_launch(self, cache, params, metadata.single), prompt_launch(self, cache, params, tokens)
        for kind in launches(metadata, prompt.short, torch_from):
            self._launch(decode if kind == "decode" else prompt, q, cache, metadata, params, out, torch_from)
        return out

    def _launch(
        self,
        launch: Launch,
        q: torch.Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
        params: AttentionParams,
        out: torch.Tensor,
        torch_from: int,
    ) -> None:
        heads, kv_heads, size = params.num_heads, params.num_kv_heads, params.head_size
        sequences, tables, block_size = metadata.seq_lens.shape[0], metadata.block_tables, cache.block_size
        tiles = sequences if launch.one_tile else q.shape[0] // launch.queries + sequences
        splits, parts = launch.splits(tiles * kv_heads * launch.head_tiles, tables.shape[1] * block_size)
        sums = found = out
        if parts:
            rows = tiles * launch.queries * heads
            workspace = torch.empty(rows * parts * (size + 2), dtype=torch.float32, device=q.device)
            found, sums = workspace[: rows * parts * size], workspace[rows * parts * size :]
        cap, sinks, slopes = params.softcap, params.sinks, params.alibi_slopes
        window = params.sliding_window is not None
        layer = Layer(
            heads, kv_heads, size, launch.padded, block_size, params.causal, window, cap is not None,
            slopes is not None, sinks is not None, cache.stored > 0,
        )  # fmt: skip
        tiling = launch.tiling(metadata.single, parts > 0)
        behind = params.reach[0] if window else 0
        fresh_from = torch_from or 1 << 30
        some, pdl = out if sinks is None else sinks, self.pdl and metadata.single
        attention_kernel[(tiles, kv_heads * launch.head_tiles, splits)](
            q, cache.data, cache.scales_or_data, some, out if slopes is None else slopes, out, sums, found,
            metadata.cu_query_lens, metadata.seq_lens, tables,
            q.stride(0), tables.stride(0), sequences, splits, parts, launch.least, fresh_from,
            params.scale * LOG2E if cap is None else params.scale / cap, 0.0 if cap is None else cap * LOG2E, behind,
            layer, tiling, pdl, num_warps=launch.warps, num_stages=launch.stages, launch_pdl=pdl,
        )  # fmt: skip
        if parts:
            join_kernel[(tiles * launch.queries, heads)](
                some, out, sums, found, metadata.cu_query_lens, metadata.seq_lens, sequences, splits, parts,
                launch.least, fresh_from, behind, layer, tiling, JOINED_AT_ONCE, pdl, num_warps=4, launch_pdl=pdl,
            )  # fmt: skip
