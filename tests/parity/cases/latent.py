"""Shapes of the families with latent attention, for parity tests."""

from __future__ import annotations

from tests.parity.cases.case import Case

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 32,
}

LATENT: dict[str, Case] = {
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2-lite": (
        "deepseek_v2",
        {"q_lora_rank": None, "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek_v2-groups": (
        "deepseek_v2",
        {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 16.0,
            "first_k_dense_replace": 0,
        },
    ),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3-yarn": (
        "deepseek_v3",
        {
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            "num_hidden_layers": 3,
            "first_k_dense_replace": 2,
            "attention_bias": True,
        },
    ),
    "deepseek_v3-uneven": (
        "deepseek_v3",
        {
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
            "q_lora_rank": None,
            "kv_lora_rank": 33,
            "qk_nope_head_dim": 7,
            "qk_rope_head_dim": 6,
            "v_head_dim": 17,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "hidden_size": 33,
        },
    ),
    "deepseek_v3-one-group": ("deepseek_v3", {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "deepseek_v3-halves": ("deepseek_v3", {"rope_interleave": False, "n_shared_experts": 2}),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "glm4_moe_lite-two-dense": (
        "glm4_moe_lite",
        {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "dense", "sparse"], "tie_word_embeddings": True},
    ),
    "minicpm3": ("minicpm3", {}),
    "minicpm3-no-query-rank": ("minicpm3", {"q_lora_rank": None, "dim_model_base": 16, "num_hidden_layers": 3}),
}

# Run by default, with both backends.
QUICK = ("deepseek_v2-lite", "deepseek_v3")
