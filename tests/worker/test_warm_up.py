"""After the warm-up nothing is left to compile, and nothing of it is left behind."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest

from quire.checkpoint.hf_config import load_model_info
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine_request import EngineRequest, ThinkingData
from quire.kernels import cpu as kernels
from quire.kernels.cpu.jit import Op
from quire.kernels.create import create_backend
from quire.models.loader import load_model
from quire.sampling_params import SamplingParams
from quire.worker.warm_up import warm_up
from quire.worker.worker import Worker
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.runner_driver import RunnerDriver


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")


def loaded() -> set[str]:
    """Names of the ops that this process has compiled or loaded."""
    names = (name for _, name, _ in pkgutil.iter_modules(kernels.__path__))
    modules = [importlib.import_module(f"{kernels.__name__}.{name}") for name in names]
    ops = (value for module in modules for value in vars(module).values() if isinstance(value, Op))
    return {op.name for op in ops if op.is_loaded}


def test_requests_of_every_kind_compile_nothing_more(folder: Path) -> None:
    core = EngineCore(EngineConfig.from_kwargs(model=str(folder), device="cpu", num_gpu_blocks_override=32))
    before = loaded()
    assert len(before) > 8
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, top_p=0.5, top_k=3, min_p=0.1),
        SamplingParams(logprobs=3, prompt_logprobs=2, repetition_penalty=1.5, presence_penalty=1.0),
        SamplingParams(allowed_token_ids=[4, 5], logit_bias={4: 1.0}, min_tokens=2),
    ]
    for number, params in enumerate(kinds):
        core.add(
            EngineRequest(
                request_id=f"{number}",
                sequence_ids=[f"{number}"],
                prompt_token_ids=list(range(3, 40)),
                sampling_params=params,
                arrival_time=0.0,
                seeds=[number],
                stop_ids=[2],
                max_tokens=4,
                thinking=ThinkingData([], [5, 6], 1, open=True) if number == 2 else None,
            )
        )
    while core.has_unfinished():
        core.step()
    assert loaded() == before


def test_the_warm_up_leaves_the_batch_empty(folder: Path) -> None:
    config = EngineConfig.from_kwargs(
        model=str(folder), device="cpu", dtype="float32", kv_cache_dtype="float32", max_model_len=1
    )
    worker = Worker(config, load_model_info(folder))
    worker.allocate(num_blocks=1, max_model_len=1)
    assert worker.runner is not None
    assert worker.runner.batch.row_of == {}
    assert worker.runner.batch.sampling.states == {}


def test_the_first_start_says_that_it_compiles(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from quire.kernels.cpu.backend import CPUBackend

    config = EngineConfig.from_kwargs(
        model=str(folder), device="cpu", dtype="float32", kv_cache_dtype="float32", max_model_len=16
    )
    for known, expected in ((True, 0), (False, 1)):
        monkeypatch.setattr(CPUBackend, "compiled_before", lambda self, known=known: known)
        caplog.clear()
        Worker(config, load_model_info(folder))
        assert sum("compiling kernels" in record.message for record in caplog.records) == expected


def test_forks_and_beams_compile_nothing_more(folder: Path) -> None:
    backend = create_backend("cpu", "float32", "float32")
    driver = RunnerDriver(load_model(load_model_info(folder), backend), backend)
    warm_up(driver.runner)
    before = loaded()
    for name, num_candidates in (("sample", 0), ("beam", 4)):
        driver.add(name, list(range(3, 13)), SamplingParams(temperature=0.0), num_candidates=num_candidates)
    driver.step({"sample": 10, "beam": 10}, branches={"sample": ["other"]})
    fork = driver.fork("beam", "twin")
    driver.tell("beam", 4)
    driver.tell("twin", 5)
    driver.step(dict.fromkeys(("sample", "other", "beam", "twin"), 1), [fork])
    assert loaded() == before
