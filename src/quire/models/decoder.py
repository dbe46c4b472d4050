"""The decoder that all model families share, and `DecoderOptions`, which describe how families differ.

A decoder has three parts: `embed` (token ids to hidden states), `layers`, and a head (the final norm, `norm`, and
`compute_logits`). `Decoder.forward` runs all three; a pipeline stage has a slice of the layers and the parts at its
ends (`Builder.layers`). Encoder-only models use it, too, with attention that is not causal and without an output head.
The files of families return their options; `models.registry` finds the function of an architecture.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from quire.checkpoint.hf_config import ModelInfo
from quire.kernels.backend import Array, AttentionMetadata, AttentionParams, Backend, LayerCache
from quire.layers.activation import Activation
from quire.layers.attention import Attention, take_rows
from quire.layers.builder import Builder
from quire.layers.embedding import LMHead, PositionEmbedding, VocabParallelEmbedding
from quire.layers.linear import (
    ColumnParallelLinear,
    GatedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from quire.layers.moe import MoE, MoEOptions
from quire.layers.norm import HeadLayerNorm, LayerNorm, ProjectionRMSNorm, RMSNorm
from quire.layers.rotary import RotaryEmbedding, rotary_embeddings
from quire.models.interface import HiddenStates
from quire.step import KVCacheSpec, LayerKVSpec, LayerStateSpec

INV_FREQ = r"rotary_emb\.inv_freq$"  # older files hold the frequencies of the rotation


class Mixer(Protocol):
    """The part of a layer that mixes tokens: self-attention, or a layer with a recurrent state."""

    def __call__(
        self, positions: Array, x: Array, cache: Any, metadata: AttentionMetadata, rows: Array | None
    ) -> Array:
        """[T, H] -> [T, H], or [R, H] of the token indices `rows`; `cache` has the arrays of `cache_spec`."""

    def cache_spec(self) -> LayerKVSpec | LayerStateSpec:
        """Return the spec of the layer's cache or state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderNames:
    """Names of modules in the checkpoint.

    Attributes:
        body: stands before all but the head; some files leave it out. attention, mlp: before the parts of a layer.
        qkv: three tensors, or one that holds queries, keys and values. mlp_input: gate and up, or one tensor.
        attention_norm, mlp_norm: of the input. attention_output_norm, mlp_output_norm: of the output.
    """

    body: str = "model"
    embedding: str = "embed_tokens"
    positions: str | None = None
    token_types: str | None = None
    project_in: str = "project_in"
    embedding_norm: str | None = None
    layers: str = "layers"
    attention_norm: str | None = "input_layernorm"
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    attention_output: str = "o_proj"
    attention_output_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp: str = "mlp"
    mlp_input: tuple[str, ...] = ("gate_proj", "up_proj")
    mlp_output: str = "down_proj"
    mlp_output_norm: str | None = None
    final_norm: str | None = "norm"
    project_out: str = "project_out"
    head: str = "lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderOptions:
    """Where model families differ.

    Attributes:
        residual: how layers add to the residual stream x.
            "sequential": x += norm(attention(norm(x))), then x += norm(mlp(norm(x))), with the norms that have a name.
            "parallel": x += attention(norm(x)) + mlp(norm(x)); without a name for `mlp_norm` both get the same input.
            "post": x = norm(x + attention(x)), then x = norm(x + mlp(x)).
        norm: "rms", or "layer" for layer norms, with a shift if `norm_bias`, and without scale or shift unless
            `norm_affine`. norm_offset: is added to the scales of all norms.
        norm_first: the first layer has an `attention_norm`.
        moe: the experts, in families that have some. gated: without it the feed-forward layer is down(act(up(x))).
        transposed: linear weights in the file are [in, out].
        qkv_by_kv_head: a single tensor holds, for each KV head, its queries, its key and its value.
        qk_norm: norms of queries and keys: an RMS norm of each head ("head") or of all heads together ("projection"),
            or a layer norm of each head with a scale of its own, stored as one matrix ("layer") or as vectors
            ("layer_list"). norm_rotated: they are taken after the rotation, not before.
        output_gate: attention's output is multiplied with sigmoid(gate(x)), whose weights are part of q_proj.
        clip_qkv: queries, keys and values are clipped to [-clip_qkv, clip_qkv].
        sinks, attention_softcap, alibi_slopes (of all heads): see `AttentionParams`.
        attention_scale: multiplies q.k, in all layers or by layer; None is head_dim**-0.5.
        interleaved: see `RotaryEmbedding`. unrotated_layers: those that do not rotate queries and keys (NoPE).
        position_offset: rows of the table of learned positions before position 0.
        num_token_types: rows of the table of token types.
        embedding_size: width of the word embeddings, if not the hidden size: then there are projections.
        embedding_scale, residual_scale, logit_scale: multiply the embedding, each layer's two outputs, the logits.
            embedding_scale_rounded: the first is rounded to the dtype of the weights, as in training.
        logit_softcap: see `Backend.softcap`.
        mixer: builds the mixer of a layer, given the layer's builder, config, number, rotation and options.
        classifier: builds `Model.classifier`.
        ignored_weights: see `Model`.
    """

    names: DecoderNames = field(default_factory=DecoderNames)
    residual: Literal["sequential", "parallel", "post"] = "sequential"
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = True
    norm_affine: bool = True
    norm_offset: float = 0.0
    norm_first: bool = True
    moe: MoEOptions | None = None
    gated: bool = True
    transposed: bool = False
    qkv_bias: bool = False
    qkv_by_kv_head: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: Literal["head", "projection", "layer", "layer_list"] | None = None
    norm_rotated: bool = False
    output_gate: bool = False
    clip_qkv: float | None = None
    sinks: bool = False
    attention_scale: float | Sequence[float] | None = None
    attention_softcap: float | None = None
    alibi_slopes: np.ndarray | None = None
    interleaved: bool = False
    unrotated_layers: frozenset[int] = frozenset()
    position_offset: int = 0
    num_token_types: int = 0
    embedding_size: int | None = None
    embedding_scale: float = 1.0
    embedding_scale_rounded: bool = False
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    mixer: Callable[[Builder, ModelInfo, int, RotaryEmbedding | None, DecoderOptions], Mixer] | None = None
    classifier: Callable[[Builder, ModelInfo], Callable[[Array], Array]] | None = None
    ignored_weights: tuple[str, ...] = (INV_FREQ,)


