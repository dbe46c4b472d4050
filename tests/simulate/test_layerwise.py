"""Layerwise blocks in simulations: what a step loads from the host and stores there, its cost, and who profits."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.config import EngineConfig
from quire.engine.resolve import load_info
from quire.engine_request import EngineRequest
from quire.kernels.meta import Work
from quire.sampling_params import SamplingParams
from quire.simulate.contents import StepContents, StepReader
from quire.simulate.cost import RooflineCost
from quire.simulate.report import summarize_run, table
from quire.simulate.run import SimulatedRun, long_enough, make_cost, simulate
from quire.simulate.trace import Synthetic, draw
from quire.step import ContinuingSequenceData, ForkData, NewSequenceData, SchedulerOutput
from quire.worker.footprint import StepWork
from tests.helpers.transfers import COPY, transfers_of
from tests.simulate.test_cost import made_up_cost

LAYERS, RESIDENT = 12, 3
PARAMS = SamplingParams(temperature=0.0)
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": 999,
    "torch_dtype": "bfloat16",
}


def new(name: str, computed: int, blocks: list[int]) -> NewSequenceData:
    return NewSequenceData(name, EngineRequest(name, list(range(30)), PARAMS), [blocks], computed)


def going(name: str, computed: int, blocks: tuple[int, ...] = (), **options: Any) -> ContinuingSequenceData:
    return ContinuingSequenceData(name, [list(blocks)] if blocks else [], computed, **options)


def step(scheduled: dict[str, int], news: Any = (), continuing: Any = (), **options: Any) -> SchedulerOutput:
    total = sum(scheduled.values())
    return SchedulerOutput(
        **{"finished_sequence_ids": [], "preempted_sequence_ids": [], **options},
        new_sequences=list(news),
        continuing=list(continuing),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=total,
    )


@pytest.fixture
def reader() -> StepReader:
    """Blocks of 4 tokens, layerwise from block 10 on, three quarters of their layers streamed."""
    made = StepReader()
    made.follow_layerwise(10, 4, 0.75)
    return made


def counts(contents: StepContents) -> tuple[int, int]:
    return contents.num_layerwise_loads, contents.num_layerwise_stores


def test_a_step_loads_what_was_computed_before_and_stores_what_it_writes(reader: StepReader) -> None:
    first, _ = reader.read(step({"a": 6}, [new("a", 0, [1, 10])]))
    assert counts(first) == (0, 1)
    second, _ = reader.read(step({"a": 6}, continuing=[going("a", 6, (11,))]))
    assert counts(second) == (1, 2), "block 10 is half full, read and written"
    assert second.streamed == pytest.approx(3 * 0.75)
    third, _ = reader.read(step({"a": 1}, continuing=[going("a", 12, (2,))]))
    assert counts(third) == (2, 0)


def test_what_several_share_is_loaded_once_and_who_computes_nothing_loads_nothing(reader: StepReader) -> None:
    reader.read(step({"a": 8}, [new("a", 0, [10, 11])]))
    both, _ = reader.read(step({"b": 1, "a": 1}, [new("b", 8, [10, 11, 12])], [going("a", 8, (13,))]))
    assert counts(both) == (2, 2)
    one, _ = reader.read(step({"a": 1}, continuing=[going("a", 9)]))
    assert counts(one) == (3, 1)
    ended, _ = reader.read(step({"b": 1}, continuing=[going("b", 9)], finished_sequence_ids=["a"]))
    assert counts(ended) == (3, 1)


def test_copies_are_counted_apart_and_tables_follow_them(reader: StepReader) -> None:
    reader.read(step({"a": 7}, [new("a", 0, [10, 11])]))
    transfers = transfers_of([(COPY, 10, 1), (COPY, 11, 12), (COPY, 3, 4)])
    replaced = [(0, 0, 1), (0, 1, 12)]
    moved, _ = reader.read(step({"a": 1}, continuing=[going("a", 7, replaced_blocks=replaced)], transfers=transfers))
    assert counts(moved) == (2 + 1, 1 + 1), "two copies read, one written; then block 12 by the step itself"
    assert moved.exchanged == pytest.approx(3 * 0.75)
    assert moved.streamed == pytest.approx(2 * 0.75)


def test_forks_have_their_parents_blocks(reader: StepReader) -> None:
    sampled = step({"a": 6}, [new("a", 0, [10, 11])], forks=[ForkData("a", "b", 1, samples=True)])
    reader.read(sampled)
    reader.rows["b"] = reader.rows["a"]  # followed elsewhere; simulations have one sequence a request
    both, _ = reader.read(step({"a": 1, "b": 1}, continuing=[going("a", 6), going("b", 6)]))
    assert both.num_layerwise_loads == 2


# Costs


def roofline(**options: Any) -> RooflineCost:
    work = StepWork(Work(0, 1e9), Work(0, 0.0), 0.0)
    return RooflineCost(
        **{
            "bandwidth": 1e12,
            "flops": 1e12,
            "overhead": 0.0,
            "host": 0.0,
            "link": 1e9,
            "disk": 1e9,
            "work": work,
            "token_kv_bytes": 0.0,
            "block_bytes": 1e6,
            "num_layers": 12,
            "num_resident": 3,
            **options,
        }
    )


def test_streaming_is_hidden_behind_as_much_computing() -> None:
    cost, contents = roofline(), StepContents(num_tokens=100)  # 0.1 s of computing
    assert cost.seconds(contents) == pytest.approx(0.1)
    assert cost.seconds(dataclasses.replace(contents, streamed=50.0)) == pytest.approx(0.1)
    # 0.4 s for nine layers: the first two come while three are computed, the others one after the other.
    assert cost.seconds(dataclasses.replace(contents, streamed=400.0)) == pytest.approx(0.4)
    # Little beyond what is computed: what comes can only begin once the resident layers have let the first two by.
    assert cost.seconds(dataclasses.replace(contents, streamed=99.0)) == pytest.approx(
        0.099 + 0.1 * 3 / 12 - 2 * 0.099 / 9
    )


def test_copies_wait_for_nothing_and_nothing_is_beside_them() -> None:
    contents = StepContents(num_tokens=100, exchanged=50.0)
    assert roofline().seconds(contents) == pytest.approx(0.15)


def test_a_measured_model_counts_what_is_streamed_as_blocks_that_are_moved() -> None:
    cost = msgspec.structs.replace(made_up_cost(), moved_block=1e-3)
    contents = StepContents(num_tokens=8, num_sequences=1, num_sampled=1)
    both = dataclasses.replace(contents, streamed=3.0, exchanged=1.5)
    assert cost.seconds(both) == pytest.approx(cost.seconds(contents) + 4.5e-3)


# Whole runs


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., SimulatedRun]:
    """Simulate a burst on a device with room for three requests of the twelve that come."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))

    def simulated(observer: Any = None, **options: Any) -> SimulatedRun:
        requests = draw([Synthetic("burst", num=12, prompt=100, output=60)])
        config = EngineConfig.from_kwargs(
            model=str(tmp_path),
            device="cuda",
            max_num_batched_tokens=128,
            max_model_len=160,
            **{"num_gpu_blocks_override": 30, **options},
        )
        info = long_enough(load_info(config), config, requests)
        cost, memory = make_cost("roofline:bandwidth=1,gflops=100,memory=1,link=1", config, info)
        return simulate(config, info, requests, cost, memory, observer)

    return simulated


