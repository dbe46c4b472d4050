"""Converts the metadata of a GGUF file ("llama.block_count", ...) into the config.json that `load_model_info` takes.

Values that ggml hard-codes, so that the metadata lacks them, are added here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quire.checkpoint.families import FAMILIES, Family
from quire.checkpoint.files import ConfigFields
from quire.checkpoint.gguf.names import TABLES, NameTable, table_of
from quire.checkpoint.gguf.reader import GGUFEntry, GGUFFile
from quire.errors import ModelError, echo

LARGE_GEMMA = {"gemma2": 46, "gemma3": 62}  # layers of the sizes whose attention is scaled by hidden size and heads
MAX_FACTORS = 2**16


def read_config(files: Sequence[GGUFFile]) -> dict[str, Any]:
    """Return the config.json of a model in these files; the first has its metadata.

    Raises:
        ModelError: naming file and key, for an architecture or a setting that is not supported.
    """
    return _Reader(files).config()


def architecture_of(path: Path, metadata: Mapping[str, Any], names: Iterable[str]) -> NameTable:
    """Return the names of a model's architecture. Raises ModelError for those that are not supported."""
    architecture = metadata.get("general.architecture")
    table = table_of(architecture, names) if isinstance(architecture, str) else None
    if table is None or table.architecture not in FAMILIES:
        known = ", ".join(name for name, item in TABLES.items() if item.architecture in FAMILIES)
        raise ModelError(f"{path}: general.architecture {echo(architecture)} is not supported (supported: {known})")
    return table


