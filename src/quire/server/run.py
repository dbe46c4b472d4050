"""`run_server`: the life of a server process, from the bound socket to the exit code.

The address is bound first, so that a port in use is known at once. Then HTTP comes up, and the engine beside it: while
the model loads, /health answers 503 {"status": "loading"}. Standard output gets two lines that programs can wait for:

    listening url=http://127.0.0.1:8000
    ready url=http://127.0.0.1:8000 model=quire-demo

SIGTERM or SIGINT: new requests are refused, running ones may end until the shutdown timeout, then the rest is aborted.
A second signal does not wait. If the engine dies, so does the server, with its exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence

import uvicorn
from fastapi import FastAPI

from quire.config import EngineConfig
from quire.errors import AddressInUseError, ConfigError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.stats import StatListener
from quire.server.app import build_app
from quire.server.context import ServerContext
from quire.server.http import BoundedHttpProtocol
from quire.server.metrics import Metrics, StatsLog
from quire.server.model_pool import served_names
from quire.server_config import ServerConfig

logger = logging.getLogger(__name__)

BACKLOG = 2048
STATS_SECONDS = 10.0
WATCH_SECONDS = 0.25
FAREWELL_SECONDS = 2.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)

MakeLLM = Callable[[EngineConfig, Sequence[StatListener]], AsyncLLM]


def make_async_llm(config: EngineConfig, listeners: Sequence[StatListener]) -> AsyncLLM:
    """Return the engine that the config describes."""
    return AsyncLLM(config, listeners=listeners)


def run_server(config: EngineConfig, make_llm: MakeLLM = make_async_llm) -> int:
    """Serve until told to stop; return the exit code.

    Args:
        make_llm: where the engine comes from.

    Raises:
        AddressInUseError, ConfigError: the address cannot be used.
        QuireError: the engine could not start, or died.
    """
    with (
        bind(config.server.host, config.server.port) as listener,
        asyncio.Runner(loop_factory=_loop_factory()) as runner,
    ):
        return runner.run(_Life(config, listener, make_llm).live())


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Connections made before anybody accepts them wait."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"host: {host!r} is not an address: {error}", param="host") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(f"address already in use: {host}:{port}", param="port") from None
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}", param="host") from None
    return listener


def url_of(listener: socket.socket, *, tls: bool) -> str:
    """Return the address of a listening socket as a URL, with the port it really has."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{shown}:{port}"


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not made for every platform
        return None
    return uvloop.new_event_loop  # type: ignore[no-any-return]


class _Uvicorn(uvicorn.Server):
    """Uvicorn without signal handlers: what signals mean is decided here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn_config(app: FastAPI, server: ServerConfig) -> uvicorn.Config:
    """Return uvicorn's options. Raises `ConfigError` if certificate and key are unusable."""
    options = uvicorn.Config(
        app,
        http=BoundedHttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=server.timeout_keep_alive,
        timeout_graceful_shutdown=int(FAREWELL_SECONDS),
        backlog=BACKLOG,
        ssl_certfile=server.ssl_certfile,
        ssl_keyfile=server.ssl_keyfile,
    )
    try:
        options.load()
    except OSError as error:
        raise ConfigError(f"ssl_certfile: no usable certificate and key: {error}", param="ssl_certfile") from None
    return options


class _Life:
    """One server process."""

    def __init__(self, config: EngineConfig, listener: socket.socket, make_llm: MakeLLM) -> None:
        self.config = config
        self.listener = listener
        self.stats_log = StatsLog()
        metrics = Metrics()
        self.llm = make_llm(config, [metrics.model(served_names(config)[0]), self.stats_log])
        app = build_app(self.llm, config, metrics)
        self.context: ServerContext = app.state.context
        self.http = _Uvicorn(_uvicorn_config(app, config.server))
        self.url = url_of(listener, tls=config.server.ssl_certfile is not None)
        self.num_signals = 0
        self.signalled = asyncio.Event()
        self.impatient = asyncio.Event()

    async def live(self) -> int:
        """Serve; return the exit code or raise what ended the server."""
        self._take_signals()
        tasks = [asyncio.create_task(self.http.serve(sockets=[self.listener]), name="quire-http")]
        if not self.config.server.disable_log_stats:
            tasks.append(asyncio.create_task(self._log_stats(), name="quire-stats"))
        self._announce(f"listening url={self.url}")
        self._warn_if_open()
        try:
            if await self._start():
                self._announce(f"ready url={self.url} model={self.context.models.first.names[0]}")
                await self._until_stopped(tasks[0])
                await self._drain(self.config.server.shutdown_timeout)
        finally:
            self.context.draining = True
            self.http.should_exit = True
            await asyncio.gather(tasks[0], return_exceptions=True)
            for task in tasks[1:]:
                task.cancel()
            await asyncio.gather(*tasks[1:], return_exceptions=True)
            await self.llm.close()
        return 0

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            try:
                loop.add_signal_handler(number, self._on_signal)
            except NotImplementedError:  # Windows
                signal.signal(number, lambda *_: loop.call_soon_threadsafe(self._on_signal))

    def _on_signal(self) -> None:
        self.num_signals += 1
        self.signalled.set()
        if self.num_signals > 1:
            self.impatient.set()

    async def _start(self) -> bool:
        """Start the engine. Returns False if a signal came first; raises `QuireError` if it cannot start."""
        start = asyncio.ensure_future(self.llm.start())
        signalled = asyncio.ensure_future(self.signalled.wait())
        await asyncio.wait((start, signalled), return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        if not start.done():
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)
            return False
        start.result()
        return True

    async def _until_stopped(self, http: asyncio.Task[None]) -> None:
        """Return when a signal comes; raise if the engine or the HTTP server ends by itself."""
        while not self.signalled.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_SECONDS):
                    await self.signalled.wait()
            if http.done():
                http.result()
                raise RuntimeError("the HTTP server ended by itself")
            if self.llm.errored:
                logger.error("the engine is gone; the server stops")
                await self._wait_idle(FAREWELL_SECONDS)  # clients get their errors first
                await self.llm.check_health()

    async def _drain(self, seconds: float) -> None:
        """Refuse new requests, let the others end for so long, then abort them."""
        self.context.draining = True
        if self.context.num_open:
            logger.info("shutting down: %d requests may end within %g s", self.context.num_open, seconds)
        await self._wait_idle(seconds)
        if self.context.num_open:
            logger.warning("aborting %d requests", self.context.num_open)
            for generation in list(self.context.generations):
                generation.abort()
            await self._wait_idle(FAREWELL_SECONDS)

    async def _wait_idle(self, seconds: float) -> None:
        """Wait until nothing is being served, but no longer than `seconds`, nor beyond a second signal."""
        waits = [asyncio.ensure_future(self.context.wait_idle()), asyncio.ensure_future(self.impatient.wait())]
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        self.impatient.clear()

    async def _log_stats(self) -> None:
        while True:
            await asyncio.sleep(STATS_SECONDS)
            line = self.stats_log.line(self.llm.stats)
            if line is not None:
                logger.info(line)

    def _announce(self, line: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads standard output
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    def _warn_if_open(self) -> None:
        host = self.listener.getsockname()[0]
        if not self.config.server.api_key and not ipaddress.ip_address(host.split("%")[0]).is_loopback:
            logger.warning("listening on %s without an API key: whoever reaches this port can use the model", host)
