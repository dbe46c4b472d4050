"""Makes engines and clients from a config. Heavy imports happen inside, so that importing this costs nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.engine.client import EngineClient
    from quire.engine.inline import InlineEngine


def create_inline_engine(config: EngineConfig) -> InlineEngine:
    """Load a model in this process, for synchronous use. Raises `QuireError`."""
    from quire.engine.core import EngineCore
    from quire.engine.inline import InlineEngine

    return InlineEngine(EngineCore(config))


def create_client(config: EngineConfig, kind: str) -> EngineClient:
    """Return a client, not started yet, for an engine in a "process" of its own or "inline" in a thread."""
    if kind == "process":
        from quire.engine.process import ProcessClient

        return ProcessClient(config)
    from quire.engine.inline import ThreadClient

    return ThreadClient(config)
