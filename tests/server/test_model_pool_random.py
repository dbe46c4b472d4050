"""Any sequence of requests, failures and deaths: never too many models, never one put away in use, nobody forgotten."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.errors import QuireError
from tests.server.pool_world import World

NAMES = "abcd"
names = st.sampled_from(NAMES)


class PoolMachine(RuleBasedStateMachine):
    """Requests come, are let in, end, or go away; engines load, fail, sleep and die; time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None
        self.waiting: list[asyncio.Task[str]] = []
        self.served: list[str] = []
        self.most = 0

    @property
    def made(self) -> World:
        assert self.world is not None
        return self.world

    @initialize(
        most=st.integers(1, 4),
        pinned=st.sets(names, max_size=3),
        idle=st.sampled_from([0.0, 5.0]),
        unload=st.booleans(),
    )
    def make(self, most: int, pinned: set[str], idle: float, unload: bool) -> None:
        self.most = most
        kept = "".join(sorted(pinned))[: max(most - 1, 0)]
        self.world = World(NAMES, most, pinned=kept, held=True, idle_timeout=idle, unload_idle=unload)

    @rule(name=names, times=st.integers(1, 3))
    def ask(self, name: str, times: int) -> None:
        self.waiting += [self.made.ask(name) for _ in range(times)]
        self.look()

    def look(self) -> None:
        """Take note of who was let in or sent away."""
        self.made.settle()
        for task in [task for task in self.waiting if task.done()]:
            self.waiting.remove(task)
            if not task.cancelled():
                assert task.exception() is None or isinstance(task.exception(), QuireError)

    @precondition(lambda self: self.world is not None and self.world.granted)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.made.end(data.draw(st.sampled_from(self.made.granted)))
        self.look()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def go_away(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.waiting)).cancel()
        self.look()

    @rule(name=names, fails=st.booleans())
    def finish(self, name: str, fails: bool) -> None:
        release = self.made.engine(name).release
        if release is not None and not release.done():
            if fails:
                self.made.fail(name)
            else:
                self.made.failures.pop(name, None)
            self.made.finish_load(name)
            self.look()

    @rule(name=names)
    def die(self, name: str) -> None:
        engine = self.made.engine(name)
        if engine.ready:
            self.made.do(engine.die)
            self.look()

    @rule(seconds=st.sampled_from([0.5, 3.0, 400.0]))
    def wait(self, seconds: float) -> None:
        self.made.now += seconds
        self.made.sweep()
        self.look()

    @invariant()
    def not_too_many(self) -> None:
        if self.world is not None:
            live = [
                engine
                for engines in self.made.engines.values()
                for engine in engines
                if engine.ready or (engine.name in self.made.starting and engine.release is not None)
            ]
            assert len(live) <= self.most
            for name in NAMES:
                assert self.made.pool.find(name).num_users == self.made.granted.count(name)

    def teardown(self) -> None:
        if self.world is None:
            return
        world = self.world
        world.failures.clear()
        for _ in range(200):
            for name in list(world.granted):
                world.end(name)
            for name in NAMES:
                release = world.engine(name).release
                if release is not None and not release.done():
                    world.finish_load(name)
            world.now += 31.0
            world.sweep()
            self.look()
            if not self.waiting and not world.granted:
                break
        assert not self.waiting, "somebody waits for ever"
        world.close()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(
    max_examples=15, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)


@pytest.mark.slow
class TestPoolOften(TestPool):  # type: ignore[misc,valid-type]
    """The same, with other histories and more of them."""

    settings = settings(TestPool.settings, max_examples=300, derandomize=False)
