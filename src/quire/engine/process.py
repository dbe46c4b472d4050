"""The engine in a process of its own. Both ends stand here: `ProcessClient` in the front, `main` in the child.

What they say to each other is in `messages.py`, how it travels in `channel.py`, how the front knows that the engine
gets on in `heartbeat.py`. The child inherits all of that and gets its options as JSON on standard input. It ends when
told to, and by itself when its parent is gone; it never outlives the front.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec

from quire import logs
from quire.child_process import start_module
from quire.config import CONFIG_GROUPS, EngineConfig
from quire.engine.channel import ChannelError, EngineEnd, FrontEnd, message
from quire.engine.heartbeat import Heartbeat, HeartbeatWriter, StallDetector, anonymous_file, create_heartbeat
from quire.engine.messages import CallResult, EngineOutputs, Failed, FromEngine, Ready, Shutdown, ToEngine
from quire.errors import ConfigError, EngineDeadError, QuireError
from quire.options import option_fields

if TYPE_CHECKING:
    from quire.engine.core import EngineCore

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 10.0
_REAP_SECONDS = 2.0  # for an engine that has closed its end to end altogether
_DUMP_SECONDS = 0.4
_DUMP_PIECE_SECONDS = 0.05
_MOST_DUMPED = 1 << 17  # bytes
_DUMP_SIGNAL = signal.SIGUSR1


class ProcessClient:
    """Starts the engine process and carries messages to and from it.

    Args:
        module: whose `main` the child runs; another one than this one is for tests.
    """

    def __init__(self, config: EngineConfig, *, module: str = __name__) -> None:
        self._config = config
        self._module = module
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: FrontEnd | None = None
        self._heartbeat: Heartbeat | None = None
        self._watch: StallDetector | None = None
        self._stacks: int | None = None  # a file in which the engine writes where it is when asked, or when it crashes
        self._num_dumped = 0  # bytes of it that were read
        self._exit: Future[int] = Future()
        self._exit.set_running_or_notify_cancel()  # so that nobody who waits for it can cancel it
        self._ready = False
        self._dead: EngineDeadError | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the engine, once started."""
        return self._process.pid if self._process else None

    def spawn(self) -> None:
        """Start the process without waiting for it; `start` does this if it was not done before."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._channel = FrontEnd(ours)
            beat, self._heartbeat = create_heartbeat()
            self._watch = StallDetector(self._heartbeat)
            try:
                self._stacks = anonymous_file("quire-stacks")
                inherited = {"channel": theirs.fileno(), "heartbeat": beat, "stacks": self._stacks}
                self._process = start_module(
                    self._module,
                    on_exit=self._exit.set_result,
                    stdin=subprocess.PIPE,
                    pass_fds=tuple(inherited.values()),
                )
            finally:
                os.close(beat)
        options = {**inherited, "log": logs.settings(), "options": _wire(self._config)}
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already: `start` says so
            self._process.stdin.write(json.dumps(options).encode())
            self._process.stdin.close()

    async def start(self) -> Ready:
        """Wait until the model is loaded.

        Raises:
            ConfigError: bad options or a bad model, as the child said. EngineDeadError: it ended without a word.
        """
        if self._process is None:
            self.spawn()
        assert self._channel is not None
        self._channel.attach()
        # The end of the channel says the same, unless a process that the engine has started holds it open.
        asyncio.wrap_future(self._exit).add_done_callback(self._ended)
        said = await self._next()
        if isinstance(said, Failed):
            await self.close()
            if said.exit_code == 2:
                raise ConfigError(said.message, param=said.param)
            raise EngineDeadError(said.message)
        if not isinstance(said, Ready):
            raise await self._malformed(f"{type(said).__name__} before it is ready")
        self._ready = True
        return said

    def send(self, message: ToEngine) -> None:
        """Send without waiting; messages keep their order. Lost silently if the engine is gone: `receive` says so."""
        assert self._channel is not None
        self._channel.send(self._encoder.encode(message))

    async def receive(self) -> EngineOutputs | CallResult:
        """Wait for a message. Raises `EngineDeadError` once the process has ended or its loop has failed."""
        said = await self._next()
        if isinstance(said, Failed):
            raise self._died(said.message)
        if isinstance(said, Ready):
            raise await self._malformed("it is ready a second time")
        return said

    async def _next(self) -> FromEngine:
        if self._dead is not None:
            raise self._dead
        assert self._channel is not None
        try:
            data = await self._channel.receive()
            if data is not None:
                return message(self._decoder, data)
        except ChannelError as error:
            raise await self._malformed(str(error)) from None
        raise self._died(f"the engine process ended with exit code {await self._exit_code()}")

    async def _malformed(self, reason: str) -> EngineDeadError:
        """End an engine whose messages are malformed; return the error of its death."""
        self.kill()
        await self._exit_code()
        return self._died(f"the engine sent what is no message, and was ended: {reason}")

    def _died(self, message: str) -> EngineDeadError:
        if self._dead is None:
            suspects = self._heartbeat.request_ids() if self._heartbeat is not None else []
            self._dead = EngineDeadError(message, suspects=suspects)
            last_words = self._read_stacks()
            if last_words:
                logger.error("%s; it was here:\n%s", message, last_words)
        return self._dead

    async def _exit_code(self) -> int:
        """Wait until the engine has ended altogether; help it if it does not."""
        ended = asyncio.wrap_future(self._exit)
        try:
            return await asyncio.wait_for(asyncio.shield(ended), _REAP_SECONDS)
        except TimeoutError:
            self.kill()
            return await ended

    def _ended(self, exit_code: asyncio.Future[int]) -> None:
        if self._channel is not None and not exit_code.cancelled():
            self._channel.finish()

    def stalled_for(self) -> float:
        """Return for how many seconds the engine has been silent for longer than its work explains; 0.0: it is not.

        To be called every few seconds: time in which nobody looked counts for five seconds at most.
        """
        return self._watch.stalled_for() if self._watch is not None and not self._exit.done() else 0.0

    async def dump_stacks(self) -> str:
        """Log where all threads of the engine are, and what it is working on; return the stacks.

        Waits for them half a second at most: an engine that is stopped cannot tell.
        """
        if self._process is None or self._watch is None or self._exit.done():
            return ""
        pid, doing = self._process.pid, json.dumps(self._watch.describe())  # now: it may be closed meanwhile
        stacks = ""
        if self._ready:  # before that it may not have said yet that it does not want to die of the signal
            self._process.send_signal(_DUMP_SIGNAL)
            loop = asyncio.get_running_loop()
            deadline = loop.time() + _DUMP_SECONDS
            while loop.time() < deadline:
                await asyncio.sleep(_DUMP_PIECE_SECONDS)
                piece = self._read_stacks()
                if stacks and not piece:
                    break
                stacks += piece
        told = stacks or "It does not say where it is."
        logger.warning("the engine process %d is at %s\n%s", pid, doing, told)
        return stacks

    def _read_stacks(self) -> str:
        if self._stacks is None:
            return ""
        data = os.pread(self._stacks, _MOST_DUMPED, self._num_dumped)
        self._num_dumped += len(data)
        return data.decode(errors="replace")

    def kill(self) -> None:
        """End the process by force."""
        if self._process is not None:
            self._process.kill()

    async def close(self) -> None:
        """End the process, politely, then by force, and release everything shared with it."""
        process, self._process = self._process, None
        if process is not None:
            if self._ready and not self._exit.done() and not self.stalled_for():
                self.send(Shutdown())
                ended = asyncio.wrap_future(self._exit)
                try:
                    await asyncio.wait_for(asyncio.shield(ended), _CLOSE_SECONDS)
                except TimeoutError:
                    logger.warning("the engine did not stop within %.0f s and is killed", _CLOSE_SECONDS)
            process.kill()
            await asyncio.wrap_future(self._exit)
        if self._dead is None:
            self._dead = EngineDeadError("the engine was closed")
        if self._channel is not None:
            self._channel.close()
        self._watch = None
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None
        if self._stacks is not None:
            os.close(self._stacks)
            self._stacks = None


def _wire(config: EngineConfig) -> dict[str, Any]:
    """The options the engine needs; those of the server, secrets among them, stay where they are."""
    values = config.to_kwargs()
    return {item.name: values[item.name] for item in option_fields(CONFIG_GROUPS)}


def _make_core(config: EngineConfig) -> EngineCore:
    from quire.engine.core import EngineCore

    return EngineCore(config)


def serve(
    channel: EngineEnd, observer: HeartbeatWriter, config: EngineConfig, make_core: Callable[[EngineConfig], EngineCore]
) -> int:
    """Load, report that, then apply messages and step until a `Shutdown`; return the exit code."""
    from quire.engine.loop import run

    encoder = msgspec.msgpack.Encoder()
    decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)

    def receive(wait: bool) -> ToEngine | None:
        data = channel.receive(wait)
        return None if data is None else message(decoder, data)

    def send(message: FromEngine) -> None:
        channel.send(encoder.encode(message))

    def fail(message: str, error: QuireError | None = None) -> int:
        failed = Failed(message, error.param if error else None, error.exit_code if error else 1)
        with contextlib.suppress(EOFError):
            send(failed)
        return failed.exit_code

    try:
        core = make_core(config)
        observer.idle()
        channel.waiting = observer.waiting
        send(core.ready)
        run(core, receive, send, observer=observer)
        observer.end()
        core.close()
        return 0
    except EOFError:
        logger.warning("the front is gone; the engine ends")
        return 1
    except ChannelError as error:
        logger.error("the engine got what is no message, and ends: %s", error)
        return fail(f"the engine got what is no message: {error}")
    except QuireError as error:
        return fail(error.message, error)
    except Exception as error:  # process boundary: the front must hear of whatever ended the engine
        logger.exception("the engine process failed")
        return fail(f"the engine failed: {type(error).__name__}")
    finally:
        channel.close()


def main(make_core: Callable[[EngineConfig], EngineCore] = _make_core) -> int:
    """Entry point of the child process."""
    # Ctrl-C, and the SIGTERM of some service managers, reach the whole group; the front decides what they mean.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    started = json.loads(sys.stdin.buffer.read())
    logs.setup(**started["log"], process="engine")
    # The front puts into its log what is written there: at the signal, or at a crash.
    os.set_inheritable(started["stacks"], False)
    faulthandler.enable(started["stacks"])
    faulthandler.register(_DUMP_SIGNAL, started["stacks"])
    observer = HeartbeatWriter(Heartbeat(started["heartbeat"]))
    os.close(started["heartbeat"])
    config = EngineConfig.from_kwargs(**started["options"])
    code = serve(EngineEnd(started["channel"]), observer, config, make_core)
    gc.freeze()  # else Python looks through all objects once more before it ends, and a server that stops waits for it
    return code
