"""Shapes of the families that mix full attention with attention through a window, for parity tests."""

from __future__ import annotations

from tests.helpers.checkpoints import GEMMA, MINISTRAL_ROPE, SMALL
from tests.parity.cases.case import Case

LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 5e5}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}

LOCAL: dict[str, Case] = {
    "gemma2": ("gemma2", {}),
    "gemma2-mha-bias-uncapped": (
        "gemma2",
        {
            "num_key_value_heads": 4,
            "attention_bias": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "num_hidden_layers": 3,
        },
    ),
    "gemma2-mqa-untied": ("gemma2", {"num_key_value_heads": 1, "tie_word_embeddings": False, "head_dim": 16}),
    "gemma3": ("gemma3_text", {}),
    "gemma3-stretched-capped": (
        "gemma3_text",
        {
            "num_hidden_layers": 7,
            "sliding_window_pattern": 6,
            "final_logit_softcapping": 5.0,
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": PLAIN},
        },
    ),
    "gemma3-mqa-bias": ("gemma3_text", {"num_key_value_heads": 1, "attention_bias": True, "hidden_size": 48}),
    "gemma3-with-vision": ("gemma3", {}),
    "gemma3-with-vision-untied": (
        "gemma3",
        {"tie_word_embeddings": False, "text_config": {**GEMMA, "tie_word_embeddings": False}},
    ),
    "olmo3": ("olmo3", {}),
    "olmo3-stretched": (
        "olmo3",
        {
            "num_key_value_heads": 4,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": {**PLAIN, "rope_theta": 5e5}},
        },
    ),
    "olmo3-mqa-bias-tied": (
        "olmo3",
        {"num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": True, "hidden_size": 48},
    ),
    "ministral": ("ministral", {}),
    "ministral-all-full-wide": (
        "ministral",
        {"layer_types": ["full_attention"] * 2, "head_dim": 16, "num_key_value_heads": 1},
    ),
    "ministral-all-window-tied": (
        "ministral",
        {"layer_types": ["sliding_attention"] * 2, "tie_word_embeddings": True},
    ),
    "ministral3": ("ministral3", {}),
    "ministral3-window-tied": (
        "ministral3",
        {"sliding_window": 9, "tie_word_embeddings": True, "num_key_value_heads": 4},
    ),
    "mistral3": ("mistral3", {}),
    "mistral3-of-ministral3": (
        "mistral3",
        {
            "text_config": {
                **SMALL,
                "num_key_value_heads": 2,
                "model_type": "ministral3",
                "head_dim": 16,
                "rope_parameters": MINISTRAL_ROPE,
            },
        },
    ),
    "cohere2": ("cohere2", {}),
    "cohere2-bias-untied": (
        "cohere2",
        {
            "attention_bias": True,
            "tie_word_embeddings": False,
            "num_key_value_heads": 4,
            "layer_norm_eps": 1e-2,
            "logit_scale": 0.3,
        },
    ),
    "cohere2-four-layers": ("cohere2", {"num_hidden_layers": 4, "sliding_window_pattern": 4, "num_key_value_heads": 1}),
}

# Run by default on the CPU backend.
QUICK: tuple[str, ...] = (
    "gemma2",
    "gemma3-with-vision",
    "gemma3-stretched-capped",
    "olmo3-stretched",
    "ministral",
    "mistral3-of-ministral3",
    "cohere2",
)