class _Reader:
    def __init__(self, files: Sequence[GGUFFile]) -> None:
        file = files[0]
        self._path = file.path
        self._home = {name: each for each in files for name in each.entries}
        self._table = architecture_of(file.path, file.metadata, self._home)
        self._name = str(file.metadata["general.architecture"])
        self._family: Family = FAMILIES[self._table.architecture]
        prefix = f"{self._name}."
        own = {key: _plain(value) for key, value in file.metadata.items() if key.startswith(prefix)}
        self.fields = ConfigFields({key[len(prefix) :]: value for key, value in own.items()}, self._path, self._name)
        self.tokens = ConfigFields(file.metadata, self._path)

    def config(self) -> dict[str, Any]:
        fields = self.fields
        heads, hidden = self._same("attention.head_count"), fields.integer("embedding_length", low=1)
        sizes: dict[str, Any] = {
            "num_hidden_layers": fields.integer("block_count"),
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": self._same("attention.head_count_kv", heads),
            "intermediate_size": self._inner_size(),
            "max_position_embeddings": fields.integer("context_length"),
            "norm_eps": self._norm_eps(),
            "head_dim": fields.integer("attention.key_length", max(1, hidden // heads), low=1),
        }
        if fields.values.get("attention.value_length", sizes["head_dim"]) != sizes["head_dim"]:
            raise fields.error("attention.value_length", f"attention.key_length, {sizes['head_dim']}")
        config = {
            "architectures": [self._table.architecture],
            "model_type": self._family.model_type,
            **{self._family.key(key): value for key, value in sizes.items()},
            "vocab_size": self._vocab_size(),
            "tie_word_embeddings": "output.weight" not in self._home,
            "dtype": self._dtype(),
            **self._ids(),
        }
        if self._family.rotary:
            config.update(self._rope(sizes["head_dim"], sizes["max_position_embeddings"]))
        special = _SPECIAL.get(self._name)
        return {**config, **(special(self, sizes) if special else {})}

    def has(self, name: str) -> bool:
        return name in self._home

    def _entry(self, name: str) -> GGUFEntry | None:
        return self._home[name].entries[name] if name in self._home else None

    def _same(self, key: str, default: int | None = None) -> int:
        """Return a number that may be a list by layer, whose entries must be equal."""
        value = self.fields.values.get(key)
        if isinstance(value, list):
            if not value or any(item != value[0] for item in value):
                raise self.fields.error(key, "the same for every layer")
            return ConfigFields({key: value[0]}, self._path, self._name).integer(key, low=1)
        return self.fields.integer(key, low=1) if default is None else self.fields.integer(key, default, low=1)

    def _inner_size(self) -> int:
        if self.fields.values.get("feed_forward_length") in (None, 0) and "expert_count" in self.fields.values:
            return self.fields.integer("expert_feed_forward_length", low=1)
        return self._same("feed_forward_length")

    def _norm_eps(self) -> float:
        names = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
        given = next((name for name in names if name in self.fields.values), names[0])
        # As the decimal number that was written, not as the float32 that it is stored in.
        return float(f"{self.fields.number(given):.6g}")

    def _vocab_size(self) -> int:
        entry = self._entry("token_embd.weight")
        if entry is None or len(entry.shape) != 2:
            raise ModelError(f"{self._path}: tensor 'token_embd.weight' is missing or no matrix")
        return entry.shape[0]

    def _dtype(self) -> str:
        """Return the dtype of most matrices; bfloat16 if they are quantized."""
        entries = (file.entries[name] for name, file in self._home.items())
        kinds = Counter(entry.format for entry in entries if len(entry.shape) > 1)
        return {"F32": "float32", "F16": "float16"}.get(kinds.most_common(1)[0][0], "bfloat16")

    def _ids(self) -> dict[str, Any]:
        def read(name: str) -> int | None:
            found: int | None = self.tokens.integer(f"tokenizer.ggml.{name}_token_id", None)
            return found

        ends = [read(name) for name in ("eos", "eot", "eom")]
        return {
            "bos_token_id": read("bos"),
            "eos_token_id": list(dict.fromkeys(index for index in ends if index is not None)) or None,
            "pad_token_id": read("padding"),
        }

    def _rope(self, head_dim: int, max_positions: int) -> dict[str, Any]:
        fields, found = self.fields, dict[str, Any]()
        found["rope_theta"] = fields.number("rope.freq_base", 10000.0)
        rotated = fields.integer("rope.dimension_count", head_dim, low=2, high=head_dim)
        part = self._family.rotary_part
        if part == "rotary_dim":
            found[part] = rotated
        elif part is not None:
            # `parse_rope` multiplies and rounds down.
            found[part] = 1.0 if rotated == head_dim else (rotated + 0.25) / head_dim
        elif rotated != head_dim:
            raise fields.error("rope.dimension_count", f"the size of a head, {head_dim}")
        scaling = self._rope_scaling(rotated // 2, max_positions)
        if scaling is not None:
            found["rope_scaling"] = scaling
        key = self._family.key("rope_theta")
        found[key] = found.pop("rope_theta")
        return found

    def _rope_scaling(self, count: int, max_positions: int) -> dict[str, Any] | None:
        fields = self.fields
        kind = fields.text("rope.scaling.type", "none")
        original = fields.integer("rope.scaling.original_context_length", None, low=1)
        if self.has("rope_factors_short.weight") or self.has("rope_factors_long.weight"):
            short, long = (self._factors(f"rope_factors_{name}.weight", count) for name in ("short", "long"))
            factor = fields.number("rope.scaling.attn_factor", None)
            return {
                "rope_type": "longrope",
                "short_factor": short,
                "long_factor": long,
                "attention_factor": factor,
                "original_max_position_embeddings": original,
            }
        if self.has("rope_freqs.weight"):  # how much slower each pair rotates, whatever formula it was made by
            factors = self._factors("rope_freqs.weight", count)
            return {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
        if kind in ("none", ""):
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": fields.number("rope.scaling.factor")}
        if kind == "yarn":
            original = original or max_positions
            return {
                "rope_type": "yarn",
                "factor": fields.number("rope.scaling.factor"),
                "original_max_position_embeddings": original,
            }
        raise fields.error("rope.scaling.type", "none, linear or yarn")

    def _factors(self, name: str, count: int) -> list[float]:
        entry = self._entry(name)
        if entry is None or entry.format != "F32" or entry.shape != (count,) or count > MAX_FACTORS:
            raise ModelError(f"{self._path}: tensor {echo(name)} is missing or wrong (expected F32 of {count} factors)")
        stored = self._home[name].view(entry.begin, entry.end)
        return [float(value) for value in stored.copy().view(np.float32)]


def _plain(value: Any) -> Any:
    """Return a short array as a list."""
    return value.tolist() if isinstance(value, np.ndarray) and value.size < 2**16 else value


def _llama(reader: _Reader, sizes: dict[str, Any]) -> dict[str, Any]:
    bias = reader.has("blk.0.attn_q.bias")
    mixtral = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
    experts = {key: reader.fields.integer(name, low=1) for key, name in mixtral.items() if name in reader.fields.values}
    return {"attention_bias": bias, "mlp_bias": reader.has("blk.0.ffn_gate.bias"), **experts}


def _granite(reader: _Reader, sizes: dict[str, Any]) -> dict[str, Any]:
    names = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    scales = {key: reader.fields.number(name) for key, name in names.items() if name in reader.fields.values}
    return {**_llama(reader, sizes), **scales}


def _qwen_moe(reader: _Reader, sizes: dict[str, Any]) -> dict[str, Any]:
    fields = reader.fields
    inner = fields.integer("expert_feed_forward_length", sizes["intermediate_size"], low=1)
    return {
        "num_experts": fields.integer("expert_count", low=1),
        "num_experts_per_tok": fields.integer("expert_used_count", low=1),
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": fields.integer("expert_shared_feed_forward_length", inner, low=1),
        "norm_topk_prob": reader._name == "qwen3moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma(reader: _Reader, sizes: dict[str, Any]) -> dict[str, Any]:
    fields, large = reader.fields, LARGE_GEMMA[reader._name] == sizes["num_hidden_layers"]
    scalar = sizes["hidden_size"] / sizes["num_attention_heads"] if large else sizes["head_dim"]
    if "attention.scale" in fields.values:
        scalar = 1 / fields.number("attention.scale") ** 2
    found: dict[str, Any] = {"query_pre_attn_scalar": scalar}
    found["sliding_window"] = fields.integer("attention.sliding_window", 4096, low=1)
    if reader._name == "gemma2":
        found["attn_logit_softcapping"] = fields.number("attn_logit_softcapping", 50.0)
        found["final_logit_softcapping"] = fields.number("final_logit_softcapping", 30.0)
    else:
        found["rope_local_base_freq"] = fields.number("rope.freq_base_swa", 10000.0)
        period = fields.values.get("attention.sliding_window_pattern", 6)
        if isinstance(period, list):
            return {**found, "layer_types": ["sliding_attention" if own else "full_attention" for own in period]}
        found["sliding_window_pattern"] = fields.integer("attention.sliding_window_pattern", 6, low=1)
    return found


def _cohere(reader: _Reader, sizes: dict[str, Any]) -> dict[str, Any]:
    return {
        "logit_scale": reader.fields.number("logit_scale"),
        "attention_bias": reader.has("blk.0.attn_q.bias"),
        "use_qk_norm": reader.has("blk.0.attn_q_norm.weight"),
    }


def _phi3(reader: _Reader, sizes: dict[str, Any]) -> dict[str, Any]:
    return {
        "sliding_window": reader.fields.integer("attention.sliding_window", None) or None,
        "original_max_position_embeddings": reader.fields.integer("rope.scaling.original_context_length", None),
    }


def _stablelm(reader: _Reader, sizes: dict[str, Any]) -> dict[str, Any]:
    if reader.has("blk.0.attn_q_norm.weight"):
        raise ModelError(f"{reader._path}: tensor 'blk.0.attn_q_norm.weight': norms of single heads are not supported")
    return {
        "use_qkv_bias": reader.has("blk.0.attn_q.bias"),
        "use_parallel_residual": reader.fields.flag("use_parallel_residual", False),
    }


def _starcoder2(reader: _Reader, sizes: dict[str, Any]) -> dict[str, Any]:
    window = reader.fields.integer("attention.sliding_window", None) or None
    return {"use_bias": reader.has("blk.0.attn_q.bias"), "sliding_window": window}


def _gptneox(reader: _Reader, sizes: dict[str, Any]) -> dict[str, Any]:
    return {"use_parallel_residual": reader.fields.flag("use_parallel_residual", True)}


_SPECIAL: dict[str, Callable[[_Reader, dict[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "granite": _granite,
    "smollm3": _llama,
    "qwen2moe": _qwen_moe,
    "qwen3moe": _qwen_moe,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "command-r": _cohere,
    "phi3": _phi3,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
    "gptneox": _gptneox,
}
