"""Causal self-attention over the paged cache, for one layer: rotate, store keys and values, attend."""

from __future__ import annotations

from quire.kernels.backend import Array, AttentionMetadata, AttentionParams, Backend, KVCache
from quire.layers.rotary import RotaryEmbedding
from quire.step import LayerKVSpec


class Attention:
    """One attention layer's constants and its three ops. Projections and per-head norms belong to the model.

    `rotary` is None where positions enter otherwise.
    """

    def __init__(self, backend: Backend, params: AttentionParams, rotary: RotaryEmbedding | None = None) -> None:
        self.backend, self.params, self.rotary = backend, params, rotary

    def __call__(
        self, positions: Array, q: Array, k: Array, v: Array, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> Array:
        """q [T, Hq*D], k and v [T, Hkv*D] at `positions` [T] -> [T, Hq*D]. q and k may be changed in place."""
        if self.rotary is not None:
            self.rotary(positions, q, k)
        self.backend.write_kv(k, v, kv_cache, metadata.slot_mapping)
        return self.backend.paged_attention(q, kv_cache, metadata, self.params)

    def kv_spec(self) -> LayerKVSpec:
        """Say what this layer caches per token."""
        params = self.params
        return LayerKVSpec(params.num_kv_heads, params.head_size, self.backend.kv_dtype, params.sliding_window)
