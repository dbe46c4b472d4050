"""GLM-4 and its successors, dense and with experts."""

from __future__ import annotations

from dataclasses import replace

from quire.checkpoint.hf_config import ModelInfo
from quire.models.decoder import DecoderOptions
from quire.models.experts import corrected_experts, first_layers_dense
from quire.models.llama import FUSED_MLP


def glm(info: ModelInfo) -> DecoderOptions:
    """GLM-4-9B and GLM-Edge (GLM team 2024): half of each head rotated, interleaved, and a fused gate."""
    return DecoderOptions(names=FUSED_MLP, qkv_bias=info.fields.flag("attention_bias", True), interleaved=True)


def glm4(info: ModelInfo) -> DecoderOptions:
    """GLM-4-0414 and GLM-Z1 (GLM team 2025): GLM with norms before and after each part of a layer."""
    names = replace(FUSED_MLP, attention_output_norm="post_self_attn_layernorm", mlp_output_norm="post_mlp_layernorm")
    return replace(glm(info), names=names)


def glm4_moe(info: ModelInfo) -> DecoderOptions:
    """GLM-4.5 (GLM team 2025): Llama's attention, partly rotated, and DeepSeek-V3's experts after a few dense layers.

    Some sizes have norms on q and k.
    """
    fields = info.fields
    dense = first_layers_dense(fields, info.num_hidden_layers)
    return DecoderOptions(
        moe=corrected_experts(info, dense, num_shared=1),
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm="head" if fields.flag("use_qk_norm", False) else None,
    )
