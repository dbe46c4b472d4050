"""Several fronts in one event loop, which use the same engines; each may freeze or die when a test says so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, cast

from quire.errors import EngineDeadError, QuireError
from quire.frontend.adapters import AdapterRegistry
from quire.frontend.async_llm import AsyncLLM
from quire.server.fronts import FrontGoneError, Fronts
from quire.server.model_pool import ModelPool
from quire.server.served_model import ServedModel
from quire.server.shared_models import SharedModels, adapters_key
from tests.helpers.live_server import server_config


class Engine:
    """An engine process, as the supervisor has it. level: of sleep. users: the fronts that are connected."""

    def __init__(self, name: str, loaded: asyncio.Future[None]) -> None:
        self.name = name
        self.loaded = loaded
        self.level = 0
        self.users: set[int] = set()
        self.released = False


class FrontLLM:
    """A front's connection to the engine of a model: what `SharedModels` and its pool need of an `AsyncLLM`."""

    def __init__(self, front: Front, name: str) -> None:
        self.front = front
        self.world = front.world
        self.name = name
        self.engine: Engine | None = None
        self.ready = self.errored = False
        self.num_unfinished = 0
        self.max_model_len = 128
        self.adapters = AdapterRegistry(server_config(enable_lora=True), self.call)
        self.adapters.on_change = lambda state: front.fronts.publish(adapters_key(name), state)

    @property
    def sleep_level(self) -> int:
        return 0 if self.engine is None else self.engine.level

    @property
    def is_sleeping(self) -> bool:
        return self.sleep_level > 0

    async def start(self) -> None:
        world = self.world
        if self.ready:
            return
        await self.check_health()
        engine = world.engines.get(self.name)
        if engine is None:
            engine = world.engines[self.name] = Engine(self.name, world.loop.create_future())
            world.log.append(f"load {self.name}")
            error = world.failures.get(self.name)
            if error is not None:
                engine.loaded.set_exception(error)
                del world.engines[self.name]
            elif not world.held:
                engine.loaded.set_result(None)
        self.engine = engine
        engine.users.add(self.front.row)
        engine.released = False
        try:
            await asyncio.shield(engine.loaded)
        except QuireError:
            self.errored, self.engine = True, None
            raise
        self.ready = not self.errored

    async def wake_up(self) -> None:
        assert self.engine is not None
        if self.engine.level:
            self.world.log.append(f"wake {self.name}")
        await asyncio.sleep(0)
        self.engine.level = 0

    async def sleep(self, level: int) -> int:
        assert self.engine is not None and not self.world.in_use(self.name), "put to sleep while it was used"
        self.world.log.append(f"sleep {self.name}")
        await asyncio.sleep(0)
        self.engine.level = level
        return 1000

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.ready, self.errored = False, True
        engine, self.engine = self.engine, None
        if engine is not None and not self.front.dead:
            engine.users.discard(self.front.row)
            engine.released = True
            self.world.end_unused(engine)

    async def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        return {"resident": 5000}

    async def check_health(self) -> None:
        if self.errored:
            raise EngineDeadError("the engine is gone")


class LinkedFronts(Fronts):
    """What one front has of the others."""

    def __init__(self, world: FrontWorld, row: int) -> None:
        super().__init__(row)
        self.world = world
        self.rows = []

    def _reacts(self, row: int) -> bool:
        fronts = self.world.fronts
        return not self.world.fronts[self.row].dead and row in self.rows and not fronts[row].frozen

    async def ask(self, row: int, method: str, value: Any = None, *, seconds: float | None = 1.0) -> Any:
        await asyncio.sleep(0)
        if not self._reacts(row):
            raise FrontGoneError("gone")
        other = self.world.fronts[row]
        answering = other.spawn(other.fronts.handlers[method](json.loads(json.dumps(value))))
        while not answering.done():
            await asyncio.wait([answering], timeout=0.001)
            if row not in self.rows or other.dead:
                raise FrontGoneError("gone")
        if answering.cancelled():
            await asyncio.Event().wait()  # it is not answered, and nobody waits for it
        try:
            return json.loads(json.dumps(answering.result()))
        except Exception as error:
            raise FrontGoneError("it has failed") from error

    def publish(self, key: str, value: Any) -> None:
        if self.world.fronts[self.row].dead:
            return
        self.world.published[key] = value = json.loads(json.dumps(value))
        super().publish(key, value)
        for row in [row for row in self.world.fronts if row != self.row]:
            self.world.loop.call_soon(self.world.deliver, row, key, value)


