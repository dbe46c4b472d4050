"""The interface of an asynchronous engine client. `inline.ThreadClient` and `process.ProcessClient` implement it."""

from __future__ import annotations

from typing import Protocol

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
