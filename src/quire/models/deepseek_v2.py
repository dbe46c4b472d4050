"""DeepSeek-V2 (DeepSeek-AI 2024): Llama's decoder with latent attention and, after a few layers, many small experts.

Experts are chosen by the softmax of all of them, in sizes with groups among the best groups, and weights are not
renormalized. Every token also sees the shared experts.
"""

from __future__ import annotations

import math
from typing import ClassVar

from quire.checkpoint.hf_config import ModelInfo
from quire.checkpoint.rope import RopeParameters
from quire.kernels.backend import Array, AttentionMetadata, KVCache
from quire.layers.attention import wanted_rows
from quire.layers.builder import Builder
from quire.layers.mla import LatentAttention, LatentSizes
from quire.layers.moe import MoEOptions
from quire.layers.rotary import RotaryEmbedding
from quire.models.llama import DecoderLayer, DecoderOptions, LlamaForCausalLM
from quire.models.routing import first_layers_dense, read_routing
from quire.step import LayerKVSpec

NORM_EPS = 1e-6  # of the norms of the two small vectors, whatever config.json says of the others


def latent_sizes(info: ModelInfo) -> LatentSizes:
    """Read the sizes of latent attention from config.json."""
    fields = info.fields
    return LatentSizes(
        heads=info.num_attention_heads,
        nope=fields.integer("qk_nope_head_dim", low=1, high=2**16),
        rope=info.head_dim,
        value=fields.integer("v_head_dim", info.hidden_size // info.num_attention_heads, low=1, high=2**16),
        rank=fields.integer("kv_lora_rank", low=1, high=2**16),
        query_rank=fields.integer("q_lora_rank", None, low=1, high=2**20),
    )


def scale_of(rope: RopeParameters | None, key_size: int) -> float:
    """Return what multiplies q.k: with yarn also the square of its correction for long contexts."""
    scale = key_size**-0.5
    if rope is None or not rope.mscale_all_dim or rope.factor <= 1:
        return scale
    return scale * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2


class LatentDecoderAttention:
    """Latent attention of one layer, a `SelfAttention`."""

    def __init__(
        self, builder: Builder, info: ModelInfo, layer: int, rotary: RotaryEmbedding, options: DecoderOptions
    ) -> None:
        self.backend, self.is_last, sizes = builder.backend, layer == info.num_hidden_layers - 1, latent_sizes(info)
        self.attention = LatentAttention(
            builder,
            info.hidden_size,
            sizes,
            rotary,
            scale=scale_of(info.rope, sizes.key),
            eps=NORM_EPS,
            bias=options.qkv_bias,
        )

    def __call__(self, positions: Array, x: Array, kv_cache: KVCache, metadata: AttentionMetadata) -> Array:
        """See `SelfAttention`."""
        return self.attention(positions, x, kv_cache, metadata, all_rows=not self.is_last)

    def wanted(self, x: Array, metadata: AttentionMetadata) -> Array:
        """See `SelfAttention`."""
        return wanted_rows(self.backend, x, metadata) if self.is_last else x

    def kv_spec(self) -> LayerKVSpec:
        """See `SelfAttention`."""
        return self.attention.kv_spec()


class LatentDecoderLayer(DecoderLayer):
    """A decoder layer with latent attention."""

    attention_class = LatentDecoderAttention


class DeepseekV2ForCausalLM(LlamaForCausalLM):
    """Neighbours are rotated."""

    layer_class: ClassVar[type[DecoderLayer]] = LatentDecoderLayer

    @staticmethod
    def options(info: ModelInfo) -> DecoderOptions:
        """Softmax scores; the best group is the one with the best expert."""
        fields = info.fields
        method = fields.text("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise fields.error("topk_method", "greedy or group_limited_greedy")
        inner = fields.integer("moe_intermediate_size", low=1)
        moe = MoEOptions(
            routing=read_routing(
                fields,
                "n_routed_experts",
                grouped=method == "group_limited_greedy",
                group_score="max",
                scale=fields.number("routed_scaling_factor", 1.0),
            ),
            inner_size=inner,
            hidden_act=info.hidden_act,
            shared_size=inner * fields.integer("n_shared_experts", 0),
            dense_layers=dense_layers(info),
        )
        return DecoderOptions(
            moe=moe,
            qkv_bias=fields.flag("attention_bias", False),
            mlp_bias=fields.flag("mlp_bias", False),
            interleaved=True,
        )


def dense_layers(info: ModelInfo) -> frozenset[int]:
    """Return the layers without experts: the first ones, and of the others those that `moe_layer_freq` leaves out."""
    step = info.fields.integer("moe_layer_freq", 1, low=1)
    later = (layer for layer in range(info.num_hidden_layers) if layer % step)
    return first_layers_dense(info.fields, info.num_hidden_layers) | frozenset(later)
