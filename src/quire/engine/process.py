"""The engine in a process of its own: `EngineProcess` is a handle of it, `main` in the process itself.

`create_client` returns a client for an engine in a process or in a thread.

`launch.py` starts the process. Its handle watches it and connects clients, here (`ProcessClient`) or in other
processes. Whoever launched it decides when it ends, clients do not, and it never outlives its parent.
"""

from __future__ import annotations

import asyncio
import errno
import faulthandler
import gc
import json
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from quire import logs
from quire.config import EngineConfig
from quire.engine.client import EndOfConnection, EngineClient, SocketClient
from quire.engine.clients import SocketClients
from quire.engine.heartbeat import Heartbeat, HeartbeatWriter, StallDetector
from quire.engine.launch import MODULE, LaunchedEngine, engine_options, launch
from quire.engine.messages import Failed, Ready, Received, ToEngine
from quire.errors import ConfigError, EngineDeadError, OverloadedError, QuireError

if TYPE_CHECKING:
    from quire.engine.core import EngineCore

logger = logging.getLogger(__name__)

EXIT_SECONDS = 2.0  # from the end of a connection to the end of the process
KILL_SECONDS = 10.0  # from a kill to it; a driver may keep the process for longer
DUMP_SECONDS = 0.4
DUMP_POLL_SECONDS = 0.05
MAX_DUMP_BYTES = 1 << 17
DUMP_SIGNAL = signal.SIGUSR1


class EngineProcess:
    """A handle of an engine process, which was started and loads its model.

    Attributes:
        pid: process id. exit_code: set when the process has ended.
    """

    def __init__(self, launched: LaunchedEngine) -> None:
        self.pid = launched.pid
        self.exit_code = launched.exit_code
        self._launched = launched
        self._closed = False
        self._listener = socket.socket(fileno=launched.listener)
        self._listener.setblocking(False)
        self._heartbeat = Heartbeat(launched.heartbeat)
        os.close(launched.heartbeat)
        # The engine writes its stacks to it on `DUMP_SIGNAL` and when it crashes. Both share its position.
        self._stacks = os.fdopen(launched.stacks, "rb", buffering=0)
        self._num_read = os.fstat(launched.stacks).st_size  # what is there was for an earlier handle
        self._stalls = StallDetector(self._heartbeat)

    @property
    def request_ids(self) -> list[str]:
        """The requests that the engine is computing, or was computing when it ended."""
        return [] if self._closed else self._heartbeat.request_ids()

    def connect(self) -> socket.socket:
        """Return a new connection, for a `SocketClient` here or in another process to which the socket is passed on.

        It is answered when the model is loaded, and is at its end if the process has ended.

        Raises `OverloadedError` if too many connections wait for the engine already: it accepts them between steps.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._listener, [b"c"], [theirs.fileno()])
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.ETOOMANYREFS):
                    ours.close()
                    raise OverloadedError("too many connections wait for the engine; try again later") from None
        return ours

    @property
    def _loaded(self) -> bool:
        return self._heartbeat.read()[0] > 0.0

    @property
    def _ended(self) -> bool:
        return self._closed or self.exit_code.done()

    def stalled_for(self) -> float:
        """See `EngineClient.stalled_for`. To be called every second or two, see `StallDetector`."""
        return 0.0 if self._ended else self._stalls.stalled_for()

    async def dump_stacks(self) -> str:
        """See `EngineClient.dump_stacks`."""
        if self._ended:
            return ""
        doing, stacks = json.dumps(self._stalls.describe()), ""
        if self._loaded:  # before that it may not handle the signal yet, and would die of it
            self._launched.signal(DUMP_SIGNAL)
            loop = asyncio.get_running_loop()
            deadline = loop.time() + DUMP_SECONDS
            while loop.time() < deadline:
                await asyncio.sleep(DUMP_POLL_SECONDS)
                piece = self.read_stacks()
                if stacks and not piece:
                    break
                stacks += piece
        where = stacks or "There are no stacks."
        logger.warning("the engine process %d is at %s\n%s", self.pid, doing, where)
        return stacks

    def read_stacks(self) -> str:
        """Return what the engine has written of its stacks since the last call."""
        if self._closed:
            return ""
        data = os.pread(self._stacks.fileno(), MAX_DUMP_BYTES, self._num_read)
        self._num_read += len(data)
        return data.decode(errors="replace")

    async def wait(self) -> int:
        """Wait for a process that is about to end, kill it if it does not, and return its exit code."""
        ended = asyncio.wrap_future(self.exit_code)
        try:
            return await asyncio.wait_for(asyncio.shield(ended), EXIT_SECONDS)
        except TimeoutError:
            self.kill()
        try:
            return await asyncio.wait_for(ended, KILL_SECONDS)
        except TimeoutError:
            logger.error("the engine process %d was killed and does not end", self.pid)
            return -signal.SIGKILL

    def kill(self) -> None:
        """End the process by force."""
        self._launched.signal(signal.SIGKILL)

    async def close(self) -> None:
        """End the process in order, then by force, unless others use it; release everything shared with it."""
        if self._closed:
            return
        reacts = self._loaded and not self.stalled_for()
        self._listener.close()
        await self._launched.end(reacts)
        if not self._closed:
            self._closed = True
            self._heartbeat.close()
            self._stacks.close()


class ProcessClient(EngineClient):
    """A client that has an engine process started, watches and ends it. See `EngineProcess`.

    Args:
        launch: starts the process; by default as a child of this one, that runs `main` of `module`.

    Attributes:
        process: None before `start`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        module: str = MODULE,
        launch: Callable[[EngineConfig], Awaitable[LaunchedEngine]] | None = None,
    ) -> None:
        self._config = config
        self._launch = launch or partial(_launch, module=module)
        self._client: SocketClient | None = None
        self._dead: EngineDeadError | None = None
        self.process: EngineProcess | None = None

    async def start(self) -> Ready:
        """Start the process and wait until the model is loaded.

        Raises:
            ConfigError: the child reports bad options or a bad model. EngineDeadError: it could not be started, or
                ended without a word. OverloadedError: too many connections wait for it.
        """
        try:
            return await self._start_process()
        except EngineDeadError:
            process = self.process
            if process is None or not process.exit_code.done() or process.exit_code.result() != ConfigError.exit_code:
                raise
        # Its options or its model are bad, and it ended before it could say so here: another one will.
        self._dead = None
        return await self._start_process()

    async def _start_process(self) -> Ready:
        try:
            self.process = EngineProcess(await self._launch(self._config))
        except (OSError, RuntimeError) as error:  # of memory, descriptors, processes or threads
            raise EngineDeadError(f"the engine process cannot be started: {error}") from error
        try:
            self._client = SocketClient(self.process.connect(), f"process {os.getpid()}", self._why_dead)
            # The connection ends, too, unless a process that the engine has started keeps it open.
            asyncio.wrap_future(self.process.exit_code).add_done_callback(self._on_exit)
            return await self._client.start()
        except QuireError:
            await self.close()
            raise
        except OSError as error:
            await self.close()
            raise EngineDeadError(f"there is no connection to the engine process: {error}") from error

    def send(self, message: ToEngine) -> None:
        assert self._client is not None, "started before"
        self._client.send(message)

    async def receive(self) -> Received:
        if self._dead is not None:
            raise self._dead
        assert self._client is not None, "started before"
        return await self._client.receive()

    def stalled_for(self) -> float:
        return 0.0 if self.process is None else self.process.stalled_for()

    async def dump_stacks(self) -> str:
        return "" if self.process is None else await self.process.dump_stacks()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()

    async def close(self) -> None:
        """End the process and release everything shared with it."""
        if self.process is not None:
            await self.process.close()
        if self._dead is None:
            self._dead = EngineDeadError("the engine was closed")
        if self._client is not None:
            await self._client.close()

    def _on_exit(self, exit_code: asyncio.Future[int]) -> None:
        if self._client is not None and not exit_code.cancelled():
            self._client.finish()

    async def _why_dead(self, end: EndOfConnection) -> EngineDeadError:
        assert self.process is not None
        if isinstance(end, Failed):
            message = end.message
        elif isinstance(end, EOFError):
            message = f"the engine process ended with exit code {await self.process.wait()}"
        else:
            self.process.kill()
            await self.process.wait()
            message = f"the engine sent an invalid message and was killed: {end}"
        stacks = self.process.read_stacks()
        if stacks:
            logger.error("%s; it was here:\n%s", message, stacks)
        self._dead = EngineDeadError(message, suspects=self.process.request_ids)
        return self._dead


