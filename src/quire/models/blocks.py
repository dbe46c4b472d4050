"""The decoder of families with layer norms, whose attention and feed-forward layer stand in sequence or in parallel:

    x = x + attention(norm(x));  x = x + mlp(norm(x))
    x = x + attention(norm(x)) + mlp(norm(x))

Parallel ones (Wang & Komatsuzaki 2021) have a norm for each or one for both. A family says in `BlockOptions` what it
has, and in `BlockNames` what its checkpoints call it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from quire.checkpoint.hf_config import ModelInfo
from quire.kernels.backend import Array, AttentionMetadata, AttentionParams, Backend, KVCache
from quire.layers.activation import Activation
from quire.layers.attention import Attention, wanted_rows
from quire.layers.builder import Builder
from quire.layers.embedding import LMHead, VocabParallelEmbedding
from quire.layers.linear import ColumnParallelLinear, GatedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from quire.layers.norm import HeadLayerNorm, LayerNorm
from quire.layers.rotary import RotaryEmbedding, rotary_embeddings
from quire.step import KVCacheSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockNames:
    """Names in the checkpoint. One name in `qkv` is a tensor of all three; two in `mlp_input` are gate and input."""

    body: str = "model"
    embedding: str = "embed_tokens"
    embedding_norm: str | None = None
    blocks: str = "layers"
    attention_norm: str = "input_layernorm"
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    attention_output: str = "o_proj"
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    mlp_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"
    mlp_input: tuple[str, ...] = ("gate_proj", "up_proj")
    mlp_output: str = "down_proj"
    final_norm: str = "norm"
    head: str = "lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOptions:
    """Where the families that share this decoder differ.

    Attributes:
        parallel: attention and feed-forward layer see the same x. shared_norm: and the same norm of it.
        norm_bias: norms have a shift. head_bias: the output head has one.
        norm_affine: norms have a scale. norm_offset: it is more by this than what the file holds.
        clip_qkv: queries, keys and values are kept within -clip_qkv and clip_qkv.
        head_norm: queries and keys have a `HeadLayerNorm` per head, its scales a matrix ("joint") or apart ("split").
        attention_scale: multiplies q.k; None is head_dim**-0.5.
        alibi_slopes: of all heads of the model, see `AttentionParams`; None without ALiBi.
        interleaved: neighbours are rotated, see `RotaryEmbedding`.
        unrotated_layers: those whose queries and keys are not rotated.
        logit_scale: multiplies the logits.
        qkv_by_group: the single tensor of `names.qkv` holds, for each KV head, its queries, its key and its value.
    """

    names: BlockNames = field(default_factory=BlockNames)
    parallel: bool = False
    shared_norm: bool = False
    qkv_by_group: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = True
    norm_affine: bool = True
    norm_offset: float = 0.0
    clip_qkv: float | None = None
    head_bias: bool = False
    head_norm: Literal["joint", "split"] | None = None
    attention_scale: float | None = None
    alibi_slopes: np.ndarray | None = None
    interleaved: bool = False
    unrotated_layers: frozenset[int] = frozenset()
    logit_scale: float = 1.0


def clipped(backend: Backend, x: Array, limit: float) -> Array:
    """Return x within -limit and limit."""
    below = backend.activation(x + limit, "relu")
    return backend.activation(below * -1.0 + 2 * limit, "relu") * -1.0 + limit


class BlockAttention:
    """Self-attention of one block."""

    def __init__(
        self, builder: Builder, info: ModelInfo, layer: int, rotary: RotaryEmbedding | None, options: BlockOptions
    ) -> None:
        heads, kv_heads, head_dim = info.num_attention_heads, info.num_key_value_heads, info.head_dim
        names = options.names
        self.backend, self.clip = builder.backend, options.clip_qkv
        self.qkv = QKVParallelLinear(
            builder,
            names.qkv,
            info.hidden_size,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=head_dim,
            bias=options.qkv_bias,
            by_group=options.qkv_by_group,
        )
        self.q_norm: HeadLayerNorm | None = None
        self.k_norm: HeadLayerNorm | None = None
        if options.head_norm:
            eps, split = info.norm_eps, options.head_norm == "split"
            self.q_norm = HeadLayerNorm(
                builder, names.query_norm, heads, head_dim, eps, mine=self.qkv.heads, split=split
            )
            self.k_norm = HeadLayerNorm(
                builder, names.key_norm, kv_heads, head_dim, eps, mine=self.qkv.kv_heads, split=split
            )
        slopes = options.alibi_slopes
        if slopes is not None:
            slopes = builder.backend.from_numpy(slopes[self.qkv.heads.start : self.qkv.heads.stop])
        self.attention = Attention(
            builder.backend,
            AttentionParams(
                num_heads=self.qkv.num_heads,
                num_kv_heads=self.qkv.num_kv_heads,
                head_size=head_dim,
                scale=head_dim**-0.5 if options.attention_scale is None else options.attention_scale,
                sliding_window=info.layer_windows[layer],
                alibi_slopes=slopes,
            ),
            rotary,
        )
        self.output = RowParallelLinear(
            builder, names.attention_output, heads * head_dim, info.hidden_size, bias=options.output_bias
        )

    def __call__(self, positions: Array, x: Array, kv_cache: KVCache, metadata: AttentionMetadata) -> Array:
        """[T, H] -> [T, H]."""
        q, k, v = self.qkv(x)
        if self.clip is not None:
            q, k, v = (clipped(self.backend, part, self.clip) for part in (q, k, v))
        if self.q_norm and self.k_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.output(self.attention(positions, q, k, v, kv_cache, metadata))


class BlockMLP:
    """Feed-forward layer, gated or plain."""

    def __init__(self, builder: Builder, info: ModelInfo, options: BlockOptions) -> None:
        hidden, inner, names = info.hidden_size, info.intermediate_size, options.names
        self.input: ColumnParallelLinear | GatedColumnParallelLinear
        self.act = None
        if len(names.mlp_input) == 2:
            self.input = GatedColumnParallelLinear(
                builder, names.mlp_input, hidden, inner, info.hidden_act, bias=options.mlp_bias
            )
        else:
            self.input = ColumnParallelLinear(builder, names.mlp_input, hidden, (inner,), bias=options.mlp_bias)
            self.act = Activation(builder.backend, info.hidden_act)
        self.output = RowParallelLinear(builder, names.mlp_output, inner, hidden, bias=options.mlp_bias)

    def __call__(self, x: Array) -> Array:
        """[T, H] -> [T, H]."""
        inner = self.input(x)
        return self.output(inner if self.act is None else self.act(inner))


def block_norm(builder: Builder, name: str, info: ModelInfo, options: BlockOptions) -> LayerNorm:
    """Return one of the norms of hidden states."""
    return LayerNorm(
        builder,
        name,
        info.hidden_size,
        info.norm_eps,
        affine=options.norm_affine,
        bias=options.norm_bias,
        offset=options.norm_offset,
    )


class Block:
    """Attention and feed-forward layer with their norms, on the residual stream."""

    def __init__(
        self, builder: Builder, info: ModelInfo, layer: int, rotary: RotaryEmbedding | None, options: BlockOptions
    ) -> None:
        names = options.names
        self.parallel = options.parallel
        self.attention_norm = block_norm(builder, names.attention_norm, info, options)
        self.attention = BlockAttention(builder.under(names.attention), info, layer, rotary, options)
        self.mlp_norm = None
        if not options.shared_norm:
            self.mlp_norm = block_norm(builder, names.mlp_norm, info, options)
        self.mlp = BlockMLP(builder.under(names.mlp), info, options)

    def __call__(self, positions: Array, x: Array, kv_cache: KVCache, metadata: AttentionMetadata) -> Array:
        """[T, H] -> [T, H]."""
        normed = self.attention_norm(x)
        after = x + self.attention(positions, normed, kv_cache, metadata)
        if self.mlp_norm is not None:
            normed = self.mlp_norm(x if self.parallel else after)
        return after + self.mlp(normed)


class BlockDecoder:
    """Embedding, blocks, final norm, output head; a family is a subclass with its `options`."""

    ignorable: ClassVar[tuple[str, ...]] = (r"rotary_emb\.inv_freq$",)

    def __init__(self, info: ModelInfo, builder: Builder, max_model_len: int) -> None:
        self.backend = builder.backend
        self.vocab_size, hidden = info.vocab_size, info.hidden_size
        options = self.options(info)
        names = options.names
        body = builder.under_if(names.body, f"{names.embedding}.weight")
        self.embedding = VocabParallelEmbedding(body, names.embedding, info.vocab_size, hidden)
        self.embedding_norm = None
        if names.embedding_norm is not None:
            self.embedding_norm = LayerNorm(body, names.embedding_norm, hidden, info.norm_eps)
        rotaries = rotary_embeddings(
            builder.backend, info.layer_ropes, info.head_dim, max_model_len, interleaved=options.interleaved
        )
        self.blocks = [
            Block(
                body.under(f"{names.blocks}.{layer}"),
                info,
                layer,
                rotaries[layer] if rotaries and layer not in options.unrotated_layers else None,
                options,
            )
            for layer in range(info.num_hidden_layers)
        ]
        self.final_norm = block_norm(body, names.final_norm, info, options)
        tied_to = self.embedding if info.tie_word_embeddings else None
        self.head = LMHead(builder, names.head, info.vocab_size, hidden, tied_to=tied_to, bias=options.head_bias)
        self.logit_scale = options.logit_scale

    @staticmethod
    def options(info: ModelInfo) -> BlockOptions:
        """What this family has, by its config."""
        return BlockOptions()

    def kv_cache_spec(self) -> KVCacheSpec:
        """See `Model.kv_cache_spec`."""
        return KVCacheSpec([block.attention.attention.kv_spec() for block in self.blocks])

    def forward(
        self, input_ids: Array, positions: Array, kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> Array:
        """See `Model.forward`."""
        x = self.embedding(input_ids)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        for block, kv_cache in zip(self.blocks, kv_caches, strict=True):
            x = block(positions, x, kv_cache, metadata)
        return self.final_norm(wanted_rows(self.backend, x, metadata))

    def compute_logits(self, hidden: Array) -> Array:
        """See `Model.compute_logits`."""
        logits = self.head(hidden)
        return logits if self.logit_scale == 1.0 else logits * self.logit_scale
