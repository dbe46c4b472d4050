"""Qwen 2 to 3.5, with and without experts; Qwen3-Next and Qwen3.5 have gated delta nets in most layers."""

from __future__ import annotations

from dataclasses import replace

from quire.checkpoint.hf_config import ModelInfo
from quire.layers.activation import activation_name
from quire.layers.builder import Builder
from quire.layers.gated_delta import DeltaSizes, GatedDeltaNet
from quire.layers.moe import MoENames, MoEOptions
from quire.layers.rotary import RotaryEmbedding
from quire.models.decoder import INV_FREQ, DecoderAttention, DecoderOptions, Mixer
from quire.models.experts import read_experts, read_routing
from quire.models.llama import attention_bias

MTP = r"^(model\.)?mtp\."  # layers for multi-token prediction, which are not used


def qwen2(info: ModelInfo) -> DecoderOptions:
    """Qwen2 and Qwen2.5 (Yang et al. 2024): Llama's decoder with biases on queries, keys and values."""
    return DecoderOptions(qkv_bias=True)


def qwen3(info: ModelInfo) -> DecoderOptions:
    """Qwen3 (Yang et al. 2025): an RMS norm on each query and key head before the rotation."""
    return replace(attention_bias(info), qk_norm="head")


def qwen2_moe(info: ModelInfo) -> DecoderOptions:
    """Qwen2-MoE (Yang et al. 2024): many small experts, and a shared one with a gate."""
    return DecoderOptions(moe=_shared_expert(info), qkv_bias=info.fields.flag("qkv_bias", True))


def qwen3_moe(info: ModelInfo) -> DecoderOptions:
    """Qwen3-MoE (Yang et al. 2025): Qwen3's attention, and experts without a shared one."""
    return replace(qwen3(info), moe=_experts(info))


def qwen3_next(info: ModelInfo, *, by_key_head: bool = True) -> DecoderOptions:
    """Qwen3-Next (Qwen team 2025): gated delta nets, and in every fourth layer attention, whose output has a gate.

    Heads are rotated in part. Norms multiply by 1 + weight, except those of delta nets. by_key_head: see `DeltaSizes`.
    """
    linear_layers = frozenset(
        layer for layer, kind in enumerate(info.fields.values["layer_types"]) if kind != "full_attention"
    )

    def mixer(
        builder: Builder, info: ModelInfo, layer: int, rotary: RotaryEmbedding | None, options: DecoderOptions
    ) -> Mixer:
        if layer not in linear_layers:
            return DecoderAttention(builder, info, layer, rotary, options)
        return GatedDeltaNet(
            builder.under("linear_attn"),
            info.hidden_size,
            delta_sizes(info, by_key_head=by_key_head),
            eps=info.norm_eps,
            activation=activation_name(info.hidden_act),
        )

    return replace(
        attention_bias(info),
        moe=_shared_expert(info) if info.fields.integer("num_experts", 0) else None,
        qk_norm="head",
        output_gate=True,
        norm_offset=1.0,
        mixer=mixer,
        ignored_weights=(INV_FREQ, MTP),
    )


def qwen3_5(info: ModelInfo) -> DecoderOptions:
    """Qwen3.5 (Qwen team 2026): Qwen3-Next with separate tensors for the inputs of delta nets.

    In multimodal models, positions of text are the same on all three axes.
    """
    return qwen3_next(info, by_key_head=False)


def _experts(info: ModelInfo) -> MoEOptions:
    """Return Qwen's experts; mlp_only_layers are dense, and all layers but every decoder_sparse_step-th."""
    fields, layers = info.fields, range(info.num_hidden_layers)
    dense = fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(layer not in layers for layer in dense):
        raise fields.error("mlp_only_layers", f"a list of layers below {info.num_hidden_layers}")
    step = fields.integer("decoder_sparse_step", 1, low=1)
    routing = read_routing(fields, "num_experts", renormalize=fields.flag("norm_topk_prob", False))
    all_but_nth = frozenset(layer for layer in layers if (layer + 1) % step)
    return read_experts(info, routing, dense_layers=frozenset(dense) | all_but_nth)


def _shared_expert(info: ModelInfo) -> MoEOptions:
    return replace(
        _experts(info),
        shared_size=info.fields.integer("shared_expert_intermediate_size", low=1),
        shared_gate=True,
        names=MoENames(shared="shared_expert"),
    )


def delta_sizes(info: ModelInfo, *, by_key_head: bool) -> DeltaSizes:
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
        by_key_head=by_key_head,
    )
