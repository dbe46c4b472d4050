"""Reads PEFT's adapter_config.json: which modules an adapter changes, with which rank and scale.

Settings that would change results and are not supported are refused with the reason. Fields that only concern
training are ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.checkpoint.files import ConfigFields, read_json_object
from quire.errors import ModelError, echo

CONFIG_FILE = "adapter_config.json"
MAX_PATTERN = 2000
# Fields that must be absent, null, false or empty; and why.
REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA rescales whole columns of the weights, which cannot be done for single rows of a batch",
    "lora_bias": "biases of adapters are not supported",
    "trainable_token_indices": "single trained tokens are not supported; save the whole embedding",
    "target_parameters": "parameters that are no linear layers, such as packed experts, are not supported",
    "layer_replication": "the model would have other layers than the one that is served",
    "alora_invocation_tokens": "adapters that begin within a prompt are not supported",
    "use_qalora": "grouped inputs are not supported",
    "velora_config": "VeLoRA is not supported",
    "monteclora_config": "MonteCLoRA is not supported",
    "use_bdlora": "block-diagonal factors are not supported",
    "arrow_config": "routing among adapters is not supported",
    "kasa_config": "KaSA is not supported",
}
# Ways to begin training that change the model's own weights, so that the adapter fits no unchanged model.
CHANGED_BASE = ("pissa", "olora", "corda", "lora_ga")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The fields of adapter_config.json that matter for inference.

    Attributes:
        targets: suffixes of module names; a regular expression for whole names; None for all linear layers.
        excluded: modules that `targets` leaves out, in the same two ways, or None.
        layers: numbers of the selected layers, None for all. layers_patterns: names that stand before the number.
        saved: modules that the adapter holds whole.
        ties: whether a change of the embedding also applies to a head that is tied to it.
    """

    path: Path
    rank: int
    alpha: float
    rslora: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    targets: tuple[str, ...] | re.Pattern[str] | None
    excluded: tuple[str, ...] | re.Pattern[str] | None
    layers: frozenset[int] | None
    layers_patterns: tuple[str, ...]
    saved: tuple[str, ...]
    ties: bool

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's factors."""
        return _by_pattern(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return what their product is multiplied by (Kalajdzievski 2023 with rslora)."""
        rank = self.rank_of(module)
        return _by_pattern(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.rslora else rank)

    def selects(self, module: str) -> bool | None:
        """Whether the adapter changes a linear layer or table of the model; None if only PEFT could tell."""
        if self.excluded is not None and _matches(self.excluded, module):
            return False
        if any(module == name or module.endswith(f".{name}") for name in self.saved):
            return False
        if self.targets is None:
            return None
        if not _matches(self.targets, module):
            return False
        return isinstance(self.targets, re.Pattern) or self.layers is None or self._layer_of(module) in self.layers

    def _layer_of(self, module: str) -> int | None:
        for pattern in self.layers_patterns or (r"[^.]*",):
            found = re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module)
            if found is not None:
                return int(found[1])
        return None


def _by_pattern(values: Mapping[str, Any], module: str, default: Any) -> Any:
    return next((value for key, value in values.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _matches(given: tuple[str, ...] | re.Pattern[str], module: str) -> bool:
    if isinstance(given, re.Pattern):
        return given.fullmatch(module) is not None
    return any(module == name or module.endswith(f".{name}") for name in given)


def read_peft_config(folder: Path, max_rank: int) -> PeftConfig:
    """Read and check adapter_config.json. Raises `ModelError` naming file and field."""
    path = folder / CONFIG_FILE
    fields = ConfigFields(read_json_object(path), path)
    kind = fields.text("peft_type", "LORA")
    if kind != "LORA":
        raise ModelError(f"{path}: peft_type is {echo(kind)} (expected LORA)")
    for name, reason in REFUSED.items():
        if fields.values.get(name):
            raise ModelError(f"{path}: {name} is {echo(fields.values[name])}: {reason}")
    bias = fields.text("bias", "none")
    if bias != "none":
        raise ModelError(f"{path}: bias is {echo(bias)} (expected none: trained biases are not supported)")
    start = fields.values.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(CHANGED_BASE):
        raise ModelError(
            f"{path}: init_lora_weights is {echo(start)}, which changes the model's own weights (expected an adapter "
            "converted to a plain one with path_initial_model_for_weight_conversion)"
        )
    rank = fields.integer("r", low=1)
    ranks = _pattern_values(fields, "rank_pattern")
    config = PeftConfig(
        path,
        rank,
        fields.number("lora_alpha", 8.0),
        fields.flag("use_rslora", False),
        {key: ranks.integer(key, low=1) for key in ranks.values},
        {key: value.number(key) for value in [_pattern_values(fields, "alpha_pattern")] for key in value.values},
        None if fields.values.get("target_modules") == "all-linear" else _modules(fields, "target_modules"),
        _modules(fields, "exclude_modules"),
        _layers(fields),
        _names(fields, "layers_pattern"),
        _names(fields, "modules_to_save"),
        fields.flag("ensure_weight_tying", False),
    )
    if fields.values.get("target_modules") is None:
        raise fields.error("target_modules", "a list of modules, a regular expression, or all-linear")
    for name, number in [("r", rank), *[(f"rank_pattern.{key}", value) for key, value in config.ranks.items()]]:
        if number > max_rank:
            raise ModelError(f"{path}: {name} is {number} (expected at most {max_rank}, --max-lora-rank)")
    return config


def _pattern_values(fields: ConfigFields, name: str) -> ConfigFields:
    inner = fields.inner(name) or ConfigFields({}, fields.path, name)
    for key in inner.values:
        _compiled(fields, name, key)
    return inner


def _compiled(fields: ConfigFields, name: str, text: str) -> re.Pattern[str]:
    try:
        if len(text) <= MAX_PATTERN:
            return re.compile(text)
    except (re.error, RecursionError, OverflowError):
        pass
    raise ModelError(f"{fields.path}: {name} has {echo(text)} (expected a regular expression)")


def _names(fields: ConfigFields, name: str) -> tuple[str, ...]:
    value = fields.values.get(name)
    items = [value] if isinstance(value, str) else value or []
    if not isinstance(items, list) or not all(isinstance(item, str) and item for item in items):
        raise fields.error(name, "a list of names")
    for item in items:
        _compiled(fields, name, item)
    return tuple(items)


def _modules(fields: ConfigFields, name: str) -> tuple[str, ...] | re.Pattern[str] | None:
    value = fields.values.get(name)
    if isinstance(value, str):
        return _compiled(fields, name, value)
    return _names(fields, name) if value else None


def _layers(fields: ConfigFields) -> frozenset[int] | None:
    value = fields.values.get("layers_to_transform")
    items = [value] if isinstance(value, int) else value
    if not items:
        return None
    if not isinstance(items, list) or not all(type(item) is int for item in items):
        raise fields.error("layers_to_transform", "a list of numbers")
    return frozenset(items)
