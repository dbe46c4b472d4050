"""Requests with layers on the host say what they say on a CPU, also where they wait and blocks are brought back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_gpu_engine import COMMON, GREEDY, HOT, OPTIONS, SMALL, ask, check_same, said
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.engine_driver import EngineDriver, Request
from tests.helpers.transfers import COPY, moves

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
NUM_BLOCKS, NUM_LAYERWISE = 12, 7  # whole ones are as many as the longest sequence has
BLOCK = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four layers, the fewest that can be split."""
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama", **{**SMALL, "num_hidden_layers": 4})


class Watched:
    """Counts what an engine with layerwise blocks does, from its plans."""

    def __init__(self, driver: EngineDriver, streamed: int | None) -> None:
        self.scheduler = driver.core.scheduler
        if streamed is not None:
            self.scheduler.kv.layerwise.max_streamed_blocks = streamed
        self.num_brought_back = self.num_waited = self.num_streaming = 0
        driver.core.on_plans = self.see

    def see(self, plans: list[Any]) -> None:
        plan = plans[-1]
        kv = self.scheduler.kv
        first_layerwise = kv.pool.first_layerwise
        self.num_brought_back += sum(
            kind == COPY and source >= first_layerwise > target for kind, source, target in moves(plan.transfers)
        )
        names = plan.num_scheduled_tokens
        self.num_waited += sum(name not in names for name in kv.tables)
        self.num_streaming += any(block.block_id >= first_layerwise for name in names for block in kv.tables[name][0])


def compare(folder: Path, turns: list[list[Request]], *, streamed: int | None, **options: Any) -> Watched:
    """Have a CPU say it, and a GPU with layerwise blocks, of which a step loads so many; return what was seen."""
    given = {
        **OPTIONS,
        "block_size": BLOCK,
        "num_gpu_blocks_override": NUM_BLOCKS,
        "max_model_len": (NUM_BLOCKS - NUM_LAYERWISE) * BLOCK,
        **options,
    }
    drivers = {
        "cpu": EngineDriver(folder, "cpu", **given),
        "cuda": EngineDriver(folder, "cuda", **{**given, "kv_resident_layers": 1, "swap_space": None}),
    }
    assert drivers["cuda"].stats().num_layerwise_blocks == NUM_LAYERWISE
    watched = Watched(drivers["cuda"], streamed)
    for driver in drivers.values():
        said(driver, turns)
        driver.close()
    check_same(drivers["cuda"].results, drivers["cpu"].results, cached=False)
    return watched


def prompts(count: int, length: int = 9, **options: Any) -> list[Request]:
    return [ask([3 + number, *COMMON[: length - 1]], GREEDY, **options) for number in range(count)]


def test_who_waits_goes_on_with_what_was_brought_back(folder: Path) -> None:
    watched = compare(folder, [prompts(2, max_tokens=3)], streamed=0)
    assert min(watched.num_brought_back, watched.num_waited, watched.num_streaming) > 0


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [None, 1])
@pytest.mark.parametrize("overlapped", [False, True])
def test_many_beside_each_other(folder: Path, overlapped: bool, streamed: int | None) -> None:
    """Prompts in chunks, preemptions, samples that share blocks, and a second turn that finds prefixes."""
    first = [*prompts(4, max_tokens=7), ask(COMMON, HOT, seeds=(1, 2), max_tokens=5)]
    second = [ask([3, *COMMON[:8], 5, 6], GREEDY), *prompts(2, max_tokens=3)]
    options = {"async_scheduling": overlapped, "max_num_batched_tokens": 12}
    watched = compare(folder, [first, second], streamed=streamed, **options)
    assert watched.num_streaming > 0
    if streamed is not None:
        assert min(watched.num_brought_back, watched.num_waited) > 0
