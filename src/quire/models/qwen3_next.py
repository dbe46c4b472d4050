"""Qwen3-Next (Qwen team 2025): most layers have a gated delta net in the place of attention, every fourth attends.

Attention has a norm on each query and key head, rotates a part of each, and its output is weighted by a gate:
attention(x) * sigmoid(gate(x)). Feed-forward layers are mixtures of experts. Norms multiply with 1 + weight, but for
those of delta nets.
"""

from __future__ import annotations

from typing import ClassVar

from quire.checkpoint.hf_config import ModelInfo
from quire.kernels.backend import Array, Arrays, AttentionMetadata, AttentionParams, LayerCache, RoutingParams
from quire.layers.activation import activation_kind
from quire.layers.attention import Attention, wanted_rows
from quire.layers.builder import Builder
from quire.layers.gated_delta import DeltaSizes, GatedDeltaNet
from quire.layers.linear import GatedQKVParallelLinear, RowParallelLinear
from quire.layers.moe import MoENames, MoEOptions
from quire.layers.norm import HeadRMSNorm, RMSNorm
from quire.layers.rotary import RotaryEmbedding
from quire.models.hybrid import HybridForCausalLM, HybridLayer
from quire.models.llama import DecoderOptions, feed_forward
from quire.step import LayerKVSpec, LayerStateSpec


class GatedAttention:
    """Self-attention of one layer, a `Mixer`."""

    def __init__(
        self, builder: Builder, info: ModelInfo, rotary: RotaryEmbedding, *, is_last: bool, offset: float
    ) -> None:
        hidden, heads, size, eps = info.hidden_size, info.num_attention_heads, info.head_dim, info.norm_eps
        bias = info.fields.flag("attention_bias", False)
        self.backend, self.is_last = builder.backend, is_last
        self.qkv_proj = GatedQKVParallelLinear(
            builder, hidden, num_heads=heads, num_kv_heads=info.num_key_value_heads, head_size=size, bias=bias
        )
        self.q_norm = HeadRMSNorm(builder, "q_norm", size, eps, offset=offset)
        self.k_norm = HeadRMSNorm(builder, "k_norm", size, eps, offset=offset)
        params = AttentionParams(self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads, size, scale=size**-0.5)
        self.attention = Attention(builder.backend, params, rotary)
        self.o_proj = RowParallelLinear(builder, "o_proj", heads * size, hidden, bias=bias)

    def __call__(self, positions: Array, x: Array, cache: LayerCache, metadata: AttentionMetadata) -> Array:
        """See `Mixer`."""
        q, k, v, gate = self.qkv_proj(x)
        out = self.attention(positions, self.q_norm(q), self.k_norm(k), v, cache, metadata)
        out, gate = self.wanted(out, metadata), self.wanted(gate, metadata)
        return self.o_proj(out * self.backend.activation(gate, "sigmoid"))

    def wanted(self, x: Array, metadata: AttentionMetadata) -> Array:
        """See `Mixer`."""
        return wanted_rows(self.backend, x, metadata) if self.is_last else x

    def spec(self) -> LayerKVSpec:
        """See `Mixer`."""
        return self.attention.kv_spec()


class DeltaMixer:
    """A gated delta net as a `Mixer`."""

    def __init__(self, builder: Builder, info: ModelInfo, sizes: DeltaSizes, *, is_last: bool) -> None:
        self.backend, self.is_last = builder.backend, is_last
        kind = activation_kind(info.hidden_act)
        self.net = GatedDeltaNet(builder, info.hidden_size, sizes, eps=info.norm_eps, activation=kind)

    def __call__(self, positions: Array, x: Array, cache: Arrays, metadata: AttentionMetadata) -> Array:
        """See `Mixer`."""
        return self.net(x, cache, metadata, metadata.wanted if self.is_last else None)

    def wanted(self, x: Array, metadata: AttentionMetadata) -> Array:
        """See `Mixer`."""
        return wanted_rows(self.backend, x, metadata) if self.is_last else x

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
        is_last, norms = layer == info.num_hidden_layers - 1, (info.hidden_size, info.norm_eps)
        before = RMSNorm(builder, "input_layernorm", *norms, offset=self.norm_offset)
        mixer: GatedAttention | DeltaMixer
        if info.fields.values["layer_types"][layer] == "full_attention":
            within = builder.under("self_attn")
            mixer = GatedAttention(within, info, rotary, is_last=is_last, offset=self.norm_offset)
        else:
            sizes = delta_sizes(info, by_group=self.by_group)
            mixer = DeltaMixer(builder.under("linear_attn"), info, sizes, is_last=is_last)
        after = RMSNorm(builder, "post_attention_layernorm", *norms, offset=self.norm_offset)
        options = DecoderOptions(moe=self.experts(info))
        return HybridLayer(before, mixer, after, feed_forward(builder, info, layer, options))

    @staticmethod
    def experts(info: ModelInfo) -> MoEOptions | None:
        """What feed-forward layers are made of; None where all are dense."""
        fields = info.fields
        number, step = fields.integer("num_experts", 0), fields.integer("decoder_sparse_step", 1, low=1)
        dense = fields.values.get("mlp_only_layers") or []
        if number == 0:
            return None
        return MoEOptions(
            routing=RoutingParams(
                number,
                fields.integer("num_experts_per_tok", low=1, high=number),
                renormalize=fields.flag("norm_topk_prob", True),
            ),
            inner_size=fields.integer("moe_intermediate_size", low=1, high=2**27),
            hidden_act=info.hidden_act,
            shared_size=fields.integer("shared_expert_intermediate_size", 0),
            shared_gate=True,
            dense_layers=frozenset(
                layer for layer in range(info.num_hidden_layers) if layer in dense or (layer + 1) % step
            ),
            names=MoENames(shared="shared_expert"),
        )
