"""Qwen3-Next (Qwen team 2025): most layers have a gated delta net in the place of attention, every fourth attends.

Attention has a norm on each query and key head, rotates a part of each, and its output is weighted by a gate:
attention(x) * sigmoid(gate(x)). Feed-forward layers are mixtures of experts. Norms multiply with 1 + weight, but for
those of delta nets.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from quire.checkpoint.hf_config import ModelInfo
from quire.kernels.backend import Array, Arrays, AttentionMetadata, AttentionParams, LayerCache
from quire.layers.activation import activation_kind
from quire.layers.attention import Attention
from quire.layers.builder import Builder
from quire.layers.gated_delta import DeltaSizes, GatedDeltaNet
from quire.layers.linear import GatedQKVParallelLinear, RowParallelLinear
from quire.layers.moe import MoENames, MoEOptions
from quire.layers.norm import HeadRMSNorm, RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.models.hybrid import HybridForCausalLM, HybridLayer, Mixer
from quire.models.llama import DecoderOptions, feed_forward
from quire.models.qwen2_moe import small_experts
from quire.step import LayerKVSpec, LayerStateSpec


class GatedAttention(Mixer):
    """Self-attention of one layer."""

    def __init__(
        self, builder: Builder, info: ModelInfo, layer: int, rotary: RotaryEmbedding, *, offset: float
    ) -> None:
        super().__init__(builder, info, layer)
        hidden, heads, size, eps = info.hidden_size, info.num_attention_heads, info.head_dim, info.norm_eps
        bias = info.fields.flag("attention_bias", False)
        self.qkv_proj = GatedQKVParallelLinear(
            builder, hidden, num_heads=heads, num_kv_heads=info.num_key_value_heads, head_size=size, bias=bias
        )
        q_norm = HeadRMSNorm(builder, "q_norm", size, eps, offset=offset)
        k_norm = HeadRMSNorm(builder, "k_norm", size, eps, offset=offset)
        params = AttentionParams(self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, size, scale=size**-0.5)
        self.attention = Attention(builder.backend, params, rotary, (q_norm, k_norm))
        self.o_proj = RowParallelLinear(builder, "o_proj", heads * size, hidden, bias=bias)

    def __call__(self, positions: Array, x: Array, cache: LayerCache, metadata: AttentionMetadata) -> Array:
        """See `Mixer`."""
        q, k, v, gate = self.qkv_proj(x)
        out = self.attention(positions, q, k, v, cache, metadata)
        out, gate = self.wanted(out, metadata), self.wanted(gate, metadata)
        return self.o_proj(out * self.backend.activation(gate, "sigmoid"))

    def spec(self) -> LayerKVSpec:
        """See `Mixer`."""
        return self.attention.kv_spec()


class DeltaMixer(Mixer):
    """A gated delta net in the place of attention."""

    def __init__(self, builder: Builder, info: ModelInfo, layer: int, sizes: DeltaSizes) -> None:
        super().__init__(builder, info, layer)
        kind = activation_kind(info.hidden_act)
        self.net = GatedDeltaNet(builder, info.hidden_size, sizes, eps=info.norm_eps, activation=kind)

    def __call__(self, positions: Array, x: Array, cache: Arrays, metadata: AttentionMetadata) -> Array:
        """See `Mixer`."""
        return self.net(x, cache, metadata, metadata.wanted if self.is_last else None)

    def spec(self) -> LayerStateSpec:
        """See `Mixer`."""
        return self.net.state_spec()


def delta_sizes(info: ModelInfo, *, by_group: bool) -> DeltaSizes:
    """Read the sizes of delta nets from config.json."""
    fields = info.fields
    key_heads = fields.integer("linear_num_key_heads", low=1, high=2**16)
    value_heads = fields.integer("linear_num_value_heads", low=1, high=2**16)
    if value_heads % key_heads:
        raise fields.error("linear_num_value_heads", f"a multiple of linear_num_key_heads, {key_heads}")
    return DeltaSizes(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=fields.integer("linear_key_head_dim", low=1, high=2**16),
        value_dim=fields.integer("linear_value_head_dim", low=1, high=2**16),
        taps=fields.integer("linear_conv_kernel_dim", low=2, high=64),
        by_group=by_group,
    )


class Qwen3NextForCausalLM(HybridForCausalLM):
    """Its files have further layers that foretell more tokens (mtp), which are not used."""

    ignorable: ClassVar[tuple[str, ...]] = (*HybridForCausalLM.ignorable, r"^(model\.)?mtp\.")
    norm_offset: ClassVar[float] = 1.0
    by_group: ClassVar[bool] = True

    def layer(self, builder: Builder, info: ModelInfo, layer: int, rotary: RotaryEmbedding) -> HybridLayer:
        """See `HybridForCausalLM.layer`."""
        norms = (info.hidden_size, info.norm_eps)
        before = RMSNorm(builder, "input_layernorm", *norms, offset=self.norm_offset)
        mixer: Mixer
        if info.fields.values["layer_types"][layer] == "full_attention":
            mixer = GatedAttention(builder.under("self_attn"), info, layer, rotary, offset=self.norm_offset)
        else:
            mixer = DeltaMixer(builder.under("linear_attn"), info, layer, delta_sizes(info, by_group=self.by_group))
        after = RMSNorm(builder, "post_attention_layernorm", *norms, offset=self.norm_offset)
        options = DecoderOptions(moe=self.experts(info))
        return HybridLayer(before, mixer, after, feed_forward(builder, info, layer, options))

    @staticmethod
    def experts(info: ModelInfo) -> MoEOptions | None:
        """What feed-forward layers are made of; None where all are dense."""
        if not info.fields.integer("num_experts", 0):
            return None
        return replace(
            small_experts(info),
            shared_size=info.fields.integer("shared_expert_intermediate_size", low=1),
            shared_gate=True,
            names=MoENames(shared="shared_expert"),
        )
