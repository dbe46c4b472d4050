"""OLMo 2 (OLMo team 2024): Llama's parts, with norms after attention and feed-forward layer instead of before them:

    x = x + norm(attention(x));  x = x + norm(mlp(x))

and a norm on all query heads together, and on all key heads.
"""

from __future__ import annotations

from typing import ClassVar

from quire.checkpoint.hf_config import ModelInfo
from quire.kernels.backend import Array, AttentionMetadata, KVCache
from quire.layers.builder import Builder
from quire.layers.norm import RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.models.llama import DecoderAttention, DecoderLayer, DecoderMLP, DecoderOptions, LlamaForCausalLM


class Olmo2Layer(DecoderLayer):
    """One layer on the residual stream."""

    def __init__(
        self, builder: Builder, info: ModelInfo, layer: int, rotary: RotaryEmbedding, options: DecoderOptions
    ) -> None:
        size, eps = info.hidden_size, info.norm_eps
        self.self_attn = DecoderAttention(builder.under("self_attn"), info, layer, rotary, options)
        self.post_attention_layernorm = RMSNorm(builder, "post_attention_layernorm", size, eps)
        self.mlp = DecoderMLP(builder.under("mlp"), info, options)
        self.post_feedforward_layernorm = RMSNorm(builder, "post_feedforward_layernorm", size, eps)

    def __call__(
        self, positions: Array, x: Array | None, residual: Array, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> tuple[Array, Array]:
        """As in `DecoderLayer`: the stream holds what came before `x`, and is brought up to date in place."""
        if x is not None:
            residual += x
        x = self.post_attention_layernorm(self.self_attn(positions, residual, kv_cache, metadata))
        residual = self.self_attn.wanted(residual, metadata)
        residual += x
        return self.post_feedforward_layernorm(self.mlp(residual)), residual


class Olmo2ForCausalLM(LlamaForCausalLM):
    """Sums, final norm and head are Llama's."""

    layer_class: ClassVar[type[DecoderLayer]] = Olmo2Layer

    @staticmethod
    def options(info: ModelInfo) -> DecoderOptions:
        """Norms on the projections; biases if the config asks for them."""
        bias = info.fields.flag("attention_bias", False)
        return DecoderOptions(qkv_bias=bias, output_bias=bias, qk_norm="projection")