class DecoderAttention:
    """Self-attention of one layer, a `Mixer`."""

    def __init__(
        self,
        layer_builder: Builder,
        info: ModelInfo,
        layer: int,
        rotary: RotaryEmbedding | None,
        options: DecoderOptions,
    ) -> None:
        names, builder = options.names, layer_builder.under(options.names.attention)
        hidden, heads, head_dim = info.hidden_size, info.num_attention_heads, info.head_dim
        self.backend, self.clip = builder.backend, options.clip_qkv
        self.qkv_proj = QKVParallelLinear(
            builder,
            names.qkv,
            hidden,
            num_heads=heads,
            num_kv_heads=info.num_key_value_heads,
            head_size=head_dim,
            bias=options.qkv_bias,
            transposed=options.transposed,
            by_kv_head=options.qkv_by_kv_head,
            gated=options.output_gate,
        )
        mine = self.qkv_proj.heads
        self.norms = self._norms(builder, info, options)
        fused_norms = None
        if options.qk_norm == "head" and not options.norm_rotated:
            fused_norms, self.norms = self.norms, None
        self.rotary_first = rotary if options.norm_rotated else None
        sinks = slopes = None
        if options.sinks:
            sinks = self.backend.vector(builder.get("sinks", (heads,)).rows(mine.start, mine.stop))
        if options.alibi_slopes is not None:
            slopes = self.backend.from_numpy(options.alibi_slopes[mine.start : mine.stop])
        scale = options.attention_scale
        if scale is None:
            scale = head_dim**-0.5
        self.attention = Attention(
            self.backend,
            AttentionParams(
                num_heads=self.qkv_proj.num_heads,
                num_kv_heads=self.qkv_proj.num_kv_heads,
                head_size=head_dim,
                scale=scale[layer] if isinstance(scale, Sequence) else scale,
                sliding_window=info.layer_windows[layer],
                causal=info.causal,
                softcap=options.attention_softcap,
                sinks=sinks,
                alibi_slopes=slopes,
            ),
            None if options.norm_rotated else rotary,
            fused_norms,
        )
        self.o_proj = RowParallelLinear(
            builder,
            names.attention_output,
            heads * head_dim,
            hidden,
            bias=options.output_bias,
            transposed=options.transposed,
        )

    def _norms(self, builder: Builder, info: ModelInfo, options: DecoderOptions) -> Any:
        parts = (
            (options.names.query_norm, info.num_attention_heads, self.qkv_proj.heads),
            (options.names.key_norm, info.num_key_value_heads, self.qkv_proj.kv_heads),
        )
        size, eps = info.head_dim, info.norm_eps
        match options.qk_norm:
            case None:
                return None
            case "head":
                return tuple(RMSNorm(builder, name, size, eps, offset=options.norm_offset) for name, _, _ in parts)
            case "projection":
                return tuple(ProjectionRMSNorm(builder, name, heads, size, eps, mine=own) for name, heads, own in parts)
        split = options.qk_norm == "layer_list"
        return tuple(
            HeadLayerNorm(builder, name, heads, size, eps, mine=own, split=split) for name, heads, own in parts
        )

    def __call__(
        self, positions: Array, x: Array, cache: LayerCache, metadata: AttentionMetadata, rows: Array | None
    ) -> Array:
        q, k, v, *gate = self.qkv_proj(x)
        if self.clip is not None:
            q, k, v = (clip(self.backend, part, self.clip) for part in (q, k, v))
        if self.rotary_first is not None:
            self.rotary_first(positions, q, k)
        if self.norms is not None:
            q, k = self.norms[0](q), self.norms[1](k)
        out = take_rows(self.backend, self.attention(positions, q, k, v, cache, metadata), rows)
        if gate:
            out = out * self.backend.activation(take_rows(self.backend, gate[0], rows), "sigmoid")
        return self.o_proj(out)

    def cache_spec(self) -> LayerKVSpec:
        return self.attention.cache_spec()


