"""Engines with layerwise blocks say what the CPU says, whatever they do with them; lanes do all as late as they may.

Without a GPU the kernels run in Triton's interpreter, and most of it is slow.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.engine.layerwise import layer_split
from quire.kernels.gpu.graphs import GraphOps
from quire.kernels.gpu.layerwise import GPULayerwiseOffload, OffloadOps
from quire.sampling_params import SamplingParams
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.engine_driver import EngineDriver, Request
from tests.helpers.graph_tape import TapeCapture
from tests.helpers.streams import Late

# Rows of padding may hold anything, and NumPy, in the interpreter, says so.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
GPU = torch.cuda.is_available()
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_dtype": "float32",
    "max_model_len": 32,
    "max_num_seqs": 5,
    "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 24,
    "enforce_eager": True,
}
MIXED: dict[str, Any] = {"kv_resident_layers": 1}  # as many whole blocks as one sequence may need, others layerwise
RESIDENT = {**MIXED, "swap_space": "1MiB"}  # all blocks layerwise but one
GREEDY, HOT = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)
COMMON = [7, 8, 9, 10, 11, 12, 13, 14, 15]
ask = partial(Request, max_tokens=5, stop_ids=())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama", **SMALL)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have streams be as late as they may, where they are not a GPU's."""
    if not GPU:
        monkeypatch.setattr(OffloadOps, "new_streams", lambda self: Late(random.Random(0).randrange))


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many blocks each step with layerwise ones, or copy between blocks, has loaded, and stored."""
    found: list[tuple[int, int]] = []
    begin = GPULayerwiseOffload.begin

    def noted(self: GPULayerwiseOffload, loads: Any, stores: Any) -> None:
        found.append((len(loads), len(stores)))
        begin(self, loads, stores)

    monkeypatch.setattr(GPULayerwiseOffload, "begin", noted)
    return found


def said(driver: EngineDriver, turns: list[list[Request]]) -> dict[str, list[int]]:
    """Run the requests of each turn beside each other, and the turns one after the other."""
    for turn, asks in enumerate(turns):
        for number, item in enumerate(asks):
            driver.add(f"{turn}.{number}", item)
        driver.run()
    driver.check_all_free()
    return {name: told.tokens for name, told in driver.results.items()}


def compare(
    folder: Path, turns: list[list[Request]], resident: dict[str, Any] = RESIDENT, **options: Any
) -> EngineDriver:
    """Have a CPU and a GPU with layerwise blocks say it; return the GPU's driver."""
    cpu = EngineDriver(folder, "cpu", **{**OPTIONS, **options})
    expected = said(cpu, turns)
    cpu.close()
    driver = EngineDriver(folder, "cuda", **{**OPTIONS, **resident, **options})
    assert said(driver, turns) == expected
    return driver


def test_what_layers_on_the_host_say(folder: Path, late: None, begun: list[tuple[int, int]]) -> None:
    driver = compare(folder, [[ask(COMMON, GREEDY, max_tokens=3)]])
    assert any(loads and stores for loads, stores in begun)
    # What was counted before anything was allocated is what is there.
    executor, stats = driver.core.executor, driver.stats()
    split, runner = layer_split(driver.core.config, executor.kv_cache_spec()), executor.worker.runner  # type: ignore[attr-defined]
    assert split is not None
    on_device = [*runner.kv_caches, runner.offload.caches[0]]
    assert sum(cache.data.nbytes for cache in on_device) == split.device_bytes(
        stats.num_blocks, stats.num_layerwise_blocks
    )
    on_host = sum(piece.nbytes for pool in runner.offload.pools for piece in pool.pieces)
    assert on_host == stats.num_layerwise_blocks * split.host_bytes
    driver.close()


MANY = [
    ask([*COMMON, 20], GREEDY),
    ask([*COMMON, 21, 22, 23], HOT, seeds=(1, 2, 3)),  # copies of what they share
    ask(list(range(3, 25)), GREEDY, max_tokens=3),  # in chunks
]
AGAIN = [ask([*COMMON, 20, 30], GREEDY), ask([*range(3, 20), 40], HOT)]  # prefixes are in the cache


