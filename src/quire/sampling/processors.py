"""Logits processors: plug-ins, named in the model options, by which a request changes its own logits.

A plug-in is a factory. It is called for each sequence with (args, prompt_ids, vocab_size): the request's `extra_args`,
overridden by the arguments of this processor; the prompt as a list of ints; and the number of logits. It returns a
callable, which is called before each token with

    output_ids: int32 numpy [n], read-only, the tokens generated so far.
    logits: float32 numpy [V], which it may change; biases and banned tokens are applied, penalties are not yet.

and returns the changed logits, float32 numpy [V], -inf for banned tokens. Logits that came in as -inf, banned by other
options or a grammar, stay banned whatever is returned. A preempted or forked sequence gets a new callable, so that
results must depend on these arguments alone.

A processor that raises, or returns anything else, ends its own request with an error that names it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from quire.errors import ConfigError, echo

logger = logging.getLogger(__name__)

GROUP = "quire.logits_processors"
LogitsProcessor = Callable[[np.ndarray, np.ndarray], np.ndarray]
LogitsProcessorFactory = Callable[[dict[str, Any], list[int], int], LogitsProcessor]


class ProcessorError(Exception):
    """The failure of a logits processor; the message is for the client."""


def registered_names(plugins: Sequence[str]) -> list[str]:
    """Return the names that requests may use. Raises `ConfigError` for empty and repeated names."""
    names = [plugin.partition("=")[0].strip() for plugin in plugins]
    for name, plugin in zip(names, plugins, strict=True):
        if not name:
            raise ConfigError(
                f"logits_processors must be NAME=MODULE:ATTRIBUTE or the name of an entry point, got {echo(plugin)}",
                param="logits_processors",
            )
        if names.count(name) > 1:
            raise ConfigError(f"logits_processors has the name {echo(name)} twice", param="logits_processors")
    return names


def load_processors(plugins: Sequence[str]) -> dict[str, LogitsProcessorFactory]:
    """Import the plug-ins of the option `logits_processors`; return their factories by name.

    Raises:
        ConfigError: one is malformed, unknown, cannot be imported, or cannot be called.
    """
    factories = {}
    for name, plugin in zip(registered_names(plugins), plugins, strict=True):
        where, load = _find(name, plugin)
        try:
            factory = load()
        except Exception as error:  # importing a plug-in may raise anything
            raise ConfigError(
                f"logits processor {name} cannot be imported from {where}: {type(error).__name__}: {error}",
                param="logits_processors",
            ) from error
        if not callable(factory):
            raise ConfigError(f"logits processor {name} is no factory: {echo(factory)}", param="logits_processors")
        factories[name] = factory
    return factories


def _find(name: str, plugin: str) -> tuple[str, Callable[[], Any]]:
    """Return where a plug-in is, as its error says, and what imports it."""
    _, equals, target = plugin.partition("=")
    if equals:
        module, colon, attribute = target.strip().partition(":")
        if not (colon and module and attribute):
            raise ConfigError(
                f"logits_processors must be NAME=MODULE:ATTRIBUTE, got {echo(f'{name}={target.strip()}')}",
                param="logits_processors",
            )
        return target.strip(), lambda: attrgetter(attribute)(importlib.import_module(module))
    points = importlib.metadata.entry_points(group=GROUP, name=name)
    if not points:
        known = sorted({point.name for point in importlib.metadata.entry_points(group=GROUP)})
        raise ConfigError(
            f"no installed package has a logits processor {echo(name)} (entry points of {GROUP}: "
            f"{', '.join(known) or 'none'}); otherwise say {name}=MODULE:ATTRIBUTE",
            param="logits_processors",
        )
    point = next(iter(points))
    return point.value, point.load


class Processors:
    """The logits processors of one sequence, in the order of the request. Errors of factories are raised by `apply`."""

    def __init__(
        self,
        chosen: Sequence[tuple[str, Mapping[str, Any]]],
        factories: Mapping[str, LogitsProcessorFactory],
        prompt_ids: list[int],
        vocab_size: int,
    ) -> None:
        self._chosen = chosen
        self._factories = factories
        self._prompt_ids = prompt_ids
        self._vocab_size = vocab_size
        self._made: list[LogitsProcessor] | None = None

    def copy(self) -> Processors:
        """Return new processors, for a fork."""
        return Processors(self._chosen, self._factories, self._prompt_ids, self._vocab_size)

    def apply(self, output_ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        """Return the processed `logits` float32 [V], which may be overwritten.

        Raises:
            ProcessorError: one failed, or returned anything but such logits.
        """
        if self._made is None:
            self._made = [self._make(name, args) for name, args in self._chosen]
        output_ids = output_ids.view()
        output_ids.flags.writeable = False
        banned = logits == -np.inf
        for (name, _), process in zip(self._chosen, self._made, strict=True):
            try:
                result = process(output_ids, logits)
            except Exception as error:  # plug-ins may raise anything
                raise _failure(name, error) from error
            problem = _problem(result, self._vocab_size)
            if problem:
                raise ProcessorError(f"logits processor {name} returned {problem}")
            logits = result
        return np.where(banned, np.float32(-np.inf), logits)

    def _make(self, name: str, args: Mapping[str, Any]) -> LogitsProcessor:
        factory = self._factories.get(name)
        if factory is None:
            raise ProcessorError(f"logits processor {name} is not registered")
        try:
            made = factory(dict(args), list(self._prompt_ids), self._vocab_size)
        except Exception as error:  # plug-ins may raise anything
            raise _failure(name, error) from error
        if not callable(made):
            raise ProcessorError(f"logits processor {name} made {echo(made)}, which cannot be called")
        return made


def _failure(name: str, error: Exception) -> ProcessorError:
    logger.warning("logits processor %s failed", name, exc_info=error)
    return ProcessorError(f"logits processor {name} failed: {type(error).__name__}: {str(error)[:200]}")


def _problem(result: Any, vocab_size: int) -> str | None:
    if not isinstance(result, np.ndarray):
        return f"a {type(result).__name__}, not an array"
    if result.dtype != np.float32 or result.shape != (vocab_size,):
        return f"{result.dtype} {list(result.shape)}, not float32 [{vocab_size}]"
    top = result.max(initial=-np.inf)
    if np.isnan(top) or top == np.inf:
        return "logits that are NaN or infinite"
    if top == -np.inf:
        return "logits that leave no token"
    return None
