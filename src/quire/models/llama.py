"""Llama (Touvron et al. 2023), and the decoder that other families share with it, each with its `DecoderOptions`.

    x = x + attention(norm(x));  x = x + mlp(norm(x))

with RMS norms, rotary positions, grouped key/value heads and a gated feed-forward layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quire.checkpoint.hf_config import ModelInfo
from quire.kernels.backend import Array, AttentionMetadata, AttentionParams, KVCache
from quire.layers.activation import GatedActivation
from quire.layers.attention import Attention
from quire.layers.builder import Builder
from quire.layers.embedding import LMHead, VocabParallelEmbedding
from quire.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from quire.layers.norm import RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.step import KVCacheSpec


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """Where the families that share this decoder differ."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    fused: bool = False  # the file holds one qkv_proj and one gate_up_proj, each a stack of the parts


class DecoderAttention:
    """Self-attention of one layer."""

    def __init__(
        self, builder: Builder, info: ModelInfo, layer: int, rotary: RotaryEmbedding, options: DecoderOptions
    ) -> None:
        hidden, heads, head_dim = info.hidden_size, info.num_attention_heads, info.head_dim
        self.qkv_proj = QKVParallelLinear(
            builder,
            ("qkv_proj",) if options.fused else ("q_proj", "k_proj", "v_proj"),
            hidden,
            num_heads=heads,
            num_kv_heads=info.num_key_value_heads,
            head_size=head_dim,
            bias=options.qkv_bias,
        )
        self.q_norm = RMSNorm(builder, "q_norm", head_dim, info.norm_eps) if options.qk_norm else None
        self.k_norm = RMSNorm(builder, "k_norm", head_dim, info.norm_eps) if options.qk_norm else None
        self.attention = Attention(
            builder.backend,
            AttentionParams(
                num_heads=self.qkv_proj.num_heads,
                num_kv_heads=self.qkv_proj.num_kv_heads,
                head_size=head_dim,
                scale=head_dim**-0.5,
                sliding_window=info.layer_windows[layer],
            ),
            rotary,
        )
        self.o_proj = RowParallelLinear(builder, "o_proj", heads * head_dim, hidden, bias=options.output_bias)

    def __call__(self, positions: Array, x: Array, kv_cache: KVCache, metadata: AttentionMetadata) -> Array:
        """[T, H] -> [T, H]."""
        q, k, v = self.qkv_proj(x)
        if self.q_norm and self.k_norm:
            q, k = self.q_norm.each_head(q), self.k_norm.each_head(k)
        return self.o_proj(self.attention(positions, q, k, v, kv_cache, metadata))


class DecoderMLP:
    """Gated feed-forward layer: down(act(gate(x)) * up(x))."""

    def __init__(self, builder: Builder, info: ModelInfo, options: DecoderOptions) -> None:
        hidden, inner = info.hidden_size, info.intermediate_size
        names = ("gate_up_proj",) if options.fused else ("gate_proj", "up_proj")
        self.gate_up_proj = ColumnParallelLinear(builder, names, hidden, (inner, inner), bias=options.mlp_bias)
        self.act = GatedActivation(builder.backend, info.hidden_act)
        self.down_proj = RowParallelLinear(builder, "down_proj", inner, hidden, bias=options.mlp_bias)

    def __call__(self, x: Array) -> Array:
        """[T, H] -> [T, H]."""
        return self.down_proj(self.act(self.gate_up_proj(x)))


class DecoderLayer:
    """One layer on the residual stream; the sum of stream and last output is taken inside the next norm."""

    def __init__(
        self, builder: Builder, info: ModelInfo, layer: int, rotary: RotaryEmbedding, options: DecoderOptions
    ) -> None:
        self.input_layernorm = RMSNorm(builder, "input_layernorm", info.hidden_size, info.norm_eps)
        self.self_attn = DecoderAttention(builder.under("self_attn"), info, layer, rotary, options)
        self.post_attention_layernorm = RMSNorm(builder, "post_attention_layernorm", info.hidden_size, info.norm_eps)
        self.mlp = DecoderMLP(builder.under("mlp"), info, options)

    def __call__(
        self, positions: Array, x: Array | None, residual: Array, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> Array:
        """Take the last layer's output `x` (None in the first) and the stream, both [T, H]; return this one's."""
        x = self.input_layernorm(residual) if x is None else self.input_layernorm.add(x, residual)
        x = self.self_attn(positions, x, kv_cache, metadata)
        x = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x)


class LlamaForCausalLM:
    """Embedding, decoder layers, final norm, output head."""

    ignorable: ClassVar[tuple[str, ...]] = (r"rotary_emb\.inv_freq$",)

    def __init__(self, info: ModelInfo, builder: Builder, max_model_len: int) -> None:
        assert info.rope is not None
        self.vocab_size = info.vocab_size
        options = self.options(info)
        model = builder.under("model")
        self.embed_tokens = VocabParallelEmbedding(model, "embed_tokens", info.vocab_size, info.hidden_size)
        rotary = RotaryEmbedding(builder.backend, info.rope, info.head_dim, max_model_len)
        self.layers = [
            DecoderLayer(model.under(f"layers.{layer}"), info, layer, rotary, options)
            for layer in range(info.num_hidden_layers)
        ]
        self.norm = RMSNorm(model, "norm", info.hidden_size, info.norm_eps)
        tied_to = self.embed_tokens if info.tie_word_embeddings else None
        self.lm_head = LMHead(builder, "lm_head", info.vocab_size, info.hidden_size, tied_to=tied_to)

    @staticmethod
    def options(info: ModelInfo) -> DecoderOptions:
        """Which biases and norms this family has."""
        bias = info.fields.flag("attention_bias", False)
        return DecoderOptions(qkv_bias=bias, output_bias=bias, mlp_bias=info.fields.flag("mlp_bias", False))

    def kv_cache_spec(self) -> KVCacheSpec:
        """See `Model.kv_cache_spec`."""
        return KVCacheSpec([layer.self_attn.attention.kv_spec() for layer in self.layers])

    def forward(
        self, input_ids: Array, positions: Array, kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> Array:
        """See `Model.forward`."""
        residual = self.embed_tokens(input_ids)
        x = None
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x = layer(positions, x, residual, kv_cache, metadata)
        return self.norm.add(x, residual)

    def compute_logits(self, hidden: Array) -> Array:
        """See `Model.compute_logits`."""
        return self.lm_head(hidden)
