"""Tiny random checkpoints in the Hugging Face layout, written by transformers, for any test that needs a model folder.

The weights are large enough (standard deviation 0.2, norm scales between 0.5 and 1.5) that logits are well apart and
that a wrong norm, bias or head order shows. transformers and torch are imported only when a checkpoint is written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

SMALL = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2 = {
    "vocab_size": 160,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA = {**SMALL, "num_key_value_heads": 2, "head_dim": 12, "query_pre_attn_scalar": 20}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
DELTA = {
    **SMALL,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    # With a smaller one, what a random query finds may be next to nothing, and its norm is mostly rounding.
    "rms_norm_eps": 1e-2,
}
# transformers computes whole prompts in a form that takes differences of long sums and strays by 1e-5 from its own
# token by token.
STEPWISE = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe")
DELTA_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
DELTA_MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXTURE = {**SMALL, "num_key_value_heads": 2, "num_experts_per_tok": 2}
LATENT = {
    **SMALL,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
LATENT_MIXTURE = {**LATENT, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "mistral": {**SMALL, "num_key_value_heads": 2, "sliding_window": None},
    "qwen2": {**SMALL, "num_key_value_heads": 2},
    "qwen3": {**SMALL, "num_key_value_heads": 2, "head_dim": 16},
    "phi3": {**SMALL, "num_key_value_heads": 2},
    "gpt_neox": SMALL,
    "stablelm": {**SMALL, "num_key_value_heads": 2},
    "starcoder2": {**SMALL, "num_key_value_heads": 2},
    "olmo2": {**SMALL, "num_key_value_heads": 2},
    "granite": {**SMALL, "num_key_value_heads": 2},
    "smollm3": {**SMALL, "num_key_value_heads": 2, "no_rope_layer_interval": 2},
    "cohere": {**SMALL, "num_key_value_heads": 2},
    "gptj": {**GPT2, "rotary_dim": 4},
    "falcon": {**SMALL, "ffn_hidden_size": 48, "num_kv_heads": 2, "new_decoder_architecture": True},
    "bloom": {"vocab_size": 160, "hidden_size": 32, "n_layer": 2, "n_head": 4, "seq_length": 256},
    "mpt": {"vocab_size": 160, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 256},
    "opt": {**{k: v for k, v in SMALL.items() if k != "intermediate_size"}, "ffn_dim": 48},
    "gpt2": GPT2,
    "gemma": {**SMALL, "num_key_value_heads": 2, "head_dim": 12},
    "phi": SMALL,
    "olmo": {**SMALL, "num_key_value_heads": 2},
    "nemotron": {**SMALL, "num_key_value_heads": 2},
    "arcee": {**SMALL, "num_key_value_heads": 2},
    "seed_oss": {**SMALL, "num_key_value_heads": 2, "head_dim": 16},
    "ernie4_5": {**SMALL, "num_key_value_heads": 2, "head_dim": 16},
    "glm": {**SMALL, "num_key_value_heads": 2, "head_dim": 16},
    "glm4": {**SMALL, "num_key_value_heads": 2, "head_dim": 16},
    "exaone4": {**SMALL, "num_key_value_heads": 2, "sliding_window": 7, "sliding_window_pattern": 2},
    "hunyuan_v1_dense": {**SMALL, "num_key_value_heads": 2, "head_dim": 8},
    "gemma2": {**GEMMA, "sliding_window": 7, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    "gemma3_text": {**GEMMA, "sliding_window": 7, "sliding_window_pattern": 2},
    "gemma3": {
        "text_config": {**GEMMA, "sliding_window": 7, "sliding_window_pattern": 2},
        "vision_config": {**VISION, "model_type": "siglip_vision_model"},
    },
    "olmo3": {**SMALL, "num_key_value_heads": 2, "sliding_window": 7, "num_hidden_layers": 4},
    "ministral": {
        **SMALL,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "ministral3": {**SMALL, "num_key_value_heads": 2, "head_dim": 16, "rope_parameters": MINISTRAL_ROPE},
    "mistral3": {
        "text_config": {**SMALL, "num_key_value_heads": 2, "model_type": "mistral", "sliding_window": None},
        "vision_config": {**VISION, "model_type": "pixtral"},
    },
    "mixtral": {**MIXTURE, "num_local_experts": 5},
    "qwen2_moe": {
        **MIXTURE,
        "num_experts": 6,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3_moe": {**MIXTURE, "num_experts": 8, "moe_intermediate_size": 24, "head_dim": 16},
    "gpt_oss": {
        **MIXTURE,
        "num_local_experts": 5,
        "head_dim": 16,
        "sliding_window": 7,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "glm4_moe": {**MIXTURE, "n_routed_experts": 8, "moe_intermediate_size": 16, "head_dim": 16, "use_qk_norm": True},
    "olmoe": {**MIXTURE, "num_experts": 8},
    "granitemoe": {**MIXTURE, "num_local_experts": 5},
    "ernie4_5_moe": {**MIXTURE, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 16},
    "minimax_m2": {**MIXTURE, "num_local_experts": 6, "head_dim": 16},
    "qwen3_next": {**DELTA, **DELTA_MIXTURE, "shared_expert_intermediate_size": 24},
    "qwen3_5_text": DELTA,
    "qwen3_5": {"text_config": DELTA, "vision_config": DELTA_VISION},
    "qwen3_5_moe": {
        "text_config": {**DELTA, **DELTA_MIXTURE, "shared_expert_intermediate_size": 24},
        "vision_config": DELTA_VISION,
    },
    "lfm2_moe": {
        **MIXTURE,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "num_experts": 6,
        "moe_intermediate_size": 16,
    },
    "lfm2": {
        **SMALL,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "block_multiple_of": 4,
    },
    "qwen3_5_moe_text": {**DELTA, **DELTA_MIXTURE, "shared_expert_intermediate_size": 24},
    "deepseek_v2": {**LATENT_MIXTURE, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "deepseek_v3": {
        **LATENT_MIXTURE,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
    },
    "glm4_moe_lite": {**LATENT_MIXTURE, "qk_nope_head_dim": 16, "v_head_dim": 24},
    "minicpm3": {**LATENT, "tie_word_embeddings": True},
    "cohere2": {**SMALL, "num_key_value_heads": 2, "sliding_window": 7, "sliding_window_pattern": 2},
}

# Of these, those that stand for the others: whose layers, names or inputs are not those of one before.
DISTINCT = (
    *(
        "llama",
        "phi3",
        "olmo2",
        "gemma2",
        "gemma3",
        "ministral3",
        "hunyuan_v1_dense",
        "olmo",
        "falcon",
        "bloom",
        "gptj",
    ),
    *("opt", "gpt2", "mixtral", "qwen2_moe", "gpt_oss", "qwen3_next", "lfm2", "deepseek_v3", "minicpm3"),
)


def family_parameters() -> list[Any]:
    """Return all families as parameters of a test; those that are like another one are slow."""
    return [pytest.param(name, marks=() if name in DISTINCT else (pytest.mark.slow,)) for name in FAMILIES]


def write_checkpoint(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str = "1GB",
    **config: Any,
) -> Path:
    """Write a random model of `family` (a key of FAMILIES) into `folder` and return it.

    `config` changes or adds keys of its config.json; `max_shard_size` below the model's size makes several files.
    """
    import torch
    import transformers

    torch.set_num_threads(1)  # more of them only wait for each other on matrices this small
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    settings = transformers.AutoConfig.for_model(family, **{**FAMILIES[family], **config})
    model = _auto_class(settings).from_config(settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2, generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.uniform_(-0.2, 0.2, generator=generator)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def _auto_class(config: Any) -> Any:
    """Return the factory of transformers that makes models which write texts with this configuration."""
    import transformers

    sees = getattr(config, "vision_config", None) is not None
    return transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM


def load_oracle(folder: Path, dtype: str = "float32") -> Any:
    """Return transformers' eager model of a folder."""
    import torch
    import transformers

    torch.set_num_threads(1)
    # With ALiBi, transformers' eager Falcon adds the bias twice: in the mask, and in each layer. Its sdpa adds it once.
    config = transformers.AutoConfig.from_pretrained(folder)
    attention = "sdpa" if config.model_type == "falcon" and config.alibi else "eager"
    options = {"attn_implementation": attention, "experts_implementation": "eager", "dtype": getattr(torch, dtype)}
    return _auto_class(config).from_pretrained(folder, **options).eval()


