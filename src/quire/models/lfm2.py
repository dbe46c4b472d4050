"""LFM2 (Liquid AI 2025): most layers are short convolutions between two gates, the others attend.

    b, c, x = split(in_proj(x));  x = out_proj(c * conv(b * x))

Attention is Llama's, with a norm on each query and key head.
"""

from __future__ import annotations

from dataclasses import replace

from quire.checkpoint.hf_config import ModelInfo
from quire.kernels.backend import Array, Arrays, AttentionMetadata
from quire.layers.attention import take_rows
from quire.layers.builder import Builder, span_of
from quire.layers.linear import ColumnParallelLinear, RowParallelLinear
from quire.layers.moe import MoENames
from quire.layers.rotary import RotaryEmbedding
from quire.layers.short_conv import ShortConv
from quire.models.decoder import DecoderAttention, DecoderNames, DecoderOptions, Mixer
from quire.models.experts import read_experts, read_routing
from quire.step import LayerStateSpec

NAMES = DecoderNames(
    attention_norm="operator_norm",
    query_norm="q_layernorm",
    key_norm="k_layernorm",
    attention_output="out_proj",
    mlp_norm="ffn_norm",
    mlp="feed_forward",
    mlp_input=("w1", "w3"),
    mlp_output="w2",
    final_norm="embedding_norm",
)


def lfm2(info: ModelInfo) -> DecoderOptions:
    """The dense models. The norm before the head has the embedding's name."""
    return DecoderOptions(names=NAMES, qk_norm="head", mixer=lfm2_mixer)


def lfm2_moe(info: ModelInfo) -> DecoderOptions:
    """The MoE models: all feed-forward layers but the first ones are mixtures of experts."""
    fields = info.fields
    routing = read_routing(
        fields,
        "num_experts",
        scoring="sigmoid",
        renormalize=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    moe = read_experts(
        info,
        routing,
        correction=fields.flag("use_expert_bias", True),
        dense_layers=frozenset(range(min(info.num_hidden_layers, fields.integer("num_dense_layers", 2)))),
        names=MoENames(block="feed_forward", correction="expert_bias", gate="w1", up="w3", down="w2"),
    )
    return replace(lfm2(info), moe=moe)


def lfm2_mixer(
    builder: Builder, info: ModelInfo, layer: int, rotary: RotaryEmbedding | None, options: DecoderOptions
) -> Mixer:
    """Build a layer's attention or convolution, see `DecoderOptions.mixer`."""
    if info.fields.values["layer_types"][layer] == "full_attention":
        return DecoderAttention(builder, info, layer, rotary, options)
    return GatedConv(builder.under("conv"), info)


class GatedConv:
    """A convolution between two gates; ranks split its channels."""

    def __init__(self, builder: Builder, info: ModelInfo) -> None:
        hidden, taps = info.hidden_size, info.fields.integer("conv_L_cache", low=2, high=64)
        bias = info.fields.flag("conv_bias", False)
        self.backend = builder.backend
        self.in_proj = ColumnParallelLinear(builder, ("in_proj",), hidden, (hidden,) * 3, bias=bias)
        mine = span_of(self.backend, hidden, "number of channels")
        self.size = len(mine)
        self.conv = ShortConv(builder, "conv", hidden, taps, mine=(mine,), bias=bias)
        self.out_proj = RowParallelLinear(builder, "out_proj", hidden, hidden, bias=bias)

    def __call__(
        self, positions: Array, x: Array, cache: Arrays, metadata: AttentionMetadata, rows: Array | None
    ) -> Array:
        whole, size = self.in_proj(x), self.size
        out = self.conv(whole[:, :size] * whole[:, 2 * size :], cache[0], metadata)
        gate = take_rows(self.backend, whole[:, size : 2 * size], rows)
        return self.out_proj(gate * take_rows(self.backend, out, rows))

    def cache_spec(self) -> LayerStateSpec:
        return LayerStateSpec((self.conv.state_shape,))
