"""The engine over two ranks, which are threads here: what one rank says, and who has died."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from quire.checkpoint.hf_config import ModelInfo
from quire.config import EngineConfig
from quire.engine_request import LoRARequest
from quire.executor.ranks import InlineExecutor, RankedExecutor
from quire.sampling_params import SamplingParams
from quire.step import AdapterResult, ModelOutput, PendingOutput, SchedulerOutput, StoredBlocks
from quire.worker.worker import Worker, new_backend
from tests.frontend.conftest import write_folder
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.engine_driver import EngineDriver, Request
from tests.helpers.ranks import rank_backends


def compute(worker: Worker, plan: SchedulerOutput) -> ModelOutput:
    return worker.submit(plan).result()


class PendingRanks:
    """A step that all ranks compute."""

    overlaps = False

    def __init__(self, executor: ThreadExecutor, futures: list[Future[ModelOutput]]) -> None:
        self._executor, self._futures = executor, futures

    def result(self) -> ModelOutput:
        """Wait for all ranks; return rank 0's result."""
        return self._executor.gather(self._futures)[0]


class ThreadExecutor(RankedExecutor):
    """A thread for each rank, which calls its worker."""

    def __init__(self, config: EngineConfig, info: ModelInfo, world_size: int) -> None:
        super().__init__()
        self.world_size = world_size
        backends = [new_backend(config) for _ in range(world_size)]
        self._barrier = rank_backends(backends)
        self._threads = [ThreadPoolExecutor(1) for _ in range(world_size)]
        self.workers: list[Worker] = self.gather(
            [
                thread.submit(Worker, config, info, lambda config, own=backend: own)
                for thread, backend in zip(self._threads, backends, strict=True)
            ]
        )

    def gather(self, futures: list[Future[Any]]) -> list[Any]:
        """Return what all ranks return; raise what one of them raises, and remember which."""
        wait(futures, 60, FIRST_EXCEPTION)
        for rank, future in enumerate(futures):
            error = future.exception() if future.done() else None
            if error is not None:
                error.add_note(f"on rank {rank} of {self.world_size}")
                self._barrier.abort()  # the others wait for this one
        return [future.result(60) for future in reversed(futures)][::-1]

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """Call every worker in its thread."""
        return self.gather(
            [
                thread.submit(attrgetter(method)(worker), *args)
                for thread, worker in zip(self._threads, self.workers, strict=True)
            ]
        )

    def submit(self, plan: SchedulerOutput) -> PendingOutput:
        """Have every worker compute the step."""
        workers = zip(self._threads, self.workers, strict=True)
        return PendingRanks(self, [thread.submit(compute, worker, plan) for thread, worker in workers])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer."""
    path = tmp_path_factory.mktemp("llama")
    write_checkpoint(path, "llama", num_key_value_heads=2, vocab_size=437)
    return write_folder(path, "byte_level")


OPTIONS = {"dtype": "float32", "num_gpu_blocks_override": 60, "num_threads": 1}
DEVICES = ["reference", "cpu"]  # the CPU's steps are recorded, collectives included


@pytest.fixture
def driver(folder: Path, request: pytest.FixtureRequest) -> Iterator[EngineDriver]:
    """An engine over two ranks, on the device of the test's parameter."""
    device = getattr(request, "param", "reference")
    found = EngineDriver(
        folder, new_executor=lambda config, info: ThreadExecutor(config, info, 2), device=device, **OPTIONS
    )
    yield found
    found.close()


ASKS = {
    "greedy": Request([5, 9, 11, 3, 7], SamplingParams(temperature=0.0)),
    "sampled": Request([5, 9, 11], SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=0.5), seeds=(3, 4)),
    "structured": Request([5, 9, 11], SamplingParams(temperature=1.0), grammar='start: "a" /[0-9]{3,6}/', seeds=(5, 6)),
}


@pytest.mark.parametrize("driver", DEVICES, indirect=True)
def test_two_ranks_say_what_one_says(folder: Path, driver: EngineDriver) -> None:
    single = EngineDriver(folder, device=driver.core.config.device.device, **OPTIONS)
    for either in (driver, single):
        for name, ask in ASKS.items():
            either.add(name, ask)
        either.run()
        either.check_all_free()
    assert driver.results == single.results
    executor = driver.core.executor
    assert isinstance(executor, ThreadExecutor)
    heads = [worker.kv_cache_spec().layers[0].num_kv_heads for worker in executor.workers]
    assert heads == [1, 1] and single.core.executor.kv_cache_spec().layers[0].num_kv_heads == 2
    assert executor.available_memory() > 0 and executor.stored_blocks() == StoredBlocks()
    single.close()


def test_the_rank_that_failed_is_named(driver: EngineDriver) -> None:
    executor = driver.core.executor
    assert isinstance(executor, ThreadExecutor)

    def broken(plan: SchedulerOutput) -> PendingOutput:
        raise ArithmeticError("as asked")

    executor.workers[1].submit = broken  # type: ignore[method-assign]
    driver.add("greedy", ASKS["greedy"])
    with pytest.raises(ArithmeticError, match="as asked") as caught:
        driver.run()
    assert caught.value.__notes__ == ["on rank 1 of 2"]


def test_one_rank_is_called_directly(folder: Path) -> None:
    driver = EngineDriver(folder, device="reference", **OPTIONS)
    executor = driver.core.executor
    assert isinstance(executor, InlineExecutor) and executor.world_size == 1
    assert executor.collective_rpc("has_adapters") == [False] and executor.adapters is None
    driver.close()


class Stores(RankedExecutor):
    """Two ranks whose stores report what the test says."""

    world_size = 2

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.reports: list[dict[str, AdapterResult]] = [{}, {}]

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """Note the call; `poll` returns what each rank reports, once."""
        self.calls.append((method, args))
        found, self.reports = self.reports, [{}, {}]
        return found if method.endswith("poll") else [True, True]

    def submit(self, plan: SchedulerOutput) -> PendingOutput:
        """Never called."""
        raise AssertionError


def test_an_adapter_is_ready_when_every_rank_has_it_and_fails_with_any() -> None:
    executor = Stores()
    adapters, good, bad = executor.adapters, AdapterResult("digest"), AdapterResult(error="no such folder")
    assert adapters is not None
    request = LoRARequest("few", 1, "/few")
    for user in ("a", "b"):
        adapters.prepare(request, user)
    assert ("adapters.prepare", (request, "b")) in executor.calls
    executor.reports = [{"a": good}, {"b": bad}]
    assert adapters.poll() == {}, "each rank lacks one"
    executor.reports = [{"b": good}, {}]
    assert adapters.poll() == {"b": bad}
    executor.reports = [{}, {"a": good}]
    assert adapters.poll(0.5) == {"a": good} and adapters.poll() == {}
    adapters.release(1, "a")
    adapters.unload(1)
    assert executor.calls[-2:] == [("adapters.release", (1, "a")), ("adapters.unload", (1,))]
