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
from quire.kernels.gpu.attention_kernels import Form, Layer, attention_kernel, batch_of, join_kernel
from quire.kernels.gpu.attention_library import FlashInfer, attend_prompts, has_flash, whole_prompts
from quire.kernels.gpu.attention_plan import Launch, decode_launch, launches, prompt_launch
from quire.kernels.gpu.cache import KVCache
from quire.kernels.gpu.graphs import splitting_op
from quire.kernels.gpu.kernel_args import rows_of
from quire.kernels.gpu.latent import latent_attention

logger = logging.getLogger(__name__)

LOG2E = math.log2(math.e)
# Tokens from which on a prompt that begins in a step is given to PyTorch's kernels, by `attention_backend`.
FROM_TOKENS = {"auto": 512, "torch": 16}


class AttentionOps(ArrayOps):
    """Attention."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        chosen, on_gpu = self.attention_backend, self.device.type == "cuda"
        without = self.batch_invariant or (chosen == "auto" and not on_gpu)
        self._torch_from = 0 if without else FROM_TOKENS.get(chosen, 0)
        self._flashinfer = FlashInfer.load(self.device) if chosen == "flashinfer" else None
        logger.info("attention: %s", self._describe_attention())

    def _describe_attention(self) -> str:
        if self._flashinfer is not None:
            return "FlashInfer's kernels in steps that are not captured, Triton's for what these lack (as asked)"
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
        """Piecewise CUDA graphs pass the array to write as `out`."""
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
        # The same for all layers of a shape, of which a step has many.
        shape = params.num_heads, params.num_kv_heads, params.head_size, cache.data.dtype, cache.block_size, tokens
        key = self.tuned_configs, shape
        found = metadata.plans.get(key)
        if found is None:
            decode = decode_launch(self, cache, params, metadata.single)
            found = metadata.plans[key] = decode, prompt_launch(self, cache, params, tokens)
        decode, prompt = found
        for kind in launches(metadata, prompt.tiling.short, torch_from):
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
        tiling = launch.tiling
        heads, kv_heads, size = params.num_heads, params.num_kv_heads, params.head_size
        sequences, tables = metadata.seq_lens.shape[0], metadata.block_tables
        tiles = sequences if tiling.one_tile else q.shape[0] // tiling.queries + sequences
        splits, parts = launch.splits(tiles * kv_heads * tiling.head_tiles, tables.shape[1] * cache.block_size)
        workspace = None
        if parts:
            rows = tiles * tiling.queries * heads
            memory = torch.empty(rows * parts * (size + 2), dtype=torch.float32, device=q.device)
            workspace = memory[rows * parts * size :], memory[: rows * parts * size]
        cap, sinks, window = params.softcap, params.sinks, params.sliding_window is not None
        behind, pdl = params.reach[0] if window else 0, self.pdl and metadata.single
        layer = Layer(heads, kv_heads, size, launch.padded, cache.block_size, params.causal, window, behind)
        scale, cap = (params.scale * LOG2E, None) if cap is None else (params.scale / cap, cap * LOG2E)
        extras, source = (sinks, params.alibi_slopes, scale, cap), (cache.data, cache.scales)
        batch, counts = batch_of(metadata), (sequences, splits, parts, torch_from or 1 << 30)
        form = Form(layer, tiling, pdl)
        options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "launch_pdl": pdl}
        attention_kernel[(tiles, kv_heads * tiling.head_tiles, splits)](
            rows_of(q), source, extras, out, workspace, batch, tables.stride(0), *counts, FORM=form, **options
        )
        if parts:
            join_kernel[(tiles * tiling.queries, heads)](
                sinks, out, workspace, batch, *counts, FORM=form, num_warps=4, launch_pdl=pdl
            )
