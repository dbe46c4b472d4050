"""Shapes of the families with layers that keep a state, for parity tests."""

from __future__ import annotations

from tests.parity.cases.case import Case

FULL, LINEAR = "full_attention", "linear_attention"
HYBRID: dict[str, Case] = {
    "qwen3-next": ("qwen3_next", {}),
    "qwen3-next-linear-last": (
        "qwen3_next",
        {
            "layer_types": [FULL, LINEAR, LINEAR],
            "num_hidden_layers": 3,
            "linear_num_value_heads": 2,
            "linear_value_head_dim": 70,
            "linear_conv_kernel_dim": 3,
            "mlp_only_layers": [1],
            "tie_word_embeddings": True,
            "attention_bias": True,
            "norm_topk_prob": False,
        },
    ),
    "qwen3.5": ("qwen3_5_text", {}),
    "qwen3.5-wide-heads-tied": (
        "qwen3_5_text",
        {
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 64,
            "tie_word_embeddings": True,
            "partial_rotary_factor": 0.5,
        },
    ),
    "qwen3.5-moe": ("qwen3_5_moe_text", {}),
    "qwen3.5-with-vision": ("qwen3_5", {}),
    "qwen3.5-moe-with-vision": ("qwen3_5_moe", {}),
    "lfm2": ("lfm2", {}),
    "lfm2-moe": ("lfm2_moe", {"routed_scaling_factor": 1.5}),
    "lfm2-moe-no-bias": ("lfm2_moe", {"use_expert_bias": False, "norm_topk_prob": False}),
    "lfm2-bias-untied": (
        "lfm2",
        {
            "conv_bias": True,
            "conv_L_cache": 5,
            "layer_types": [FULL, "conv", FULL],
            "tie_word_embeddings": False,
            "block_auto_adjust_ff_dim": False,
        },
    ),
}

# Run by default, with both backends.
QUICK: tuple[str, ...] = ("qwen3-next", "qwen3.5-wide-heads-tied", "lfm2")
