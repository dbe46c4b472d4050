"""Encoder-only families, with bidirectional attention: BERT, RoBERTa, ModernBERT; their classifiers."""

from __future__ import annotations

from dataclasses import replace

from quire.checkpoint.hf_config import ModelInfo
from quire.kernels.backend import Array
from quire.layers.activation import Activation
from quire.layers.builder import Builder
from quire.layers.linear import ReplicatedLinear
from quire.layers.norm import LayerNorm
from quire.models.decoder import DecoderNames, DecoderOptions

BERT = DecoderNames(
    body="bert",
    embedding="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    token_types="embeddings.token_type_embeddings",
    embedding_norm="embeddings.LayerNorm",
    layers="encoder.layer",
    attention_norm=None,
    attention="attention",
    qkv=("self.query", "self.key", "self.value"),
    attention_output="output.dense",
    attention_output_norm="attention.output.LayerNorm",
    mlp_norm=None,
    mlp="",
    mlp_input=("intermediate.dense",),
    mlp_output="output.dense",
    mlp_output_norm="output.LayerNorm",
    final_norm=None,
)


def bert(info: ModelInfo) -> DecoderOptions:
    """BERT (Devlin et al. 2019): post-norm, learned position and token type embeddings."""
    return DecoderOptions(
        names=BERT,
        residual="post",
        norm="layer",
        gated=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        num_token_types=info.fields.integer("type_vocab_size", low=1),
        # Older files hold the numbers of the positions; heads of other tasks are not used.
        ignored_weights=(r"embeddings\.position_ids$", r"(^|\.)pooler\.", r"^(cls|lm_head|classifier)\."),
        classifier=bert_classifier if has_classifier(info) else None,
    )


def bert_classifier(builder: Builder, info: ModelInfo) -> TanhClassifier:
    """Build BERT's classifier, whose dense layer is the pooler of the body."""
    body = builder.under_if(BERT.body, f"{BERT.embedding}.weight")
    return TanhClassifier(body, "pooler.dense", builder, "classifier", info)


def roberta(info: ModelInfo) -> DecoderOptions:
    """RoBERTa (Liu et al. 2019): BERT, whose positions begin after the row of the padding token.

    config.json counts these rows as positions, `ModelInfo` does not.
    """
    offset = info.fields.integer("pad_token_id", low=0) + 1
    return replace(
        bert(info),
        names=replace(BERT, body="roberta"),
        position_offset=offset,
        classifier=roberta_classifier if has_classifier(info) else None,
    )


def roberta_classifier(builder: Builder, info: ModelInfo) -> TanhClassifier:
    """Build RoBERTa's classifier, which has its own dense layer."""
    return TanhClassifier(builder, "classifier.dense", builder, "classifier.out_proj", info)


def modernbert(info: ModelInfo) -> DecoderOptions:
    """ModernBERT (Warner et al. 2024): pre-norm, rotary embeddings and gated feed-forward layers.

    Every third layer has full attention, the others a window to both sides, with other rotary parameters. The first
    layer has no norm before its attention.
    """
    bias = info.fields.flag("attention_bias")
    return DecoderOptions(
        names=DecoderNames(
            embedding="embeddings.tok_embeddings",
            embedding_norm="embeddings.norm",
            attention_norm="attn_norm",
            attention="attn",
            qkv=("Wqkv",),
            attention_output="Wo",
            mlp_norm="mlp_norm",
            mlp_input=("Wi",),  # gate above up
            mlp_output="Wo",
            final_norm="final_norm",
        ),
        norm="layer",
        norm_bias=info.fields.flag("norm_bias"),
        norm_first=False,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=info.fields.flag("mlp_bias"),
        ignored_weights=(r"^(head|decoder|classifier)\.",),
        classifier=NormClassifier if has_classifier(info) else None,
    )


def has_classifier(info: ModelInfo) -> bool:
    """Whether the model gives scores of classes, computed from the first token's hidden states."""
    return info.architecture.endswith("ForSequenceClassification")


def num_labels(info: ModelInfo) -> int:
    """Return the number of classes."""
    return len(info.pooling.labels) if info.pooling is not None else 2


class TanhClassifier:
    """out(tanh(dense(x)))."""

    def __init__(self, dense_in: Builder, dense: str, out_in: Builder, out: str, info: ModelInfo) -> None:
        hidden, self.tanh = info.hidden_size, Activation(out_in.backend, "tanh")
        self.dense = ReplicatedLinear(dense_in, dense, hidden, hidden, bias=True)
        self.out = ReplicatedLinear(out_in, out, hidden, num_labels(info), bias=True)

    def __call__(self, pooled: Array) -> Array:
        """The first tokens' hidden states [R, H] -> logits [R, classes]."""
        return self.out(self.tanh(self.dense(pooled)))


class NormClassifier:
    """classifier(norm(act(dense(x))))."""

    def __init__(self, builder: Builder, info: ModelInfo) -> None:
        hidden, fields = info.hidden_size, info.fields
        self.dense = ReplicatedLinear(builder, "head.dense", hidden, hidden, bias=fields.flag("classifier_bias"))
        self.act = Activation(builder.backend, fields.text("classifier_activation"))
        self.norm = LayerNorm(builder, "head.norm", hidden, info.norm_eps, bias=fields.flag("norm_bias"))
        self.out = ReplicatedLinear(builder, "classifier", hidden, num_labels(info), bias=True)

    def __call__(self, pooled: Array) -> Array:
        """Pooled hidden states [R, H] -> logits [R, classes]."""
        return self.out(self.norm(self.act(self.dense(pooled))))
