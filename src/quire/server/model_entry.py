"""A model to serve, as the options describe it. Imports little: `quire serve` reads entries before it starts."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from quire.config import SERVER_GROUPS, EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A model to serve.

    Attributes:
        config: its options, and the server's.
        pinned: it is never unloaded to make room, or for being idle. at_start: it is loaded before the server is ready.
        max_model_len: its context length [tokens], if it is known without loading it.
    """

    config: EngineConfig
    pinned: bool = True
    at_start: bool = True
    max_model_len: int | None = None

    @property
    def names(self) -> list[str]:
        """Names under which it is offered; the first one is its own."""
        return served_names(self.config)

    def to_kwargs(self) -> dict[str, Any]:
        """Return it as another process gets it, JSON-like; the inverse of `from_kwargs`."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return {**values, "config": self.config.to_kwargs()}

    @classmethod
    def from_kwargs(cls, *, config: dict[str, Any], **values: Any) -> ModelEntry:
        """Return the entry that `to_kwargs` describes."""
        return cls(config=EngineConfig.from_kwargs(groups=SERVER_GROUPS, **config), **values)


def served_names(config: EngineConfig) -> list[str]:
    """Return the names of the model: those given, or the model's own, of a folder only the last part."""
    if config.model.served_model_name:
        return list(config.model.served_model_name)
    model = config.model.model
    return [os.path.basename(os.path.abspath(model)) if os.path.isdir(model) else model]


def accepted_names(config: EngineConfig) -> set[str]:
    """Return the names by which requests may call it: those it is offered under, or else also what was given."""
    names = set(served_names(config))
    return names if config.model.served_model_name else names | {config.model.model}