async def _launch(config: EngineConfig, module: str) -> LaunchedEngine:
    return launch(engine_options(config), module)


def create_client(config: EngineConfig, kind: str) -> EngineClient:
    """Return a client, not started yet, for an engine in a "process" of its own or "inline" in a thread."""
    if kind == "process":
        return ProcessClient(config)
    # Lazy: it imports the engine, which this process needs only then.
    from quire.engine.thread import ThreadClient

    return ThreadClient(config)


def _make_core(config: EngineConfig) -> EngineCore:
    from quire.engine.core import EngineCore

    return EngineCore(config)


def serve(
    listener: socket.socket,
    observer: HeartbeatWriter,
    config: EngineConfig,
    make_core: Callable[[EngineConfig], EngineCore],
) -> int:
    """Load the model, then serve clients until the parent closes the listener; return the exit code."""
    from quire.engine.loop import run

    clients = SocketClients(listener)
    try:
        core = make_core(config)
        observer.idle()
        clients.on_wait = observer.wait
        ready = msgspec.structs.replace(core.ready, incarnation=uuid.uuid4().hex)
        clients.start(lambda: msgspec.structs.replace(ready, sleep_level=core.sleep_level))
        run(core, clients, observer)
        observer.stop()
        core.close()
        return 0
    except QuireError as error:
        return clients.fail(Failed(error.message, error.param, error.exit_code))
    except Exception as error:  # process boundary: clients must learn what ended the engine
        logger.exception("the engine process failed")
        return clients.fail(Failed(f"the engine failed: {type(error).__name__}"))
    finally:
        clients.close()


def main(make_core: Callable[[EngineConfig], EngineCore] = _make_core) -> int:
    """Entry point of the child process."""
    started = json.loads(sys.stdin.buffer.read())
    logs.setup(**started["log"], process="engine", in_thread=True)
    # The parent logs what is written there at the signal or at a crash.
    os.set_inheritable(started["stacks"], False)
    faulthandler.enable(started["stacks"])
    faulthandler.register(DUMP_SIGNAL, started["stacks"])
    observer = HeartbeatWriter(Heartbeat(started["heartbeat"]))
    os.close(started["heartbeat"])
    config = EngineConfig.from_kwargs(**started["options"])
    code = serve(socket.socket(fileno=started["listener"]), observer, config, make_core)
    gc.freeze()  # else Python looks through all objects once more before it ends, and a server that stops waits for it
    return code
