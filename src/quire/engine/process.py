"""The engine in a process of its own. Both ends stand here: `ProcessClient` in the front, `main` in the child.

They talk msgpack over two ZMQ sockets, one each way, in a directory only the user can enter. The child gets its options
as JSON on standard input. It ends when told to, and by itself when its parent is gone; it never outlives the front.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from quire.child_process import start_module
from quire.config import SERVER_GROUPS, EngineConfig
from quire.engine.messages import CallResult, EngineOutputs, Failed, FromEngine, Ready, Shutdown, ToEngine
from quire.errors import ConfigError, EngineDeadError, QuireError

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 10.0
_IDLE_MILLISECONDS = 1000
_LAST_WORDS_SECONDS = 0.1


class ProcessClient:
    """Starts the engine process and carries messages to and from it.

    Attributes:
        directory: where the sockets are, once spawned; removed by `close`.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self.directory: Path | None = None
        self._context: zmq.asyncio.Context | None = None
        self._inbox: zmq.asyncio.Socket | None = None
        self._outbox: zmq.Socket[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._exit: asyncio.Future[int] | None = None
        self._receiving: asyncio.Future[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the engine, once started."""
        return self._process.pid if self._process else None

    def spawn(self) -> None:
        """Start the process without waiting for it; `start` does this if it was not done before."""
        self.directory = Path(tempfile.mkdtemp(prefix="quire-"))  # mode 0700
        self._context = zmq.asyncio.Context(io_threads=1)
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.bind(f"ipc://{self.directory}/from-engine")
        # Sending is plain, not asyncio: no future per message. It needs a socket of its own, since a plain call on an
        # asyncio socket can swallow its wake-up. Connecting, not binding, lets messages queue before the child is up.
        self._outbox = zmq.Context(self._context).socket(zmq.PUSH)
        for socket in (self._inbox, self._outbox):
            socket.set_hwm(0)  # bounded by admission, not here: a full socket must not block the event loop
            socket.setsockopt(zmq.LINGER, 0)
        self._outbox.connect(f"ipc://{self.directory}/to-engine")
        options = {
            "directory": str(self.directory),
            "log_level": self._config.server.log_level,
            "options": _wire(self._config),
        }
        self._process = start_module("quire.engine.process", stdin=subprocess.PIPE)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(options).encode())
        self._process.stdin.close()

    async def start(self) -> Ready:
        """Wait until the model is loaded.

        Raises:
            ConfigError: bad options or a bad model, as the child said. EngineDeadError: it ended without a word.
        """
        if self._process is None:
            self.spawn()
        process = self._process
        assert process is not None
        loop = asyncio.get_running_loop()
        self._exit = loop.create_future()

        def watch() -> None:
            code = process.wait()
            with contextlib.suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(self._ended, code)

        # A daemon: an engine that outlives everything must not keep the interpreter from ending.
        threading.Thread(target=watch, name="quire-engine-watch", daemon=True).start()
        message = await self._next()
        if isinstance(message, Failed):
            await self.close()
            if message.exit_code == 2:
                raise ConfigError(message.message, param=message.param)
            raise EngineDeadError(message.message)
        assert isinstance(message, Ready), message
        return message

    def send(self, message: ToEngine) -> None:
        """Send without waiting; messages keep their order. Lost silently if the engine is gone: `receive` says so."""
        assert self._outbox is not None
        self._outbox.send(self._encoder.encode(message), zmq.NOBLOCK)

    async def receive(self) -> EngineOutputs | CallResult:
        """Wait for news. Raises `EngineDeadError` once the process has ended or its loop has failed."""
        message = await self._next()
        if isinstance(message, Failed):
            raise EngineDeadError(message.message)
        assert isinstance(message, EngineOutputs | CallResult), message
        return message

    async def _next(self) -> FromEngine:
        assert self._inbox is not None and self._exit is not None
        if self._receiving is None:
            self._receiving = asyncio.ensure_future(self._inbox.recv())
        try:
            data = await asyncio.shield(self._receiving)
        except asyncio.CancelledError:
            if self._receiving is not None and self._receiving.cancelled():
                raise EngineDeadError(f"the engine process ended with exit code {self._exit.result()}") from None
            raise
        self._receiving = None
        return self._decoder.decode(data)

    def _ended(self, code: int) -> None:
        """Note that the process has ended; what it sent before may still be on its way for a moment."""
        assert self._exit is not None
        loop = self._exit.get_loop()
        if not self._exit.done():
            self._exit.set_result(code)
            loop.call_later(_LAST_WORDS_SECONDS, self._stop_receiving)

    def _stop_receiving(self) -> None:
        if self._receiving is None and self._inbox is not None and not self._inbox.closed:
            self._receiving = asyncio.ensure_future(self._inbox.recv())
        if self._receiving is not None and not self._receiving.done():
            self._receiving.cancel()

    def stalled_for(self) -> float:
        """Return 0.0: nothing is known of the engine's progress."""
        return 0.0

    def kill(self) -> None:
        """End the process by force."""
        if self._process is not None:
            self._process.kill()

    async def close(self) -> None:
        """End the process: politely, then by force; remove its socket."""
        process, self._process = self._process, None
        if process is not None and self._exit is None:  # spawned, never started
            process.kill()
            process.wait()
        elif process is not None and self._exit is not None:
            if not self._exit.done():
                self.send(Shutdown())
                try:
                    await asyncio.wait_for(asyncio.shield(self._exit), _CLOSE_SECONDS)
                except TimeoutError:
                    logger.warning("the engine did not stop within %.0f s and is killed", _CLOSE_SECONDS)
                    process.kill()
            await self._exit
            self._stop_receiving()
        for socket in (self._inbox, self._outbox):
            if socket is not None:
                socket.close()
        if self._context is not None:
            self._context.term()
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)


def _wire(config: EngineConfig) -> dict[str, Any]:
    """The options the engine needs; secrets of the server stay where they are."""
    values = config.to_kwargs()
    for name in ("api_key", "ssl_keyfile", "ssl_certfile"):
        del values[name]
    return values


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies (Linux); elsewhere the idle loop notices."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(directory: str, config: EngineConfig) -> int:
    """The child's life: load, say so, then apply messages and step until told to stop. Returns the exit code."""
    from quire.engine.core import EngineCore
    from quire.engine.loop import run

    encoder = msgspec.msgpack.Encoder()
    decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
    parent = os.getppid()
    context = zmq.Context(io_threads=1)
    inbox = context.socket(zmq.PULL)
    outbox = context.socket(zmq.PUSH)
    for socket in (inbox, outbox):
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 2000)
    inbox.bind(f"ipc://{directory}/to-engine")
    outbox.connect(f"ipc://{directory}/from-engine")

    def receive(wait: bool) -> ToEngine | None:
        return decoder.decode(inbox.recv()) if inbox.poll(_IDLE_MILLISECONDS if wait else 0) else None

    def send(message: FromEngine) -> None:
        outbox.send(encoder.encode(message))

    try:
        core = EngineCore(config)
        send(core.ready)
        run(core, receive, send, alive=lambda: os.getppid() == parent)
        return 0
    except QuireError as error:
        send(Failed(error.message, error.param, error.exit_code))
        return error.exit_code
    except Exception as error:  # process boundary: the front must hear of whatever ended the engine
        logger.exception("the engine process failed")
        send(Failed(f"the engine failed: {type(error).__name__}", None, 1))
        return 1
    finally:
        inbox.close()
        outbox.close()
        context.term()


def main() -> int:
    """Entry point of the child process."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the front decides what it means
    started = json.loads(sys.stdin.buffer.read())
    logging.basicConfig(
        level=started["log_level"].upper(), format="%(asctime)s %(levelname)s engine %(name)s: %(message)s"
    )
    return serve(started["directory"], EngineConfig.from_kwargs(groups=SERVER_GROUPS, **started["options"]))


if __name__ == "__main__":
    sys.exit(main())
