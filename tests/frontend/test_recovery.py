"""Engines die and hang; streams go on, the innocent are never ended, the guilty are found."""

from __future__ import annotations

import asyncio
import errno
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import AsyncLLM, SamplingParams
from quire.config import EngineConfig
from quire.engine.messages import Ready
from quire.engine.process import ProcessClient
from quire.errors import ConfigError, EngineDeadError, GenerationError, OverloadedError, QuireError
from quire.frontend import quarantine, recovery
from quire.outputs import RequestOutput
from quire.sampling_params import BeamSearchParams, RequestOutputKind
from tests.frontend.test_output_processor import Listener
from tests.helpers.fake_engine import FakeClient, FakeEngine, fake_front_model

DELTA = RequestOutputKind.DELTA
FRONT = fake_front_model()


class SlowClient(FakeClient):
    """A client whose engine gets ready only when it is let."""

    loading: asyncio.Event | None = None
    num_kills = 0

    def kill(self) -> None:
        self.num_kills += 1
        super().kill()

    async def start(self) -> Ready:
        if self.loading is not None:
            await self.loading.wait()
        return await super().start()


@dataclass
class World:
    """An `AsyncLLM` whose engines can be replaced; all of them stay here.

    `killers` as in `FakeEngine`. `start_errors` are what the engines after the first raise at their start.
    """

    killers: dict[str, int] = field(default_factory=dict)
    max_num_seqs: int = 8
    start_errors: list[QuireError] = field(default_factory=list)
    loading: asyncio.Event | None = None
    clients: list[SlowClient] = field(default_factory=list)

    def make_client(self) -> SlowClient:
        engine = FakeEngine(vocab_size=FRONT.info.vocab_size, max_num_seqs=self.max_num_seqs)
        engine.killers = self.killers
        error = self.start_errors.pop(0) if self.start_errors and self.clients else None
        self.clients.append(SlowClient(engine, start_error=error))
        if len(self.clients) > 1:
            self.clients[-1].loading = self.loading
        return self.clients[-1]

    @property
    def client(self) -> SlowClient:
        """That of the present engine."""
        return self.clients[-1]

    @property
    def num_deaths(self) -> int:
        return sum(client._dead is not None for client in self.clients)

    def llm(self, listeners: Any = (), **options: Any) -> AsyncLLM:
        return AsyncLLM(
            client=self.make_client(),
            make_client=self.make_client,
            front_model=FRONT,
            listeners=listeners,
            max_num_seqs=self.max_num_seqs,
            **{"max_num_queued_reqs": 1000, **options},
        )


def in_world(test: Callable[[World, AsyncLLM], Awaitable[None]], listeners: Any = (), **options: Any) -> None:
    """Run a test; afterwards nothing may be left behind."""

    async def run() -> None:
        world = World(max_num_seqs=options.pop("max_num_seqs", 8))
        llm = world.llm(listeners, **options)
        async with asyncio.timeout(60), llm:
            await test(world, llm)
        assert all(client.closed for client in world.clients)
        assert llm._requests.outputs.request_ids == []
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


async def settle(rounds: int = 20) -> None:
    for _ in range(rounds):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0)


async def outputs_of(stream: Any) -> list[RequestOutput]:
    return [output async for output in stream]


def joined(outputs: list[RequestOutput], index: int = 0) -> dict[str, Any]:
    """Add up what a DELTA reader got of one completion."""
    found: dict[str, Any] = {"text": "", "token_ids": [], "logprobs": [], "finish_reason": None}
    for output in outputs:
        for item in output.outputs:
            if item.index == index:
                found["text"] += item.text
                found["token_ids"] += item.token_ids
                found["logprobs"] += item.logprobs or []
                found["finish_reason"] = item.finish_reason
    return found


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "seed": 7, "output_kind": DELTA, "ignore_eos": True, **changes})


