"""LoRA adapters in PEFT's format, and what a model is once one is merged into it; without torch."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from quire.checkpoint.safetensors import SafetensorsFile, open_safetensors
from tests.helpers.checkpoints import safetensors_bytes

PREFIX = "base_model.model."
Tensors = dict[str, np.ndarray]


def read_tensors(folder: Path) -> Tensors:
    """Return the weights of a model folder, float32."""
    return {name: np.array(stored.read().to_float32()) for name, stored in open_safetensors(folder).tensors.items()}


def factors(
    base: Tensors, suffixes: Iterable[str], *, rank: int | Mapping[str, int], seed: int, transposed: bool = False
) -> Tensors:
    """Return random factors for all modules of a model whose names end so; `rank` of all, or by suffix.

    `transposed`: weights are [in, out], as GPT-2's.
    """
    rng, found = np.random.default_rng(seed), Tensors()
    for suffix in suffixes:
        for name in sorted(name for name in base if name.endswith(f"{suffix}.weight")):
            module, shape = PREFIX + name.removesuffix(".weight"), base[name].shape
            outputs, inputs = shape[::-1] if transposed else shape
            r = rank if isinstance(rank, int) else rank[suffix]
            table = "embed_tokens" in suffix or suffix == "wte"
            first, second = ("embedding_A", "embedding_B") if table else ("A.weight", "B.weight")
            a, b = ((r, outputs), (inputs, r)) if table else ((r, inputs), (outputs, r))
            found[f"{module}.lora_{first}"] = (rng.standard_normal(a) * 0.3).astype(np.float32)
            found[f"{module}.lora_{second}"] = (rng.standard_normal(b) * 0.3).astype(np.float32)
    return found


def write_adapter(folder: Path, tensors: Tensors, *, r: int = 4, lora_alpha: float = 8, **config: Any) -> Path:
    """Write an adapter's two files and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    targets = {name.split(".lora_")[0].rpartition(".")[2] for name in tensors if ".lora_" in name}
    fields = {"peft_type": "LORA", "r": r, "lora_alpha": lora_alpha, "target_modules": sorted(targets), **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors))
    return folder


def merge(base: Path, adapter: Path, folder: Path, *, transposed: bool = False) -> Path:
    """Write the model that `base` is with an adapter; written apart from what it is to check."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    file = SafetensorsFile(adapter / "adapter_model.safetensors")
    given = {name.removeprefix(PREFIX): np.array(file.read(name).array) for name in file.entries}
    tensors, fields = read_tensors(base), json.loads((base / "config.json").read_text())
    for name in [name for name in given if ".lora_" not in name]:
        key = name.replace(".base_layer", "")
        tensors[key] = given.pop(name)
        if key.endswith(("embed_tokens.weight", "lm_head.weight")):
            fields["vocab_size"] = len(tensors[key])
    for name in [name for name in given if "_A" in name]:
        module = name.split(".lora_")[0]
        a, b = given[name].astype(np.float64), given[name.replace("_A", "_B")].astype(np.float64)
        alpha = _of(config.get("alpha_pattern"), module, config["lora_alpha"])
        scale = alpha / (math.sqrt(len(a)) if config.get("use_rslora") else len(a))
        change = (b @ a).T if ("embedding" in name) != transposed else b @ a
        tensors[f"{module}.weight"] = (tensors[f"{module}.weight"] + scale * change).astype(np.float32)
    folder.mkdir(parents=True)
    for path in base.glob("*.json"):
        shutil.copy(path, folder)
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return folder


def _of(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    return next((value for key, value in (patterns or {}).items() if re.search(rf"(^|\.){key}$", module)), default)
