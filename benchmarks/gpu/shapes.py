"""Published shapes of models, whose weights are made up: what config.json says of them, and what a step has to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.engine.resolve import load_info, resolve_config
from quire.worker.footprint import Footprint, StepWork

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 128001,
    "bos_token_id": 128000,
}
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
    "bos_token_id": 151643,
}
QWEN3_30B_A3B = {
    **QWEN3_06B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
SHAPES = {"llama-3.1-8b": LLAMA_8B, "qwen3-0.6b": QWEN3_06B, "qwen3-30b-a3b": QWEN3_30B_A3B}
SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 96, "head_dim": 16}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "eos_token_id": 1, "bos_token_id": 0}
SMALL_MIXTURE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}


def shape_of(name: str, *, small: bool = False) -> dict[str, Any]:
    """Return what config.json says of a shape; `small`: of a toy of the same family."""
    shape: dict[str, Any] = dict(SHAPES[name])
    if small:
        shape |= SMALL | {key: value for key, value in SMALL_MIXTURE.items() if key in shape}
    return shape


def write_config(name: str, folder: Path, *, small: bool = False) -> Path:
    """Write config.json of a shape, or a toy, into a folder of its own and return that."""
    target = folder / (f"{name}-small" if small else name)
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(shape_of(name, small=small), indent=1))
    return target


def work_of(config: EngineConfig) -> tuple[StepWork, int]:
    """Return what steps of a model read and compute, and the bytes that a token takes in the cache of all layers."""
    info = load_info(config)
    resolved = resolve_config(config, info)
    footprint = Footprint(resolved, info)
    assert resolved.model.max_model_len is not None
    block = footprint.spec.block_bytes(resolved.cache.block_size, resolved.model.max_model_len)
    return footprint.work(resolved.cache.block_size), block // resolved.cache.block_size
