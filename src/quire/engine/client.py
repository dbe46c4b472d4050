"""The asynchronous engine client interface, and the two ways to make an engine."""

from __future__ import annotations

from typing import Protocol

from quire.config import EngineConfig
from quire.engine.inline import InlineEngine
from quire.engine.messages import CallResult, EngineOutputs, Ready, ToEngine


class EngineClient(Protocol):
    """Carries messages between one asyncio loop and an engine elsewhere."""

    async def start(self) -> Ready:
        """Wait until the engine is ready. Raises `QuireError` if it cannot start."""

    def send(self, message: ToEngine) -> None:
        """Send in order, never blocking."""

    async def receive(self) -> EngineOutputs | CallResult:
        """Wait for news. Raises `EngineDeadError` once the engine is gone."""

    async def close(self) -> None:
        """End the engine and release what it held."""


def create_inline_engine(config: EngineConfig) -> InlineEngine:
    """Load a model in this process, for synchronous use. Raises `QuireError`."""
    from quire.engine.core import EngineCore

    return InlineEngine(EngineCore(config))


def create_client(config: EngineConfig, kind: str) -> EngineClient:
    """Return a client, not started yet, for an engine in a "process" of its own or "inline" in a thread."""
    if kind == "process":
        from quire.engine.process import ProcessClient  # lazy: only this one needs zmq

        return ProcessClient(config)
    from quire.engine.inline import ThreadClient

    return ThreadClient(config)
