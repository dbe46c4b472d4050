"""`AdapterRegistry`: the LoRA adapters of a served model, by the names that clients use.

The engine identifies adapters by number and loads them when a request needs one, also an engine that replaced another.
Here they get their numbers, and are loaded once when they are registered: a folder that cannot be used is an error of
that call, not of later requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from quire.config import EngineConfig
from quire.engine_request import LoRARequest
from quire.errors import ConfigError, NotFoundError, RequestError, UnsupportedError, echo

Name = Annotated[str, msgspec.Meta(min_length=1)]


class LoRAModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of `--lora-modules`. base_model_name: the model it belongs to, None for the first one."""

    name: Name
    path: Name
    base_model_name: Name | None = None


@dataclass(frozen=True, slots=True)
class RegisteredAdapter:
    """An adapter that requests can name. created: time of its registration [Unix seconds]."""

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
        return msgspec.json.decode(spec, type=LoRAModule)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"lora_modules: {echo(spec)} must have name, path and perhaps base_model_name, as texts: {error}",
            param="lora_modules",
        ) from None


class AdapterRegistry:
    """The adapters of one model, for a frontend in asyncio.

    Args:
        call: runs an operation of the engine.

    Attributes:
        enabled: whether the engine serves adapters. on_change: called with what `restore` takes, after each change.
    """

    def __init__(self, config: EngineConfig, call: Callable[..., Awaitable[dict[str, Any]]]) -> None:
        self.enabled = config.lora.enable_lora
        self._call = call
        self._modules = parse_modules(config.server.lora_modules)
        self._modules_loaded = False
        self._registered: dict[str, RegisteredAdapter] = {}
        self._loading: set[str] = set()
        self._last_number = 0
        self.on_change: Callable[[dict[str, Any]], None] = lambda state: None

    @property
    def registered(self) -> list[RegisteredAdapter]:
        """All of them, in order of registration."""
        return list(self._registered.values())

    def find(self, name: str) -> LoRARequest | None:
        """Return the adapter of this name, or None."""
        found = self._registered.get(name)
        return None if found is None else found.request

    def state(self) -> dict[str, Any]:
        """Return all adapters and what else there is to know about them, JSON-like."""
        adapters = [[*msgspec.structs.astuple(item.request), item.created] for item in self._registered.values()]
        return {"adapters": adapters, "last_number": self._last_number, "modules_loaded": self._modules_loaded}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over the adapters of another registry of this model."""
        found = [RegisteredAdapter(LoRARequest(*request), created) for *request, created in state["adapters"]]
        self._registered = {item.request.lora_name: item for item in found}
        self._last_number, self._modules_loaded = state["last_number"], state["modules_loaded"]

    async def load_modules(self, names: Sequence[str], *, first: bool, alone: bool) -> None:
        """Load those of `--lora-modules` that belong to a model of these names, once. Raises `QuireError`.

        Args:
            first: whether modules without a model name belong to it. alone: whether it is the only model.
        """
        if self._modules_loaded:
            return
        for module in self._modules:
            base = module.base_model_name
            if alone or (first if base is None else base in names):
                await self.load(module.name, module.path)
        self._modules_loaded = True
        self.on_change(self.state())

    async def load(self, name: str, path: str) -> LoRARequest:
        """Load and check an adapter, and register it.

        Raises:
            UnsupportedError: this model has none. NotFoundError: no such folder.
            RequestError: the name is taken, or the adapter cannot be used; the message says why.
        """
        self._check_enabled()
        if name in self._registered or name in self._loading:
            raise RequestError(f"the adapter {echo(name)} is loaded already; unload it first", param="lora_name")
        self._last_number += 1
        request = LoRARequest(name, self._last_number, path)
        if not await asyncio.to_thread(_is_folder, path):
            raise NotFoundError(f"{path}: no such folder", param="lora_path", code="adapter_not_found")
        self._loading.add(name)
        self.on_change(self.state())  # the number is taken, even if this process does not live to see it loaded
        try:
            await self._call("load_lora", **msgspec.structs.asdict(request))
        finally:
            self._loading.discard(name)
        self._registered[name] = RegisteredAdapter(request, int(time.time()))
        self.on_change(self.state())
        return request

    async def unload(self, name: str) -> None:
        """Unregister an adapter. Requests that have begun keep it. Raises `NotFoundError`."""
        request = self.withdraw(name)
        await self._call("unload_lora", lora_int_id=request.lora_int_id)

    def withdraw(self, name: str) -> LoRARequest:
        """As `unload`, without an engine; return the adapter."""
        self._check_enabled()
        found = self._registered.pop(name, None)
        if found is None:
            raise NotFoundError(f"there is no adapter {echo(name)}", param="lora_name", code="adapter_not_found")
        self.on_change(self.state())
        return found.request

    def _check_enabled(self) -> None:
        if not self.enabled:
            raise UnsupportedError("this model serves no LoRA adapters (--enable-lora)", param="lora_name")


def _is_folder(path: str) -> bool:
    try:
        return Path(path).expanduser().is_dir()
    except (OSError, RuntimeError, ValueError):
        return False
