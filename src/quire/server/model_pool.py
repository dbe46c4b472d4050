"""`ModelPool`: the models of a server, and which of them are loaded. What requests ask of one is not known here."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from quire.config import EngineConfig
from quire.errors import NotFoundError, echo
from quire.frontend.async_llm import AsyncLLM


class ServedModel:
    """One model.

    Attributes:
        config, llm: its options and its engine. names: under which it is offered, the first one is its own.
        created: when the server came to offer it [Unix seconds]. num_users: answers under way that need it.
    """

    def __init__(self, config: EngineConfig, llm: AsyncLLM) -> None:
        self.config = config
        self.llm = llm
        self.names = served_names(config)
        self.created = int(time.time())
        self.num_users = 0
        self._accepted = {*self.names, config.model.model} if not config.model.served_model_name else {*self.names}

    def answers_to(self, name: str) -> bool:
        """Whether requests may call it so."""
        return name in self._accepted


class ModelPool:
    """All models of one server, in the order of its options; the first one is what the server was started for.

    Args:
        models: at least one, no two with the same name.
    """

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self.models = list(models)

    @property
    def first(self) -> ServedModel:
        """The model that requests without a model's name are about."""
        return self.models[0]

    @property
    def names(self) -> list[str]:
        """The names of all models."""
        return [name for model in self.models for name in model.names]

    def find(self, name: str) -> ServedModel:
        """Return the model of this name. Raises `NotFoundError`."""
        for model in self.models:
            if model.answers_to(name):
                return model
        raise NotFoundError(
            f"the model {echo(name)} does not exist; this server has {', '.join(self.names)}", param="model"
        )

    async def acquire(self, model: ServedModel) -> None:
        """Have a model ready, and keep it so until `release`. Raises `QuireError` if it cannot be loaded."""
        await model.llm.check_health()
        model.num_users += 1

    def release(self, model: ServedModel) -> None:
        """Say that an answer that needed it is complete."""
        model.num_users -= 1


def served_names(config: EngineConfig) -> list[str]:
    """Return the names of the model: those given, or the model's own, of a folder only the last part."""
    if config.model.served_model_name:
        return list(config.model.served_model_name)
    model = config.model.model
    return [os.path.basename(os.path.abspath(model)) if os.path.isdir(model) else model]
