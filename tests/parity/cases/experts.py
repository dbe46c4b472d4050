"""Shapes of the families with mixtures of experts, for parity tests."""

from __future__ import annotations

from tests.parity.cases.case import Case

EXPERTS: dict[str, Case] = {
    "mixtral": ("mixtral", {}),
    "mixtral-window": ("mixtral", {"sliding_window": 5, "num_experts_per_tok": 1}),
    "mixtral-all-experts": ("mixtral", {"num_experts_per_tok": 5, "tie_word_embeddings": True}),
    "mixtral-odd": ("mixtral", {"intermediate_size": 20, "vocab_size": 131, "head_dim": 16, "hidden_act": "gelu"}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe-windows": (
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3, "num_hidden_layers": 4},
    ),
    "qwen2_moe-dense-layers": (
        "qwen2_moe",
        {"mlp_only_layers": [3], "decoder_sparse_step": 2, "num_hidden_layers": 4, "norm_topk_prob": True},
    ),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe-eight-of-forty": ("qwen3_moe", {"num_experts": 40, "num_experts_per_tok": 8, "attention_bias": True}),
    "qwen3_moe-window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 6, "mlp_only_layers": [0]}),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss-all-experts": ("gpt_oss", {"num_experts_per_tok": 5}),
    "gpt_oss-listed-layers": (
        "gpt_oss",
        {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "num_hidden_layers": 3,
            "num_experts_per_tok": 4,
            "intermediate_size": 20,
        },
    ),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe-groups": (
        "glm4_moe",
        {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5, "attention_bias": True},
    ),
    "glm4_moe-two-shared": (
        "glm4_moe",
        {"n_shared_experts": 2, "use_qk_norm": False, "norm_topk_prob": False, "first_k_dense_replace": 0},
    ),
    "olmoe": ("olmoe", {}),
    "olmoe-renormalized": ("olmoe", {"norm_topk_prob": True, "num_experts_per_tok": 3}),
    "granitemoe": ("granitemoe", {}),
    "granitemoe-multipliers": (
        "granitemoe",
        {
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.5,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "tie_word_embeddings": True,
        },
    ),
    "ernie4_5_moe": ("ernie4_5_moe", {}),
    "ernie4_5_moe-some-layers": (
        "ernie4_5_moe",
        {
            "num_hidden_layers": 5,
            "moe_layer_interval": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 3,
            "moe_num_shared_experts": 1,
            "tie_word_embeddings": False,
        },
    ),
    "minimax_m2": ("minimax_m2", {}),
    "minimax_m2-partly-rotated": (
        "minimax_m2",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
}

# Run by default, with both backends.
QUICK = ("mixtral", "qwen2_moe", "gpt_oss", "glm4_moe-groups")