@pytest.mark.slow
@pytest.mark.parametrize("overlapped", [True, False])
@pytest.mark.parametrize("resident", [MIXED, RESIDENT], ids=["mixed", "layerwise"])
def test_chunks_forks_and_prefixes(
    folder: Path, late: None, begun: list[tuple[int, int]], resident: dict[str, Any], overlapped: bool
) -> None:
    driver = compare(folder, [MANY, AGAIN], resident, async_scheduling=overlapped)
    assert driver.results["1.0"].num_cached and driver.results["1.1"].num_cached
    assert max(loads for loads, _ in begun) > 4
    driver.close()


@pytest.mark.slow
@pytest.mark.parametrize("resident", [MIXED, RESIDENT], ids=["mixed", "layerwise"])
def test_preemption(folder: Path, late: None, begun: list[tuple[int, int]], resident: dict[str, Any]) -> None:
    asks = [ask([*COMMON, 20 + number], GREEDY, max_tokens=9) for number in range(4)]
    driver = compare(folder, [asks], resident, num_gpu_blocks_override=11, enable_prefix_caching=False)
    assert driver.stats().num_preemptions and begun
    driver.close()


@pytest.mark.slow
def test_steps_with_layerwise_blocks_stand_beside_recorded_ones(
    folder: Path, late: None, begun: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """First one sequence in whole blocks, then more than these hold, then one again."""
    if not GPU:
        monkeypatch.setattr(GraphOps, "new_capture", lambda self: TapeCapture())
    one = [ask([3, 4], GREEDY, max_tokens=6)]
    more = [ask([*COMMON, 20 + number], GREEDY, max_tokens=3) for number in range(3)]
    options = {"enforce_eager": False, "enable_prefix_caching": False}
    driver = compare(folder, [one, more, one], MIXED, **options)
    stats = driver.core.executor.worker.backend.graph_stats()  # type: ignore[attr-defined]
    assert stats.captured and not stats.failed and begun
    driver.close()


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
def test_layerwise_blocks_are_there_again_after_a_sleep(folder: Path, late: None, level: int) -> None:
    driver = EngineDriver(folder, "cuda", **{**OPTIONS, **RESIDENT})
    before = driver.generate("before", MANY[0])
    offload = driver.core.executor.worker.runner.offload  # type: ignore[attr-defined]
    driver.core.call("sleep", {"level": level})
    assert not offload.caches and not any(pool.pieces for pool in offload.pools)
    driver.core.call("wake_up")
    after = driver.generate("after", MANY[0])
    assert after == before and after.num_cached == 0
    driver.check_all_free()
    driver.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kv_dtype"), [("llama", "int8"), ("llama", "fp8"), ("deepseek_v3", "float32"), ("gpt2", "float32")]
)
def test_families_and_formats(
    tmp_path: Path, late: None, begun: list[tuple[int, int]], family: str, kv_dtype: str
) -> None:
    """Compared with the same backend, all of whose blocks are whole."""
    layers = {"n_layer": 4} if family == "gpt2" else {"num_hidden_layers": 4}
    path = write_checkpoint(tmp_path, family, **(SMALL if family == "llama" else {"vocab_size": 64, **layers}))
    options = {**OPTIONS, "kv_cache_dtype": kv_dtype}
    asks = [[ask([*COMMON, 20], GREEDY, max_tokens=3), ask([5, 6, 7], HOT, seeds=(1, 2), max_tokens=3)]]
    plain = EngineDriver(path, "cuda", **options, swap_space=0)
    expected = said(plain, asks)
    plain.close()
    driver = EngineDriver(path, "cuda", **options, kv_resident_layers=1, swap_space="1MiB")
    assert said(driver, asks) == expected
    assert any(loads and stores for loads, stores in begun)
    driver.close()


@pytest.mark.slow
def test_code_of_transformers(folder: Path, late: None, begun: list[tuple[int, int]]) -> None:
    compare(folder, [[ask(COMMON, GREEDY, max_tokens=3)]], model_impl="transformers").close()
    assert any(loads and stores for loads, stores in begun)
