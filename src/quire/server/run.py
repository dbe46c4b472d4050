"""`run_server`: the life of a server process, from the bound socket to the exit code.

The address is bound first, so that a port in use is known at once. Then HTTP comes up, and the engine beside it: while
the model loads, /readyz answers 503 {"status": "loading"}. Standard output gets two lines that programs can wait for:

    listening url=http://127.0.0.1:8000
    ready url=http://127.0.0.1:8000 model=quire-demo

SIGTERM or SIGINT: new requests are refused, running ones may end until the shutdown timeout, then the rest is aborted.
A second signal does not wait. An engine that dies is replaced, unless it dies too often: then the server ends, with an
exit code that says so. systemd is notified of all this.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import ipaddress
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import uvicorn

from quire.config import EngineConfig
from quire.engine.client import EngineClient
from quire.engine.process import create_client
from quire.errors import ConfigError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.stats import StatListener
from quire.server.app import build_app
from quire.server.auth import ApiKeys, with_key_weights
from quire.server.context import ServerContext
from quire.server.health import liveness
from quire.server.json_io import return_large_blocks
from quire.server.listen import listening, reload_certificate, url_of, uvicorn_config
from quire.server.metrics import Metrics, ModelMetrics
from quire.server.model_entry import ModelEntry
from quire.server.model_pool import ModelPool
from quire.server.served_model import ServedModel
from quire.server_config import ServerConfig

logger = logging.getLogger(__name__)

STATS_SECONDS = 10.0
WATCH_SECONDS = 0.25
POLL_SECONDS = 1.0
FAREWELL_SECONDS = 2.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)

MakeLLM = Callable[[EngineConfig, Sequence[StatListener]], AsyncLLM]


def make_async_llm(config: EngineConfig, listeners: Sequence[StatListener]) -> AsyncLLM:
    """Return the engine that the config describes."""
    return AsyncLLM(config, listeners=listeners)


class FirstEngine:
    """Makes engines like `make_async_llm`, the first one around a client whose process was started before."""

    def __init__(self, client: EngineClient) -> None:
        self._client: EngineClient | None = client

    def __call__(self, config: EngineConfig, listeners: Sequence[StatListener]) -> AsyncLLM:
        """Return the engine."""
        client, self._client = self._client, None
        if client is None:
            return make_async_llm(config, listeners)
        again = partial(create_client, config, config.server.engine)
        return AsyncLLM(config, listeners=listeners, client=client, make_client=again)


def run_server(
    config: EngineConfig,
    make_llm: MakeLLM = make_async_llm,
    entries: Sequence[ModelEntry] | None = None,
    first: EngineClient | None = None,
) -> int:
    """Serve until a signal stops it; return the exit code.

    Args:
        config: of the server, and of its model unless there are `entries` of several.
        make_llm: makes engines. first: a client of the first one, whose process is being started.

    Raises:
        AddressInUseError, ConfigError: the address cannot be used.
        QuireError: the engine could not start, or died.
    """
    make_llm = make_llm if first is None else FirstEngine(first)
    return_large_blocks()
    models = [
        dataclasses.replace(entry, config=with_key_weights(entry.config))
        for entry in entries or [ModelEntry(config=config)]
    ]
    with (
        listening(config.server) as listener,
        asyncio.Runner(loop_factory=_loop_factory()) as runner,
    ):
        code = runner.run(_ServerProcess(config, listener, make_llm, models).run())
    gc.freeze()  # else Python looks through all objects once more before it ends, which takes longer than all the rest
    return code


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


class _ServerProcess:
    """One server process: its HTTP server, its models, and what signals do to them."""

    def __init__(
        self, config: EngineConfig, listener: socket.socket, make_llm: MakeLLM, entries: Sequence[ModelEntry]
    ) -> None:
        self.config = config
        self.listener = listener
        self.metrics = Metrics()
        pool = create_pool(entries, config.server, make_llm, self.metrics)
        app = build_app(pool, config, self.metrics)
        self.context: ServerContext = app.state.context
        options = uvicorn_config(app, config.server, farewell_seconds=FAREWELL_SECONDS)
        self.http = _Uvicorn(options)
        self.watch = watch_files(config.server, self.context.keys, options.ssl)
        self.url = url_of(listener, tls=config.server.ssl_certfile is not None)
        self.num_signals = 0
        self.signalled = asyncio.Event()
        self.signalled_again = asyncio.Event()

    async def run(self) -> int:
        """Serve; return the exit code or raise what ended the server."""
        self._handle_signals()
        tasks = [asyncio.create_task(self.http.serve(sockets=[self.listener]), name="quire-http")]
        if not self.config.server.disable_log_stats:
            tasks.append(asyncio.create_task(self._log_stats(), name="quire-stats"))
        tasks.append(asyncio.create_task(self.metrics.watch_loop(), name="quire-loop-lag"))
        tasks.append(asyncio.create_task(self._notify_watchdog(), name="quire-sd-watchdog"))
        tasks.append(asyncio.create_task(self.watch.run(), name="quire-watch"))
        self._announce(f"listening url={self.url}")
        self._warn_if_open()
        try:
            if await self._start():
                self._announce(f"ready url={self.url} model={self.context.models.first.names[0]}")
                notify("READY=1")
                await self._until_stopped(tasks[0])
                await self._drain(self.config.server.shutdown_timeout)
        finally:
            self.context.draining = True
            notify("STOPPING=1")
            self.http.should_exit = True
            closing = asyncio.ensure_future(self.context.models.close())  # beside HTTP: each takes a moment
            for task in tasks[1:]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await closing
            if self.context.tracing is not None:
                await asyncio.to_thread(self.context.tracing.close)
        return 0

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            try:
                loop.add_signal_handler(number, self._on_signal)
            except NotImplementedError:  # Windows
                signal.signal(number, lambda *_: loop.call_soon_threadsafe(self._on_signal))
        with contextlib.suppress(NotImplementedError, AttributeError):
            loop.add_signal_handler(signal.SIGHUP, lambda: self.watch.poll(force=True))

    def _on_signal(self) -> None:
        self.num_signals += 1
        self.signalled.set()
        if self.num_signals > 1:
            self.signalled_again.set()

    async def _start(self) -> bool:
        """Load the models that are loaded at start. Returns False if a signal came first; raises `QuireError`."""
        start = asyncio.ensure_future(self.context.models.start())
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
            if self.context.models.fatal:
                logger.error("the engine is gone; the server stops")
                await self._wait_idle(FAREWELL_SECONDS)  # clients get their errors first
                await self.context.models.check_health()

    async def _drain(self, seconds: float) -> None:
        """Refuse new requests, let the others end for so long, then abort them. An engine that dies is replaced."""
        self.context.draining = True
        notify("STOPPING=1")
        if self.context.num_open:
            logger.info("shutting down: %d requests may end within %g s", self.context.num_open, seconds)
        await self._wait_idle(seconds)
        if self.context.num_open:
            logger.warning("aborting %d requests", self.context.num_open)
            self.context.models.abort_waiting()
            for job in list(self.context.jobs):
                job.abort()
            await self._wait_idle(FAREWELL_SECONDS)

    async def _wait_idle(self, seconds: float) -> None:
        """Wait until nothing is being served, but no longer than `seconds`, nor beyond a second signal."""
        waits = [asyncio.ensure_future(self.context.wait_idle()), asyncio.ensure_future(self.signalled_again.wait())]
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        self.signalled_again.clear()

    async def _log_stats(self) -> None:
        while True:
            await asyncio.sleep(STATS_SECONDS)
            models = self.context.models.models
            for model in models:
                name = model.names[0]
                line = self.metrics.model(name).log.line(model.llm.stats)
                if line is not None:
                    logger.info("%s%s", f"{name}: " if len(models) > 1 else "", line)

    async def _notify_watchdog(self) -> None:
        """Send systemd's watchdog what it expects while the server is alive."""
        seconds = watchdog_seconds()
        while seconds is not None:
            if liveness(self.context) == "ok":
                notify("WATCHDOG=1")
            await asyncio.sleep(seconds / 3)

    def _announce(self, line: str) -> None:
        with contextlib.suppress(OSError):  # standard output was closed
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    def _warn_if_open(self) -> None:
        if self.listener.family == socket.AF_UNIX or self.context.keys.required:
            return
        host = self.listener.getsockname()[0]
        if not ipaddress.ip_address(host.split("%")[0]).is_loopback:
            logger.warning("listening on %s without an API key: anyone who can reach this port can use the model", host)


