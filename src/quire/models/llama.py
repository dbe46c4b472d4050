"""Llama (Touvron et al. 2023), and the decoder that other families share with it, each with its `DecoderOptions`.

    x = x + attention(norm(x));  x = x + mlp(norm(x))

with RMS norms, rotary positions, grouped key/value heads and a gated feed-forward layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from quire.checkpoint.hf_config import ModelInfo
from quire.kernels.backend import Array, AttentionMetadata, AttentionParams, KVCache
from quire.layers.activation import Activation
from quire.layers.attention import Attention, wanted_rows
from quire.layers.builder import Builder
from quire.layers.embedding import LMHead, VocabParallelEmbedding
from quire.layers.linear import ColumnParallelLinear, GatedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from quire.layers.moe import MoE, MoEOptions
from quire.layers.norm import HeadRMSNorm, ProjectionRMSNorm, RMSNorm
from quire.layers.rotary import RotaryEmbedding, rotary_embeddings
from quire.step import KVCacheSpec, LayerKVSpec


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """Where the families that share this decoder differ.

    Attributes:
        moe: what the feed-forward layers are, where they are no dense ones.
        qk_norm: queries and keys have an RMS norm: each head by itself, or all heads together. qk_norm_names: theirs.
        norm_rotated: it is that of queries and keys after rotation, not before.
        fused: the file holds one qkv_proj and one gate_up_proj, each a stack of the parts. fused_mlp: the latter only.
        gated: without it the feed-forward layer is down(act(up(x))).
        sinks: softmax of attention has one more logit a head, which is learned, see `AttentionParams`.
        interleaved: neighbours are rotated, see `RotaryEmbedding`.
        unrotated_layers: those whose queries and keys are not rotated.
        norm_offset: is added to the scales of all norms.
        attention_scale: multiplies q.k; None is head_dim**-0.5.
        attention_softcap, logit_softcap: bend attention's and the output's logits, see `Backend.softcap`.
        residual_scale, embedding_scale, logit_scale: multiply each layer's two outputs, the embedding, the logits.
    """

    moe: MoEOptions | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["head", "projection"] | None = None
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    norm_rotated: bool = False
    fused: bool = False
    fused_mlp: bool = False
    gated: bool = True
    sinks: bool = False
    interleaved: bool = False
    unrotated_layers: frozenset[int] = frozenset()
    norm_offset: float = 0.0
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    residual_scale: float = 1.0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0


class SelfAttention(Protocol):
    """What lets the tokens of a layer see those before them."""

    def __call__(self, positions: Array, x: Array, kv_cache: KVCache, metadata: AttentionMetadata) -> Array:
        """[T, H] -> [T, H], or [R, H] of the rows that `wanted` returns."""

    def wanted(self, x: Array, metadata: AttentionMetadata) -> Array:
        """Return what goes on after attention: all of x [T, N], or in the last layer the rows that are asked for."""

    def kv_spec(self) -> LayerKVSpec:
        """Say what it caches per token."""


class DecoderAttention:
    """Self-attention of one layer."""

    def __init__(
        self, builder: Builder, info: ModelInfo, layer: int, rotary: RotaryEmbedding, options: DecoderOptions
    ) -> None:
        hidden, heads, head_dim = info.hidden_size, info.num_attention_heads, info.head_dim
        kv_heads, eps = info.num_key_value_heads, info.norm_eps
        self.backend, self.is_last = builder.backend, layer == info.num_hidden_layers - 1
        self.qkv_proj = QKVParallelLinear(
            builder,
            ("qkv_proj",) if options.fused else ("q_proj", "k_proj", "v_proj"),
            hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=head_dim,
            bias=options.qkv_bias,
        )
        self.q_norm: HeadRMSNorm | ProjectionRMSNorm | None = None
        self.k_norm: HeadRMSNorm | ProjectionRMSNorm | None = None
        head_norms = None
        q_name, k_name = options.qk_norm_names
        if options.qk_norm == "head":
            q_norm = HeadRMSNorm(builder, q_name, head_dim, eps, offset=options.norm_offset)
            k_norm = HeadRMSNorm(builder, k_name, head_dim, eps, offset=options.norm_offset)
            if options.norm_rotated:
                self.q_norm, self.k_norm = q_norm, k_norm
            else:
                head_norms = q_norm, k_norm
        elif options.qk_norm == "projection":
            self.q_norm = ProjectionRMSNorm(builder, q_name, heads, head_dim, eps, mine=self.qkv_proj.heads)
            self.k_norm = ProjectionRMSNorm(builder, k_name, kv_heads, head_dim, eps, mine=self.qkv_proj.kv_heads)
        self.rotary_first = rotary if options.norm_rotated else None
        sinks = None
        if options.sinks:
            mine = self.qkv_proj.heads
            sinks = builder.backend.vector(builder.get("sinks", (heads,)).rows(mine.start, mine.stop))
        self.attention = Attention(
            builder.backend,
            AttentionParams(
                num_heads=self.qkv_proj.num_heads,
                num_kv_heads=self.qkv_proj.num_kv_heads,
                head_size=head_dim,
                scale=head_dim**-0.5 if options.attention_scale is None else options.attention_scale,
                sliding_window=info.layer_windows[layer],
                causal=info.causal,
                softcap=options.attention_softcap,
                sinks=sinks,
            ),
            None if layer in options.unrotated_layers or options.norm_rotated else rotary,
            head_norms,
        )
        self.o_proj = RowParallelLinear(builder, "o_proj", heads * head_dim, hidden, bias=options.output_bias)

    def __call__(self, positions: Array, x: Array, kv_cache: KVCache, metadata: AttentionMetadata) -> Array:
        """[T, H] -> [T, H]; of the last layer [R, H], see `wanted`."""
        q, k, v = self.qkv_proj(x)
        if self.rotary_first:
            self.rotary_first(positions, q, k)
        if self.q_norm and self.k_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.o_proj(self.wanted(self.attention(positions, q, k, v, kv_cache, metadata), metadata))

    def wanted(self, x: Array, metadata: AttentionMetadata) -> Array:
        """Return what goes on after attention: all of x [T, N], or in the last layer the rows that are asked for."""
        return wanted_rows(self.backend, x, metadata) if self.is_last else x

    def kv_spec(self) -> LayerKVSpec:
        """Say what it caches per token."""
        return self.attention.kv_spec()


class DecoderMLP:
    """Feed-forward layer: down(act(gate(x)) * up(x)), or down(act(up(x)))."""

    def __init__(self, builder: Builder, info: ModelInfo, options: DecoderOptions) -> None:
        hidden, inner = info.hidden_size, info.intermediate_size
        names = ("gate_up_proj",) if options.fused or options.fused_mlp else ("gate_proj", "up_proj")
        self.input: GatedColumnParallelLinear | ColumnParallelLinear
        self.act = None
        if options.gated:
            self.input = GatedColumnParallelLinear(
                builder, names, hidden, inner, info.hidden_act, bias=options.mlp_bias
            )
        else:
            self.input = ColumnParallelLinear(builder, ("up_proj",), hidden, (inner,), bias=options.mlp_bias)
            self.act = Activation(builder.backend, info.hidden_act)
        self.down_proj = RowParallelLinear(builder, "down_proj", inner, hidden, bias=options.mlp_bias)

    def __call__(self, x: Array) -> Array:
        """[T, H] -> [T, H]."""
        inner = self.input(x)
        return self.down_proj(inner if self.act is None else self.act(inner))


def feed_forward(builder: Builder, info: ModelInfo, layer: int, options: DecoderOptions) -> DecoderMLP | MoE:
    """Return the feed-forward layer of a decoder layer: experts where the family has them."""
    if options.moe is None or layer in options.moe.dense_layers:
        return DecoderMLP(builder.under("mlp"), info, options)
    return MoE(options.moe.names.under(builder), info.hidden_size, options.moe)


class DecoderLayer:
    """One layer on the residual stream; the sum of stream and last output is taken inside the next norm."""

    attention_class: ClassVar[Callable[..., SelfAttention]] = DecoderAttention

    def __init__(
        self, builder: Builder, info: ModelInfo, layer: int, rotary: RotaryEmbedding, options: DecoderOptions
    ) -> None:
        size, eps, offset = info.hidden_size, info.norm_eps, options.norm_offset
        self.input_layernorm = RMSNorm(builder, "input_layernorm", size, eps, offset=offset)
        self.self_attn: SelfAttention = self.attention_class(builder.under("self_attn"), info, layer, rotary, options)
        self.post_attention_layernorm = RMSNorm(builder, "post_attention_layernorm", size, eps, offset=offset)
        self.mlp = feed_forward(builder, info, layer, options)
        self.scale = options.residual_scale

    def __call__(
        self, positions: Array, x: Array | None, residual: Array, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> tuple[Array, Array]:
        """Take the last layer's output `x` (None in the first) and the stream, both [T, H]; return this one's."""
        x = self.input_layernorm(residual) if x is None else self.input_layernorm.add(x, residual)
        x = self.self_attn(positions, x, kv_cache, metadata)
        residual = self.self_attn.wanted(residual, metadata)
        x = self.post_attention_layernorm.add(scaled(x, self.scale), residual)
        return scaled(self.mlp(x), self.scale), residual


def scaled(x: Array, scale: float) -> Array:
    """x times `scale`, which costs nothing where it is 1."""
    return x if scale == 1.0 else x * scale


class LlamaForCausalLM:
    """Embedding, decoder layers, final norm, output head. A family is a subclass with its `options`."""

    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer
    ignorable: ClassVar[tuple[str, ...]] = (r"rotary_emb\.inv_freq$",)

    def __init__(self, info: ModelInfo, builder: Builder, max_model_len: int) -> None:
        self.vocab_size = info.vocab_size
        options = self.options(info)
        self.backend, self.logit_softcap = builder.backend, options.logit_softcap
        self.embedding_scale, self.logit_scale = options.embedding_scale, options.logit_scale
        model = builder.under_if("model", "embed_tokens.weight")
        self.embed_tokens = VocabParallelEmbedding(model, "embed_tokens", info.vocab_size, info.hidden_size)
        rotaries = rotary_embeddings(
            builder.backend, info.layer_ropes, info.head_dim, max_model_len, interleaved=options.interleaved
        )
        self.layers = [
            self.layer_class(model.under(f"layers.{layer}"), info, layer, rotary, options)
            for layer, rotary in enumerate(rotaries)
        ]
        self.norm = RMSNorm(model, "norm", info.hidden_size, info.norm_eps, offset=options.norm_offset)
        tied_to = self.embed_tokens if info.tie_word_embeddings else None
        self.lm_head = LMHead(builder, "lm_head", info.vocab_size, info.hidden_size, tied_to=tied_to)

    @staticmethod
    def options(info: ModelInfo) -> DecoderOptions:
        """Which biases and norms this family has."""
        bias = info.fields.flag("attention_bias", False)
        return DecoderOptions(qkv_bias=bias, output_bias=bias, mlp_bias=info.fields.flag("mlp_bias", False))

    def kv_cache_spec(self) -> KVCacheSpec:
        """See `Model.kv_cache_spec`."""
        return KVCacheSpec([layer.self_attn.kv_spec() for layer in self.layers])

    def forward(
        self, input_ids: Array, positions: Array, kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> Array:
        """See `Model.forward`."""
        residual = scaled(self.embed_tokens(input_ids), self.embedding_scale)
        x = None
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x, residual = layer(positions, x, residual, kv_cache, metadata)
        return self.norm.add(x, residual)

    def compute_logits(self, hidden: Array) -> Array:
        """See `Model.compute_logits`."""
        logits = scaled(self.lm_head(hidden), self.logit_scale)
        if self.logit_softcap is not None:
            self.backend.softcap(logits, self.logit_softcap)
        return logits
