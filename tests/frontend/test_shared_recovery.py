"""Processes that share an engine: when it dies the requests of all go on, and a poison request costs no other one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import AsyncLLM, SamplingParams
from quire.outputs import RequestOutput
from tests.frontend.test_recovery import FRONT, joined, outputs_of, params, undisturbed
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.shared_engine import SharedClient, SharedEngine


@dataclass
class World:
    """Some `AsyncLLM`s over one engine at a time, which is replaced when it dies."""

    killers: dict[str, int] = field(default_factory=dict)
    max_num_seqs: int = 64
    seed: int = 0
    engines: list[SharedEngine] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def engine(self) -> SharedEngine:
        """Return the present engine."""
        if not self.engines or self.engines[-1].dead is not None:
            engine = FakeEngine(vocab_size=FRONT.info.vocab_size, max_num_seqs=self.max_num_seqs)
            engine.killers = self.killers
            self.engines.append(SharedEngine(engine, self.rng))
        return self.engines[-1]

    def make_client(self) -> SharedClient:
        return SharedClient(self.engine, self.rng)

    def llm(self) -> AsyncLLM:
        return AsyncLLM(
            client=self.make_client(),
            make_client=self.make_client,
            front_model=FRONT,
            max_num_seqs=self.max_num_seqs,
            max_num_queued_reqs=1000,
        )

    @property
    def num_deaths(self) -> int:
        return sum(engine.dead is not None for engine in self.engines)


Asks = Mapping[str, tuple[str, SamplingParams]]


def serve(world: World, asks: list[Asks], num_kills: int = 0) -> list[dict[str, list[RequestOutput]]]:
    """Have each of several processes serve these requests, while the engine is killed so often; return the outputs."""

    async def run() -> list[dict[str, list[RequestOutput]]]:
        llms = [world.llm() for _ in asks]
        async with asyncio.timeout(60):
            for llm in llms:
                await llm.start()
            world.engine().held = True
            readers = [
                {name: asyncio.create_task(outputs_of(await llm.submit(*ask, name))) for name, ask in own.items()}
                for llm, own in zip(llms, asks, strict=True)
            ]
            world.engine().held = False
            world.engine().news.set()
            for _ in range(num_kills):
                for _ in range(world.rng.randrange(60)):
                    await asyncio.sleep(0)
                if world.engines[-1].dead is None:
                    world.engines[-1].kill()
            found = [{name: await reader for name, reader in own.items()} for own in readers]
            assert not any(llm.errored for llm in llms)
            for llm in llms:
                await llm.close()
        return found

    return asyncio.run(run())


def requests_of(front: int, lengths: list[int]) -> dict[str, tuple[str, SamplingParams]]:
    return {f"f{front}-{index}": (f"prompt {index}", params(max_tokens=length)) for index, length in enumerate(lengths)}


@pytest.mark.parametrize("seed", range(20))
def test_kills_from_outside_cost_no_request_of_any_process(seed: int) -> None:
    asks = [requests_of(0, [90] * 16), requests_of(1, [40] * (1 if seed % 2 else 16))]
    expected = [undisturbed(own) for own in asks]
    found = serve(World(seed=seed), asks, num_kills=2)
    for mine, right in zip(found, expected, strict=True):
        assert {name: joined(outputs) for name, outputs in mine.items()} == {
            name: joined(outputs) for name, outputs in right.items()
        }


@st.composite
def stories(draw: st.DrawFn) -> tuple[list[list[int]], dict[str, int], int]:
    lengths = draw(st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=8), min_size=2, max_size=3))
    names = [f"f{front}-{index}" for front, own in enumerate(lengths) for index in range(len(own))]
    guilty = draw(st.lists(st.sampled_from(names), max_size=3, unique=True))
    return lengths, {name: draw(st.integers(0, 60)) for name in guilty}, draw(st.integers(0, 1000))


@settings(max_examples=60, deadline=None)
@given(stories())
def test_the_innocent_complete_and_the_guilty_are_found(story: tuple[list[list[int]], dict[str, int], int]) -> None:
    lengths, killers, seed = story
    asks = [requests_of(front, own) for front, own in enumerate(lengths)]
    expected = [undisturbed(own) for own in asks]
    world = World(killers, seed=seed)
    found = serve(world, asks)
    for own, mine, right in zip(asks, found, expected, strict=True):
        for name, outputs in mine.items():
            got: dict[str, Any] = joined(outputs)
            if killers.get(name, 99) < own[name][1].max_tokens:
                assert got["finish_reason"] == "error"
                assert outputs[-1].outputs[0].error.code == "request_killed_engine"  # type: ignore[union-attr]
            else:
                assert got == joined(right[name])