def test_first_tokens_come_earlier_and_second_ones_later_with_layerwise_blocks(
    run: Callable[..., SimulatedRun],
) -> None:
    seen: list[StepContents] = []
    without = summarize_run(run())
    # As much memory on the device: 30 resident blocks, or 20 and 24 layerwise ones (of 3 layers and 2 staged, of 12).
    found = run(
        lambda plan, contents, seconds: seen.append(contents),
        num_gpu_blocks_override=44,
        kv_resident_layers=RESIDENT,
        swap_space=24 * 9 * 16 * 2 * 256 * 2,
    )
    result = summarize_run(found)
    assert found.log.stats.num_layerwise_blocks == found.log.stats.num_free_layerwise_blocks == 24
    assert sum(contents.num_layerwise_stores for contents in seen) > 0
    assert result["completed"] == without["completed"] == 12
    assert result["ttft"]["mean"] < 0.9 * without["ttft"]["mean"]
    assert result["second"]["mean"] > without["second"]["mean"]
    assert "from that to the second" in table(result)


def test_without_pressure_thin_blocks_change_nothing(run: Callable[..., SimulatedRun]) -> None:
    first = run(num_gpu_blocks_override=200)
    second = run(num_gpu_blocks_override=220, kv_resident_layers=RESIDENT, swap_space=20 * 9 * 16 * 2 * 256 * 2)
    assert second.log.stats.num_layerwise_blocks == 20
    assert summarize_run(first) | {"num_blocks": 0, "kv_usage": 0} == summarize_run(second) | {
        "num_blocks": 0,
        "kv_usage": 0,
    }
