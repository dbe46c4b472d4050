"""OPT (Zhang et al. 2022): learned positions, layer norms before each block (or after, in the 350M), plain MLP.

Word embeddings may be narrower than the hidden states (350M), with a projection on either side.
"""

from __future__ import annotations

from typing import ClassVar

from quire.checkpoint.hf_config import ModelInfo
from quire.kernels.backend import Array, AttentionMetadata, AttentionParams, KVCache
from quire.layers.activation import Activation
from quire.layers.attention import Attention, wanted_rows
from quire.layers.builder import Builder
from quire.layers.embedding import LMHead, PositionEmbedding, VocabParallelEmbedding
from quire.layers.linear import ColumnParallelLinear, QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from quire.layers.norm import LayerNorm
from quire.step import KVCacheSpec

UNUSED_POSITIONS = 2  # rows of the position table before position 0


class OPTAttention:
    """Self-attention of one layer."""

    def __init__(self, builder: Builder, info: ModelInfo) -> None:
        hidden, bias = info.hidden_size, info.fields.flag("enable_bias", True)
        self.qkv_proj = QKVParallelLinear(
            builder,
            ("q_proj", "k_proj", "v_proj"),
            hidden,
            num_heads=info.num_attention_heads,
            num_kv_heads=info.num_attention_heads,
            head_size=info.head_dim,
            bias=bias,
        )
        heads = self.qkv_proj.num_heads
        self.attention = Attention(
            builder.backend, AttentionParams(heads, heads, info.head_dim, scale=info.head_dim**-0.5)
        )
        self.out_proj = RowParallelLinear(builder, "out_proj", hidden, hidden, bias=bias)

    def __call__(self, positions: Array, x: Array, kv_cache: KVCache, metadata: AttentionMetadata) -> Array:
        """[T, H] -> [T, H]."""
        q, k, v = self.qkv_proj(x)
        return self.out_proj(self.attention(positions, q, k, v, kv_cache, metadata))


class OPTLayer:
    """Attention and feed-forward, each with a residual and a norm before or after it."""

    def __init__(self, builder: Builder, info: ModelInfo) -> None:
        hidden, inner, bias = info.hidden_size, info.intermediate_size, info.fields.flag("enable_bias", True)
        affine = info.fields.flag("layer_norm_elementwise_affine", True)
        self.norm_first = info.fields.flag("do_layer_norm_before", True)
        self.self_attn = OPTAttention(builder.under("self_attn"), info)
        self.self_attn_layer_norm = LayerNorm(builder, "self_attn_layer_norm", hidden, info.norm_eps, affine=affine)
        self.fc1 = ColumnParallelLinear(builder, ("fc1",), hidden, (inner,), bias=bias)
        self.act = Activation(builder.backend, info.hidden_act)
        self.fc2 = RowParallelLinear(builder, "fc2", inner, hidden, bias=bias)
        self.final_layer_norm = LayerNorm(builder, "final_layer_norm", hidden, info.norm_eps, affine=affine)

    def __call__(self, positions: Array, x: Array, kv_cache: KVCache, metadata: AttentionMetadata) -> Array:
        """[T, H] -> [T, H]."""
        if self.norm_first:
            x = x + self.self_attn(positions, self.self_attn_layer_norm(x), kv_cache, metadata)
            return x + self.fc2(self.act(self.fc1(self.final_layer_norm(x))))
        x = self.self_attn_layer_norm(x + self.self_attn(positions, x, kv_cache, metadata))
        return self.final_layer_norm(x + self.fc2(self.act(self.fc1(x))))


class OPTForCausalLM:
    """Word and position embeddings, layers, final norm, output head."""

    ignorable: ClassVar[tuple[str, ...]] = ()

    def __init__(self, info: ModelInfo, builder: Builder, max_model_len: int) -> None:
        self.backend = builder.backend
        self.vocab_size, hidden = info.vocab_size, info.hidden_size
        width = info.fields.integer("word_embed_proj_dim", hidden, low=1)
        decoder = builder.under_if("model", "decoder.embed_tokens.weight").under("decoder")
        self.embed_tokens = VocabParallelEmbedding(decoder, "embed_tokens", info.vocab_size, width)
        self.embed_positions = PositionEmbedding(
            decoder, "embed_positions", info.max_position_embeddings, hidden, skip=UNUSED_POSITIONS
        )
        self.project_in = ReplicatedLinear(decoder, "project_in", width, hidden) if width != hidden else None
        self.layers = [OPTLayer(decoder.under(f"layers.{layer}"), info) for layer in range(info.num_hidden_layers)]
        self.final_layer_norm = None
        if info.fields.flag("do_layer_norm_before", True) and not info.fields.flag("_remove_final_layer_norm", False):
            affine = info.fields.flag("layer_norm_elementwise_affine", True)
            self.final_layer_norm = LayerNorm(decoder, "final_layer_norm", hidden, info.norm_eps, affine=affine)
        self.project_out = ReplicatedLinear(decoder, "project_out", hidden, width) if width != hidden else None
        tied_to = self.embed_tokens if info.tie_word_embeddings else None
        self.lm_head = LMHead(builder, "lm_head", info.vocab_size, width, tied_to=tied_to)

    def kv_cache_spec(self) -> KVCacheSpec:
        """See `Model.kv_cache_spec`."""
        return KVCacheSpec([layer.self_attn.attention.kv_spec() for layer in self.layers])

    def forward(
        self, input_ids: Array, positions: Array, kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> Array:
        """See `Model.forward`."""
        x = self.embed_tokens(input_ids)
        if self.project_in is not None:
            x = self.project_in(x)
        x = x + self.embed_positions(positions)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x = layer(positions, x, kv_cache, metadata)
        x = wanted_rows(self.backend, x, metadata)
        return x if self.final_layer_norm is None else self.final_layer_norm(x)

    def compute_logits(self, hidden: Array) -> Array:
        """See `Model.compute_logits`."""
        return self.lm_head(hidden if self.project_out is None else self.project_out(hidden))