def logits_of(oracle: Any, token_ids: list[int]) -> Any:
    """Return float32 numpy [len(token_ids), vocab] logits of a model from `load_oracle` for one sequence."""
    import torch

    with torch.no_grad():
        if oracle.config.model_type not in STEPWISE:
            return oracle(torch.tensor([token_ids])).logits[0].float().numpy()
        cache, rows = None, []
        for token in token_ids:
            step = oracle(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            rows.append(step.logits[0, 0].float().numpy())
        return np.stack(rows)


def oracle_logits(folder: Path, token_ids: list[int]) -> Any:
    """Return float32 numpy [len(token_ids), vocab] logits of transformers' eager float32 model for one sequence."""
    return logits_of(load_oracle(folder), token_ids)


# What follows needs neither torch nor transformers: folders for tests of loading, where the values do not matter.

PLAIN_CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SMALL}


def plain_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Return float32 tensors, by name, that fit PLAIN_CONFIG."""
    hidden, inner, vocab = SMALL["hidden_size"], SMALL["intermediate_size"], SMALL["vocab_size"]
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    for layer in range(SMALL["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"{at}self_attn.{name}.weight"] = (hidden, hidden)
        shapes[f"{at}mlp.gate_proj.weight"] = shapes[f"{at}mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{at}mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{at}input_layernorm.weight"] = shapes[f"{at}post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    rng = np.random.default_rng(seed)
    return {name: (rng.standard_normal(shape) * 0.2).astype(np.float32) for name, shape in shapes.items()}


def safetensors_bytes(tensors: dict[str, np.ndarray]) -> bytes:
    """Return the bytes of a float32 safetensors file."""
    header, data = {}, b""
    for name, array in tensors.items():
        raw = array.astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def write_plain(folder: Path, tensors: dict[str, np.ndarray] | None = None, **config: Any) -> Path:
    """Write a tiny Llama: `config` over PLAIN_CONFIG and `tensors`, or those that fit PLAIN_CONFIG."""
    (folder / "config.json").write_text(json.dumps({**PLAIN_CONFIG, **config}))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(plain_tensors() if tensors is None else tensors))
    return folder
