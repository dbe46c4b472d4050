"""`AdapterRegistry`: the LoRA adapters that a model is offered with, by the names that clients use.

The engine knows adapters by number and reads them when a request needs one, also an engine that took the place of
another. Here they get their numbers, and are read once before they are offered: a folder that cannot be used is the
fault of whoever names it, not of those who ask for it later.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.engine_request import LoRARequest
from quire.errors import ConfigError, NotFoundError, RequestError, UnsupportedError, echo

FIRST_WAIT_SECONDS, MOST_WAIT_SECONDS = 0.01, 0.5
MODULE_FIELDS = frozenset({"name", "path", "base_model_name"})


@dataclass(frozen=True, slots=True)
class LoRAModule:
    """One of `--lora-modules`. base_model_name: the model it belongs to, None for the first one."""

    name: str
    path: str
    base_model_name: str | None = None


@dataclass(frozen=True, slots=True)
class OfferedAdapter:
    """An adapter that requests can name. created: since when it is offered [Unix seconds]."""

    request: LoRARequest
    created: int


def parse_modules(specs: Sequence[str]) -> list[LoRAModule]:
    """Return what `--lora-modules` names. Raises `ConfigError`."""
    modules = [_parse_module(spec) for spec in specs]
    names = [module.name for module in modules]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"lora_modules names {echo(name)} twice", param="lora_modules")
    return modules


def _parse_module(spec: str) -> LoRAModule:
    if not spec.lstrip().startswith("{"):
        name, found, path = spec.partition("=")
        if not (name and found and path):
            raise ConfigError(f"lora_modules: {echo(spec)} must be NAME=PATH or a JSON object", param="lora_modules")
        return LoRAModule(name, path)
    try:
        fields = json.loads(spec)
    except ValueError as error:
        raise ConfigError(f"lora_modules: {echo(spec)} is not JSON: {error}", param="lora_modules") from None
    texts = isinstance(fields, dict) and all(isinstance(value, str) and value for value in fields.values())
    if not texts or not {"name", "path"} <= fields.keys() <= MODULE_FIELDS:
        raise ConfigError(
            f"lora_modules: {echo(spec)} must have name, path and perhaps base_model_name, as texts",
            param="lora_modules",
        )
    return LoRAModule(**fields)


class AdapterRegistry:
    """The adapters of one model, for a front end in asyncio.

    Args:
        call: runs an operation of the engine.
    """

    def __init__(self, config: EngineConfig, call: Callable[..., Awaitable[dict[str, Any]]]) -> None:
        self._enabled = config.lora.enable_lora
        self._call = call
        self._modules = parse_modules(config.server.lora_modules)
        self._modules_loaded = False
        self._offered: dict[str, OfferedAdapter] = {}
        self._loading: set[str] = set()
        self._numbers = itertools.count(1)

    @property
    def offered(self) -> list[OfferedAdapter]:
        """All of them, in the order in which they came."""
        return list(self._offered.values())

    @property
    def enabled(self) -> bool:
        """Whether there may be any."""
        return self._enabled

    def find(self, name: str) -> LoRARequest | None:
        """Return the adapter of this name, if it is offered."""
        found = self._offered.get(name)
        return None if found is None else found.request

    def adopt(self, other: AdapterRegistry) -> None:
        """Offer what the registry of an engine offered in whose place this one's comes."""
        self._offered, self._numbers, self._modules_loaded = other._offered, other._numbers, other._modules_loaded

    async def load_modules(self, names: Sequence[str], *, first: bool, alone: bool) -> None:
        """Load those of `--lora-modules` that belong to a model of these names, once. Raises `QuireError`.

        Args:
            first: whether it is the model to which those belong that name none. alone: whether there is no other.
        """
        if self._modules_loaded:
            return
        for module in self._modules:
            base = module.base_model_name
            if alone or (first if base is None else base in names):
                await self.load(module.name, module.path)
        self._modules_loaded = True

    async def load(self, name: str, path: str) -> LoRARequest:
        """Have an adapter read and checked, and offer it.

        Raises:
            UnsupportedError: this model has none. NotFoundError: no such folder.
            RequestError: the name is taken, or the adapter cannot be used; the message says why.
        """
        self._check_enabled()
        if name in self._offered or name in self._loading:
            raise RequestError(f"the adapter {echo(name)} is loaded already; unload it first", param="lora_name")
        request = LoRARequest(name, next(self._numbers), path)
        if not await asyncio.to_thread(_is_folder, path):
            raise NotFoundError(f"{path}: no such folder", param="lora_path", code="adapter_not_found")
        self._loading.add(name)
        try:
            arguments = {"lora_name": name, "lora_int_id": request.lora_int_id, "lora_path": path}
            answer, wait = await self._call("load_lora", **arguments), FIRST_WAIT_SECONDS
            while answer["state"] == "loading":
                await asyncio.sleep(wait)
                wait = min(2 * wait, MOST_WAIT_SECONDS)
                answer = await self._call("lora_status", lora_int_id=request.lora_int_id)
        finally:
            self._loading.discard(name)
        if answer["state"] == "failed":
            raise RequestError(
                f"the adapter {name} cannot be used: {answer['error']}", param="lora_path", code="invalid_adapter"
            )
        self._offered[name] = OfferedAdapter(request, int(time.time()))
        return request

    async def unload(self, name: str) -> None:
        """Offer an adapter no more. Requests that have begun go on with it. Raises `NotFoundError`."""
        request = self.withdraw(name)
        await self._call("unload_lora", lora_int_id=request.lora_int_id)

    def withdraw(self, name: str) -> LoRARequest:
        """As `unload`, of an engine that is not there, and return what the adapter was."""
        self._check_enabled()
        found = self._offered.pop(name, None)
        if found is None:
            raise NotFoundError(f"there is no adapter {echo(name)}", param="lora_name", code="adapter_not_found")
        return found.request

    def _check_enabled(self) -> None:
        if not self._enabled:
            raise UnsupportedError("this model serves no LoRA adapters (--enable-lora)", param="lora_name")


def _is_folder(path: str) -> bool:
    try:
        return Path(path).expanduser().is_dir()
    except (OSError, RuntimeError, ValueError):
        return False
