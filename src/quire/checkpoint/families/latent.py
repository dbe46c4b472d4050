"""Decoders with multi-head latent attention."""

from __future__ import annotations

from typing import Any

from quire.checkpoint.families.family import Family, family, num_layers
from quire.checkpoint.files import ConfigFields


def _rotated_part(fields: ConfigFields) -> dict[str, Any]:
    """Return qk_rope_head_dim as `head_dim`, from which the rotary table is made."""
    return {"head_dim": fields.integer("qk_rope_head_dim", low=2, high=2**16)}


def _glm_layers(fields: ConfigFields) -> dict[str, Any]:
    """Return first_k_dense_replace, from mlp_layer_types if the file has them."""
    layers, first = num_layers(fields), 1
    if fields.values.get("mlp_layer_types") is not None:
        types = fields.names("mlp_layer_types", layers, ("dense", "sparse"))
        first = types.index("sparse") if "sparse" in types else layers
        if "dense" in types[first:]:
            raise fields.error("mlp_layer_types", "dense layers before sparse ones only")
    return {**_rotated_part(fields), "first_k_dense_replace": first, "moe_layer_freq": 1}


_DEEPSEEK = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}

LATENT: dict[str, Family] = {
    "DeepseekV2ForCausalLM": family(
        "deepseek_v2",
        "deepseek.deepseek_v2",
        _DEEPSEEK,
        max_position_embeddings=2048,
        n_routed_experts=64,
        n_shared_experts=2,
        q_lora_rank=1536,
        moe_intermediate_size=1407,
        derive=_rotated_part,
    ),
    "DeepseekV3ForCausalLM": family(
        "deepseek_v3",
        "deepseek.deepseek_v3",
        _DEEPSEEK,
        max_position_embeddings=4096,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        q_lora_rank=1536,
        moe_intermediate_size=2048,
        first_k_dense_replace=3,
        routed_scaling_factor=2.5,
        derive=_rotated_part,
    ),
    "Glm4MoeLiteForCausalLM": family(
        "glm4_moe_lite",
        "deepseek.deepseek_v3",
        _DEEPSEEK,
        rms_norm_eps=1e-5,
        max_position_embeddings=202752,
        n_routed_experts=64,
        n_shared_experts=1,
        num_experts_per_tok=4,
        q_lora_rank=768,
        qk_nope_head_dim=192,
        v_head_dim=256,
        moe_intermediate_size=1536,
        routed_scaling_factor=1.8,
        derive=_glm_layers,
    ),
    "MiniCPM3ForCausalLM": family(
        "minicpm3",
        "deepseek.minicpm3",
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        q_lora_rank=768,
        kv_lora_rank=256,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        scale_emb=12,
        scale_depth=1.4,
        dim_model_base=256,
        derive=_rotated_part,
    ),
}
