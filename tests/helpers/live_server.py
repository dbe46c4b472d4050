"""A real HTTP server on a real socket, in a thread, in front of the fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx
import uvicorn

from quire.config import SERVER_GROUPS, EngineConfig
from quire.frontend.async_llm import AsyncLLM
from quire.server.app import build_app
from quire.server.http_server import uvicorn_config
from quire.server.metrics import Metrics
from quire.server.model_entry import served_names
from quire.supervisor.listen import bind, url_of
from tests.helpers.fake_engine import FakeClient, FakeEngine, fake_async_llm

T = TypeVar("T")
MakeServer = Callable[..., "LiveServer"]


def server_config(**options: Any) -> EngineConfig:
    """Options of a server for the fake model."""
    return EngineConfig.from_kwargs(groups=SERVER_GROUPS, **{"served_model_name": "fake", **options})


class PromptServer(uvicorn.Server):
    """Uvicorn without the tenths of a second after which it looks whether it is to end and whether all have gone."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._told = asyncio.Event()

    def end(self) -> None:
        """Have it end; call this on its loop."""
        self.should_exit = True
        self._told.set()

    async def main_loop(self) -> None:
        """Do what uvicorn does ten times a second until the end."""
        for tick in itertools.count():
            if await self.on_tick(tick):
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), 0.1)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Leave at once if nobody is being answered, and as uvicorn does otherwise."""
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await asyncio.sleep(0.005)
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)
            return
        for server in self.servers:
            server.close()


class LiveServer:
    """Serves from construction until `close`.

    Args:
        options: of the config. llm: further arguments of `fake_async_llm`, such as `reply_text`.
        start: whether the engine is started; otherwise it stays "loading" until `call(server.llm.start)`.
        real: a real engine with the model of the options, in the place of the fake one.
    """

    def __init__(
        self, *, llm: dict[str, Any] | None = None, start: bool = True, real: bool = False, **options: Any
    ) -> None:
        config = server_config(**options)
        self.metrics = Metrics()
        listeners = [self.metrics.model(served_names(config)[0])]
        if real:
            self.llm = AsyncLLM(config, listeners=listeners)
        else:
            self.llm, self.client = fake_async_llm(config=config, listeners=listeners, **(llm or {}))
        self.app = build_app(self.llm, config, self.metrics)
        self.context = self.app.state.context
        self.listener = bind("127.0.0.1", 0)
        self.url = url_of(self.listener, tls=config.server.ssl_certfile is not None)
        settings = uvicorn_config(self.app, config.server, farewell_seconds=1.0)
        self.tls = settings.ssl
        self._server = PromptServer(settings)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(start)), daemon=True)
        self._thread.start()
        assert self._up.wait(60)
        self.http = httpx.Client(base_url=self.url, timeout=20, trust_env=False, verify=False)

    async def _serve(self, start: bool) -> None:
        self._loop = asyncio.get_running_loop()
        if start:
            await self.llm.start()
        self.app.state.batch_runner.start()
        self._up.set()
        await self._server.serve(sockets=[self.listener])
        await self.app.state.batch_runner.stop()
        await self.llm.close()
        self.context.responses.close()
        self.context.batches.close()

    @property
    def engine(self) -> FakeEngine:
        """The fake engine behind the server."""
        return self.client.engine

    @property
    def fake_client(self) -> FakeClient:
        """The way to the fake engine, to hold it or kill it."""
        return self.client

    def call(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run a coroutine on the server's loop and return its result."""

        async def run() -> T:
            return await work()

        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

    def do(self, work: Callable[[], T]) -> T:
        """Run a plain function on the server's loop and return its result."""

        async def run() -> T:
            return work()

        return self.call(run)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return once the condition, looked at on the server's loop, holds."""

        async def run() -> None:
            async with asyncio.timeout(10):
                while not condition():  # noqa: ASYNC110 - it depends on several parties, none of which tells
                    await asyncio.sleep(0)

        self.call(run)

    @property
    def connections(self) -> set[Any]:
        """The open connections, as uvicorn keeps them."""
        return self._server.server_state.connections

    def raw(self, data: bytes, *, shut: bool = False) -> bytes:
        """Send bytes on a new connection and return everything that comes back until the server closes it."""
        with self.connect() as connection:
            connection.sendall(data)
            if shut:
                connection.shutdown(socket.SHUT_WR)
            chunks = []
            while chunk := connection.recv(65536):
                chunks.append(chunk)
        return b"".join(chunks)

    def connect(self) -> socket.socket:
        """Return a new connection."""
        return socket.create_connection(self.listener.getsockname()[:2], timeout=20)

    def close(self) -> None:
        """End the server and wait for it."""
        self.http.close()
        if self._thread.is_alive():
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._server.end)
        self._thread.join(10)
        self.listener.close()
        assert not self._thread.is_alive()
