"""`ModelList`: the models of a server, found by name and used, and whether they let it live."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence

from quire.errors import NotFoundError, echo
from quire.server.served_model import ServedModel


class ModelList(ABC):
    """All models of one server, in the order of its options; at least one, no two with the same name."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self.models = list(models)

    @property
    def first(self) -> ServedModel:
        """The model of requests that name none."""
        return self.models[0]

    @property
    def names(self) -> list[str]:
        """The names of all models."""
        return [name for model in self.models for name in model.names]

    @property
    def adapter_names(self) -> list[str]:
        """The names of all LoRA adapters."""
        return [item.request.lora_name for model in self.models for item in model.llm.adapters.registered]

    def find(self, name: str) -> ServedModel:
        """Return the model of this name. Raises `NotFoundError`."""
        for model in self.models:
            if model.answers_to(name):
                return model
        raise NotFoundError(
            f"the model {echo(name)} does not exist; this server has {', '.join([*self.names, *self.adapter_names])}",
            param="model",
        )

    @abstractmethod
    async def acquire(self, model: ServedModel) -> None:
        """Have a model ready, and keep it so until `release`; may be cancelled."""

    @abstractmethod
    def release(self, model: ServedModel) -> None:
        """End a use that `acquire` began."""

    @contextlib.asynccontextmanager
    async def using(self, model: ServedModel) -> AsyncIterator[None]:
        """Have a model ready while the block runs. Raises as `acquire`."""
        await self.acquire(model)
        try:
            yield
        finally:
            self.release(model)

    @property
    def starting(self) -> bool:
        """Whether a model that is loaded at start has never been ready so far."""
        return any(model.at_start and not model.was_ready for model in self.models)

    @property
    def fatal(self) -> bool:
        """Whether an essential model has died."""
        return any(model.essential and model.llm.errored and model.task is None for model in self.models)

    async def check_health(self) -> None:
        """Raise the error of which an essential model died."""
        for model in self.models:
            if model.essential and model.task is None:
                await model.llm.check_health()
