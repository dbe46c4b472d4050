"""Makes the pool of a server's models from its options."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.config import EngineConfig
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.stats import StatListener
from quire.server.metrics import Metrics
from quire.server.model_entry import ModelEntry
from quire.server.model_pool import ModelPool
from quire.server.served_model import ServedModel
from quire.server_config import ServerConfig

MakeLLM = Callable[[EngineConfig, Sequence[StatListener]], AsyncLLM]


def create_pool(
    entries: Sequence[ModelEntry],
    server: ServerConfig,
    make_llm: MakeLLM,
    metrics: Metrics,
    listeners: Sequence[StatListener],
) -> ModelPool:
    """Return the pool of these models, none of them started.

    Args:
        make_llm: where engines come from. metrics: of which each model gets its own. listeners: one for each model.
    """
    models = [
        _served(entry, make_llm, metrics, listener, vital=len(entries) == 1)
        for entry, listener in zip(entries, listeners, strict=True)
    ]
    return ModelPool(
        models,
        max_loaded=server.max_loaded_models,
        load_timeout=server.model_load_timeout,
        idle_timeout=server.model_idle_timeout,
        unload_idle=server.model_idle_action == "unload",
    )


def _served(
    entry: ModelEntry, make_llm: MakeLLM, metrics: Metrics, listener: StatListener, *, vital: bool
) -> ServedModel:
    own = metrics.model(entry.names[0])

    def make() -> AsyncLLM:
        llm = make_llm(entry.config, [own, listener])
        own.attach(llm)
        return llm

    return ServedModel(
        entry.config,
        make(),
        pinned=entry.pinned,
        at_start=entry.at_start,
        vital=vital,
        remake=make,
        max_model_len=entry.max_model_len,
        on_sleep=own.on_sleep,
    )
