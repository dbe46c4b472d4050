"""`quire train`: train a small model from scratch on a CPU.

The options are the fields of `TrainConfig`; nothing is declared twice. PyTorch is imported only when training starts.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import sys
import typing
from typing import Any

from quire.train.config import PRESETS, TrainConfig, config_from_preset


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Register the `train` command on the object that `ArgumentParser.add_subparsers` returned."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "train",
        help="train a small model from scratch on a text file or on the built-in corpus",
        description="Train a small Llama from scratch and write a checkpoint that `quire serve` can serve.",
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), help="named recipe; other options override it")
    types = typing.get_type_hints(TrainConfig)
    for field in dataclasses.fields(TrainConfig):
        flag = "--" + field.name.replace("_", "-")
        help_text = f"{field.metadata['help']} (default: {field.default})".replace("%", "%%")
        if types[field.name] is bool:
            # SUPPRESS leaves an option that was not given out of the result, so that a preset can set it.
            parser.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=help_text)
            continue
        parser.add_argument(
            flag,
            type=_value_type(types[field.name]),
            choices=field.metadata["choices"] or None,
            default=argparse.SUPPRESS,
            metavar=None if field.metadata["choices"] else field.name.upper(),
            help=help_text,
        )
    parser.set_defaults(run=run)
    return parser


def _value_type(annotation: Any) -> type:
    """`int | None` -> int, `int` -> int."""
    members = [member for member in typing.get_args(annotation) if member is not type(None)]
    value_type: type = members[0] if members else annotation
    return value_type


def config_from_args(args: argparse.Namespace) -> TrainConfig:
    """The configuration that the given options and the preset amount to. Raises ConfigError."""
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    given = {name: value for name, value in vars(args).items() if name in names}
    return config_from_preset(args.preset, **given) if args.preset else TrainConfig(**given)


def run(args: argparse.Namespace) -> int:
    """Train; returns the exit code: 0, or 2 if the packages of the `train` extra are missing."""
    missing = [name for name in ("torch", "safetensors", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"quire train needs {' and '.join(missing)}: pip install quire[train]", file=sys.stderr)
        return 2
    from quire.train import train

    result = train(config_from_args(args))
    print(f"{result.num_parameters} parameters, step {result.step}, training loss {result.train_loss:.4f}")
    if result.metrics:
        print(f"test loss {result.metrics['test_loss']:.4f}, perplexity {result.metrics['perplexity']:.2f}")
    for task, scored in result.metrics.get("tasks", {}).items():
        print(f"{task}: {scored['right']} of {scored['cases']} right")
    print(f"checkpoint written to {result.out}; try: quire chat --model {result.out}")
    return 0
