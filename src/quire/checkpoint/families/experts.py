"""Decoders whose feed-forward layers are mixtures of experts."""

from __future__ import annotations

from typing import Any

from quire.checkpoint.families.family import LLAMA_LIKE, Family, Windows
from quire.checkpoint.files import Fields


def _qwen2_layers(fields: Fields) -> dict[str, Any]:
    """With windows, every other layer below max_window_layers has one, unless layer_types says otherwise."""
    if not fields.flag("use_sliding_window"):
        return {"sliding_window": None}  # it may be 0
    if fields.values.get("layer_types") is not None:
        return {}
    last = fields.integer("max_window_layers")
    layers = range(fields.integer("num_hidden_layers", low=1, high=4096))
    kinds = ["sliding_attention" if i < last and i % 2 == 0 else "full_attention" for i in layers]
    return {"layer_types": kinds}


def _qwen3_names(fields: Fields) -> dict[str, Any]:
    """Experts are counted under one of two names; all layers have a window, or none has."""
    found: dict[str, Any] = {}
    if fields.values.get("num_experts") is None:
        found["num_experts"] = fields.integer("num_local_experts", 128)
    if not fields.flag("use_sliding_window"):
        found["sliding_window"] = None
    return found


def _gpt_oss_layers(fields: Fields) -> dict[str, Any]:
    """Layers have a window in turn, the first one first."""
    if fields.values.get("layer_types") is not None:
        return {}
    layers = range(fields.integer("num_hidden_layers", low=1, high=4096))
    return {"layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in layers]}


def _minimax_rotation(fields: Fields) -> dict[str, Any]:
    """Published files give the rotated part of a head as a number of its values."""
    part, size = fields.integer("rotary_dim", None, low=2), fields.integer("head_dim", low=2)
    return {} if part is None or "rope_parameters" in fields.values else {"partial_rotary_factor": part / size}


EXPERTS: dict[str, Family] = {
    "MixtralForCausalLM": Family(
        "mixtral",
        {
            **LLAMA_LIKE,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rope_theta": 1e6,
        },
        windows=Windows.ALL,
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe",
        {
            **LLAMA_LIKE,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        windows=Windows.LISTED,
        derive=_qwen2_layers,
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        {
            **LLAMA_LIKE,
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        windows=Windows.ALL,
        derive=_qwen3_names,
    ),
    "GptOssForCausalLM": Family(
        "gpt_oss",
        {
            **LLAMA_LIKE,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "use_sliding_window": True,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        windows=Windows.LISTED,
        derive=_gpt_oss_layers,
    ),
    "Glm4MoeForCausalLM": Family(
        "glm4_moe",
        {
            **LLAMA_LIKE,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
        },
        rotary_part="partial_rotary_factor",
    ),
    "OlmoeForCausalLM": Family(
        "olmoe",
        {
            **LLAMA_LIKE,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
    ),
    "GraniteMoeForCausalLM": Family(
        "granitemoe",
        {**LLAMA_LIKE, "max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        "ernie4_5_moe",
        {
            **LLAMA_LIKE,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 4,
            "moe_num_experts": 64,
            "moe_k": 6,
            "moe_intermediate_size": 1536,
        },
    ),
    "MiniMaxM2ForCausalLM": Family(
        "minimax_m2",
        {
            **LLAMA_LIKE,
            "max_position_embeddings": 196608,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "rope_theta": 5e6,
        },
        rotary_part="partial_rotary_factor",
        derive=_minimax_rotation,
    ),
}