class Front:
    """One front, with a pool of its own."""

    def __init__(self, world: FrontWorld, row: int) -> None:
        self.world = world
        self.row = row
        self.dead = self.frozen = False
        self.undelivered: list[tuple[str, Any]] = []
        self.tasks: set[asyncio.Task[Any]] = set()
        self.fronts = LinkedFronts(world, row)
        self.fronts.published = dict(world.published)
        models = [
            ServedModel(
                server_config(served_model_name=name),
                self._make(name)(),
                pinned=name in world.at_start,
                at_start=name in world.at_start,
                make_llm=self._make(name),
            )
            for name in world.names
        ]
        self.pool = ModelPool(models, max_loaded=world.max_loaded, clock=lambda: world.now, **world.options)
        self.models = SharedModels(self.pool, self.fronts, may_unload=world.may_unload)

    def _make(self, name: str) -> Callable[[], AsyncLLM]:
        def make() -> AsyncLLM:
            llm = FrontLLM(self, name)
            state = self.fronts.published.get(adapters_key(name))
            if state is not None:
                llm.adapters.restore(state)
            return cast(AsyncLLM, llm)

        return make

    def spawn(self, work: Awaitable[Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        return task

    def spawn_soon(self, work: Callable[[], Awaitable[Any]]) -> None:
        """Begin something as soon as the loop runs."""
        self.world.loop.call_soon(lambda: self.spawn(work()))

    @property
    def states(self) -> dict[str, str]:
        """The state of each model, as this front shows it."""
        return {model.names[0]: model.status for model in self.models.models}


class FrontWorld:
    """Fronts with models "a", "b", ..., the engines they use, and what these did, in order (`log`)."""

    def __init__(
        self,
        num_fronts: int,
        names: str,
        max_loaded: int | None = None,
        *,
        at_start: str = "",
        held: bool = False,
        may_unload: bool = True,
        **options: Any,
    ) -> None:
        self.loop = asyncio.new_event_loop()
        self.names, self.at_start, self.max_loaded = names, at_start, max_loaded
        self.may_unload, self.options = may_unload, options
        self.now = 1000.0
        self.held = held
        self.failures: dict[str, QuireError] = {}
        self.log: list[str] = []
        self.engines: dict[str, Engine] = {}
        self.published: dict[str, Any] = {}
        self.serving: list[int] = []
        self.fronts: dict[int, Front] = {}
        self.ended: list[Front] = []
        self.used: list[tuple[Front, str]] = []
        self.asked: list[asyncio.Task[None]] = []
        for row in range(num_fronts):
            self.start(row, wait=not held)

    # ---- the supervisor ----

    def start(self, row: int, *, wait: bool = True) -> None:
        """Start a front, and have it ready."""

        async def run() -> None:
            front = self.fronts[row] = Front(self, row)
            started = front.spawn(front.models.start())
            await asyncio.sleep(0)
            self.serving.append(row)
            self._tell()
            if wait:
                await asyncio.wait_for(started, 5)

        self.loop.run_until_complete(run())
        self.settle()

    def kill(self, row: int) -> None:
        """End a front at once."""

        async def run() -> None:
            front = self.fronts.pop(row)
            front.dead = True
            self.ended.append(front)
            self.used = [item for item in self.used if item[0] is not front]
            self.serving.remove(row)
            for engine in list(self.engines.values()):
                if row in engine.users:
                    engine.users.discard(row)
                    if engine.released:
                        self.end_unused(engine)
            self._tell()
            for task in [*front.tasks, *front.models._tasks, *front.pool._tasks]:
                task.cancel()
            front.models._closing = front.pool._closing = True

        self.loop.run_until_complete(run())
        self.settle()

    def freeze(self, row: int, frozen: bool = True) -> None:
        """Have a front not react; what it was told meanwhile arrives when it goes on."""
        front = self.fronts[row]
        front.frozen = frozen
        if not frozen:
            undelivered, front.undelivered = front.undelivered, []

            async def run() -> None:
                for key, value in undelivered:
                    self.deliver(row, key, value)

            self.loop.run_until_complete(run())
            self.settle()

    def _tell(self) -> None:
        for front in self.fronts.values():
            front.fronts.rows = list(self.serving)
            for note in front.fronts.on_change:
                note()

    def deliver(self, row: int, key: str, value: Any) -> None:
        front = self.fronts.get(row)
        if front is None:
            return
        if front.frozen:
            front.undelivered.append((key, value))
            return
        front.fronts.published[key] = value
        for note in front.fronts.on_published:
            note(key)

    def end_unused(self, engine: Engine) -> None:
        """End an engine without users."""
        if not engine.users and self.engines.get(engine.name) is engine:
            assert not self.in_use(engine.name), "unloaded while it was used"
            self.log.append(f"unload {engine.name}")
            del self.engines[engine.name]

    # ---- clients ----

    def in_use(self, name: str) -> bool:
        return any(used == name for _, used in self.used)

    def ask(self, row: int, name: str) -> asyncio.Task[None]:
        """Begin a request at a front, which becomes a user of the model; end it with `end`."""
        front = self.fronts[row]

        async def request() -> None:
            model = front.models.find(name)
            await front.models.acquire(model)
            llm = cast(FrontLLM, model.llm)
            assert llm.ready and not llm.is_sleeping, "let in although it was not ready"
            assert llm.engine is self.engines[name], "it has another engine"
            self.used.append((front, name))

        task = self.loop.create_task(request())
        front.tasks.add(task)
        self.asked.append(task)
        return task

    def begin(self, row: int, name: str) -> asyncio.Task[None]:
        """As `ask`, and let everything happen."""
        task = self.ask(row, name)
        self.settle()
        return task

    def end(self, row: int, name: str) -> None:
        """End one request."""
        front = self.fronts[row]
        self.used.remove((front, name))
        self.do(lambda: front.models.release(front.models.find(name)))

    def serve(self, row: int, names: str) -> None:
        """Serve a request to each of these models, one after the other, a second each."""
        for name in names:
            task = self.begin(row, name)
            assert task.done(), f"{name} was not let in"
            task.result()
            self.now += 1.0
            self.end(row, name)

    def operate(self, row: int, action: str, name: str, *arguments: Any) -> None:
        """Have an operator's request done by a front."""
        front = self.fronts[row]
        model = front.models.find(name)
        self.loop.run_until_complete(asyncio.wait_for(getattr(front.models, action)(model, *arguments), 5))

    def finish_load(self, name: str) -> None:
        """Let loading end."""
        self.engines[name].loaded.set_result(None)
        self.settle()

    def do(self, work: Callable[[], None]) -> None:
        """Do something on the loop, and let happen what follows."""

        async def run() -> None:
            work()

        self.loop.run_until_complete(run())
        self.settle()

    def settle(self, turns: int = 40) -> None:
        """Let everything happen that can."""

        async def run() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            await asyncio.sleep(0.002)
            for _ in range(turns):
                await asyncio.sleep(0)

        self.loop.run_until_complete(run())

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Let things happen until the condition holds."""

        async def run() -> None:
            async with asyncio.timeout(5):
                while not condition():  # noqa: ASYNC110 - it depends on several parties, none of which tells
                    await asyncio.sleep(0.001)

        self.loop.run_until_complete(run())

    @property
    def states(self) -> dict[str, str]:
        """The state of each model, the same at every front."""
        states = [front.states for front in self.fronts.values()]
        assert all(state == states[0] for state in states), states
        return states[0]

    @property
    def loaded(self) -> str:
        """Names of the models that have an engine."""
        return "".join(name for name in self.names if name in self.engines)

    @property
    def leader(self) -> Front:
        """The front that decides."""
        return self.fronts[self.serving[0]]

    def close(self) -> None:
        """End all fronts."""
        self.used.clear()

        async def run() -> None:
            for front in self.fronts.values():
                await front.models.close()
            rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

        self.loop.run_until_complete(run())
        self.loop.close()
