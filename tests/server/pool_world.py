"""A pool of models with engines that load, fail, sleep and die when a test says so, and a clock that it sets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from quire.errors import EngineDeadError, ModelError, QuireError
from quire.frontend.adapters import AdapterRegistry
from quire.frontend.async_llm import AsyncLLM
from quire.server.model_pool import ModelPool
from quire.server.served_model import ServedModel
from tests.helpers.live_server import server_config


class FakeLLM:
    """What the pool needs of an `AsyncLLM`."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.ready = self.errored = self.is_sleeping = self.closed = False
        self.level = 0
        self.sleep_error: QuireError | None = None
        self.close_error: Exception | None = None
        self.num_unfinished = 0
        self.max_model_len = 128
        self.adapters = AdapterRegistry(server_config(), self.call)
        self.release: asyncio.Future[None] | None = None

    async def _held(self) -> None:
        """Wait for the test to say how it ends, unless loading is not held."""
        if self.world.held:
            self.release = self.world.loop.create_future()
            try:
                await self.release
            finally:
                self.release = None

    async def start(self) -> None:
        assert not self.closed and not self.ready
        self.world.log.append(f"load {self.name}")
        self.world.starting.add(self.name)
        try:
            await self._held()
            error = self.world.failures.get(self.name)
            if error is not None:
                raise error
        except QuireError:
            self.errored = True
            raise
        finally:
            self.world.starting.discard(self.name)
        self.world.now += self.world.load_seconds
        self.ready = True

    @property
    def sleep_level(self) -> int:
        return self.level if self.is_sleeping else 0

    async def wake_up(self) -> None:
        self.world.log.append(f"wake {self.name}")
        await self._held()
        if self.errored:
            raise EngineDeadError("died while waking")
        self.is_sleeping = False

    async def sleep(self, level: int) -> int:
        assert self.ready and not self.world.in_use(self.name)
        self.world.log.append(f"sleep {self.name}")
        await asyncio.sleep(0)
        if self.sleep_error is not None:
            raise self.sleep_error
        self.is_sleeping, self.level = True, level
        return 1000

    async def close(self) -> None:
        if self.ready and not self.errored:
            assert not self.world.in_use(self.name), "closed while it was used"
            self.world.log.append(f"unload {self.name}")
        await asyncio.sleep(0)
        if self.close_error is not None:
            raise self.close_error
        self.closed = True
        self.ready = self.is_sleeping = False
        self.errored = True

    async def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        return {"resident": 5000}

    async def check_health(self) -> None:
        if self.errored:
            raise EngineDeadError("the engine is gone")

    def die(self) -> None:
        self.ready, self.errored = False, True
        if self.release is not None and not self.release.done():
            self.release.set_result(None)


class World:
    """Models "a", "b", ... in a pool, and what their engines did, in order (`log`)."""

    def __init__(
        self,
        names: str,
        max_loaded: int | None,
        *,
        pinned: str = "",
        at_start: str = "",
        held: bool = False,
        max_waiting: int = 100,
        **options: Any,
    ) -> None:
        self.loop = asyncio.new_event_loop()
        self.now = 1000.0
        self.load_seconds = 0.0
        self.held = held
        self.log: list[str] = []
        self.starting: set[str] = set()
        self.failures: dict[str, QuireError] = {}
        self.engines: dict[str, list[FakeLLM]] = {name: [] for name in names}
        self.granted: list[str] = []  # users, by model
        self.asked: list[asyncio.Task[str]] = []
        models = [
            ServedModel(
                server_config(served_model_name=name, max_num_queued_reqs=max_waiting),
                self._make(name)(),
                pinned=name in pinned,
                at_start=name in at_start,
                make_llm=self._make(name),
            )
            for name in names
        ]
        self.pool = ModelPool(models, max_loaded=max_loaded, clock=lambda: self.now, **options)

    def _make(self, name: str) -> Callable[[], AsyncLLM]:
        def make() -> AsyncLLM:
            self.engines[name].append(FakeLLM(self, name))
            return cast(AsyncLLM, self.engines[name][-1])

        return make

    def in_use(self, name: str) -> bool:
        return name in self.granted

    def engine(self, name: str) -> FakeLLM:
        return self.engines[name][-1]

    @property
    def loaded(self) -> str:
        """Names of the models in memory."""
        return "".join(name for name in self.engines if self.engine(name).ready)

    def settle(self) -> None:
        """Let everything happen that can."""

        async def turns() -> None:
            for _ in range(40):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())

    def ask(self, name: str) -> asyncio.Task[str]:
        """Begin a request, which becomes a user of the model; end it with `end`."""

        async def request() -> str:
            model = self.pool.find(name)
            await self.pool.acquire(model)
            engine = cast(FakeLLM, model.llm)
            assert engine.ready and not engine.is_sleeping, "let in although it was not ready"
            self.granted.append(name)
            return name

        self.asked.append(self.loop.create_task(request()))
        return self.asked[-1]

    def begin(self, name: str) -> asyncio.Task[str]:
        """As `ask`, and let everything happen."""
        task = self.ask(name)
        self.settle()
        return task

    def end(self, name: str) -> None:
        """End one request to a model."""
        self.granted.remove(name)
        self.do(lambda: self.pool.release(self.pool.find(name)))

    def sweep(self) -> None:
        """Let the pool look after idle and dead models."""
        self.do(self.pool.sweep)

    def do(self, work: Callable[[], None]) -> None:
        """Do something on the loop, and let happen what follows."""

        async def run() -> None:
            work()

        self.loop.run_until_complete(run())
        self.settle()

    def serve(self, names: str) -> None:
        """Serve a request to each of these models, one after the other, a second each."""
        for name in names:
            task = self.begin(name)
            assert task.done(), f"{name} was not let in"
            task.result()
            self.now += 1.0
            self.end(name)

    def finish_load(self, name: str) -> None:
        """Let loading, or waking, end."""
        release = self.engine(name).release
        assert release is not None, "it is not being loaded"
        release.set_result(None)
        self.settle()

    def fail(self, name: str, message: str = "config.json is missing") -> None:
        """Have loading fail from now on."""
        self.failures[name] = ModelError(message)

    def close(self) -> None:
        """Close the pool and the loop."""
        self.granted.clear()
        self.held = False
        self.loop.run_until_complete(self.pool.close())
        if self.asked:
            self.loop.run_until_complete(asyncio.wait(self.asked))
            for task in self.asked:
                if not task.cancelled():
                    task.exception()  # looked at
        self.loop.close()
