"""A fake engine with several clients in one event loop, whose messages take their time in both directions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from quire.engine.client import EngineClient
from quire.engine.isolation import Isolation
from quire.engine.loop import RequestOwners
from quire.engine.messages import (
    AbortRequests,
    Call,
    CallResult,
    FromEngine,
    Isolate,
    Ready,
    Received,
    SteppedAside,
    ToEngine,
)
from quire.engine_request import EngineRequest
from quire.errors import EngineDeadError
from tests.helpers.fake_engine import FakeEngine


class SharedEngine:
    """One engine. `dead` is set once it has died, with what it was working on."""

    def __init__(self, engine: FakeEngine, rng: random.Random) -> None:
        self.engine = engine
        self.dead: EngineDeadError | None = None
        self.held = False
        self.news = asyncio.Event()
        self.clients: dict[int, SharedClient] = {}
        self.inbox: list[tuple[int, ToEngine | None]] = []
        self._num_clients = 0
        self._rng = rng
        self._owners = RequestOwners()
        self._isolation = Isolation(lambda index, message: self.clients[index].deliver(message))
        self._task = asyncio.create_task(self._run())

    def connect(self, client: SharedClient) -> int:
        """Return the number of a new client."""
        self._num_clients += 1
        self.clients[self._num_clients] = client
        return self._num_clients

    def kill(self) -> None:
        """End it, from outside."""
        names = dict.fromkeys(item.request.request_id for item in self.engine._live.values())
        self._die(EngineDeadError("the engine process ended with exit code -9", suspects=list(names)))

    def close(self) -> None:
        """End it, with its last client."""
        self._task.cancel()

    def _die(self, error: EngineDeadError) -> None:
        self.dead = error
        self._task.cancel()
        for client in self.clients.values():
            client.news.set()

    async def _run(self) -> None:
        while True:
            for _ in range(self._rng.randrange(3)):
                await asyncio.sleep(0)
            received, self.inbox = self.inbox, []
            for index, message in received:
                self._apply(index, message)
                self._isolation.note(index, message)
            self._isolation.update(list(self.clients))
            if self.engine.has_unfinished() and not self.held:
                try:
                    step = self.engine.step()
                except EngineDeadError as error:
                    self._die(error)
                    return
                for index, outputs in self._owners.split(step.outputs).items():
                    self.clients[index].deliver(self.engine.outputs(outputs))
            elif not self.inbox:
                self.news.clear()
                await self.news.wait()

    def _apply(self, index: int, message: ToEngine | None) -> None:
        match message:
            case EngineRequest():
                self.engine.send(message)
                self._owners.add(index, message)
            case AbortRequests():
                self.engine.send(AbortRequests(self._owners.remove(index, message.request_ids)))
            case Call():
                answer = CallResult(call_id=message.call_id, value=self.engine.call(message.method, message.arguments))
                self.clients[index].deliver(answer)
            case None:
                self.engine.send(AbortRequests(self._owners.remove(index, self._owners.owned_by(index))))
            case Isolate() | SteppedAside():
                pass


class SharedClient(EngineClient):
    """One client. `engine` returns the engine that runs when it starts."""

    def __init__(self, engine: Callable[[], SharedEngine], rng: random.Random) -> None:
        self._find = engine
        self._rng = rng
        self._engine: SharedEngine | None = None
        self._index = 0
        self._inbox: list[Received] = []
        self.news = asyncio.Event()

    async def start(self) -> Ready:
        """Connect to the engine, after a while."""
        for _ in range(self._rng.randrange(4)):
            await asyncio.sleep(0)
        self._engine = self._find()
        self._index = self._engine.connect(self)
        return self._engine.engine.ready

    def send(self, message: ToEngine) -> None:
        """Put a message on its way."""
        assert self._engine is not None
        if self._engine.dead is None:
            self._engine.inbox.append((self._index, message))
            self._engine.news.set()

    def deliver(self, message: FromEngine) -> None:
        """Take a message of the engine."""
        assert isinstance(message, Received)
        self._inbox.append(message)
        self.news.set()

    async def receive(self) -> Received:
        """Wait for a message."""
        assert self._engine is not None
        for _ in range(self._rng.randrange(3)):
            await asyncio.sleep(0)
        while not self._inbox:
            if self._engine.dead is not None:
                raise self._engine.dead
            self.news.clear()
            await self.news.wait()
        return self._inbox.pop(0)

    async def close(self) -> None:
        """Leave the engine; it ends with its last client."""
        engine = self._engine
        if engine is not None and engine.dead is None and engine.clients.pop(self._index, None) is not None:
            engine.inbox.append((self._index, None))
            engine.news.set()
            if not engine.clients:
                engine.close()
