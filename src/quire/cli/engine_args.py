"""`EngineArgs`: the options of an engine by vLLM's name for them, from keywords or from a command line of one's own."""

from __future__ import annotations

import argparse
from typing import Any, TypeVar

from quire.cli.flags import add_flags, flags_of
from quire.config import CONFIG_GROUPS, DEMO_MODEL, AcceptedOptions, EngineConfig

FLAGS = flags_of((*CONFIG_GROUPS, AcceptedOptions))

ParserT = TypeVar("ParserT", bound=argparse.ArgumentParser)


class EngineArgs:
    """Options of an engine, for `LLMEngine.from_engine_args` and `AsyncLLM.from_engine_args`.

    Args:
        model: folder, Hugging Face id, or "quire-demo". options: any other option of `EngineConfig`, by name.

    Raises:
        ConfigError: an unknown option, or a bad value.
    """

    def __init__(self, model: str = DEMO_MODEL, **options: Any) -> None:
        self._config = EngineConfig.from_kwargs(model=model, **options)

    @staticmethod
    def add_cli_args(parser: ParserT) -> ParserT:
        """Add a flag for each option, and return the parser."""
        add_flags(parser, FLAGS)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """Return the options that were given as flags; other attributes of the namespace are ignored."""
        return cls(**{flag.name: getattr(args, flag.name) for flag in FLAGS if hasattr(args, flag.name)})

    def create_engine_config(self) -> EngineConfig:
        """Return the checked options."""
        return self._config
