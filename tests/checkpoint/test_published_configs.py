"""config.json in the manner of published models: older keys, keys nobody reads, nulls. Only what decides is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.checkpoint.hf_config import load_model_info

SHAPE = {"hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 32, "vocab_size": 1000}
ALIKE = {**SHAPE, "intermediate_size": 8192}
ATTENTION = {"alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "clip_qkv": None, "softmax_scale": None}
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Phi-4-mini": (
        {
            "architectures": ["Phi3ForCausalLM"],
            "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
            **ALIKE,
            "hidden_size": 3072,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2] * 48},
            "sliding_window": 262144,
            "tie_word_embeddings": True,
        },
        {"rotary_dim": 96, "max_model_len": 4096, "longest_model_len": 131072, "head_dim": 128},
    ),
    "Pythia": (
        {
            "architectures": ["GPTNeoXForCausalLM"],
            **ALIKE,
            "max_position_embeddings": 2048,
            "rotary_emb_base": 10000,
            "rotary_pct": 0.25,
            "use_parallel_residual": True,
        },
        {"rotary_dim": 16, "norm_eps": 1e-5, "hidden_act": "gelu", "num_key_value_heads": 32},
    ),
    "StarCoder2": (
        {
            "architectures": ["Starcoder2ForCausalLM"],
            **ALIKE,
            "activation_function": "gelu",
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": 1e-5,
            "norm_type": "layer_norm",
            "num_key_value_heads": 2,
            "max_position_embeddings": 16384,
            "rope_theta": 999999.4420358813,
            "sliding_window": 4096,
        },
        {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "layer_windows": (4096,) * 4},
    ),
    "SmolLM3": (
        {
            "architectures": ["SmolLM3ForCausalLM"],
            **ALIKE,
            "layer_types": ["full_attention"] * 4,
            "max_position_embeddings": 65536,
            "max_window_layers": 28,
            "no_rope_layers": [1, 1, 1, 0],
            "num_key_value_heads": 4,
            "rope_scaling": None,
            "rope_theta": 5000000.0,
            "sliding_window": None,
            "use_sliding_window": False,
        },
        {"layer_windows": (None,) * 4, "max_model_len": 65536, "tie_word_embeddings": True},
    ),
    "GPT-J": (
        {
            "architectures": ["GPTJForCausalLM"],
            "n_embd": 4096,
            "n_head": 16,
            "n_inner": None,
            "n_layer": 28,
            "n_positions": 2048,
            "rotary": True,
            "rotary_dim": 64,
            "vocab_size": 50400,
        },
        {"rotary_dim": 64, "intermediate_size": 16384, "hidden_act": "gelu_new", "tie_word_embeddings": False},
    ),
    "Falcon-7B": (
        {
            "architectures": ["FalconForCausalLM"],
            **SHAPE,
            "hidden_size": 4544,
            "num_attention_heads": 71,
            "alibi": False,
            "apply_residual_connection_post_layernorm": False,
            "multi_query": True,
            "new_decoder_architecture": False,
            "parallel_attn": True,
        },
        {"num_key_value_heads": 1, "head_dim": 64, "intermediate_size": 18176, "rotary_dim": 64},
    ),
    "BLOOM": (
        {
            "architectures": ["BloomForCausalLM"],
            "masked_softmax_fusion": True,
            "n_embed": 1024,
            "n_inner": None,
            "n_layer": 24,
            "num_attention_heads": 16,
            "offset_alibi": 100,
            "seq_length": 2048,
            "vocab_size": 250880,
        },
        {"hidden_size": 1024, "intermediate_size": 4096, "num_key_value_heads": 16, "rotary_dim": None},
    ),
    "MPT": (
        {
            "architectures": ["MPTForCausalLM"],
            "auto_map": {"AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM"},
            "attn_config": ATTENTION,
            "d_model": 4096,
            "expansion_ratio": 4,
            "learned_pos_emb": True,
            "logit_scale": None,
            "max_seq_len": 2048,
            "n_heads": 32,
            "n_layers": 32,
            "no_bias": True,
            "norm_type": "low_precision_layernorm",
            "vocab_size": 50432,
        },
        {"architecture": "MptForCausalLM", "intermediate_size": 16384, "max_model_len": 2048, "hidden_act": "gelu"},
    ),
    "Mixtral-8x7B": (
        {
            "architectures": ["MixtralForCausalLM"],
            **ALIKE,
            "max_position_embeddings": 32768,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "rope_theta": 1000000.0,
            "sliding_window": None,
        },
        {"layer_windows": (None,) * 4, "max_model_len": 32768, "norm_eps": 1e-5},
    ),
    "Qwen3-30B-A3B": (
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            **ALIKE,
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "max_window_layers": 48,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_key_value_heads": 4,
            "max_position_embeddings": 40960,
            "rope_scaling": None,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "use_sliding_window": False,
        },
        {"layer_windows": (None,) * 4, "head_dim": 128, "rotary_dim": 128, "num_key_value_heads": 4},
    ),
    "gpt-oss-20b": (
        {
            "architectures": ["GptOssForCausalLM"],
            **ALIKE,
            "experts_per_token": 4,
            "head_dim": 64,
            "initial_context_length": 4096,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
            "rope_theta": 150000,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
        },
        {"layer_windows": (128, None, 128, None), "max_model_len": 131072, "head_dim": 64},
    ),
    "GLM-4.5-Air": (
        {
            "architectures": ["Glm4MoeForCausalLM"],
            **ALIKE,
            "attention_bias": True,
            "first_k_dense_replace": 1,
            "head_dim": 128,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "n_routed_experts": 128,
            "num_key_value_heads": 8,
            "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 0.5,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "topk_group": 1,
        },
        {"head_dim": 128, "rotary_dim": 64, "max_model_len": 131072},
    ),
    "MiniMax-M2": (
        {
            "architectures": ["MiniMaxM2ForCausalLM"],
            "auto_map": {"AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM"},
            **ALIKE,
            "head_dim": 128,
            "max_position_embeddings": 196608,
            "num_key_value_heads": 8,
            "num_local_experts": 256,
            "rope_theta": 5000000,
            "rotary_dim": 64,
            "use_qk_norm": True,
        },
        {"head_dim": 128, "rotary_dim": 64, "layer_windows": (None,) * 4},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_understood(name: str, tmp_path: Path) -> None:
    config, expected = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    info = load_model_info(tmp_path)
    found = {key: getattr(info, key) for key in expected if key != "rotary_dim"}
    if "rotary_dim" in expected:
        found["rotary_dim"] = info.rope.rotary_dim if info.rope else None
    assert found == expected
