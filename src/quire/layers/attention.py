"""Causal self-attention over the paged cache, for one layer: rotate, store keys and values, attend."""

from __future__ import annotations

import numpy as np

from quire.kernels.backend import Array, AttentionMetadata, AttentionParams, Backend, LayerCache
from quire.layers.norm import RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.step import LayerKVSpec


def alibi_slopes(num_heads: int, span: float = 8.0) -> np.ndarray:
    """Return each head's slope of ALiBi (Press et al. 2022, section 3), float32 [num_heads].

    For a power of two, heads have 2 ** (-span * i / num_heads), i from 1; other numbers take every second slope of
    the next power, and then from those between, as in the authors' code.
    """
    power = 1 << (num_heads - 1).bit_length()
    exponents = span * np.arange(1, power + 1) / power
    if power != num_heads:
        exponents = np.concatenate([exponents[1::2], exponents[::2]])[:num_heads]
    return np.asarray(2.0**-exponents, np.float32)


def take_rows(backend: Backend, x: Array, rows: Array | None) -> Array:
    """Return the rows of x [T, N] with the indices `rows`, [R, N]; x itself if that is None."""
    return x if rows is None else backend.take_rows(x, rows)


class Attention:
    """One attention layer's constants and its ops; the projections are the model's.

    `rotary` is None where positions enter otherwise. `norms` are those of query and key heads before the rotation.
    """

    def __init__(
        self,
        backend: Backend,
        params: AttentionParams,
        rotary: RotaryEmbedding | None = None,
        norms: tuple[RMSNorm, RMSNorm] | None = None,
    ) -> None:
        self.backend, self.params, self.rotary, self.norms = backend, params, rotary, norms

    def __call__(
        self, positions: Array, q: Array, k: Array, v: Array, kv_cache: LayerCache, metadata: AttentionMetadata
    ) -> Array:
        """q [T, Hq*D], k and v [T, Hkv*D] at `positions` [T] -> [T, Hq*D]. q and k may be changed in place."""
        own = kv_cache.wait_for_load(metadata)
        if self.rotary is not None:
            norms = self.norms and (self.norms[0].weight, self.norms[1].weight, self.norms[0].eps)
            q, k = self.rotary.write(positions, q, k, v, kv_cache.cache, own.slot_mapping, norms)
        else:
            if self.norms is not None:
                q, k = self.norms[0](q), self.norms[1](k)
            self.backend.write_kv(k, v, kv_cache.cache, own.slot_mapping)
        out = self.backend.paged_attention(q, kv_cache.cache, own, self.params, (k, v))
        kv_cache.save()
        return out

    def cache_spec(self) -> LayerKVSpec:
        """Say what this layer caches per token."""
        params = self.params
        return LayerKVSpec(params.num_kv_heads, params.head_size, self.backend.kv_dtype, params.sliding_window)