def clip(backend: Backend, x: Array, limit: float) -> Array:
    """Return x clipped to [-limit, limit]."""
    below = backend.activation(x + limit, "relu")
    return backend.activation(below * -1.0 + 2 * limit, "relu") * -1.0 + limit


class MLP:
    """Feed-forward layer: down(act(gate(x)) * up(x)), or down(act(up(x)))."""

    def __init__(self, builder: Builder, info: ModelInfo, options: DecoderOptions) -> None:
        hidden, inner, names, bias = info.hidden_size, info.intermediate_size, options.names, options.mlp_bias
        self.input: GatedColumnParallelLinear | ColumnParallelLinear
        self.act = None
        if options.gated:
            self.input = GatedColumnParallelLinear(builder, names.mlp_input, hidden, inner, info.hidden_act, bias=bias)
        else:
            self.input = ColumnParallelLinear(
                builder, names.mlp_input, hidden, (inner,), bias=bias, transposed=options.transposed
            )
            self.act = Activation(builder.backend, info.hidden_act)
        self.output = RowParallelLinear(
            builder, names.mlp_output, inner, hidden, bias=bias, transposed=options.transposed
        )

    def __call__(self, x: Array) -> Array:
        """[T, H] -> [T, H]."""
        x = self.input(x)
        if self.act is not None:
            x = self.act(x)
        return self.output(x)


def build_norm(builder: Builder, name: str, info: ModelInfo, options: DecoderOptions) -> RMSNorm | LayerNorm:
    """Return a norm of hidden states."""
    if options.norm == "rms":
        return RMSNorm(builder, name, info.hidden_size, info.norm_eps, offset=options.norm_offset)
    return LayerNorm(
        builder,
        name,
        info.hidden_size,
        info.norm_eps,
        affine=options.norm_affine,
        bias=options.norm_bias,
        offset=options.norm_offset,
    )


def add_norm(norm: RMSNorm | LayerNorm | None, hidden: HiddenStates) -> Array:
    """Add the update to the residual stream in place; return the norm of the sum, or without a norm the stream."""
    if isinstance(norm, RMSNorm) and hidden.update is not None:
        return norm.add(hidden.take_update(), hidden.residual)
    if hidden.update is not None:
        hidden.residual += hidden.take_update()
    return hidden.residual if norm is None else norm(hidden.residual)


def scaled(x: Array, scale: float) -> Array:
    """Return x * scale; x itself if the scale is 1."""
    return x if scale == 1.0 else x * scale


