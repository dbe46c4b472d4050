"""A front: the process that serves HTTP, from its start by the supervisor to its exit code.

HTTP comes up first: while the model loads, /readyz answers 503 {"status": "loading"}. When the server is to stop, new
requests are refused, running ones may end until the shutdown timeout, then the rest is aborted; a second signal does
not wait. An engine that dies is replaced, unless it dies too often: then the server ends, with an exit code that says
so. What does not belong here: sockets, signals and systemd, which are the supervisor's.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import gc
import ipaddress
import json
import logging
import os
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from quire import logs
from quire.config import SERVER_GROUPS, EngineConfig
from quire.errors import ConfigError, QuireError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.stats import StatListener
from quire.server.app import build_app
from quire.server.auth import ApiKeys, with_key_weights
from quire.server.batches.runner import BatchRunner
from quire.server.context import ServerContext
from quire.server.fronts import Fronts
from quire.server.health import liveness
from quire.server.http_server import HttpServer, reload_certificate, uvicorn_config
from quire.server.json_io import return_large_blocks
from quire.server.metrics import Metrics, ModelMetrics
from quire.server.model_entry import ModelEntry
from quire.server.model_pool import ModelPool
from quire.server.served_model import ServedModel
from quire.server.shared_models import adapters_key
from quire.server.supervisor_client import AsyncLLMFactory, SupervisorClient
from quire.server_config import ServerConfig
from quire.supervisor.board import Board
from quire.supervisor.channel import Channel, ConnectionQueue
from quire.supervisor.front import DUMP_SIGNAL

logger = logging.getLogger(__name__)

STATS_SECONDS = 10.0
WATCH_SECONDS = 0.25
POLL_SECONDS = 1.0
FAREWELL_SECONDS = 2.0
SWITCH_INTERVAL = 0.0005  # seconds for which a thread at work keeps the event loop waiting

MakeLLM = Callable[[EngineConfig, Sequence[StatListener]], AsyncLLM]


def make_async_llm(config: EngineConfig, listeners: Sequence[StatListener]) -> AsyncLLM:
    """Return the engine that the config describes."""
    return AsyncLLM(config, listeners=listeners)


def main(make_llm: MakeLLM | None = None) -> int:
    """Entry point of a front, a child of the supervisor; see `quire.supervisor.front`.

    Args:
        make_llm: makes engines, in the place of those of the options (for tests).
    """
    front_args = json.loads(sys.stdin.buffer.read())
    logs.setup(**front_args["log"], in_thread=True)
    for name in ("channel", "queue", "stacks"):
        os.set_inheritable(front_args[name], False)
    faulthandler.enable(front_args["stacks"])
    faulthandler.register(DUMP_SIGNAL, front_args["stacks"])
    board = Board(front_args["board"], front_args["num_rows"], front_args["num_queues"])
    os.close(front_args["board"])
    channel = Channel(socket.socket(fileno=front_args["channel"]))
    queue = ConnectionQueue(socket.socket(fileno=front_args["queue"]))
    supervisor = SupervisorClient(channel, queue, board, front_args["row"], front_args["published"])
    return_large_blocks()
    sys.setswitchinterval(SWITCH_INTERVAL)
    code, error = 1, ""
    try:
        config = EngineConfig.from_kwargs(groups=SERVER_GROUPS, **front_args["options"])
        if make_llm is None:
            make_llm = AsyncLLMFactory(supervisor) if config.server.engine == "process" else make_async_llm
        entries = _entries(front_args["entries"], supervisor) or [ModelEntry(config=config)]
        front = _Front(config, make_llm, entries, supervisor, front_args["url"], resumed=front_args["resumed"])
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            code = runner.run(front.run())
    except QuireError as problem:
        code, error = problem.exit_code, problem.message
    except Exception as problem:  # the boundary of the process: a bug, reported as one
        logger.exception("the front failed")
        error = f"unexpected {type(problem).__name__}: {problem}"
    supervisor.exit(code, error)
    gc.freeze()  # else Python looks through all objects once more before it ends, which takes longer than all the rest
    return code


def _entries(given: list[dict[str, Any]] | None, supervisor: SupervisorClient) -> list[ModelEntry] | None:
    """Return the models of the file of `--models` with their shares of the memory, which the first front decides."""
    if given is None:
        return None
    entries = [ModelEntry.from_kwargs(**entry) for entry in supervisor.published.get("entries", given)]
    if "entries" not in supervisor.published:
        entries = shared_out(entries)
        supervisor.publish("entries", [entry.to_kwargs() for entry in entries])
    return entries


def shared_out(entries: Sequence[ModelEntry]) -> list[ModelEntry]:
    """Return the entries with their shares of the memory. Raises `ConfigError` if they do not fit into it."""
    from quire.engine.shares import SharingModel, share_memory  # heavy, and only for several models

    models = [SharingModel(entry.names[0], entry.config, entry.pinned) for entry in entries]
    most = entries[0].config.server.max_loaded_models or len(entries)
    return [
        dataclasses.replace(entry, config=share.config, max_model_len=share.max_model_len)
        for entry, share in zip(entries, share_memory(models, min(most, len(entries))), strict=True)
    ]


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not made for every platform
        return None
    return uvloop.new_event_loop  # type: ignore[no-any-return]


class _Front:
    """One front: its HTTP server, its models, and what the supervisor's orders do to them.

    Args:
        url: of the server. resumed: whether this process follows one that died.
    """

    def __init__(
        self,
        config: EngineConfig,
        make_llm: MakeLLM,
        entries: Sequence[ModelEntry],
        supervisor: SupervisorClient,
        url: str,
        *,
        resumed: bool,
    ) -> None:
        self.config = config
        self.supervisor = supervisor
        self.resumed = resumed
        self.url = url
        self.metrics = Metrics(supervisor)
        pool = create_pool(entries, config.server, make_llm, self.metrics, supervisor)
        app = build_app(pool, config, self.metrics, supervisor)
        self.context: ServerContext = app.state.context
        self.batches: BatchRunner = app.state.batch_runner
        options = uvicorn_config(
            app,
            config.server,
            farewell_seconds=FAREWELL_SECONDS,
            share=supervisor.share_receiving_bytes,
            is_crowded=supervisor.is_crowded,
        )
        self.http = HttpServer(options)
        self.watch = watch_files(config.server, self.context.keys, options.ssl)
        self.num_signals = 0
        self.signalled = asyncio.Event()
        self.signalled_again = asyncio.Event()

    async def run(self) -> int:
        """Serve; return the exit code or raise what ended the server."""
        tasks = [asyncio.create_task(self.http.serve(sockets=[]), name="quire-http")]
        if not self.config.server.disable_log_stats:
            tasks.append(asyncio.create_task(self._log_stats(), name="quire-stats"))
        tasks.append(asyncio.create_task(self.metrics.watch_loop(), name="quire-loop-lag"))
        tasks.append(asyncio.create_task(self.metrics.publish_often(), name="quire-publish-metrics"))
        tasks.append(asyncio.create_task(self.watch.run(), name="quire-watch"))
        beat = asyncio.create_task(self.supervisor.beat(self._is_alive), name="quire-beat")
        await self.http.has_started.wait()
        self._attach()
        if not self.resumed:
            self._warn_if_open()
        try:
            if await self._start():
                for model in self.context.models.models:
                    model.llm.refresh_stats()  # those of an engine that has worked for another front
                gc.freeze()  # what was imported stays: looking through it takes a tenth of a second and more
                self.supervisor.ready(self.context.models.first.names[0])
                self.batches.start()
                await self._until_stopped(tasks[0])
                await self._drain(self.config.server.shutdown_timeout)
        finally:
            self.context.draining = True
            await self.batches.stop()
            self.supervisor.stopping()
            self.http.should_exit = True
            closing = asyncio.ensure_future(self.context.models.close())  # beside HTTP: each takes a moment
            for task in tasks[1:]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await closing
            if self.context.tracing is not None:
                await asyncio.to_thread(self.context.tracing.close)
            beat.cancel()  # last: a front that waits for the end of its engines is not held to be stuck
            await asyncio.gather(beat, return_exceptions=True)
        return 0

    def _attach(self) -> None:
        """Take connections and orders from the supervisor."""
        supervisor = self.supervisor
        supervisor.on_connection = lambda fd, number, admission: self.http.adopt(
            fd, admission, partial(supervisor.close_connection, number)
        )
        supervisor.on_drain = self._on_signal
        supervisor.on_reload = lambda: self.watch.poll(force=True)
        supervisor.attach()

    def _is_alive(self) -> bool:
        return liveness(self.context) == "ok"

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
        await self.batches.stop()
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
            if self.context.fronts.leader == self.context.fronts.row:
                for line in await self.metrics.log_lines():
                    logger.info("%s", line)

    def _warn_if_open(self) -> None:
        host = urlsplit(self.url).hostname
        if host is None or self.context.keys.required:
            return
        if not ipaddress.ip_address(host.split("%")[0]).is_loopback:
            logger.warning("listening on %s without an API key: anyone who can reach this port can use the model", host)


def create_pool(
    entries: Sequence[ModelEntry],
    server: ServerConfig,
    make_llm: MakeLLM,
    metrics: Metrics,
    supervisor: SupervisorClient | None = None,
) -> ModelPool:
    """Return the pool of these models, none of them started; their adapters are published by the supervisor."""
    fronts = supervisor or Fronts()
    entries = [dataclasses.replace(entry, config=with_key_weights(entry.config, fronts)) for entry in entries]
    return ModelPool(
        [
            _served(number, entry, make_llm, metrics.model(entry.names[0]), supervisor, essential=len(entries) == 1)
            for number, entry in enumerate(entries)
        ],
        max_loaded=server.max_loaded_models,
        load_timeout=server.model_load_timeout,
        idle_timeout=server.model_idle_timeout,
        unload_idle=server.model_idle_action == "unload",
    )


def _served(
    number: int,
    entry: ModelEntry,
    make_llm: MakeLLM,
    metrics: ModelMetrics,
    supervisor: SupervisorClient | None,
    *,
    essential: bool,
) -> ServedModel:
    key = adapters_key(entry.names[0])

    def make() -> AsyncLLM:
        llm = make_llm(entry.config, [metrics])
        metrics.attach(llm)
        if supervisor is not None:
            llm.share_load = partial(supervisor.share_load, number)
            llm.adapters.on_change = partial(supervisor.publish, key)
            if key in supervisor.published:
                llm.adapters.restore(supervisor.published[key])
        return llm

    return ServedModel(
        entry.config,
        make(),
        pinned=entry.pinned,
        at_start=entry.at_start,
        essential=essential,
        make_llm=make,
        max_model_len=entry.max_model_len,
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