def create_pool(entries: Sequence[ModelEntry], server: ServerConfig, make_llm: MakeLLM, metrics: Metrics) -> ModelPool:
    """Return the pool of these models, none of them started."""
    return ModelPool(
        [_served(entry, make_llm, metrics.model(entry.names[0]), essential=len(entries) == 1) for entry in entries],
        max_loaded=server.max_loaded_models,
        load_timeout=server.model_load_timeout,
        idle_timeout=server.model_idle_timeout,
        unload_idle=server.model_idle_action == "unload",
    )


def _served(entry: ModelEntry, make_llm: MakeLLM, metrics: ModelMetrics, *, essential: bool) -> ServedModel:
    def make() -> AsyncLLM:
        llm = make_llm(entry.config, [metrics])
        metrics.attach(llm)
        return llm

    return ServedModel(
        entry.config,
        make(),
        pinned=entry.pinned,
        at_start=entry.at_start,
        essential=essential,
        make_llm=make,
        max_model_len=entry.max_model_len,
        on_sleep=metrics.on_sleep,
    )


class FileWatch:
    """Reloads files that have changed, by polling their metadata."""

    def __init__(self) -> None:
        self._watched: list[tuple[Sequence[str], Callable[[], None]]] = []
        self._signatures: dict[str, tuple[int, ...] | None] = {}

    def add(self, paths: Sequence[str], reload: Callable[[], None]) -> None:
        """Have `reload` called when any of these files changes; it may raise `ConfigError`."""
        self._watched.append((paths, reload))
        self._signatures.update({path: _signature(path) for path in paths})

    def poll(self, *, force: bool = False) -> None:
        """Reload what has changed; with `force` everything."""
        signatures = {path: _signature(path) for path in self._signatures}
        for paths, reload in self._watched:
            if force or any(signatures[path] != self._signatures[path] for path in paths):
                try:
                    reload()
                except ConfigError as error:
                    logger.error("%s; it stays as it was", error.message)
                except Exception:  # boundary: the other files, and later versions of this one, are still watched
                    logger.exception("%s cannot be reloaded and stays as it was", ", ".join(paths))
        self._signatures = signatures

    async def run(self) -> None:
        """Poll every `POLL_SECONDS`, until cancelled."""
        while self._watched:
            await asyncio.sleep(POLL_SECONDS)
            self.poll()


def watch_files(server: ServerConfig, keys: ApiKeys, tls: ssl.SSLContext | None) -> FileWatch:
    """Return the watch over the files that a server's options name."""
    watch = FileWatch()
    if server.api_key_file is not None:
        watch.add([server.api_key_file], keys.reload)
    if tls is not None and server.ssl_certfile is not None and server.ssl_keyfile is not None:
        watch.add([server.ssl_certfile, server.ssl_keyfile], lambda: reload_certificate(tls, server))
    return watch


def _signature(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev)


def notify(state: str) -> None:
    """Send "READY=1", "STOPPING=1" or "WATCHDOG=1" to systemd, see sd_notify(3); without systemd do nothing."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.setblocking(False)
        channel.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)


def watchdog_seconds() -> float | None:
    """Return the longest time between two "WATCHDOG=1" [s]; None if systemd expects none."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    meant = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(microseconds) / 1e6 if meant and microseconds.isdecimal() and int(microseconds) else None
