"""LFM2 (Liquid AI 2025): most layers are short convolutions between two gates, the others attend.

    b, c, x = split(in_proj(x));  x = out_proj(c * conv(b * x))

Attention is Llama's, with a norm on each query and key head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from quire.checkpoint.hf_config import ModelInfo
from quire.kernels.backend import Array, Arrays, AttentionMetadata, AttentionParams, LayerCache
from quire.layers.attention import Attention
from quire.layers.builder import Builder
from quire.layers.linear import (
    ColumnParallelLinear,
    GatedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from quire.layers.moe import MoE, MoENames, MoEOptions
from quire.layers.norm import HeadRMSNorm, RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.layers.short_conv import ShortConv
from quire.models.hybrid import HybridForCausalLM, HybridLayer, Mixer
from quire.models.routing import read_routing
from quire.step import LayerKVSpec, LayerStateSpec


class Lfm2Attention(Mixer):
    """Self-attention of one layer."""

    def __init__(self, builder: Builder, info: ModelInfo, layer: int, rotary: RotaryEmbedding) -> None:
        super().__init__(builder, info, layer)
        hidden, heads, size = info.hidden_size, info.num_attention_heads, info.head_dim
        names, kv_heads = ("q_proj", "k_proj", "v_proj"), info.num_key_value_heads
        self.qkv_proj = QKVParallelLinear(
            builder, names, hidden, num_heads=heads, num_kv_heads=kv_heads, head_size=size
        )
        q_norm = HeadRMSNorm(builder, "q_layernorm", size, info.norm_eps)
        k_norm = HeadRMSNorm(builder, "k_layernorm", size, info.norm_eps)
        params = AttentionParams(self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, size, scale=size**-0.5)
        self.attention = Attention(builder.backend, params, rotary, (q_norm, k_norm))
        self.out_proj = RowParallelLinear(builder, "out_proj", heads * size, hidden)

    def __call__(self, positions: Array, x: Array, cache: LayerCache, metadata: AttentionMetadata) -> Array:
        """See `Mixer`."""
        q, k, v = self.qkv_proj(x)
        out = self.attention(positions, q, k, v, cache, metadata)
        return self.out_proj(self.wanted(out, metadata))

    def spec(self) -> LayerKVSpec:
        """See `Mixer`."""
        return self.attention.kv_spec()


class GatedConv(Mixer):
    """A convolution between two gates; ranks split its channels."""

    def __init__(self, builder: Builder, info: ModelInfo, layer: int) -> None:
        super().__init__(builder, info, layer)
        hidden, taps = info.hidden_size, info.fields.integer("conv_L_cache", low=2, high=64)
        bias, parallel = info.fields.flag("conv_bias", False), builder.parallel
        self.in_proj = ColumnParallelLinear(builder, ("in_proj",), hidden, (hidden,) * 3, bias=bias)
        self.size = parallel.share(hidden, "number of channels")
        mine = range(parallel.tp_rank * self.size, (parallel.tp_rank + 1) * self.size)
        self.conv = ShortConv(builder, "conv", hidden, taps, mine=(mine,), bias=bias)
        self.out_proj = RowParallelLinear(builder, "out_proj", hidden, hidden, bias=bias)

    def __call__(self, positions: Array, x: Array, cache: Arrays, metadata: AttentionMetadata) -> Array:
        """See `Mixer`."""
        whole, size = self.in_proj(x), self.size
        out = self.conv(whole[:, :size] * whole[:, 2 * size :], cache[0], metadata)
        return self.out_proj(self.wanted(whole[:, size : 2 * size], metadata) * self.wanted(out, metadata))

    def spec(self) -> LayerStateSpec:
        """See `Mixer`."""
        return LayerStateSpec((self.conv.state_shape,))


class Lfm2MLP:
    """Gated feed-forward layer."""

    def __init__(self, builder: Builder, info: ModelInfo) -> None:
        hidden, inner = info.hidden_size, info.intermediate_size
        self.gate_up = GatedColumnParallelLinear(builder, ("w1", "w3"), hidden, inner, info.hidden_act)
        self.down = RowParallelLinear(builder, "w2", inner, hidden)

    def __call__(self, x: Array) -> Array:
        """[T, H] -> [T, H]."""
        return self.down(self.gate_up(x))


class Lfm2ForCausalLM(HybridForCausalLM):
    """The norm before the head has the embedding's name."""

    final_norm: ClassVar[str] = "embedding_norm"

    def layer(self, builder: Builder, info: ModelInfo, layer: int, rotary: RotaryEmbedding) -> HybridLayer:
        """See `HybridForCausalLM.layer`."""
        size, eps = info.hidden_size, info.norm_eps
        before = RMSNorm(builder, "operator_norm", size, eps)
        mixer: Mixer
        if info.fields.values["layer_types"][layer] == "full_attention":
            mixer = Lfm2Attention(builder.under("self_attn"), info, layer, rotary)
        else:
            mixer = GatedConv(builder.under("conv"), info, layer)
        after = RMSNorm(builder, "ffn_norm", size, eps)
        return HybridLayer(before, mixer, after, self.feed_forward(builder.under("feed_forward"), info, layer))

    def feed_forward(self, builder: Builder, info: ModelInfo, layer: int) -> Callable[[Array], Array]:
        """Build a layer's second half."""
        return Lfm2MLP(builder, info)


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    """All but the first feed-forward layers are mixtures of experts."""

    def feed_forward(self, builder: Builder, info: ModelInfo, layer: int) -> Callable[[Array], Array]:
        """See `Lfm2ForCausalLM.feed_forward`."""
        fields = info.fields
        if layer < fields.integer("num_dense_layers", 2):
            return Lfm2MLP(builder, info)
        routing = read_routing(
            fields,
            "num_experts",
            scoring="sigmoid",
            renormalize=fields.flag("norm_topk_prob", True),
            scale=fields.number("routed_scaling_factor", 1.0),
        )
        options = MoEOptions(
            routing=routing,
            inner_size=fields.integer("moe_intermediate_size", low=1),
            hidden_act=info.hidden_act,
            correction=fields.flag("use_expert_bias", True),
            names=MoENames(block="feed_forward", correction="expert_bias", gate="w1", up="w3", down="w2"),
        )
        return MoE(builder, info.hidden_size, options)
