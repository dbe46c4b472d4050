"""Hybrid decoders: attention layers, and layers with a recurrent state (gated delta nets, short convolutions)."""

from __future__ import annotations

from typing import Any

from quire.checkpoint.families.family import Family, family, num_layers
from quire.checkpoint.files import ConfigFields

FULL, LINEAR, CONV = "full_attention", "linear_attention", "conv"


def _linear_layers(fields: ConfigFields) -> dict[str, Any]:
    """Return layer types, by default attention in every fourth layer, and a feed-forward size of MoE models."""
    layers = num_layers(fields)
    types = fields.values.get("layer_types")
    if types is None:
        period = fields.integer("full_attention_interval", 4, low=1)
        types = [LINEAR if (layer + 1) % period else FULL for layer in range(layers)]
    _check_types(fields, types, layers, (FULL, LINEAR))
    inner = fields.values.get("intermediate_size", fields.values.get("moe_intermediate_size"))
    return {"layer_types": types, "intermediate_size": inner}


def _check_types(fields: ConfigFields, types: Any, layers: int, known: tuple[str, str]) -> None:
    """Raise `ModelError` unless each layer has a known type, and at least one `known[0]`, attention."""
    fields = ConfigFields({**fields.values, "layer_types": types}, fields.path)
    if known[0] not in fields.names("layer_types", layers, known):
        raise fields.error("layer_types", f"at least one {known[0]}")


def _lfm2(fields: ConfigFields) -> dict[str, Any]:
    """Return layer types, which older files give as full_attn_idxs, and LFM2's adjusted feed-forward width."""
    layers = num_layers(fields)
    types = fields.values.get("layer_types")
    if types is None:
        attending = fields.values.get("full_attn_idxs")
        attending = list(range(layers)) if attending is None else attending
        if not isinstance(attending, list):
            raise fields.error("full_attn_idxs", "a list of layers")
        types = [FULL if layer in attending else CONV for layer in range(layers)]
    _check_types(fields, types, layers, (FULL, CONV))
    inner = fields.integer("block_ff_dim", None, low=1) or fields.integer("intermediate_size", low=1)
    if fields.flag("block_auto_adjust_ff_dim", True):
        unit = fields.integer("block_multiple_of", 256, low=1)
        inner = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3))
        inner = -(-inner // unit) * unit
    tied = fields.flag("tie_embedding", None)
    return {
        "layer_types": types,
        "intermediate_size": inner,
        **({} if tied is None else {"tie_word_embeddings": tied}),
    }


_QWEN = {
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_SHARED = {"norm_topk_prob": True, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_LFM2 = {
    "norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "max_position_embeddings": 128000,
    "rope_theta": 1e6,
    "conv_L_cache": 3,
}
_QWEN35 = {"num_key_value_heads": 4}
_QWEN35_MOE = {**_SHARED, "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8}


def _qwen(model_type: str, options: str, defaults: dict[str, Any], within: str | None = None) -> Family:
    return family(model_type, options, _QWEN, defaults, keeps_states=True, derive=_linear_layers, within=within)


HYBRID: dict[str, Family] = {
    "Qwen3NextForCausalLM": _qwen(
        "qwen3_next",
        "qwen.qwen3_next",
        {**_SHARED, "num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10},
    ),
    "Lfm2ForCausalLM": family("lfm2", "lfm2.lfm2", _LFM2, keeps_states=True, derive=_lfm2),
    "Lfm2MoeForCausalLM": family(
        "lfm2_moe",
        "lfm2.lfm2_moe",
        _LFM2,
        num_key_value_heads=8,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=1792,
        block_auto_adjust_ff_dim=False,
        keeps_states=True,
        derive=_lfm2,
    ),
    "Qwen3_5ForCausalLM": _qwen("qwen3_5_text", "qwen.qwen3_5", _QWEN35),
    "Qwen3_5MoeForCausalLM": _qwen("qwen3_5_moe_text", "qwen.qwen3_5", _QWEN35_MOE),
    "Qwen3_5ForConditionalGeneration": _qwen("qwen3_5", "qwen.qwen3_5", _QWEN35, "text_config"),
    "Qwen3_5MoeForConditionalGeneration": _qwen("qwen3_5_moe", "qwen.qwen3_5", _QWEN35_MOE, "text_config"),
}
