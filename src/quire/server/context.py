"""`ServerContext`: what the routes of one app share. There is one per app, in `app.state.context`."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from starlette.requests import Request

from quire.config import EngineConfig
from quire.errors import NotFoundError, echo
from quire.frontend.async_llm import AsyncLLM
from quire.server.auth import ApiKeys
from quire.server.metrics import Metrics


class Abortable(Protocol):
    """What `generation.Generation` is to those who only want to end it."""

    def abort(self) -> None:
        """End it; whoever waits for it is told."""


class ServerContext:
    """State of a server.

    Attributes:
        names: names of the model, as listed. created: when the server came up [Unix seconds].
        metrics: None where nobody counts.
        draining: set once the server has begun to shut down; new work is refused from then on.
        generations: those that the engine works on, or that are being sent.
    """

    def __init__(self, llm: AsyncLLM, config: EngineConfig, metrics: Metrics | None) -> None:
        self.llm = llm
        self.config = config
        self.metrics = metrics
        self.keys = ApiKeys(config.server.api_key)
        self.created = int(time.time())
        self.names = served_names(config)
        self.draining = False
        self.generations: set[Abortable] = set()
        self._accepted = {*self.names, config.model.model} if not config.model.served_model_name else {*self.names}
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def check_model(self, name: str) -> str:
        """Return the name to answer with. Raises `NotFoundError` if it is not one of this server's."""
        if name not in self._accepted:
            raise NotFoundError(
                f"the model {echo(name)} does not exist; this server has {', '.join(self.names)}", param="model"
            )
        return name if name in self.names else self.names[0]

    def note_rejection(self, reason: str) -> None:
        """Count a request that is turned away: one of `metrics.REJECTIONS`."""
        if self.metrics is not None:
            self.metrics.on_rejected(reason)

    @contextmanager
    def open_request(self) -> Iterator[None]:
        """Count a request as being worked on while the block runs."""
        self._count_open(1)
        try:
            yield
        finally:
            self._count_open(-1)

    def _count_open(self, change: int) -> None:
        self._num_open += change
        if self._num_open:
            self._idle.clear()
        else:
            self._idle.set()
        if self.metrics is not None:
            self.metrics.on_open(self._num_open)

    @property
    def num_open(self) -> int:
        """Requests being worked on."""
        return self._num_open

    async def wait_idle(self) -> None:
        """Return once no request is being worked on."""
        await self._idle.wait()


def served_names(config: EngineConfig) -> list[str]:
    """Return the names of the model: those given, or the model's own, of a folder only the last part."""
    if config.model.served_model_name:
        return list(config.model.served_model_name)
    model = config.model.model
    return [os.path.basename(os.path.abspath(model)) if os.path.isdir(model) else model]


def context_of(request: Request) -> ServerContext:
    """Return the context of the app that serves this request."""
    context: ServerContext = request.app.state.context
    return context
