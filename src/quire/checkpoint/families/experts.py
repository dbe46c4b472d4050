"""Decoders whose feed-forward layers are mixtures of experts."""

from __future__ import annotations

from typing import Any

from quire.checkpoint.families.family import Family, Windows, family, layer_types
from quire.checkpoint.files import ConfigFields


def _qwen2_layers(fields: ConfigFields) -> dict[str, Any]:
    """Return layer types: with use_sliding_window, every other layer below max_window_layers has a window."""
    if not fields.flag("use_sliding_window"):
        return {"sliding_window": None}  # it may be 0
    return layer_types(fields, lambda layer: layer < fields.integer("max_window_layers") and layer % 2 == 0)


def _qwen3_names(fields: ConfigFields) -> dict[str, Any]:
    """Read the number of experts under either key, and drop the window without use_sliding_window."""
    found: dict[str, Any] = {}
    if fields.values.get("num_experts") is None:
        found["num_experts"] = fields.integer("num_local_experts", 128)
    if not fields.flag("use_sliding_window"):
        found["sliding_window"] = None
    return found


def _gpt_oss_layers(fields: ConfigFields) -> dict[str, Any]:
    """Return layer types that alternate, beginning with a window."""
    return layer_types(fields, lambda layer: layer % 2 == 0)


def _minimax_rotation(fields: ConfigFields) -> dict[str, Any]:
    """Convert rotary_dim of published files into a share of the head."""
    part, size = fields.integer("rotary_dim", None, low=2), fields.integer("head_dim", low=2)
    return {} if part is None or "rope_parameters" in fields.values else {"partial_rotary_factor": part / size}


EXPERTS: dict[str, Family] = {
    "MixtralForCausalLM": family(
        "mixtral",
        "mistral.mixtral",
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        rope_theta=1000000.0,
        windows=Windows.ALL,
    ),
    "Qwen2MoeForCausalLM": family(
        "qwen2_moe",
        "qwen.qwen2_moe",
        max_position_embeddings=32768,
        use_sliding_window=False,
        sliding_window=4096,
        max_window_layers=28,
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        windows=Windows.LISTED,
        derive=_qwen2_layers,
    ),
    "Qwen3MoeForCausalLM": family(
        "qwen3_moe",
        "qwen.qwen3_moe",
        max_position_embeddings=32768,
        num_key_value_heads=4,
        use_sliding_window=False,
        sliding_window=4096,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        windows=Windows.ALL,
        derive=_qwen3_names,
    ),
    "GptOssForCausalLM": family(
        "gpt_oss",
        "llama.gpt_oss",
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        num_key_value_heads=8,
        head_dim=64,
        use_sliding_window=True,
        sliding_window=128,
        num_local_experts=128,
        num_experts_per_tok=4,
        rope_theta=150000.0,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        windows=Windows.LISTED,
        derive=_gpt_oss_layers,
    ),
    "Glm4MoeForCausalLM": family(
        "glm4_moe",
        "glm.glm4_moe",
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        num_key_value_heads=8,
        partial_rotary_factor=0.5,
        n_routed_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
    ),
    "OlmoeForCausalLM": family(
        "olmoe", "olmo.olmoe", max_position_embeddings=4096, rms_norm_eps=1e-5, num_experts=64, num_experts_per_tok=8
    ),
    "GraniteMoeForCausalLM": family(
        "granitemoe", "granite.granite_moe", max_position_embeddings=2048, num_local_experts=8, num_experts_per_tok=2
    ),
    "Ernie4_5_MoeForCausalLM": family(
        "ernie4_5_moe",
        "llama.ernie_moe",
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        num_key_value_heads=4,
        moe_num_experts=64,
        moe_k=6,
        moe_intermediate_size=1536,
    ),
    "MiniMaxM2ForCausalLM": family(
        "minimax_m2",
        "llama.minimax_m2",
        max_position_embeddings=196608,
        num_key_value_heads=8,
        head_dim=128,
        num_local_experts=256,
        num_experts_per_tok=8,
        rope_theta=5000000.0,
        rotary_part="partial_rotary_factor",
        derive=_minimax_rotation,
    ),
}