class DecoderLayer:
    """One layer on the residual stream, see `DecoderOptions.residual`.

    The last layer keeps only the tokens whose logits are needed (`AttentionMetadata.logits_indices`), as soon as keys
    and values are written.
    """

    def __init__(
        self,
        builder: Builder,
        info: ModelInfo,
        layer: int,
        rotary: RotaryEmbedding | None,
        options: DecoderOptions,
    ) -> None:
        def norm(name: str | None) -> RMSNorm | LayerNorm | None:
            return None if name is None else build_norm(builder, name, info, options)

        names = options.names
        self.backend, self.is_last = builder.backend, layer == info.num_hidden_layers - 1
        self.residual, self.scale = options.residual, options.residual_scale
        self.attention_norm = norm(names.attention_norm if layer or options.norm_first else None)
        self.mixer = (options.mixer or DecoderAttention)(builder, info, layer, rotary, options)
        self.attention_output_norm = norm(names.attention_output_norm)
        self.mlp_norm = norm(names.mlp_norm)
        self.mlp: MLP | MoE
        if options.moe is None or layer in options.moe.dense_layers:
            self.mlp = MLP(builder.under(names.mlp), info, options)
        else:
            self.mlp = MoE(options.moe.names.under(builder), info.hidden_size, options.moe)
        self.mlp_output_norm = norm(names.mlp_output_norm)

    def __call__(self, positions: Array, hidden: HiddenStates, cache: Any, metadata: AttentionMetadata) -> HiddenStates:
        """Hidden states of T tokens -> of T, or after the last layer of R."""
        rows = metadata.logits_indices if self.is_last else None
        normed = add_norm(self.attention_norm, hidden)
        out = self.mixer(positions, normed, cache, metadata, rows)
        residual = hidden.residual
        if self.residual == "parallel":
            if self.mlp_norm is not None:
                normed = self.mlp_norm(residual)
            residual = take_rows(self.backend, residual, rows)
            residual += out
            del out  # here and below: frees memory for the next op
            return HiddenStates(residual, self.mlp(take_rows(self.backend, normed, rows)))
        del normed
        if self.residual == "sequential":
            if self.attention_output_norm is not None:
                out = self.attention_output_norm(out)
            out = scaled(out, self.scale)
        hidden = HiddenStates(take_rows(self.backend, residual, rows), out)
        del out, residual
        if self.residual == "post":
            hidden = HiddenStates(add_norm(self.attention_output_norm, hidden))
            hidden.update = self.mlp(hidden.residual)
            return HiddenStates(add_norm(self.mlp_output_norm, hidden))
        hidden.update = self.mlp(add_norm(self.mlp_norm, hidden))
        if self.mlp_output_norm is not None:
            hidden.update = self.mlp_output_norm(hidden.update)
        hidden.update = scaled(hidden.update, self.scale)
        return hidden


