"""The file of `quire serve --models`: a list of models, each with options of its own, checked as flags are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.cli.flags import Flag, check_mapping, flags_of, load_yaml
from quire.config import CONFIG_GROUPS, SERVER_GROUPS, EngineConfig
from quire.errors import ConfigError
from quire.options import option
from quire.server.model_entry import ModelEntry, accepted_names
from quire.server_config import ServerConfig

ONE_MODEL = ("model", "served_model_name")  # options that make no sense as a default for several models


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryOptions:
    """Several models"""

    pinned: bool = option(False, "Never unload this model.")
    load: str | None = option(
        None,
        "Load it before the server is ready, or with its first request; default: demand, but start for pinned models.",
        choices=("start", "demand"),
    )


def read_entries(path: Path, defaults: Mapping[str, Any]) -> list[ModelEntry]:
    """Return the models of a file.

    Args:
        defaults: checked values of options, engine's and server's, from the command line.

    Raises:
        ConfigError: names the file, the entry and the option.
    """
    for name in ONE_MODEL:
        if name in defaults:
            raise ConfigError(f"models contradicts {name}; put it into {path}", param="models")
    loaded = load_yaml(path, "models")
    if not isinstance(loaded, list) or not loaded:
        raise ConfigError(
            f"{path} must hold a list of models, each a mapping of option names to values", param="models"
        )
    flags = flags_of((*CONFIG_GROUPS, EntryOptions))
    entries = [_entry(f"{path}: entry {number}", found, defaults, flags) for number, found in enumerate(loaded, 1)]
    _check_names(path, entries)
    return entries


def _entry(where: str, found: Any, defaults: Mapping[str, Any], flags: Sequence[Flag]) -> ModelEntry:
    if not isinstance(found, dict):
        raise ConfigError(f"{where} must be a mapping of option names to values", param="models")
    named = found.get("served_model_name", found.get("served-model-name", found.get("model")))
    if isinstance(named, str):
        where = f"{where} ({named[:100]})"
    for flag in flags_of((ServerConfig,)):
        if flag.name in found or flag.option.removeprefix("--") in found:
            raise ConfigError(f"{where}: {flag.name} is an option of the server, not of a model", param=flag.name)
    values = check_mapping(found, flags, where)
    if "model" not in values:
        raise ConfigError(f"{where}: model is missing", param="model")
    pinned, load = values.pop("pinned", False), values.pop("load", None)
    try:
        config = EngineConfig.from_kwargs(groups=SERVER_GROUPS, **{**defaults, **values})
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", param=error.param) from None
    return ModelEntry(config=config, pinned=pinned, at_start=load == "start" if load else pinned)


def _check_names(path: Path, entries: Sequence[ModelEntry]) -> None:
    numbers: dict[str, int] = {}
    for number, entry in enumerate(entries, 1):
        if len(set(entry.names)) < len(entry.names):
            raise ConfigError(f"{path}: entry {number}: a served_model_name is given twice", param="served_model_name")
        for name in sorted(accepted_names(entry.config)):
            if name in numbers:
                raise ConfigError(
                    f"{path}: entries {numbers[name]} and {number} are both called {name}; give one of them another "
                    "served_model_name",
                    param="served_model_name",
                )
            numbers[name] = number


def check_room(path: Path, entries: Sequence[ModelEntry]) -> None:
    """Check that the models which must be in memory may be, and leave a place for the others. Raises `ConfigError`."""
    most = entries[0].config.server.max_loaded_models or len(entries)
    pinned = sum(entry.pinned for entry in entries)
    at_start = sum(entry.at_start or entry.pinned for entry in entries)
    if at_start > most:
        raise ConfigError(
            f"{path}: {at_start} models are pinned or loaded at start; max_loaded_models allows {most}",
            param="max_loaded_models",
        )
    if pinned == most < len(entries):
        raise ConfigError(
            f"{path}: {pinned} pinned models take all of max_loaded_models {most}, so that the other "
            f"{len(entries) - pinned} could never be loaded",
            param="max_loaded_models",
        )
