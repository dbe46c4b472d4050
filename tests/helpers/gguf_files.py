"""GGUF files of tiny models, written by the package `gguf`: the same weights as a transformers folder, in any type.

Names come from the package's own tables. What llama.cpp's converters do to some tensors (`_stored`) is written from
their description: rotated pairs side by side, norms of Gemma with 1 added, queries, keys and values apart, experts
stacked. Needs torch, transformers and gguf, which are imported only when a file is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quire.checkpoint.safetensors import open_safetensors

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
    "gpt2": "gpt2",
    "gpt_neox": "gptneox",
    "olmo2": "olmo2",
    "granite": "granite",
    "smollm3": "smollm3",
    "cohere": "command-r",
}
ROTATED = ("llama", "granite", "smollm3")
Choose = Callable[[str, np.ndarray], str]


def write_gguf(
    folder: Path, file: Path, kind: str | Choose = "F32", extra: Mapping[str, Any] | None = None
) -> dict[str, np.ndarray]:
    """Write the model of a transformers folder into `file`; return its weights as they can be had back, by HF name.

    `kind` is the type of matrices, or a function of stored name and values. `extra`: further metadata, key -> value.
    """
    import gguf

    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(file, architecture)
    _add_config(writer, config)
    for key, value in (extra or {}).items():
        _add(writer, key, value)
    stored_tensors = open_safetensors(folder).tensors
    tensors = {name: np.array(stored.read().to_float32()) for name, stored in stored_tensors.items()}
    back = {}
    names = gguf.get_tensor_name_map(_enum(architecture), config.get("num_hidden_layers") or config["n_layer"])
    for name, value in _stacked(tensors, config).items():
        stored_name = _stored_name(names, name)
        stored, undo = _stored(architecture, name, value.astype(np.float32), config)
        chosen = (kind if isinstance(kind, str) else kind(stored_name, stored)) if stored.ndim > 1 else "F32"
        if "ffn_gate_inp" in stored_name:
            chosen = "F32"
        data, found = quantized(np.ascontiguousarray(stored), chosen)
        writer.add_tensor(stored_name, data, raw_dtype=gguf.GGMLQuantizationType[chosen])
        back.update(_unstacked(name, undo(found), tensors))
    finish(writer)
    return back


def finish(writer: Any) -> None:
    """Write everything that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tokenizer(folder: Path, file: Path, model: str, /, **metadata: Any) -> Path:
    """Write a GGUF file with nothing but the tokenizer of tokenizer.json in a folder; `metadata` without prefix."""
    import gguf

    writer = gguf.GGUFWriter(file, "llama")
    for key, value in {**tokenizer_metadata(folder, model), **metadata}.items():
        _add(writer, key if "." in key else f"tokenizer.ggml.{key}", value)
    finish(writer)
    return file


def tokenizer_metadata(folder: Path, model: str) -> dict[str, Any]:
    """Return what of tokenizer.json goes into a GGUF file."""
    stored = json.loads((folder / "tokenizer.json").read_text())
    added = {item["id"]: item for item in stored["added_tokens"]}
    vocab = {**stored["model"]["vocab"], **{item["content"]: index for index, item in added.items()}}
    tokens = sorted(vocab, key=vocab.__getitem__)
    types = [(3 if added[vocab[text]]["special"] else 4) if vocab[text] in added else 1 for text in tokens]
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in stored["model"]["merges"]]
    names = {"model": model, "tokens": tokens, "token_type": types, "merges": merges}
    return {f"tokenizer.ggml.{key}": value for key, value in names.items()}


def quantized(values: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of a matrix in a type, and the float32 values that they stand for."""
    import gguf

    chosen = gguf.GGMLQuantizationType[kind]
    if kind == "F32":
        return values, values
    if kind in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"):  # which the package can read only
        data = random_blocks(kind, values.shape, seed=values.size)
    else:
        data = gguf.quants.quantize(values, chosen)
    return data, gguf.quants.dequantize(data, chosen).reshape(values.shape)


def random_blocks(kind: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return random blocks of a type, with scales that make weights of about 0.2."""
    import gguf

    size, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // size, nbytes), dtype=np.uint8)
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind]
    scale = {"Q2_K": 0.01, "Q3_K": 0.004, "Q4_K": 0.0007, "Q5_K": 0.0004, "Q6_K": 0.0001}[kind]
    for place in places:
        scales = rng.uniform(0.5 * scale, scale, blocks.shape[:-1]).astype(np.float16)
        blocks[..., place : place + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def _enum(architecture: str) -> Any:
    import gguf

    return next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)