class Decoder:
    """Embedding, decoder layers, final norm, output head: a `Model`, or one pipeline stage of it.

    A stage that does not begin with the first layer has no embedding, one that does not end with the last layer no
    head.
    """

    supports_graphs = True

    def __init__(self, info: ModelInfo, builder: Builder, max_model_len: int, options: DecoderOptions) -> None:
        """Read every tensor from `builder`, in file order where possible, and pack it at once.

        The constructor runs twice, first on a `DryRunWeights` that only checks names and shapes. So it must not use
        values of tensors, and the choice of tensors to read may depend on `info` and `builder.has` only.
        """
        names, hidden, eps = options.names, info.hidden_size, info.norm_eps
        width = options.embedding_size or hidden
        numbers = range(info.num_hidden_layers) if builder.layers is None else builder.layers
        is_first, is_last = numbers.start == 0, numbers.stop == info.num_hidden_layers
        self.backend, self.vocab_size = builder.backend, info.vocab_size
        self.ignored_weights, self.num_token_types = options.ignored_weights, options.num_token_types
        self.embedding_scale = options.embedding_scale
        if options.embedding_scale_rounded:
            self.embedding_scale = rounded(options.embedding_scale, builder.backend.dtype)
        self.logit_scale, self.logit_softcap = options.logit_scale, options.logit_softcap

        body = builder.under_if(names.body, f"{names.embedding}.weight")
        self.embedding = None
        self.positions = self.token_types = self.project_in = self.embedding_norm = None
        if is_first or (is_last and info.tie_word_embeddings):
            self.embedding = VocabParallelEmbedding(body, names.embedding, info.vocab_size, width)
        if is_first and names.positions is not None:
            self.positions = PositionEmbedding(
                body, names.positions, info.max_position_embeddings, hidden, skip=options.position_offset
            )
        if is_first and names.token_types is not None:
            self.token_types = PositionEmbedding(body, names.token_types, options.num_token_types, hidden)
        if is_first and width != hidden:
            self.project_in = ReplicatedLinear(body, names.project_in, width, hidden)
        if is_first and names.embedding_norm is not None:
            self.embedding_norm = LayerNorm(body, names.embedding_norm, hidden, eps, bias=options.norm_bias)

        rotaries = rotary_embeddings(
            builder.backend,
            info.layer_ropes[numbers.start : numbers.stop],
            info.head_dim,
            max_model_len,
            interleaved=options.interleaved,
        )
        self.layers = [
            DecoderLayer(
                body.under(f"{names.layers}.{layer}"),
                info,
                layer,
                rotary if layer not in options.unrotated_layers else None,
                options,
            )
            for layer, rotary in zip(numbers, rotaries or itertools.repeat(None, len(numbers)), strict=True)
        ]
        self.specs = [layer.mixer.cache_spec() for layer in self.layers]

        self.final_norm = self.project_out = self.lm_head = self.classifier = None
        if not is_last:
            return
        if names.final_norm is not None:
            self.final_norm = build_norm(body, names.final_norm, info, options)
        if width != hidden:
            self.project_out = ReplicatedLinear(body, names.project_out, hidden, width)
        tied_to = self.embedding if info.tie_word_embeddings else None
        self.lm_head = LMHead(builder, names.head, info.vocab_size, width, tied_to=tied_to, bias=options.head_bias)
        if options.classifier is not None:
            self.classifier = options.classifier(builder, info)

    def kv_cache_spec(self) -> KVCacheSpec:
        """See `Model.kv_cache_spec`; of a stage, the spec of its own layers."""
        return KVCacheSpec(
            [spec for spec in self.specs if isinstance(spec, LayerKVSpec)],
            [spec for spec in self.specs if isinstance(spec, LayerStateSpec)],
        )

    def embed(self, input_ids: Array, positions: Array, metadata: AttentionMetadata) -> HiddenStates:
        """Token ids [T] at `positions` [T] -> hidden states, replaced where `metadata.inputs_embeds` says so."""
        assert self.embedding is not None, "only the first stage has an embedding"
        x = self.embedding(input_ids)
        if self.token_types is not None:
            x = x + self.token_types(metadata.token_types)
        if self.project_in is not None:
            x = self.project_in(x)
        if self.positions is not None:
            x = x + self.positions(positions)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        x = scaled(x, self.embedding_scale)
        if metadata.inputs_embeds is not None:
            x = x * metadata.inputs_embeds.mask + metadata.inputs_embeds.rows
        return HiddenStates(x)

    def run_layers(
        self, hidden: HiddenStates, positions: Array, kv_caches: list[Any], metadata: AttentionMetadata
    ) -> HiddenStates:
        """Run the layers of this stage. `positions` are passed to the rotary embedding unchanged."""
        attends = [isinstance(spec, LayerKVSpec) for spec in self.specs]
        caches, states = iter(kv_caches[: sum(attends)]), iter(kv_caches[sum(attends) :])
        for layer, is_attention in zip(self.layers, attends, strict=True):
            hidden = layer(positions, hidden, next(caches if is_attention else states), metadata)
        return hidden

    def norm(self, hidden: HiddenStates) -> Array:
        """Return the final norm of hidden states after the last layer, which `compute_logits` takes."""
        return add_norm(self.final_norm, hidden)

    def forward(self, input_ids: Array, positions: Array, kv_caches: list[Any], metadata: AttentionMetadata) -> Array:
        hidden = self.embed(input_ids, positions, metadata)
        return self.norm(self.run_layers(hidden, positions, kv_caches, metadata))

    def compute_logits(self, hidden: Array) -> Array:
        assert self.lm_head is not None, "only the last stage has a head"
        logits = self.lm_head(hidden if self.project_out is None else self.project_out(hidden))
        logits = scaled(logits, self.logit_scale)
        if self.logit_softcap is not None:
            self.backend.softcap(logits, self.logit_softcap)
        return logits


def rounded(value: float, dtype: str) -> float:
    """Round to the nearest number of this dtype, ties to even."""
    if dtype == "bfloat16":
        bits = int(np.float32(value).view(np.uint32))
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        return float(np.uint32(bits).view(np.float32))
    return float(np.dtype(dtype).type(value))
