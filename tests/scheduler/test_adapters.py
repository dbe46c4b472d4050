"""Who waits for a LoRA adapter: at most so many in a batch, and nobody is kept waiting by those who do, or for ever."""

from __future__ import annotations

import random

import pytest

from quire.config import EngineConfig
from quire.engine_request import EngineRequest, LoRARequest
from quire.executor.null import NullExecutor
from quire.sampling_params import SamplingParams
from quire.scheduler.admission import ADAPTER_MAX_OVERTAKE_SECONDS
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler, create_scheduler


class World:
    """A scheduler in virtual time, over an executor without a model."""

    def __init__(self, *, num_blocks: int = 64, **options: object) -> None:
        config = EngineConfig.from_kwargs(enable_lora=True, max_num_batched_tokens=64, **options)
        self.now, self.executor = 0.0, NullExecutor()
        self.scheduler: Scheduler = create_scheduler(
            config,
            self.executor.kv_cache_spec().groups(256),
            num_blocks=num_blocks,
            max_model_len=256,
            clock=lambda: self.now,
            num_host_blocks=num_blocks,
        )
        self.adapter_of: dict[str, int] = {}

    def add(self, name: str, adapter: int, *, tokens: int = 4, priority: int = 0, prompt: int = 8) -> None:
        lora = LoRARequest(f"adapter-{adapter}", adapter, "/x") if adapter else None
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        ids = [hash((name, i)) % 900 for i in range(prompt)]
        self.adapter_of[name] = adapter
        self.scheduler.add_request(
            Request(EngineRequest(name, ids, params, self.now, tokens, priority=priority, lora=lora))
        )

    def step(self) -> list[str]:
        """Run a step; return the names of those that were computed."""
        plan = self.scheduler.schedule()
        for new in plan.new_sequences:
            assert new.request.lora_int_id == self.adapter_of[new.sequence_id]
        self.scheduler.update_from_output(plan, self.executor.execute(plan))
        names = list(plan.num_scheduled_tokens)
        adapters = {self.adapter_of[name] for name in names} - {0}
        assert len(adapters) <= self.scheduler.admission.max_loras, names
        self.scheduler.check_integrity()
        self.now += 0.1
        return names


def test_those_without_room_for_their_adapter_are_overtaken_and_keep_their_order() -> None:
    world = World(max_loras=2)
    for name, adapter in (("a", 1), ("b", 2), ("c", 3), ("d", 1), ("e", 4), ("f", 0), ("g", 3)):
        world.add(name, adapter)
    assert world.step() == ["a", "b", "d", "f"]
    assert world.scheduler.stats().running_adapters == ["adapter-1", "adapter-2"]
    assert world.scheduler.stats().waiting_adapters == ["adapter-3", "adapter-4"]
    seen: list[str] = []
    while world.scheduler.has_unfinished():
        seen += [name for name in world.step() if name not in seen]
    assert seen == ["a", "b", "d", "f", "c", "e", "g"]


def test_many_that_wait_do_not_hide_those_that_could_run() -> None:
    world = World(max_loras=1)
    world.add("first", 1, tokens=30)
    for number in range(60):
        world.add(f"waits-{number}", 2)
    world.add("last", 1)
    assert set(world.step()) == {"first", "last"}


def test_a_stream_of_others_keeps_nobody_waiting_for_ever() -> None:
    world = World(max_loras=1)
    world.add("one-0", 1)
    world.step()
    world.add("two", 2)
    for number in range(1, 200):
        world.add(f"one-{number}", 1)
        if "two" in world.step():
            break
    assert ADAPTER_MAX_OVERTAKE_SECONDS <= world.now < ADAPTER_MAX_OVERTAKE_SECONDS + 2


def test_a_request_of_higher_rank_takes_the_place_of_another_adapter() -> None:
    world = World(max_loras=1, scheduling_policy="priority")
    world.add("low", 1, priority=5, tokens=50)
    world.step()
    world.add("high", 2, priority=1)
    assert world.step() == ["high"]
    world.add("higher", 3, priority=0, tokens=50)
    world.add("beside", 2, priority=1)
    assert world.step() == ["higher"]
    world.add("same", 4, priority=0)
    assert world.step() == ["higher"], "no one of the same rank gives way"


@pytest.mark.parametrize("scheduler", ["unified", "prefill-first"])
@pytest.mark.parametrize("seed", range(4))
def test_everybody_gets_through(seed: int, scheduler: str) -> None:
    rng = random.Random(seed)
    options = {"preemption_mode": rng.choice(["recompute", "swap"]), "max_num_seqs": rng.choice([3, 16])}
    world = World(max_loras=rng.choice([1, 2, 3]), num_blocks=14, scheduler=scheduler, **options)
    for number in range(40):
        world.add(f"{number}", rng.randrange(5), tokens=rng.randrange(1, 40), prompt=rng.randrange(1, 60))
        if rng.random() < 0.5:
            world.step()
    for _ in range(4000):
        if not world.scheduler.has_unfinished():
            return
        world.step()
    raise AssertionError("some never finished")
