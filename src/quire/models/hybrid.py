"""Decoders in which some layers attend and others keep a state of fixed size for each sequence:

    x = x + mixer(norm(x));  x = x + mlp(norm(x))

A family says what the layers are made of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from quire.checkpoint.hf_config import ModelInfo
from quire.kernels.backend import Array, AttentionMetadata
from quire.layers.attention import wanted_rows
from quire.layers.builder import Builder
from quire.layers.embedding import LMHead, VocabParallelEmbedding
from quire.layers.norm import RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.step import KVCacheSpec, LayerKVSpec, LayerStateSpec


class Mixer(ABC):
    """What lets a layer's tokens see those before them: attention, or something in its place."""

    def __init__(self, builder: Builder, info: ModelInfo, layer: int) -> None:
        self.backend, self.is_last = builder.backend, layer == info.num_hidden_layers - 1

    @abstractmethod
    def __call__(self, positions: Array, x: Array, cache: Any, metadata: AttentionMetadata) -> Array:
        """[T, H] -> [T, H], or [R, H] of the rows that `wanted` returns; `cache` is what `spec` asks for."""

    @abstractmethod
    def spec(self) -> LayerKVSpec | LayerStateSpec:
        """Say what it keeps of a sequence."""

    def wanted(self, x: Array, metadata: AttentionMetadata) -> Array:
        """Return what goes on after the layer: all of x [T, N], or in the last layer the rows that are asked for."""
        return wanted_rows(self.backend, x, metadata) if self.is_last else x


@dataclass(frozen=True, slots=True)
class HybridLayer:
    """One layer on the residual stream."""

    norm: RMSNorm
    mixer: Mixer
    mlp_norm: RMSNorm
    mlp: Callable[[Array], Array]

    def __call__(
        self, positions: Array, x: Array | None, residual: Array, cache: Any, metadata: AttentionMetadata
    ) -> tuple[Array, Array]:
        """Take the last layer's output `x` (None in the first) and the stream, both [T, H]; return this one's."""
        x = self.norm(residual) if x is None else self.norm.add(x, residual)
        x = self.mixer(positions, x, cache, metadata)
        residual = self.mixer.wanted(residual, metadata)
        return self.mlp(self.mlp_norm.add(x, residual)), residual


class HybridForCausalLM(ABC):
    """Embedding, layers, final norm, output head. A family is a subclass with its `layer`."""

    ignorable: ClassVar[tuple[str, ...]] = (r"rotary_emb\.inv_freq$",)
    final_norm: ClassVar[str] = "norm"
    norm_offset: ClassVar[float] = 0.0

    def __init__(self, info: ModelInfo, builder: Builder, max_model_len: int) -> None:
        assert info.rope is not None
        self.vocab_size = info.vocab_size
        model = builder.under("model")
        self.embed_tokens = VocabParallelEmbedding(model, "embed_tokens", info.vocab_size, info.hidden_size)
        rotary = RotaryEmbedding(builder.backend, info.rope, info.head_dim, max_model_len)
        self.layers = [
            self.layer(model.under(f"layers.{layer}"), info, layer, rotary) for layer in range(info.num_hidden_layers)
        ]
        self.specs = [layer.mixer.spec() for layer in self.layers]
        self.norm = RMSNorm(model, self.final_norm, info.hidden_size, info.norm_eps, offset=self.norm_offset)
        tied_to = self.embed_tokens if info.tie_word_embeddings else None
        self.lm_head = LMHead(builder, "lm_head", info.vocab_size, info.hidden_size, tied_to=tied_to)

    @abstractmethod
    def layer(self, builder: Builder, info: ModelInfo, layer: int, rotary: RotaryEmbedding) -> HybridLayer:
        """Build one layer."""

    def kv_cache_spec(self) -> KVCacheSpec:
        """See `Model.kv_cache_spec`."""
        return KVCacheSpec(
            [spec for spec in self.specs if isinstance(spec, LayerKVSpec)],
            [spec for spec in self.specs if isinstance(spec, LayerStateSpec)],
        )

    def forward(self, input_ids: Array, positions: Array, kv_caches: list[Any], metadata: AttentionMetadata) -> Array:
        """See `Model.forward`."""
        attending = [isinstance(spec, LayerKVSpec) for spec in self.specs]
        caches, states = iter(kv_caches[: sum(attending)]), iter(kv_caches[sum(attending) :])
        residual, x = self.embed_tokens(input_ids), None
        for layer, attends in zip(self.layers, attending, strict=True):
            x, residual = layer(positions, x, residual, next(caches if attends else states), metadata)
        return self.norm.add(x, residual)

    def compute_logits(self, hidden: Array) -> Array:
        """See `Model.compute_logits`."""
        return self.lm_head(hidden)