def undisturbed(prompts: Mapping[str, tuple[str, SamplingParams]]) -> dict[str, list[RequestOutput]]:
    """What these requests give when nothing happens."""

    async def run() -> dict[str, list[RequestOutput]]:
        async with World(max_num_seqs=64).llm() as llm:
            streams = {name: await llm.submit(*ask, name) for name, ask in prompts.items()}
            return {name: await outputs_of(stream) for name, stream in streams.items()}

    return asyncio.run(run())


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("when", [0, 1, 3, 30])
def test_streams_do_not_notice_a_death(kind: RequestOutputKind, when: int) -> None:
    asks = {
        "a": ("hello", params(output_kind=kind)),
        "b": ("world", params(output_kind=kind, n=3, logprobs=2)),
        "c": ("again", params(output_kind=kind, stop=["a"], prompt_logprobs=1, max_tokens=200)),
        "d": (
            "long",
            params(output_kind=kind, **({} if kind == RequestOutputKind.FINAL_ONLY else {"stream_interval": 5})),
        ),
    }
    expected = undisturbed(asks)

    async def test(world: World, llm: AsyncLLM) -> None:
        streams = {name: await llm.submit(*ask, name) for name, ask in asks.items()}
        readers = {name: asyncio.create_task(outputs_of(stream)) for name, stream in streams.items()}
        await until(lambda: world.client.engine.num_steps >= when)
        world.client.die()
        for name, reader in readers.items():
            outputs = await reader
            assert all(output.outputs for output in outputs)
            last, last_expected = outputs[-1], expected[name][-1]
            for index in range(asks[name][1].n):
                assert joined(outputs, index)["text"].endswith(last.outputs[0].text) or index
                if kind == DELTA:
                    assert joined(outputs, index) == joined(expected[name], index)
            if kind != DELTA:
                assert last.outputs == last_expected.outputs
                assert last.prompt_logprobs == last_expected.prompt_logprobs
        assert llm.num_restarts == 1
        assert not (llm.errored or llm.recovering or llm.stalled)
        assert llm.last_recovery_seconds is not None

    in_world(test, max_num_seqs=16)


def test_beams_begin_anew() -> None:
    async def test(world: World, llm: AsyncLLM) -> None:
        expected = await llm.beam_search("hello", BeamSearchParams(beam_width=2, max_tokens=5))
        world.client.hold()
        search = asyncio.create_task(llm.beam_search("hello", BeamSearchParams(beam_width=2, max_tokens=5)))
        await settle()
        world.client.die()
        found = await search
        assert [beam.tokens for beam in found.sequences] == [beam.tokens for beam in expected.sequences]

    in_world(test)


def test_times_stay_those_of_the_reader() -> None:
    listener = Listener()

    async def test(world: World, llm: AsyncLLM) -> None:
        stream = await llm.submit("hello", params(output_kind=RequestOutputKind.CUMULATIVE))
        first = await anext(stream)
        assert first.metrics is not None
        before = (first.metrics.first_scheduled_time, first.metrics.first_token_time, first.num_cached_tokens)
        world.client.die()
        last = (await outputs_of(stream))[-1]
        assert last.metrics is not None
        assert (last.metrics.first_scheduled_time, last.metrics.first_token_time, last.num_cached_tokens) == before

    in_world(test, [listener])
    assert len(listener.first) == 1
    assert len(listener.next) == 39
    assert len(listener.finished) == 1


def test_aborts_and_new_requests_while_there_is_no_engine() -> None:
    async def test(world: World, llm: AsyncLLM) -> None:
        world.loading = asyncio.Event()
        one, two = [await llm.submit("x", params(), name) for name in ("one", "two")]
        await anext(one)
        world.client.die()
        await settle()
        assert llm.recovering and llm.ready
        one.close()
        three = await llm.submit("y", params(), "three")
        call = asyncio.create_task(llm.call("check_integrity"))
        await settle()
        assert not call.done()
        world.loading.set()
        assert joined(await outputs_of(two))["finish_reason"] == "length"
        assert joined(await outputs_of(three))["finish_reason"] == "length"
        assert await call == {"ok": True}
        assert [add.request_id for add in world.client.engine.added] == ["two", "three"]
        assert world.client.engine.aborted == []

    in_world(test)


def test_the_queue_is_bounded_while_there_is_no_engine() -> None:
    async def test(world: World, llm: AsyncLLM) -> None:
        world.loading = asyncio.Event()
        world.client.die()
        await settle()
        streams = [await llm.submit("x", params(max_tokens=2)) for _ in range(3)]
        with pytest.raises(OverloadedError):
            await llm.submit("x")
        world.loading.set()
        for stream in streams:
            assert joined(await outputs_of(stream))["finish_reason"] == "length"

    in_world(test, max_num_queued_reqs=3)


def test_an_operation_under_way_fails_with_the_engine() -> None:
    async def test(world: World, llm: AsyncLLM) -> None:
        call = asyncio.create_task(llm.call("stats"))
        await asyncio.sleep(0)
        world.client._answers.clear()
        world.client.die()
        with pytest.raises(EngineDeadError):
            await call
        assert await llm.call("check_integrity") == {"ok": True}

    in_world(test)


def test_gauges_are_those_of_the_new_engine() -> None:
    async def test(world: World, llm: AsyncLLM) -> None:
        world.loading = asyncio.Event()
        stream = await llm.submit("x", params())
        await anext(stream)
        assert llm.stats.num_running == 1
        world.client.die()
        await settle()
        stream.close()
        world.loading.set()
        await settle()
        assert llm.stats.num_running == 0

    in_world(test)


