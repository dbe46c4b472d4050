"""Steps of a GPU, padded and captured, say what the reference says step by step; CUDA is a tape (graph_tape.py)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.checkpoint.hf_config import ModelInfo, load_model_info
from quire.config import EngineConfig
from quire.engine.loop import run
from quire.executor.base import Executor
from quire.executor.ranks import InlineExecutor
from quire.kernels.create import create_backend
from quire.models.loader import load_model
from quire.sampling_params import SamplingParams
from quire.worker.worker import Worker
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.engine_driver import EngineDriver, Request
from tests.helpers.graph_tape import TapeCapture
from tests.helpers.loop_clients import ScriptedClients
from tests.helpers.plain_gpu import PlainGPU
from tests.helpers.runner_driver import RunnerDriver

GREEDY = SamplingParams(temperature=0.0)
FAMILIES = ("llama", "gemma3_text", "qwen3_5_text", "lfm2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write_checkpoint(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> Callable[[str], dict[str, list[int]]]:
    """Return the `story` of a family on the reference backend."""
    return functools.cache(
        lambda family: story(runner(folders[family], create_backend("reference", "float32", "float32")))
    )


def runner(folder: Path, backend: object) -> RunnerDriver:
    return RunnerDriver(load_model(load_model_info(folder), backend), backend)  # type: ignore[arg-type]


STEPS = [
    "aaa",
    "aabbbb",
    "abbbb",
    "abbbc",
    *["abc"] * 4,
    "bddddddca",
    "dddc",
    "-b",
    *["ca"] * 3,
    *["dac"] * 3,
    "-ac",
    *["d"] * 3,
]
"""Which sequence computes how many tokens, or which leave: chunks, prompts among decodes, batches that grow and shrink.
"""


def story(driver: RunnerDriver, suffix: str = "") -> dict[str, list[int]]:
    """Run STEPS with sequences of these names and a suffix; return what each has said."""
    rng, said = np.random.default_rng(5), {name: list[int]() for name in "abcd"}
    for name, length in (("a", 5), ("b", 11), ("c", 1), ("d", 9)):
        driver.add(name + suffix, rng.integers(3, 150, length).tolist(), GREEDY)
    for step in [*STEPS, "-d"]:
        if step[0] == "-":
            driver.end(*(name + suffix for name in step[1:]))
            continue
        counts = {name + suffix: step.count(name) for name in dict.fromkeys(step)}
        for name, tokens in driver.step(counts).sampled_token_ids.items():
            said[name[0]] += tokens
    return said


@pytest.mark.parametrize(
    "family",
    ["llama", "lfm2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3_text", "qwen3_5_text"))],
)
def test_recorded_steps_say_what_the_reference_says(folders: dict[str, Path], expected: Any, family: str) -> None:
    tape = TapeCapture()
    backend = PlainGPU(tape)
    driver = runner(folders[family], backend)
    assert story(driver) == expected(family)
    stats = driver.backend.graph_stats()
    assert stats.failed == 0
    assert stats.captured == len(tape.made)
    assert {len(graphs) > 1 for graphs in tape.made} == {True, False}, "in pieces and whole"
    assert stats.graphs > stats.captured
    assert backend.asides > backend.whole > 0
    before = backend.whole
    assert story(driver, "-again") == expected(family)
    assert backend.whole < 2 * before, "more was captured"


def test_without_a_recorder_steps_have_their_exact_sizes(folders: dict[str, Path], expected: Any) -> None:
    backend = PlainGPU()
    driver = runner(folders["llama"], backend)
    assert story(driver) == expected("llama")
    assert backend.whole == 0, "lengths are known on the host"
    assert driver.backend.graph_stats().captured == 0


def test_an_op_that_cannot_be_recorded_leaves_its_shape_as_it_was(
    folders: dict[str, Path], expected: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = PlainGPU.rms_norm

    def waiting(self: PlainGPU, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        assert len(x) != 4 or x[0, 0].item() is not None
        return norm(self, x, weight, eps)

    monkeypatch.setattr(PlainGPU, "rms_norm", waiting)
    driver = runner(folders["llama"], PlainGPU(TapeCapture()))
    with caplog.at_level(logging.WARNING):
        assert story(driver) == expected("llama")
    stats = driver.backend.graph_stats()
    assert stats.failed == 1
    assert stats.captured > 1
    told = [record.getMessage() for record in caplog.records if "could not be captured" in record.getMessage()]
    assert len(told) == 1 and "item" in told[0]


def test_idle_times_record_what_is_likely_to_come(folders: dict[str, Path]) -> None:
    tape = TapeCapture()
    driver = runner(folders["lfm2"], PlainGPU(tape))
    graphs = driver.runner.graphs
    assert not graphs.capture_next(), "nothing was seen yet"
    names = ("a", "b", "c")
    for name in names:
        driver.add(name, [5, 6], GREEDY)
    driver.step(dict.fromkeys(names, 2))
    driver.step(dict.fromkeys(names, 1))
    caches = [cache.clone() for cache in driver.runner.kv_caches]
    states = [state[:-1].clone() for layer in driver.runner.states.arrays for state in layer]
    made = []
    while graphs.capture_next():
        made.append(len(tape.made[-1]))
    assert made == [1, 1, 1, 1], "1, 2, 4, and 8 as the next"
    for before, after in zip(caches, driver.runner.kv_caches, strict=True):
        assert torch.equal(before[:, :-1].nan_to_num(7), after[:, :-1].nan_to_num(7))
    after = [state[:-1] for layer in driver.runner.states.arrays for state in layer]
    assert all(torch.equal(one, other) for one, other in zip(states, after, strict=True))
    driver.step(dict.fromkeys(names, 1))
    assert len(tape.made) == len(made), "it was there already"


def on_tape(tape: TapeCapture) -> Callable[[EngineConfig, ModelInfo], Executor]:
    """Return what makes an executor whose steps are captured on `tape`."""
    return lambda config, info: InlineExecutor(Worker(config, info, lambda config: PlainGPU(tape)))


def ask(driver: EngineDriver) -> dict[str, list[int]]:
    shared = [7, 8, 9, 10, 11, 12, 13, 14, 15]
    for number, prompt in enumerate(([3, 4], [*shared, 20], [*shared, 21, 22, 23], [5] * 30)):
        driver.add(f"{number}", Request(prompt, GREEDY, max_tokens=4 + 3 * number, stop_ids=()))
    driver.run()
    for number, prompt in enumerate(([*shared, 20, 30], [3]), start=4):
        driver.add(f"{number}", Request(prompt, GREEDY, max_tokens=5, stop_ids=()))
    driver.run()
    driver.check_all_free()
    return {name: told.tokens for name, told in driver.results.items()}


@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.slow), True], ids=["plain", "slots"])
def test_an_engine_with_recorded_steps(folders: dict[str, Path], lora: bool) -> None:
    options = {"max_model_len": 64, "max_num_seqs": 6, "max_num_batched_tokens": 24, "enable_lora": lora}
    types = {"dtype": "float32", "kv_cache_dtype": "float32"}
    expected = ask(EngineDriver(folders["llama"], "reference", **types, **options))
    tape = TapeCapture()
    captured = EngineDriver(folders["llama"], "reference", on_tape(tape), **types, **options)
    assert ask(captured) == expected
    assert len(tape.made) > 3


def test_an_engine_that_has_nothing_to_do_gets_ready_between_looks_at_its_messages(folders: dict[str, Path]) -> None:
    driver = EngineDriver(folders["llama"], "reference", max_model_len=16)
    left = [True, True, False]
    driver.core.executor.idle = lambda: left.pop(0)  # type: ignore[method-assign]
    clients = ScriptedClients([])
    run(driver.core, clients)
    assert clients.waits == [False, False, True], "it waits once nothing is left to prepare"
