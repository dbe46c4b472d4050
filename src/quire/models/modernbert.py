"""ModernBERT (Warner et al. 2024): BERT's task with a newer decoder's parts.

    x = x + attention(norm(x));  x = x + mlp(norm(x))

Positions are rotations. Every third layer sees the whole text, the others a window to both sides, with rotations of
their own; feed-forward layers have a gate. The first layer has no norm before its attention.
"""

from __future__ import annotations

from typing import ClassVar

from quire.checkpoint.hf_config import ModelInfo
from quire.kernels.backend import Array, AttentionMetadata, AttentionParams, KVCache
from quire.layers.activation import Activation
from quire.layers.attention import Attention, wanted_rows
from quire.layers.builder import Builder
from quire.layers.embedding import VocabParallelEmbedding
from quire.layers.linear import GatedColumnParallelLinear, QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from quire.layers.norm import LayerNorm
from quire.layers.rotary import RotaryEmbedding, rotary_embeddings
from quire.step import KVCacheSpec


class ModernBertLayer:
    """Attention and feed-forward layer on the residual stream."""

    def __init__(self, builder: Builder, info: ModelInfo, layer: int, rotary: RotaryEmbedding) -> None:
        self.backend, self.is_last = builder.backend, layer == info.num_hidden_layers - 1
        hidden, inner, eps, fields = info.hidden_size, info.intermediate_size, info.norm_eps, info.fields
        bias, mlp_bias, norm_bias = (fields.flag(name) for name in ("attention_bias", "mlp_bias", "norm_bias"))
        self.attn_norm = LayerNorm(builder, "attn_norm", hidden, eps, bias=norm_bias) if layer else None
        attention = builder.under("attn")
        heads = info.num_attention_heads
        self.qkv = QKVParallelLinear(
            attention,
            ("Wqkv",),
            hidden,
            num_heads=heads,
            num_kv_heads=heads,
            head_size=info.head_dim,
            bias=bias,
        )
        params = AttentionParams(
            num_heads=self.qkv.num_heads,
            num_kv_heads=self.qkv.num_kv_heads,
            head_size=info.head_dim,
            scale=info.head_dim**-0.5,
            sliding_window=info.layer_windows[layer],
            causal=info.causal,
        )
        self.attention = Attention(builder.backend, params, rotary)
        self.attention_output = RowParallelLinear(attention, "Wo", hidden, hidden, bias=bias)
        self.mlp_norm = LayerNorm(builder, "mlp_norm", hidden, eps, bias=norm_bias)
        mlp = builder.under("mlp")
        # The file's Wi holds what is activated above what it is multiplied with.
        self.gated = GatedColumnParallelLinear(mlp, ("Wi",), hidden, inner, info.hidden_act, bias=mlp_bias)
        self.output = RowParallelLinear(mlp, "Wo", inner, hidden, bias=mlp_bias)

    def __call__(self, positions: Array, x: Array, kv_cache: KVCache, metadata: AttentionMetadata) -> Array:
        """[T, H] -> [T, H]; of the last layer [R, H], the rows that are asked for."""
        normed = x if self.attn_norm is None else self.attn_norm(x)
        seen = self.attention(positions, *self.qkv(normed), kv_cache, metadata)
        if self.is_last:
            seen, x = wanted_rows(self.backend, seen, metadata), wanted_rows(self.backend, x, metadata)
        x = x + self.attention_output(seen)
        return x + self.output(self.gated(self.mlp_norm(x)))


class ModernBertModel:
    """Embedding, layers, final norm; the result is hidden states."""

    ignorable: ClassVar[tuple[str, ...]] = (r"^(head|decoder|classifier)\.",)

    def __init__(self, info: ModelInfo, builder: Builder, max_model_len: int) -> None:
        self.vocab_size, hidden, eps = info.vocab_size, info.hidden_size, info.norm_eps
        body, bias = builder.under_if("model", "embeddings.tok_embeddings.weight"), info.fields.flag("norm_bias")
        self.words = VocabParallelEmbedding(body, "embeddings.tok_embeddings", info.vocab_size, hidden)
        self.norm = LayerNorm(body, "embeddings.norm", hidden, eps, bias=bias)
        rotaries = rotary_embeddings(builder.backend, info.layer_ropes, info.head_dim, max_model_len)
        self.layers = [
            ModernBertLayer(body.under(f"layers.{layer}"), info, layer, rotary) for layer, rotary in enumerate(rotaries)
        ]
        self.final_norm = LayerNorm(body, "final_norm", hidden, eps, bias=bias)

    def kv_cache_spec(self) -> KVCacheSpec:
        """See `Model.kv_cache_spec`."""
        return KVCacheSpec([layer.attention.kv_spec() for layer in self.layers])

    def forward(
        self, input_ids: Array, positions: Array, kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> Array:
        """See `Model.forward`."""
        x = self.norm(self.words(input_ids))
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x = layer(positions, x, kv_cache, metadata)
        return self.final_norm(x)


class ModernBertForSequenceClassification(ModernBertModel):
    """With scores of classes: a dense layer, a norm, and another layer."""

    def __init__(self, info: ModelInfo, builder: Builder, max_model_len: int) -> None:
        super().__init__(info, builder, max_model_len)
        hidden, fields = info.hidden_size, info.fields
        self.dense = ReplicatedLinear(builder, "head.dense", hidden, hidden, bias=fields.flag("classifier_bias"))
        self.act = Activation(builder.backend, fields.text("classifier_activation"))
        self.head_norm = LayerNorm(builder, "head.norm", hidden, info.norm_eps, bias=fields.flag("norm_bias"))
        num_labels = len(info.pooling.labels) if info.pooling is not None else 2
        self.classifier = ReplicatedLinear(builder, "classifier", hidden, num_labels, bias=True)

    def project(self, pooled: Array) -> Array:
        """The texts' vectors [R, H] -> logits [R, classes]."""
        return self.classifier(self.head_norm(self.act(self.dense(pooled))))
