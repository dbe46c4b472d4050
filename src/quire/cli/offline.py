"""What commands with an engine in this process share: engine options, the engine, and sampling flags."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys
import typing
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from quire.cli.flags import Flag
from quire.config import CONFIG_GROUPS, AcceptedOptions, EngineConfig
from quire.errors import ConfigError
from quire.options import Option, base_type, option, option_fields
from quire.sampling_params import DEFAULTS, OPTIONS, SamplingParams
from quire.server_config import ServerConfig

if TYPE_CHECKING:
    from quire.frontend.async_llm import AsyncLLM
    from quire.frontend.llm import LLM

# Enough requests in the engine that its batch never runs dry while results are collected.
READY_PER_RUNNING = 2
NO_TOKEN_LIMIT = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """Logging"""

    log_level: str = option("warning", "Lowest level of messages shown.", choices=("debug", "info", "warning", "error"))


OFFLINE_GROUPS = (*CONFIG_GROUPS, AcceptedOptions, LogOptions)


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


def with_long_queues(config: EngineConfig, num_reqs: int) -> EngineConfig:
    """Return the config with queues for `num_reqs` unfinished requests of any length, unless limits were given.

    There are no other clients, so a request that is not admitted would only be sent again.
    """
    longer: dict[str, int] = {}
    if config.scheduler.max_num_queued_reqs is None:
        longer["max_num_queued_reqs"] = num_reqs
    if config.scheduler.max_num_queued_tokens is None:
        longer["max_num_queued_tokens"] = NO_TOKEN_LIMIT
    return config.replace(**longer)


def open_llm(config: EngineConfig) -> LLM:
    """Load a model for synchronous use."""
    from quire.frontend.llm import LLM

    return LLM(**values_of(CONFIG_GROUPS, config.to_kwargs()))


def open_async_llm(config: EngineConfig) -> AsyncLLM:
    """Make an engine for use from one event loop; the caller awaits `start`."""
    from quire.frontend.async_llm import AsyncLLM

    return AsyncLLM(config)


@contextlib.asynccontextmanager
async def started_llm(config: EngineConfig) -> AsyncIterator[AsyncLLM]:
    """Yield a started engine, which is closed afterwards."""
    llm = open_async_llm(config)
    try:
        await llm.start()
        yield llm
    finally:
        await llm.close()


@contextlib.contextmanager
def utf8_stdin() -> Iterator[TextIO]:
    """Yield standard input as UTF-8, whatever the locale says. Raises `ConfigError` where something else is read."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    try:
        yield sys.stdin
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not UTF-8 text: {error}", param="input") from None


# The engine has a --seed as well, so that of sampling is spelled differently.
SPELLING = {"seed": "sampling_seed"}


def sampling_flags(*, exclude: tuple[str, ...] = (), defaults: Mapping[str, Any] | None = None) -> list[Flag]:
    """Return one flag per documented field of `SamplingParams` but those in `exclude`.

    Types, bounds and help are those of the class. `defaults` replaces the defaults that help shows, and no others.
    """
    hints = typing.get_type_hints(SamplingParams)
    shown = {item.name: item.default for item in msgspec.structs.fields(SamplingParams)} | dict(defaults or {})
    flags = []
    for name, field in OPTIONS.items():
        if not field.help or name in exclude:
            continue
        kind, repeat = base_type(hints[name])
        flags.append(
            Flag(
                name=SPELLING.get(name, name),
                group="Sampling",
                kind=kind,
                repeat=repeat,
                details=Option(help=field.help),
                check=_field_check(name),
                default=shown[name],
            )
        )
    return flags


def _field_check(name: str) -> Callable[[Any], Any]:
    """Return a check of one field by itself.

    `max_tokens` is left open, because `min_tokens` is compared with it; the field that this one needs is set.
    """
    beside = {other: DEFAULTS[other] is False or 1 for other in OPTIONS[name].needs[:1]}

    def check(value: Any) -> Any:
        SamplingParams(**{"max_tokens": None, **beside, name: value})
        return value

    return check


def sampling_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Pick the sampling fields out of `given_values`, in the spelling of `SamplingParams`.

    `--seed` makes a run repeatable, so it is the seed of sampling too unless `--sampling-seed` is given.
    """
    fields = {SPELLING.get(name, name): name for name, field in OPTIONS.items() if field.help}
    chosen = {fields[name]: value for name, value in values.items() if name in fields}
    return {"seed": values["seed"], **chosen} if "seed" in values else chosen
