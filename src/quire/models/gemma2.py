"""Gemma 2 (Gemma team 2024): Gemma with norms before and after each part of a layer, and bent logits:

    x = x + norm(attention(norm(x)));  x = x + norm(mlp(norm(x)))

Every second layer attends through a window.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from quire.checkpoint.hf_config import ModelInfo
from quire.kernels.backend import Array, AttentionMetadata, KVCache
from quire.layers.builder import Builder
from quire.layers.norm import RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.models.gemma import GemmaForCausalLM
from quire.models.llama import DecoderAttention, DecoderLayer, DecoderOptions, feed_forward


class SandwichLayer(DecoderLayer):
    """One layer on the residual stream; `norm_names` are those of its norms, in the order in which they are taken."""

    norm_names: ClassVar[tuple[str, str, str, str]] = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )

    def __init__(
        self, builder: Builder, info: ModelInfo, layer: int, rotary: RotaryEmbedding, options: DecoderOptions
    ) -> None:
        self.self_attn = DecoderAttention(builder.under("self_attn"), info, layer, rotary, options)
        self.mlp = feed_forward(builder, info, layer, options)
        self.norms = [
            RMSNorm(builder, name, info.hidden_size, info.norm_eps, offset=options.norm_offset)
            for name in self.norm_names
        ]

    def __call__(
        self, positions: Array, x: Array | None, residual: Array, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> tuple[Array, Array]:
        """As in `DecoderLayer`."""
        before_attention, after_attention, before_mlp, after_mlp = self.norms
        x = before_attention(residual) if x is None else before_attention.add(x, residual)
        x = after_attention(self.self_attn(positions, x, kv_cache, metadata))
        residual = self.self_attn.wanted(residual, metadata)
        return after_mlp(self.mlp(before_mlp.add(x, residual))), residual


class Gemma2ForCausalLM(GemmaForCausalLM):
    """The scale of attention is set by config.json, not by the size of heads."""

    layer_class: ClassVar[type[DecoderLayer]] = SandwichLayer

    @staticmethod
    def options(info: ModelInfo) -> DecoderOptions:
        """Gemma's, and the caps of both kinds of logits."""
        fields = info.fields
        return replace(
            GemmaForCausalLM.options(info),
            attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
            attention_softcap=fields.number("attn_logit_softcapping", None),
            logit_softcap=fields.number("final_logit_softcapping", None),
        )
