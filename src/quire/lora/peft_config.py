"""Reads PEFT's adapter_config.json: which modules an adapter changes, with which rank and scale.

Settings that would change results and are not supported are refused with the reason. Fields that only concern
training are ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from quire.checkpoint.files import ConfigFields, read_json_object
from quire.errors import ModelError, echo, first_line
from quire.lora.patterns import Pattern, Work

CONFIG_FILE = "adapter_config.json"
MAX_NAMES = 2048  # rank_pattern and the like may name every module
MAX_WORK = 2**22  # steps for compiling and matching all expressions: some seconds
MAX_PATHS = 64  # of lists of layers
NUMBER = re.compile(r"\.(\d+)(?=\.)")  # of a layer, in the name of a module
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
T = TypeVar("T")
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
    ranks: tuple[tuple[Pattern, int], ...]
    alphas: tuple[tuple[Pattern, float], ...]
    targets: tuple[str, ...] | Pattern | None
    excluded: tuple[str, ...] | Pattern | None
    layers: frozenset[int] | None
    layers_patterns: tuple[Pattern, ...]
    saved: tuple[str, ...]
    ties: bool

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's factors."""
        return _first(self.ranks, module, self.rank)

    def scale_of(self, module: str, rank: int) -> float:
        """Return what the product of factors of that rank is multiplied by (Kalajdzievski 2023 with rslora)."""
        return _first(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.rslora else rank)

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
        return isinstance(self.targets, Pattern) or self.layers is None or self._layer_of(module) in self.layers

    def _layer_of(self, module: str) -> int | None:
        for pattern in self.layers_patterns or (None,):
            for found in NUMBER.finditer(module):
                if pattern is None or pattern.fullmatch(module[: found.start()]):
                    return int(found[1])
        return None


def _first(values: tuple[tuple[Pattern, Any], ...], module: str, default: Any) -> Any:
    return next((value for pattern, value in values if pattern.fullmatch(module)), default)


def _matches(given: tuple[str, ...] | Pattern, module: str) -> bool:
    if isinstance(given, Pattern):
        return given.fullmatch(module)
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
    ranks, alphas = _by_name(fields, "rank_pattern"), _by_name(fields, "alpha_pattern")
    left = [MAX_WORK]
    config = PeftConfig(
        path,
        rank,
        fields.number("lora_alpha", 8.0),
        fields.flag("use_rslora", False),
        _by_pattern(fields, "rank_pattern", ranks, lambda key: ranks.integer(key, low=1), left),
        _by_pattern(fields, "alpha_pattern", alphas, alphas.number, left),
        None if fields.values.get("target_modules") == "all-linear" else _modules(fields, "target_modules", left),
        _modules(fields, "exclude_modules", left),
        _layers(fields),
        _compiled(fields, "layers_pattern", _names(fields, "layers_pattern", MAX_PATHS), left),
        _names(fields, "modules_to_save"),
        fields.flag("ensure_weight_tying", False),
    )
    if fields.values.get("target_modules") is None:
        raise fields.error("target_modules", "a list of modules, a regular expression, or all-linear")
    for name, number in [("r", rank), *[(f"rank_pattern.{key}", value) for key, value in ranks.values.items()]]:
        if number > max_rank:
            shown = echo(name)[1:-1]
            raise ModelError(f"{path}: {shown} is {number} (expected at most {max_rank}, --max-lora-rank)")
    return config


def _by_name(fields: ConfigFields, name: str) -> ConfigFields:
    inner = fields.inner(name) or ConfigFields({}, fields.path, name)
    if len(inner.values) > MAX_NAMES:
        raise fields.error(name, f"at most {MAX_NAMES} names or regular expressions")
    return inner


def _by_pattern(
    fields: ConfigFields, name: str, given: ConfigFields, read: Callable[[str], T], left: list[int]
) -> tuple[tuple[Pattern, T], ...]:
    return tuple(zip(_compiled(fields, name, given.values, left), map(read, given.values), strict=True))


def _compiled(
    fields: ConfigFields, name: str, texts: Iterable[str], left: list[int], *, ending: bool = True
) -> tuple[Pattern, ...]:
    """Return the regular expressions of a field; `left` as for `Work`, `ending` as for `Pattern`."""
    work = Work(left, fields.error(name, "fewer or simpler regular expressions, which take less time"))

    def compiled(text: str) -> Pattern:
        try:
            return Pattern(text, work, ending=ending)
        except ValueError as error:
            raise ModelError(
                f"{fields.path}: {name} has {echo(text)} (expected a regular expression; {first_line(error)})"
            ) from None

    return tuple(map(compiled, texts))


def _names(fields: ConfigFields, name: str, most: int = MAX_NAMES) -> tuple[str, ...]:
    value = fields.values.get(name)
    items = [value] if isinstance(value, str) else value or []
    if not isinstance(items, list) or len(items) > most or not all(isinstance(item, str) and item for item in items):
        raise fields.error(name, f"a list of names, {most} at most")
    return tuple(items)


def _modules(fields: ConfigFields, name: str, left: list[int]) -> tuple[str, ...] | Pattern | None:
    value = fields.values.get(name)
    if isinstance(value, str):
        return _compiled(fields, name, [value], left, ending=False)[0]
    return _names(fields, name) if value else None


def _layers(fields: ConfigFields) -> frozenset[int] | None:
    value = fields.values.get("layers_to_transform")
    items = [value] if isinstance(value, int) else value
    if not items:
        return None
    if not isinstance(items, list) or not all(type(item) is int for item in items):
        raise fields.error("layers_to_transform", "a list of numbers")
    return frozenset(items)
