"""What the flight recorder tells of requests, of which every step is known."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from quire.checkpoint.hf_config import load_model_info
from quire.config import EngineConfig
from quire.engine import recorder as recorder_module
from quire.engine.core import EngineCore
from quire.engine.recorder import MAX_STEPS, FlightRecorder, StepRecord
from quire.engine_request import EngineRequest
from quire.errors import ConfigError
from quire.executor.null import NullExecutor
from quire.sampling_params import SamplingParams
from quire.step import PendingOutput, SchedulerOutput, SchedulerStats


class Clock:
    """Stands still until somebody moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class SlowExecutor(NullExecutor):
    """Takes 10 ms for a step and, if asked to, more for each token; fails on demand."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(1000)
        self.clock = clock
        self.per_token = 0.0
        self.broken = False

    def submit(self, plan: SchedulerOutput) -> PendingOutput:
        self.clock.now += 0.01 + self.per_token * plan.total_num_scheduled_tokens
        if self.broken:
            raise RuntimeError("no memory")
        return super().submit(plan)


def make_core(folder: Path, **options: object) -> EngineCore:
    clock = Clock()
    settings = {"block_size": 4, "num_gpu_blocks_override": 64, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    config = EngineConfig.from_kwargs(model=str(folder), **{**settings, **options})
    return EngineCore(config, executor=SlowExecutor(clock), info=load_model_info(folder), clock=clock)


def add(core: EngineCore, name: str, prompt: list[int], max_tokens: int, count: int = 1) -> None:
    names = [name] if count == 1 else [f"{name}-{index}" for index in range(count)]
    params = SamplingParams(max_tokens=max_tokens, n=count, seed=1)
    core.add(EngineRequest(name, prompt, params, core.clock(), max_tokens, sequence_ids=names, seeds=[0] * count))


def finish(core: EngineCore) -> None:
    while core.has_unfinished():
        core.step()


def story(core: EngineCore, name: str, **arguments: int) -> dict[str, Any]:
    return core.call("timeline", {"request_id": name, **arguments})


def test_a_request_whose_id_continues_that_of_another_is_not_part_of_it(folder: Path) -> None:
    core = make_core(folder)
    for name in ("a", "a-1", "a/1", "a-10"):
        add(core, name, [7] * 10, max_tokens=3)
    finish(core)
    add(core, "b", [7] * 10, max_tokens=3, count=2)
    add(core, "b-2", [7] * 10, max_tokens=30)
    finish(core)
    assert [event["event"] for event in story(core, "a")["events"]] == ["scheduled"]
    assert story(core, "a")["steps"]["count"] == story(core, "a-1")["steps"]["count"] == 3
    assert story(core, "b", num_sequences=2)["steps"]["count"] == 3


def test_a_request_alone(folder: Path) -> None:
    core = make_core(folder)
    add(core, "a", [7] * 100, max_tokens=5)
    finish(core)
    told = story(core, "a")
    assert told["complete"]
    [scheduled] = told["events"]
    assert scheduled["event"] == "scheduled" and scheduled["at"] == 100.0
    assert scheduled["cached"] == {"device": 0, "host": 0, "disk": 0}
    assert scheduled["waited_for"] is None
    assert [(chunk["tokens"], chunk["others"]) for chunk in told["chunks"]] == [(64, 0), (36, 0)]
    assert told["steps"]["count"] == 6  # two chunks, then four tokens after the first
    assert told["steps"]["mean"] == pytest.approx(0.01)
    assert told["steps"]["p99"] == pytest.approx(0.01)


def test_what_the_cache_gave(folder: Path) -> None:
    core = make_core(folder)
    add(core, "a", list(range(1, 41)), max_tokens=2)
    finish(core)
    add(core, "b", [*range(1, 33), 500, 501], max_tokens=2)
    finish(core)
    [scheduled] = story(core, "b")["events"]
    assert scheduled["cached"] == {"device": 32, "host": 0, "disk": 0}
    assert scheduled["prompt_tokens"] == 34


@pytest.mark.parametrize(("mode", "how"), [("recompute", "recompute"), ("swap", "swap")])
def test_a_preemption_is_named(folder: Path, mode: str, how: str) -> None:
    core = make_core(
        folder, num_gpu_blocks_override=12, preemption_mode=mode, swap_space="1MiB", enable_prefix_caching=False
    )
    add(core, "a", [1] * 16, max_tokens=24)
    add(core, "b", [2] * 16, max_tokens=24)
    finish(core)
    told = story(core, "b")
    preemptions = [event for event in told["events"] if event["event"] == "preempted"]
    assert [event["how"] for event in preemptions] == [how]
    [event] = preemptions
    assert event["tokens"] > 0
    assert event["resumed"] > event["at"]
    assert event["seconds"] >= event["resumed"] - event["at"]
    assert event["recomputed"] == (0 if mode == "swap" else 16 + event["tokens"])
    assert not [event for event in story(core, "a")["events"] if event["event"] == "preempted"]


def test_what_was_waited_for(folder: Path) -> None:
    core = make_core(folder, max_num_seqs=1)
    add(core, "a", [1] * 8, max_tokens=10)
    add(core, "b", [2] * 8, max_tokens=1)
    finish(core)
    assert story(core, "b", since_us=100_000_000)["events"][0]["waited_for"] == "seats"
    late = story(core, "b", since_us=100_105_000)["events"][0]
    assert late["waited_for"] is None, "what was before it came does not count"

    core = make_core(folder, num_gpu_blocks_override=8)
    add(core, "a", [1] * 24, max_tokens=6)
    add(core, "b", [2] * 24, max_tokens=1)
    finish(core)
    assert story(core, "b")["events"][0]["waited_for"] == "kv_cache"


def test_several_sequences_and_names_alike(folder: Path) -> None:
    core = make_core(folder)
    add(core, "a", [1] * 8, max_tokens=4, count=3)
    add(core, "a-0-other", [2] * 8, max_tokens=9)
    finish(core)
    assert story(core, "a", num_sequences=3)["steps"]["count"] == 4
    assert story(core, "a-0-other")["steps"]["count"] == 9
    assert story(core, "a-0")["events"] == story(core, "a", num_sequences=3)["events"]


def test_the_slowest_steps_tell_what_else_was_in_them(folder: Path) -> None:
    core = make_core(folder)
    assert isinstance(core.executor, SlowExecutor)
    core.executor.per_token = 0.001
    add(core, "a", [1] * 4, max_tokens=8)
    for _ in range(3):
        core.step()
    core.executor.clock.now += 5.0  # between steps: nobody's
    add(core, "b", [2] * 40, max_tokens=1)
    finish(core)
    told = story(core, "a")
    slow = max(told["slowest"], key=lambda step: step["seconds"])
    assert slow["seconds"] == told["steps"]["max"] == pytest.approx(0.051)
    assert (slow["own_tokens"], slow["sequences"], slow["tokens"]) == (1, 2, 41)
    assert (slow["prompts"], slow["prompt_tokens"], slow["admitted"]) == (1, 40, 1)


def test_the_ring_forgets_the_oldest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MAX_ENTRIES", 6)
    core = make_core(folder)
    add(core, "a", [1] * 4, max_tokens=20)
    finish(core)
    assert len(core.recorder) <= 7
    told = story(core, "a")
    assert not told["complete"]
    assert 0 < told["steps"]["count"] <= 7
    assert story(core, "a", since_us=99_000_000)["steps"] == told["steps"]


def test_steps_outside_of_its_time_are_not_looked_at(folder: Path) -> None:
    core = make_core(folder)
    add(core, "a", [1] * 4, max_tokens=4)
    finish(core)
    assert story(core, "a", since_us=90_000_000, until_us=99_000_000)["steps"]["count"] == 0
    assert story(core, "a", since_us=100_000_000, until_us=100_015_000)["steps"]["count"] == 2
    assert story(core, "nobody", since_us=100_000_000)["events"] == []


def test_bad_arguments(folder: Path) -> None:
    core = make_core(folder)
    with pytest.raises(ConfigError, match="request_id"):
        core.call("timeline", {})
    with pytest.raises(ConfigError, match="num_sequences"):
        core.call("timeline", {"request_id": "a", "num_sequences": 0})


def test_a_crash_tells_the_last_shapes(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    core = make_core(folder)
    add(core, "secret-name", [77] * 40, max_tokens=8)
    core.step()
    assert isinstance(core.executor, SlowExecutor)
    core.executor.broken = True
    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError):
        core.step()
    assert "not finished; sequences 1, tokens 1" in caplog.text
    assert "sequences 1, tokens 40, prompts 1, prompt_tokens 40, admitted 1" in caplog.text
    assert "secret-name" not in caplog.text and "77" not in caplog.text


def test_a_full_ring_stays_as_large_as_it_is(folder: Path) -> None:
    core = make_core(folder)
    recorder = FlightRecorder(core.clock, block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    empty = core.scheduler.schedule()
    for _ in range(MAX_STEPS + 10):
        recorder.begin(empty, core.scheduler)
    assert len(recorder) == MAX_STEPS
    assert len(recorder.last()) == 5


def test_a_step_says_how_many_blocks_with_layers_on_the_host_were_in_use() -> None:
    record = StepRecord(1.0, SchedulerOutput([], [], {"a": 1}, 1, [], []))
    assert record.shape()["thin_blocks"] == 0
    record.seconds, record.stats = 0.1, SchedulerStats(num_layerwise_blocks=5, num_free_layerwise_blocks=2)
    assert "thin_blocks 3" in str(record)
