"""`ThreadClient`: the engine in a thread of this process. Without a thread, `EngineCore` itself is called (`LLM`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import uuid
from collections.abc import Callable

import msgspec

from quire.config import EngineConfig
from quire.engine.client import EngineClient
from quire.engine.core import EngineCore
from quire.engine.loop import run
from quire.engine.messages import FromEngine, Ready, Received, ToEngine
from quire.errors import EngineDeadError, QuireError

logger = logging.getLogger(__name__)

IDLE_SECONDS = 60.0


class _OneClient:
    """The only client of an engine in a thread, for the loop (`loop.Clients`): messages go through queues as they are.

    Args:
        deliver: takes what the engine sends, on its thread.
    """

    def __init__(self, deliver: Callable[[FromEngine], None]) -> None:
        self.inbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()  # None: the loop is to end
        self.connected = [0]
        self.closed = False
        self._deliver = deliver

    def receive(self, wait: bool) -> list[tuple[int, ToEngine | None]]:
        received: list[tuple[int, ToEngine | None]] = []
        with contextlib.suppress(queue.Empty):
            while not self.closed:
                message = self.inbox.get(block=wait and not received, timeout=IDLE_SECONDS)
                if message is None:
                    self.closed = True
                else:
                    received.append((0, message))
        return received

    def send(self, client_index: int, message: FromEngine) -> None:
        self._deliver(message)


class ThreadClient(EngineClient):
    """An engine in a thread of its own, reached from one asyncio loop. It is not watched: it could not be replaced."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._clients = _OneClient(self._deliver)
        self._outbox: asyncio.Queue[FromEngine | Exception] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._dead: Exception | None = None

    async def start(self) -> Ready:
        """Load the model; return when requests can be sent. Raises what loading raised."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        first = await self._outbox.get()
        if isinstance(first, Exception):
            self._dead = first
            raise first
        assert isinstance(first, Ready), first
        return first

    def send(self, message: ToEngine) -> None:
        self._clients.inbox.put(message)

    async def receive(self) -> Received:
        if self._dead is None:
            item = await self._outbox.get()
            if not isinstance(item, Exception):
                assert isinstance(item, Received), item
                return item
            self._dead = item
        raise EngineDeadError(f"the engine stopped: {self._dead}") from self._dead

    async def close(self) -> None:
        """End the thread after its current step and release the model."""
        if self._thread.is_alive():
            self._clients.inbox.put(None)
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    def _deliver(self, item: FromEngine | Exception) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._outbox.put_nowait, item)
        except RuntimeError:
            # The event loop was closed without close().
            logger.warning("an engine output came after its event loop had closed")

    def _run(self) -> None:
        """The thread: load, then apply messages and step until closed."""
        core: EngineCore | None = None
        try:
            core = EngineCore(self._config)
            self._deliver(msgspec.structs.replace(core.ready, incarnation=uuid.uuid4().hex))
            run(core, self._clients)
            self._deliver(EngineDeadError("the engine was closed"))
        except Exception as error:  # thread boundary: the client must learn what ended the engine
            if not isinstance(error, QuireError):
                logger.exception("the engine thread failed")
            self._deliver(error)
        finally:
            if core is not None:
                core.close()
