"""What `chat`, `generate` and the offline benchmarks share: their engine options, and an engine made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.config import CONFIG_GROUPS, EngineConfig
from quire.options import option, option_fields
from quire.server_config import ServerConfig

if TYPE_CHECKING:
    from quire.frontend.async_llm import AsyncLLM
    from quire.frontend.llm import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """Logging"""

    log_level: str = option("warning", "Least important messages shown.", choices=("debug", "info", "warning", "error"))


OFFLINE_GROUPS = (*CONFIG_GROUPS, LogOptions)


def values_of(groups: tuple[type, ...], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `values` that are options of these groups."""
    return {item.name: values[item.name] for item in option_fields(groups) if item.name in values}


def options_from(group: type, values: Mapping[str, Any]) -> Any:
    """Build one option dataclass from checked values, ignoring those that belong to others."""
    return group(**values_of((group,), values))


def engine_config(values: Mapping[str, Any]) -> EngineConfig:
    """Build the config from those of `values` that are engine options; the engine runs in this process."""
    config = EngineConfig.from_kwargs(**values_of(CONFIG_GROUPS, values))
    return dataclasses.replace(config, server=ServerConfig(engine="inline"))


def open_llm(config: EngineConfig) -> LLM:
    """Load a model for synchronous use."""
    from quire.frontend.llm import LLM

    return LLM(**values_of(CONFIG_GROUPS, config.to_kwargs()))


def open_async_llm(config: EngineConfig) -> AsyncLLM:
    """Make an engine for use from one event loop; the caller awaits `start`."""
    from quire.frontend.async_llm import AsyncLLM

    return AsyncLLM(config)


def recommended_sampling(llm: AsyncLLM) -> dict[str, Any]:
    """Return the sampling values that the model's generation_config.json recommends, unless told to ignore it."""
    front = llm.front_model
    return dict(front.info.sampling_defaults) if front.use_sampling_defaults else {}
