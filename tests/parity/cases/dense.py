"""Shapes of the dense families: which of their options each parity test runs with."""

from __future__ import annotations

from tests.parity.cases.case import Case

LONG, SHORT = [1.0 + 0.5 * i for i in range(4)], [1.0 + 0.1 * i for i in range(4)]
DENSE: dict[str, Case] = {
    # head layouts, tied and untied
    "llama-mha": ("llama", {}),
    "llama-gqa-tied": ("llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama-mqa-wide-heads": ("llama", {"num_key_value_heads": 1, "head_dim": 16}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-2}),
    "llama-gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-relu": ("llama", {"hidden_act": "relu", "vocab_size": 131}),
    # rope kinds
    "llama-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "llama-llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 1e4,
            }
        },
    ),
    "llama-yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 1e4,
            }
        },
    ),
    "qwen3-yarn-mscale": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 1e4,
                "mscale": 0.7,
                "mscale_all_dim": 0.3,
                "beta_fast": 8.0,
                "truncate": False,
            }
        },
    ),
    "llama-longrope": (
        "llama",
        {
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": SHORT,
                "long_factor": LONG,
                "rope_theta": 1e4,
            },
        },
    ),
    # windows
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-bias": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 8}),
    # fused projections, partial rotation
    "phi3": ("phi3", {}),
    "phi3-mha-window": ("phi3", {"num_key_value_heads": 4, "sliding_window": 7, "tie_word_embeddings": True}),
    "phi3-longrope-partial": (
        "phi3",
        {
            "num_key_value_heads": 1,
            "hidden_size": 64,
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": SHORT,
                "long_factor": LONG,
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    # norms after the layers; multipliers; layers that do not rotate
    "olmo2": ("olmo2", {}),
    "olmo2-mha-bias-tied": ("olmo2", {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True}),
    "olmo2-mqa": ("olmo2", {"num_key_value_heads": 1, "rms_norm_eps": 1e-2, "num_hidden_layers": 3}),
    "granite": (
        "granite",
        {
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
        },
    ),
    "granite-defaults-biases": (
        "granite",
        {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "smollm3": ("smollm3", {}),
    "smollm3-window": (
        "smollm3",
        {
            "num_hidden_layers": 3,
            "no_rope_layers": [0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 7,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    # layer norms and rotation, blocks in parallel
    "gpt-neox": ("gpt_neox", {}),
    "gpt-neox-sequence": ("gpt_neox", {"use_parallel_residual": False, "rotary_pct": 1.0, "num_attention_heads": 2}),
    "gpt-neox-tied-no-bias": (
        "gpt_neox",
        {"attention_bias": False, "tie_word_embeddings": True, "hidden_size": 64, "rotary_emb_base": 500},
    ),
    "stablelm": ("stablelm", {}),
    "stablelm-biases": ("stablelm", {"use_qkv_bias": True, "num_key_value_heads": 4, "partial_rotary_factor": 1.0}),
    "stablelm-parallel-head-norms": (
        "stablelm",
        {"use_parallel_residual": True, "qk_layernorm": True, "hidden_size": 64, "layer_norm_eps": 1e-2},
    ),
    "starcoder2": ("starcoder2", {}),
    "starcoder2-window-no-bias": (
        "starcoder2",
        {"sliding_window": 7, "use_bias": False, "num_key_value_heads": 4, "tie_word_embeddings": False},
    ),
    "starcoder2-mqa": ("starcoder2", {"num_key_value_heads": 1, "hidden_size": 48}),
    "cohere": ("cohere", {}),
    "cohere-head-norms": ("cohere", {"use_qk_norm": True, "layer_norm_eps": 1e-2, "logit_scale": 0.3}),
    "cohere-mha-bias-untied": (
        "cohere",
        {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": False, "hidden_size": 48},
    ),
    "gptj": ("gptj", {}),
    "gptj-tied-wide": ("gptj", {"tie_word_embeddings": True, "n_head": 2, "rotary_dim": 10, "n_inner": 40}),
    "falcon": ("falcon", {}),
    "falcon-one-norm-bias": ("falcon", {"num_ln_in_parallel_attn": 1, "bias": True, "num_kv_heads": 4}),
    "falcon-multi-query": ("falcon", {"new_decoder_architecture": False, "hidden_size": 48, "ffn_hidden_size": None}),
    "falcon-rw": (
        "falcon",
        {
            "new_decoder_architecture": False,
            "multi_query": False,
            "num_kv_heads": 4,
            "parallel_attn": False,
            "alibi": True,
            "bias": True,
            "tie_word_embeddings": False,
        },
    ),
    # biases by distance
    "bloom": ("bloom", {}),
    "bloom-six-heads-untied": ("bloom", {"hidden_size": 48, "n_head": 6, "tie_word_embeddings": False}),
    "mpt": ("mpt", {}),
    "mpt-five-heads-scaled": (
        "mpt",
        {"d_model": 40, "n_heads": 5, "attn_config": {"softmax_scale": 0.5}},
    ),
    # learned positions
    "opt": ("opt", {}),
    "opt-post-norm-projected": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 24}),
    "opt-no-bias-no-affine": ("opt", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    "gpt2": ("gpt2", {}),
    "gpt2-scaled": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 40, "tie_word_embeddings": False}),
}

# Families on the same decoders that differ from their models in little.
DENSE |= {
    "gemma": ("gemma", {}),
    "gemma-mqa-bias-untied": (
        "gemma",
        {"num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": False, "hidden_size": 48},
    ),
    "phi": ("phi", {}),
    "phi-gqa-whole-heads-tied": (
        "phi",
        {"num_key_value_heads": 2, "partial_rotary_factor": 1.0, "tie_word_embeddings": True},
    ),
    "olmo": ("olmo", {}),
    "olmo-clipped-bias-tied": ("olmo", {"clip_qkv": 0.5, "attention_bias": True, "tie_word_embeddings": True}),
    "nemotron": ("nemotron", {}),
    "nemotron-biases-wide": (
        "nemotron",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 16, "partial_rotary_factor": 0.25, "norm_eps": 1e-2},
    ),
    "arcee": ("arcee", {}),
    "arcee-biases-tied": ("arcee", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "seed-oss": ("seed_oss", {}),
    "seed-oss-other-biases": (
        "seed_oss",
        {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "ernie4-5": ("ernie4_5", {}),
    "ernie4-5-biases-untied": ("ernie4_5", {"use_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 1}),
    "glm": ("glm", {}),
    "glm-mha-no-bias-tied": (
        "glm",
        {"num_key_value_heads": 4, "attention_bias": False, "tie_word_embeddings": True, "head_dim": 8},
    ),
    "glm4": ("glm4", {}),
    "glm4-mqa-whole-heads": ("glm4", {"num_key_value_heads": 1, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-2}),
    "exaone4": ("exaone4", {}),
    "exaone4-no-window": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2, "head_dim": 16}),
    "hunyuan": ("hunyuan_v1_dense", {}),
    "hunyuan-alpha-bias-tied": (
        "hunyuan_v1_dense",
        {
            "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1e4},
            "attention_bias": True,
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
        },
    ),
}

# Run by default on the CPU backend: one or two of each family, which between them have every feature once.
QUICK = (
    "llama-gqa-tied",
    "llama-biases",
    "llama-llama3",
    "mistral-window",
    "qwen2-window",
    "qwen3-yarn-mscale",
    "phi3-longrope-partial",
    "olmo2",
    "granite",
    "smollm3-window",
    "gpt-neox",
    "stablelm-parallel-head-norms",
    "starcoder2",
    "cohere-head-norms",
    "gptj",
    "falcon",
    "falcon-rw",
    "bloom-six-heads-untied",
    "mpt",
    "opt-post-norm-projected",
    "gpt2-scaled",
    "gemma",
    "phi",
    "olmo-clipped-bias-tied",
    "nemotron",
    "arcee",
    "seed-oss",
    "ernie4-5",
    "glm4",
    "exaone4",
    "hunyuan-alpha-bias-tied",
)

# Run by default on the reference backend as well: those that between them call every op of the backend in every way.
REFERENCE_QUICK = (
    "llama-gqa-tied",
    "qwen2-window",
    "phi3-longrope-partial",
    "cohere-head-norms",
    "gptj",
    "falcon-rw",
    "mpt",
    "opt-post-norm-projected",
    "nemotron",
)
