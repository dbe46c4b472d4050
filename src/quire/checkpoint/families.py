"""What each supported architecture's config.json leaves unsaid: its key names, its defaults, how positions enter.

One row per architecture; `quire.models.registry` names the class for each. The defaults are those of the
architecture's own configuration class, which apply when a folder's config.json omits the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Windows(Enum):
    """Which layers attend through a sliding window."""

    NEVER = "sliding_window has no meaning"
    ALL = "every layer, if sliding_window is set"
    LISTED = "those layer_types names, if use_sliding_window"
    BY_LAYER = "those layer_types or max_window_layers name, if use_sliding_window"


@dataclass(frozen=True, slots=True)
class Family:
    """How to read the config.json of one architecture.

    Attributes:
        model_type: the config's model_type, used when `architectures` is absent.
        defaults: values of keys that may be absent. A key that is present but null stays null.
        keys: our field name -> its key, where they differ.
        rotary: positions enter by rotation; otherwise by a learned table, which bounds the context length.
        rotary_part: key of the share of each head that is rotated, or "rotary_dim", a number of its values; None
            where whole heads are.
        windows: which layers have a sliding window.
    """

    model_type: str
    defaults: Mapping[str, Any]
    keys: Mapping[str, str] = field(default_factory=dict)
    rotary: bool = True
    rotary_part: str | None = None
    windows: Windows = Windows.NEVER


_LLAMA_LIKE = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}
_WINDOW_LAYERS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GPT2_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
    "norm_eps": "layer_norm_epsilon",
}

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", {**_LLAMA_LIKE, "max_position_embeddings": 2048}),
    "MistralForCausalLM": Family(
        "mistral",
        {**_LLAMA_LIKE, "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        windows=Windows.ALL,
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2", {**_LLAMA_LIKE, **_WINDOW_LAYERS, "max_position_embeddings": 32768}, windows=Windows.BY_LAYER
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        {**_LLAMA_LIKE, **_WINDOW_LAYERS, "max_position_embeddings": 32768, "head_dim": 128},
        windows=Windows.BY_LAYER,
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        {
            **_LLAMA_LIKE,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        },
        rotary_part="partial_rotary_factor",
        windows=Windows.ALL,
    ),
    "GPTNeoXForCausalLM": Family(
        "gpt_neox",
        {
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu",
            "tie_word_embeddings": False,
            "max_position_embeddings": 2048,
            "rotary_pct": 0.25,
        },
        {"norm_eps": "layer_norm_eps", "rope_theta": "rotary_emb_base"},
        rotary_part="rotary_pct",
    ),
    "StableLmForCausalLM": Family(
        "stablelm",
        {
            "layer_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "max_position_embeddings": 4096,
            "partial_rotary_factor": 0.25,
        },
        {"norm_eps": "layer_norm_eps"},
        rotary_part="partial_rotary_factor",
    ),
    "Starcoder2ForCausalLM": Family(
        "starcoder2",
        {
            "norm_epsilon": 1e-5,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "max_position_embeddings": 4096,
            "num_key_value_heads": 2,
        },
        {"norm_eps": "norm_epsilon"},
        windows=Windows.ALL,
    ),
    "Olmo2ForCausalLM": Family("olmo2", {**_LLAMA_LIKE, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048}),
    "GraniteForCausalLM": Family("granite", {**_LLAMA_LIKE, "max_position_embeddings": 2048}),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        {
            **_LLAMA_LIKE,
            "tie_word_embeddings": True,
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "rope_theta": 2000000.0,
            "use_sliding_window": False,
        },
        windows=Windows.LISTED,
    ),
    "CohereForCausalLM": Family(
        "cohere",
        {
            "layer_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "max_position_embeddings": 8192,
            "rope_theta": 500000.0,
        },
        {"norm_eps": "layer_norm_eps"},
    ),
    "GPTJForCausalLM": Family(
        "gptj",
        {
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_new",
            "tie_word_embeddings": False,
            "n_positions": 2048,
            "rotary_dim": 64,
        },
        _GPT2_KEYS,
        rotary_part="rotary_dim",
    ),
    "OPTForCausalLM": Family(
        "opt",
        {"layer_norm_eps": 1e-5, "activation_function": "relu", "tie_word_embeddings": True},
        {"intermediate_size": "ffn_dim", "hidden_act": "activation_function", "norm_eps": "layer_norm_eps"},
        rotary=False,
    ),
    "GPT2LMHeadModel": Family(
        "gpt2",
        {"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "tie_word_embeddings": True},
        _GPT2_KEYS,
        rotary=False,
    ),
}
