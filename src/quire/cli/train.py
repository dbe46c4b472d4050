"""`quire train`: train a small model from scratch on a CPU. PyTorch is imported only when training starts."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from typing import Any

from quire.cli.flags import Command, flags_of
from quire.options import option
from quire.train.config import PRESETS, TrainConfig, config_from_preset


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetOptions:
    """Preset"""

    preset: str | None = option(None, "Named recipe; other options override it.", choices=tuple(sorted(PRESETS)))


def train_config(values: dict[str, Any]) -> TrainConfig:
    """Return the configuration that the given options and the preset amount to. Raises ConfigError."""
    given = {name: value for name, value in values.items() if name != "preset"}
    return config_from_preset(values["preset"], **given) if "preset" in values else TrainConfig(**given)


def run(values: dict[str, Any]) -> int:
    """Train; returns the exit code: 0, or 2 if the packages of the `train` extra are missing."""
    missing = [name for name in ("torch", "safetensors", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"quire train needs {' and '.join(missing)}: pip install 'quire[train]'", file=sys.stderr)
        return 2
    from quire.train import train

    result = train(train_config(values))
    print(f"{result.num_parameters} parameters, step {result.step}, training loss {result.train_loss:.4f}")
    if result.metrics:
        print(f"test loss {result.metrics['test_loss']:.4f}, perplexity {result.metrics['perplexity']:.2f}")
    for task, scored in result.metrics.get("tasks", {}).items():
        print(f"{task}: {scored['right']} of {scored['cases']} right")
    print(f"checkpoint written to {result.out}; try: quire chat --model {result.out}")
    return 0


COMMAND = Command(
    run=run,
    flags=flags_of((PresetOptions, TrainConfig)),
    description="Train a small Llama from scratch and write a checkpoint that `quire serve` can serve.",
    arguments=(),
    config_file=False,
)