@pytest.mark.parametrize("restarts", [0, 2])
def test_too_many_deaths_end_everything(restarts: int) -> None:
    async def run() -> None:
        world = World()
        llm = world.llm(max_engine_restarts=restarts)
        await llm.start()
        stream = await llm.submit("x", params(max_tokens=200))
        for _ in range(restarts + 1):
            await settle()
            # Not while one request is alone with its engine: it would have to be to blame.
            world.client.engine.has_unfinished = lambda: False  # type: ignore[method-assign]
            world.client.die(suspects=["somebody else", "and another"])
            await settle()
        with pytest.raises(EngineDeadError) as caught:
            await outputs_of(stream)
        assert ("too often" in caught.value.message) == bool(restarts)
        assert (llm.errored, llm.ready, llm.recovering, llm.num_restarts) == (True, False, False, restarts)
        with pytest.raises(EngineDeadError):
            await llm.submit("x")
        with pytest.raises(EngineDeadError):
            await llm.call("stats")
        await llm.close()
        assert all(client.closed for client in world.clients)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_a_new_engine_that_cannot_start_ends_everything() -> None:
    async def run() -> None:
        world = World(start_errors=[EngineDeadError("killed"), ConfigError("no memory")])
        llm = world.llm()
        await llm.start()
        stream = await llm.submit("x", params())
        call = asyncio.create_task(llm.call("stats"))
        await asyncio.sleep(0)
        world.client.die()
        with pytest.raises(EngineDeadError, match="could not be started again: no memory"):
            await outputs_of(stream)
        await asyncio.gather(call, return_exceptions=True)
        assert len(world.clients) == 3
        await llm.close()
        assert all(client.closed for client in world.clients)

    asyncio.run(run())


def test_a_new_engine_that_hangs_while_it_loads_is_killed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "MIN_LOAD_TIMEOUT", 0.05)
    monkeypatch.setattr(recovery, "RETRY_SECONDS", 0.0)

    async def test(world: World, llm: AsyncLLM) -> None:
        stream = await llm.submit("x", params())
        world.loading = asyncio.Event()
        world.client.die()
        await until(lambda: len(world.clients) == 2)
        world.loading = None
        assert joined(await outputs_of(stream))["finish_reason"] == "length"
        assert [client.num_kills for client in world.clients] == [0, 1, 0]

    in_world(test)


