"""BERT (Devlin et al. 2019) and RoBERTa (Liu et al. 2019): every token sees every other one, norms come after the sums.

    x = norm(x + attention(x));  x = norm(x + mlp(x))

Positions, and places in a pair of texts, are learned tables. RoBERTa's begins behind the row of the padding token.
"""

from __future__ import annotations

from typing import ClassVar

from quire.checkpoint.hf_config import ModelInfo
from quire.kernels.backend import Array, AttentionMetadata, AttentionParams, KVCache
from quire.layers.activation import Activation, tanh
from quire.layers.attention import Attention, wanted_rows
from quire.layers.builder import Builder
from quire.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from quire.layers.linear import ColumnParallelLinear, QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from quire.layers.norm import LayerNorm
from quire.step import KVCacheSpec


class BertLayer:
    """Attention and feed-forward layer, each with a residual and a norm."""

    def __init__(self, builder: Builder, info: ModelInfo, layer: int) -> None:
        self.backend, self.is_last = builder.backend, layer == info.num_hidden_layers - 1
        hidden, inner, heads, eps = info.hidden_size, info.intermediate_size, info.num_attention_heads, info.norm_eps
        attention = builder.under("attention")
        self.qkv = QKVParallelLinear(
            attention.under("self"),
            ("query", "key", "value"),
            hidden,
            num_heads=heads,
            num_kv_heads=heads,
            head_size=info.head_dim,
            bias=True,
        )
        params = AttentionParams(
            num_heads=self.qkv.num_heads,
            num_kv_heads=self.qkv.num_kv_heads,
            head_size=info.head_dim,
            scale=info.head_dim**-0.5,
            causal=info.causal,
        )
        self.attention = Attention(builder.backend, params)
        self.attention_output = RowParallelLinear(attention, "output.dense", hidden, hidden, bias=True)
        self.attention_norm = LayerNorm(attention, "output.LayerNorm", hidden, eps)
        self.input = ColumnParallelLinear(builder, ("intermediate.dense",), hidden, (inner,), bias=True)
        self.act = Activation(builder.backend, info.hidden_act)
        self.output = RowParallelLinear(builder, "output.dense", inner, hidden, bias=True)
        self.output_norm = LayerNorm(builder, "output.LayerNorm", hidden, eps)

    def __call__(self, positions: Array, x: Array, kv_cache: KVCache, metadata: AttentionMetadata) -> Array:
        """[T, H] -> [T, H]; of the last layer [R, H], the rows that are asked for."""
        seen = self.attention(positions, *self.qkv(x), kv_cache, metadata)
        if self.is_last:
            seen, x = wanted_rows(self.backend, seen, metadata), wanted_rows(self.backend, x, metadata)
        x = self.attention_norm(x + self.attention_output(seen))
        return self.output_norm(x + self.output(self.act(self.input(x))))


class BertModel:
    """Embeddings and layers; the result is hidden states."""

    body: ClassVar[str] = "bert"
    # Older files hold the numbers of the positions; heads of other tasks are not needed.
    ignorable: ClassVar[tuple[str, ...]] = (
        r"embeddings\.position_ids$",
        r"(^|\.)pooler\.",
        r"^(cls|lm_head|classifier)\.",
    )

    def __init__(self, info: ModelInfo, builder: Builder, max_model_len: int) -> None:
        self.vocab_size = info.vocab_size
        body = builder.under_if(self.body, "embeddings.word_embeddings.weight")
        embeddings, hidden = body.under("embeddings"), info.hidden_size
        num_types = info.fields.integer("type_vocab_size", low=1)
        self.words = VocabParallelEmbedding(embeddings, "word_embeddings", info.vocab_size, hidden)
        self.positions = PositionEmbedding(
            embeddings, "position_embeddings", info.max_position_embeddings, hidden, skip=self.first_position(info)
        )
        self.types = PositionEmbedding(embeddings, "token_type_embeddings", num_types, hidden)
        self.num_token_types = num_types
        self.norm = LayerNorm(embeddings, "LayerNorm", hidden, info.norm_eps)
        self.layers = [
            BertLayer(body.under(f"encoder.layer.{layer}"), info, layer) for layer in range(info.num_hidden_layers)
        ]

    @staticmethod
    def first_position(info: ModelInfo) -> int:
        """Row of the position table that the first token takes."""
        return 0

    def kv_cache_spec(self) -> KVCacheSpec:
        """See `Model.kv_cache_spec`."""
        return KVCacheSpec([layer.attention.kv_spec() for layer in self.layers])

    def forward(
        self, input_ids: Array, positions: Array, kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> Array:
        """See `Model.forward`."""
        assert metadata.token_types is not None
        x = self.words(input_ids) + self.types(metadata.token_types)
        x = self.norm(x + self.positions(positions))
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x = layer(positions, x, kv_cache, metadata)
        return x


class BertForSequenceClassification(BertModel):
    """With scores of classes."""

    def __init__(self, info: ModelInfo, builder: Builder, max_model_len: int) -> None:
        super().__init__(info, builder, max_model_len)
        self.backend, hidden = builder.backend, info.hidden_size
        body = builder.under_if(self.body, "embeddings.word_embeddings.weight")
        self.dense = ReplicatedLinear(body, "pooler.dense", hidden, hidden, bias=True)
        num_labels = len(info.pooling.labels) if info.pooling is not None else 2
        self.classifier = ReplicatedLinear(builder, "classifier", hidden, num_labels, bias=True)

    def project(self, pooled: Array) -> Array:
        """The first tokens' vectors [R, H] -> logits [R, classes]."""
        return self.classifier(tanh(self.backend, self.dense(pooled)))


class RobertaModel(BertModel):
    """BERT's layers; positions begin behind the padding token's row."""

    body: ClassVar[str] = "roberta"

    @staticmethod
    def first_position(info: ModelInfo) -> int:
        """See `BertModel`. config.json counts these rows as positions, `ModelInfo` does not."""
        return info.fields.integer("pad_token_id", low=0) + 1


class RobertaForSequenceClassification(RobertaModel):
    """With scores of classes; the dense layer belongs to the classifier."""

    def __init__(self, info: ModelInfo, builder: Builder, max_model_len: int) -> None:
        super().__init__(info, builder, max_model_len)
        self.backend, hidden = builder.backend, info.hidden_size
        self.dense = ReplicatedLinear(builder, "classifier.dense", hidden, hidden, bias=True)
        num_labels = len(info.pooling.labels) if info.pooling is not None else 2
        self.out_proj = ReplicatedLinear(builder, "classifier.out_proj", hidden, num_labels, bias=True)

    def project(self, pooled: Array) -> Array:
        """The first tokens' vectors [R, H] -> logits [R, classes]."""
        return self.out_proj(tanh(self.backend, self.dense(pooled)))
