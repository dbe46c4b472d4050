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
        """Wait for a message. Raises `EngineDeadError` once the engine is gone."""

    def stalled_for(self) -> float:
        """Return for how many seconds the engine has been silent for longer than its work explains; 0.0 if it is not.

        Cheap, and without the engine's help: it may be stuck.
        """

    async def dump_stacks(self) -> str:
        """Log what an engine that does not react is doing, and return it; for before `kill`.

        Waits half a second at most: an engine that is stopped cannot tell.
        """

    def kill(self) -> None:
        """End an engine that does not react; `receive` then raises `EngineDeadError`. Does nothing where it cannot."""

    async def close(self) -> None:
        """End the engine and release what it held."""