@pytest.mark.parametrize("fails", ["loading", "starting a process"])
def test_new_engines_that_never_start_end_everything(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    monkeypatch.setattr(recovery, "MIN_LOAD_TIMEOUT", 0.01)
    monkeypatch.setattr(recovery, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(quarantine, "WINDOW_SECONDS", 0.0)  # each attempt takes longer than deaths are remembered
    attempts = []

    def refuse(*args: object, **options: object) -> None:
        attempts.append(args)
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    async def run() -> None:
        world = World(loading=asyncio.Event())
        make_client = world.make_client
        if fails != "loading":
            monkeypatch.setattr(subprocess, "Popen", refuse)
            make_client = partial(ProcessClient, EngineConfig())  # type: ignore[assignment]
        llm = AsyncLLM(client=world.make_client(), make_client=make_client, front_model=FRONT, max_engine_restarts=2)
        async with asyncio.timeout(60), llm:
            stream = await llm.submit("x", params())
            world.client.die()
            await until(lambda: llm.recovering)
            call = asyncio.create_task(llm.call("stats"))
            for waiter in (outputs_of(stream), call):
                with pytest.raises(EngineDeadError):
                    await waiter
            assert llm.errored and not llm.recovering
        assert len(world.clients) - 1 + len(attempts) == 3

    asyncio.run(run())


def test_closing_while_there_is_no_engine() -> None:
    async def run() -> None:
        world = World(loading=asyncio.Event())
        llm = world.llm()
        await llm.start()
        stream = await llm.submit("x", params())
        world.client.die()
        await settle()
        call = asyncio.create_task(llm.call("stats"))
        await settle()
        await llm.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await outputs_of(stream)
        with pytest.raises(EngineDeadError, match="closed"):
            await call
        assert all(client.closed for client in world.clients)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_an_engine_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "WATCH_SECONDS", 0.0)

    async def test(world: World, llm: AsyncLLM) -> None:
        first = world.client
        first.hold()
        stream = await llm.submit("x", params())
        for silent, stalled in ((1.4, False), (1.6, True), (0.0, False), (2.9, True)):
            first.stalled = silent
            await settle()
            assert llm.stalled == stalled
        assert (first.num_dumps, llm.num_restarts) == (0, 0)
        first.stalled = 3.1
        assert joined(await outputs_of(stream))["finish_reason"] == "length"
        assert (first.num_dumps, llm.num_restarts, llm.stalled) == (1, 1, False)

    in_world(test)


def test_a_lone_request_that_kills_engines_is_ended() -> None:
    async def test(world: World, llm: AsyncLLM) -> None:
        world.killers["bad"] = 5
        outputs = await outputs_of(await llm.submit("x", params(), "bad"))
        error = outputs[-1].outputs[0].error
        assert isinstance(error, GenerationError)
        assert error.code == "request_killed_engine"
        assert len(joined(outputs)["token_ids"]) == 5
        assert (world.num_deaths, llm.num_poison_requests) == (2, 1)
        assert joined(await outputs_of(await llm.submit("x", params())))["finish_reason"] == "length"

    in_world(test)


def test_deaths_far_apart_condemn_nobody() -> None:
    async def test(world: World, llm: AsyncLLM) -> None:
        stream = await llm.submit("x", params(max_tokens=200), "unlucky")
        outputs = []
        for _ in range(6):
            while sum(len(output.outputs[0].token_ids) for output in outputs) < 20 * world.num_deaths + 20:
                outputs.append(await anext(stream))
            world.client.die(suspects=["unlucky"])
            await settle()
        outputs += await outputs_of(stream)
        assert joined(outputs)["finish_reason"] == "length"
        assert (world.num_deaths, llm.num_restarts) == (6, 6)

    in_world(test, max_engine_restarts=100)


def test_whoever_is_aborted_while_on_trial_makes_room() -> None:
    async def test(world: World, llm: AsyncLLM) -> None:
        names = ["a", "b", "c"]
        streams = [await llm.submit(name, params(), name) for name in names]
        for _ in range(2):
            world.client.hold()
            world.client.die(suspects=names)
            await until(lambda: llm.num_restarts == world.num_deaths)
            world.client.hold()
        await until(lambda: bool(world.client.engine.added))
        assert [add.request_id for add in world.client.engine.added] == ["a"]
        streams[0].close()
        world.client.resume()
        for stream in streams[1:]:
            assert joined(await outputs_of(stream))["finish_reason"] == "length"
        assert llm.num_poison_requests == 0

    in_world(test)


@dataclass
class Story:
    """Some requests, which of them kill at which token, and how many run at a time."""

    lengths: list[int]
    killers: dict[int, int]
    max_num_seqs: int
    n: list[int]


@st.composite
def stories(draw: st.DrawFn, most_token: int = 60) -> Story:
    count = draw(st.integers(1, 32))
    lengths = draw(st.lists(st.integers(1, 60), min_size=count, max_size=count))
    guilty = draw(st.lists(st.integers(0, count - 1), max_size=4, unique=True))
    killers = {index: draw(st.integers(0, most_token)) for index in guilty}
    return Story(lengths, killers, draw(st.sampled_from([4, 8, 64])), [1 + (index % 5 == 4) for index in range(count)])


def tell(story: Story) -> tuple[int, int]:
    """Run a story and check who ended how; return the number of deaths, and of poison requests."""
    names = [f"r{index}" for index in range(len(story.lengths))]
    asks = {
        name: (f"prompt {name}", params(max_tokens=length, n=n))
        for name, length, n in zip(names, story.lengths, story.n, strict=True)
    }
    expected = undisturbed(asks)

    async def run() -> tuple[int, int]:
        world = World({names[index]: token for index, token in story.killers.items()}, story.max_num_seqs)
        async with asyncio.timeout(60), world.llm() as llm:
            world.client.hold()
            streams = {name: await llm.submit(*ask, name) for name, ask in asks.items()}
            readers = {name: asyncio.create_task(outputs_of(stream)) for name, stream in streams.items()}
            world.client.resume()
            found = {name: await reader for name, reader in readers.items()}
            for name, outputs in found.items():
                deadly = world.killers.get(name, 99)
                for index in range(asks[name][1].n):
                    mine, right = joined(outputs, index), joined(expected[name], index)
                    if deadly < asks[name][1].max_tokens:
                        assert mine["finish_reason"] == "error"
                        assert len(mine["token_ids"]) <= deadly
                        assert mine["token_ids"] == right["token_ids"][: len(mine["token_ids"])]
                        assert right["text"].startswith(mine["text"])
                        assert outputs[-1].outputs[0].error.code == "request_killed_engine"  # type: ignore[union-attr]
                    else:
                        assert mine == right
            assert not llm.errored
            return world.num_deaths, llm.num_poison_requests

    return asyncio.run(run())


@settings(max_examples=20, deadline=None)
@given(stories())
def test_the_innocent_complete_and_the_guilty_are_found(story: Story) -> None:
    deaths, poison = tell(story)
    assert deaths <= (1 + 2 * poison if poison else 0)


@settings(max_examples=10, deadline=None)
@given(stories(most_token=7))
def test_those_that_kill_at_once_are_found_with_a_death_each(story: Story) -> None:
    story.max_num_seqs = 64
    deaths, poison = tell(story)
    assert deaths <= (2 + poison if poison else 0)
