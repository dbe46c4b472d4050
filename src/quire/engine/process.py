"""The engine in a process of its own: `EngineProcess` in its parent, `main` in the process itself.

`create_client` returns a client for an engine in a process or in a thread.

The parent starts the process, watches it and ends it; it connects clients, itself (`ProcessClient`) or other processes.
The child inherits a listener, by which clients are connected (`clients.py`), the memory of its heartbeat
(`heartbeat.py`), and a file for its stacks; it gets its options as JSON on standard input. The parent decides when it
ends, clients do not, and it never outlives its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import faulthandler
import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec

from quire import logs
from quire.child_process import start_module
from quire.config import CONFIG_GROUPS, EngineConfig
from quire.engine.client import EndOfConnection, EngineClient, SocketClient
from quire.engine.clients import SocketClients
from quire.engine.heartbeat import Heartbeat, HeartbeatWriter, StallDetector, anonymous_file, create_heartbeat
from quire.engine.messages import CallResult, EngineOutputs, Failed, Ready, ToEngine
from quire.errors import EngineDeadError, OverloadedError, QuireError
from quire.options import option_fields

if TYPE_CHECKING:
    from quire.engine.core import EngineCore

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
EXIT_SECONDS = 2.0  # from the end of a connection to the end of the process
DUMP_SECONDS = 0.4
DUMP_POLL_SECONDS = 0.05
MAX_DUMP_BYTES = 1 << 17
DUMP_SIGNAL = signal.SIGUSR1


class EngineProcess:
    """A parent's handle of an engine process, which is started at once and loads its model.

    Args:
        module: the child runs its `main`; tests pass another module than this one.

    Attributes:
        pid: process id. exit_code: set when the process has ended.

    Raises:
        EngineDeadError: the system starts no process.
    """

    def __init__(self, config: EngineConfig, *, module: str = __name__) -> None:
        self.exit_code: Future[int] = Future()
        self.exit_code.set_running_or_notify_cancel()  # so that it cannot be cancelled
        self._closed = False
        self._num_read = 0  # bytes of `_stacks`
        try:
            with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
                self._listener, listener = socket.socketpair()
                ours.enter_context(self._listener)
                theirs.enter_context(listener)
                self._listener.setblocking(False)
                beat, self._heartbeat = create_heartbeat()
                theirs.callback(os.close, beat)
                ours.callback(self._heartbeat.close)
                # The engine writes its stacks to it on `DUMP_SIGNAL` and when it crashes. Both share its position.
                self._stacks = ours.enter_context(os.fdopen(anonymous_file("quire-stacks"), "rb", buffering=0))
                inherited = {"listener": listener.fileno(), "heartbeat": beat, "stacks": self._stacks.fileno()}
                self._process = start_module(
                    module, on_exit=self.exit_code.set_result, stdin=subprocess.PIPE, pass_fds=tuple(inherited.values())
                )
                self._shared = ours.pop_all()
        except (OSError, RuntimeError) as error:  # of memory, descriptors, processes or threads
            raise EngineDeadError(f"the engine process cannot be started: {error}") from error
        self._stalls = StallDetector(self._heartbeat)
        self.pid = self._process.pid
        options = {**inherited, "log": logs.settings(), "options": _engine_options(config)}
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already: its connections are at their ends
            self._process.stdin.write(json.dumps(options).encode())
            self._process.stdin.close()

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
            self._process.send_signal(DUMP_SIGNAL)
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
            return await ended

    def kill(self) -> None:
        """End the process by force."""
        self._process.kill()

    async def close(self) -> None:
        """End the process in order, then by force, and release everything shared with it."""
        if self._closed:
            return
        reacts = self._loaded and not self.stalled_for()
        self._listener.close()
        ended = asyncio.wrap_future(self.exit_code)
        if reacts:
            try:
                await asyncio.wait_for(asyncio.shield(ended), CLOSE_SECONDS)
            except TimeoutError:
                logger.warning("the engine did not stop within %.0f s and is killed", CLOSE_SECONDS)
        self.kill()
        await ended
        if not self._closed:
            self._closed = True
            self._shared.close()


class ProcessClient(EngineClient):
    """The client that owns an engine process: it starts, watches and ends it. See `EngineProcess`.

    Attributes:
        process: None before `spawn`.
    """

    def __init__(self, config: EngineConfig, *, module: str = __name__) -> None:
        self._config = config
        self._module = module
        self._client: SocketClient | None = None
        self._dead: EngineDeadError | None = None
        self.process: EngineProcess | None = None

    def spawn(self) -> None:
        """Start the process without waiting for it; `start` does this if it was not done before.

        Raises `EngineDeadError` if it cannot be started.
        """
        self.process = EngineProcess(self._config, module=self._module)
        self._client = SocketClient(self.process.connect(), f"process {os.getpid()}", self._why_dead)

    async def start(self) -> Ready:
        """Wait until the model is loaded.

        Raises:
            ConfigError: the child reports bad options or a bad model. EngineDeadError: it could not be started, or
                ended without a word.
        """
        if self._client is None:
            self.spawn()
        assert self._client is not None and self.process is not None
        # The connection ends, too, unless a process that the engine has started keeps it open.
        asyncio.wrap_future(self.process.exit_code).add_done_callback(self._on_exit)
        try:
            return await self._client.start()
        except QuireError:
            await self.close()
            raise

    def send(self, message: ToEngine) -> None:
        assert self._client is not None, "started before"
        self._client.send(message)

    async def receive(self) -> EngineOutputs | CallResult:
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


def create_client(config: EngineConfig, kind: str) -> EngineClient:
    """Return a client, not started yet, for an engine in a "process" of its own or "inline" in a thread."""
    if kind == "process":
        return ProcessClient(config)
    # Lazy: it imports the engine, which this process needs only then.
    from quire.engine.thread import ThreadClient

    return ThreadClient(config)


def _engine_options(config: EngineConfig) -> dict[str, Any]:
    """Return the engine's options, without those of the server, which include secrets."""
    values = config.to_kwargs()
    return {item.name: values[item.name] for item in option_fields(CONFIG_GROUPS)}


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
        clients.start(msgspec.structs.replace(core.ready, incarnation=uuid.uuid4().hex))
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
    # Ctrl-C, and the SIGTERM of some service managers, reach the whole process group; the parent handles them.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    started = json.loads(sys.stdin.buffer.read())
    logs.setup(**started["log"], process="engine")
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