def _stored_name(names: Any, name: str) -> str:
    found: str | None = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def _stacked(tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the tensors with experts one on the other, gate and up apart."""
    found: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = np.split(value, 2, axis=1)
            found[name.replace("gate_up_proj", "gate_proj.weight")] = gate
            found[name.replace("gate_up_proj", "up_proj.weight")] = up
        elif name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = value
        elif ".experts." in name:
            before, _, rest = name.partition(".experts.")
            number, _, part = rest.partition(".")
            if number == "0":
                count = sum(f"{before}.experts.{e}.{part}" in tensors for e in range(1000))
                parts = [tensors[f"{before}.experts.{e}.{part}"] for e in range(count)]
                found[f"{before}.experts.{part}"] = np.stack(parts)
        else:
            found[name] = value
    return found


def _unstacked(name: str, value: np.ndarray, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the values under the names that the folder has."""
    if name in tensors:
        return {name: value}
    before, _, part = name.rpartition("experts.")
    return {f"{before}experts.{e}.{part}": value[e] for e in range(len(value))}


def _stored(
    architecture: str, name: str, value: np.ndarray, config: Mapping[str, Any]
) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """Return a tensor as llama.cpp's converter stores it, and what undoes that."""
    heads = config.get("num_attention_heads") or config.get("n_head")
    if architecture in ROTATED and name.endswith(("q_proj.weight", "k_proj.weight")):
        number = heads if "q_proj" in name else config["num_key_value_heads"]
        pairs = value.reshape(number, 2, -1, value.shape[1])
        apart = (number, -1, 2, value.shape[1])
        return pairs.swapaxes(1, 2).reshape(value.shape), lambda x: x.reshape(apart).swapaxes(1, 2).reshape(value.shape)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return value + np.float32(1), lambda x: x - np.float32(1)
    if architecture == "gpt2" and value.ndim == 2 and name.startswith("transformer.h."):
        return value.T, lambda x: x.T
    if architecture == "gptneox" and "query_key_value" in name:
        mixed = value.reshape(heads, 3, -1, *value.shape[1:]).swapaxes(0, 1)
        return mixed.reshape(value.shape), lambda x: x.reshape(mixed.shape).swapaxes(0, 1).reshape(value.shape)
    return value, lambda x: x


def _add_config(writer: Any, config: Mapping[str, Any]) -> None:
    """Write what converters write of a config."""
    get = config.get
    heads = get("num_attention_heads") or get("n_head")
    hidden = get("hidden_size") or get("n_embd")
    writer.add_block_count(get("num_hidden_layers") or get("n_layer"))
    writer.add_context_length(get("max_position_embeddings") or get("n_positions"))
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(get("intermediate_size") or 4 * hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(get("num_key_value_heads") or heads)
    if get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    else:
        names = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
        writer.add_layer_norm_eps(next(config[name] for name in names if name in config))
    _add_rope(writer, config, get("head_dim") or hidden // heads)
    numbers = {
        "add_logit_scale": get("logits_scaling") or get("logit_scale"),
        "add_embedding_scale": get("embedding_multiplier"),
        "add_residual_scale": get("residual_multiplier"),
        "add_attention_scale": get("attention_multiplier"),
        "add_attn_logit_softcapping": get("attn_logit_softcapping"),
        "add_final_logit_softcapping": get("final_logit_softcapping"),
        "add_sliding_window": get("sliding_window"),
        "add_parallel_residual": get("use_parallel_residual"),
        "add_expert_count": get("num_local_experts") or get("num_experts"),
        "add_expert_used_count": get("num_experts_per_tok"),
        "add_expert_feed_forward_length": get("moe_intermediate_size"),
        "add_expert_shared_feed_forward_length": get("shared_expert_intermediate_size"),
    }
    for method, value in numbers.items():
        if value is not None:
            getattr(writer, method)(value)


def _add_rope(writer: Any, config: Mapping[str, Any], head_dim: int) -> None:
    rope = config.get("rope_parameters") or {}
    if not rope:
        return
    rope = rope.get("full_attention", rope)
    share = rope.get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(head_dim * share))
    writer.add_rope_freq_base(rope["rope_theta"])


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
