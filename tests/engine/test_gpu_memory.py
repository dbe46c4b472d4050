"""An engine on a GPU fits itself to its memory: its share of all of it, less what a real step was seen to take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.checkpoint.hf_config import load_model_info
from quire.cli.main import main
from quire.config import EngineConfig
from quire.engine import plan as planning
from quire.engine.core import EngineCore
from quire.engine.kv_cache_size import SWAP_SPACE, fit_kv_cache, reserved_bytes
from quire.engine.plan import GPU_RUNTIME_BYTES, check_before_loading, make_plan
from quire.engine.resolve import resolve_config
from quire.errors import ConfigError
from quire.executor.null import NullExecutor
from quire.kernels.gpu import probe
from quire.kernels.gpu.probe import GPU
from quire.kernels.memory import DeviceMemory
from quire.step import KVCacheSpec, LayerKVSpec
from quire.worker.footprint import Footprint, graph_bytes
from tests.helpers.advice import advised

GB, GIB, MIB = 10**9, 2**30, 2**20
SPEC = KVCacheSpec([LayerKVSpec(num_kv_heads=8, head_size=128, dtype="bfloat16")] * 32)
BLOCK_BYTES = 2 * 2**20  # of 16 tokens


def on_gpu(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig.from_kwargs(model=str(folder), device="cuda", dtype="bfloat16", **options)


class OneGPU(NullExecutor):
    """An executor that does nothing, on a device with so much memory."""

    def __init__(self, memory: DeviceMemory | None) -> None:
        super().__init__()
        self._memory = memory
        self.allocated: tuple[int, int, int] = (0, 0, 0)
        self.num_layerwise_blocks = 0

    def kv_cache_spec(self) -> KVCacheSpec:
        return SPEC

    def device_memory(self) -> DeviceMemory:
        if self._memory is None:
            raise MemoryError
        return self._memory

    def allocate(
        self, num_blocks: int, max_model_len: int, num_host_blocks: int = 0, num_layerwise_blocks: int = 0
    ) -> None:
        self.allocated = num_blocks, max_model_len, num_host_blocks
        self.num_layerwise_blocks = num_layerwise_blocks


@pytest.mark.parametrize("utilization", [0.9, 0.5, 1.0])
def test_blocks_are_the_share_of_all_memory_less_the_peak_of_a_step(folder: Path, utilization: float) -> None:
    peak = 2_345_678_901  # weights, libraries and other processes, and a step
    executor = OneGPU(DeviceMemory(8 * GB, peak - 300 * MIB, 300 * MIB))
    asked = on_gpu(folder, gpu_memory_utilization=utilization)
    core = EngineCore(asked, executor=executor, info=load_model_info(folder))
    assert core.ready.num_blocks == (int(8 * GB * utilization) - peak) // BLOCK_BYTES
    assert executor.allocated == (core.ready.num_blocks, 512, min(SWAP_SPACE // BLOCK_BYTES, core.ready.num_blocks))


def test_what_others_take_counts_as_taken_and_shares_are_of_the_whole_device(folder: Path) -> None:
    def blocks(used: int) -> int:
        asked = on_gpu(folder)
        return EngineCore(
            asked, executor=OneGPU(DeviceMemory(8 * GB, used, 0)), info=load_model_info(folder)
        ).ready.num_blocks

    assert blocks(3 * GB) - blocks(5 * GB) in (2 * GB // BLOCK_BYTES, 2 * GB // BLOCK_BYTES + 1)


def test_what_was_asked_for_may_take_all_that_is_free(folder: Path) -> None:
    executor = OneGPU(DeviceMemory(8 * GB, 5 * GB, 0))
    asked = on_gpu(folder, num_gpu_blocks_override=3 * GB // BLOCK_BYTES)
    assert EngineCore(asked, executor=executor, info=load_model_info(folder)).ready.num_blocks == 3 * GB // BLOCK_BYTES
    with pytest.raises(ConfigError, match=r"2\.79 GiB are free beside weights and steps"):
        EngineCore(
            on_gpu(folder, num_gpu_blocks_override=3 * GB // BLOCK_BYTES + 1),
            executor=executor,
            info=load_model_info(folder),
        )


def test_a_step_that_leaves_no_room_is_refused_with_a_command_that_works(folder: Path) -> None:
    info, asked = load_model_info(folder), on_gpu(folder)
    config = resolve_config(asked, info)
    counted = Footprint(config, info)
    memory = DeviceMemory(8 * GB, 6 * GB, 3 * GB)

    def scratch(now: EngineConfig) -> int:
        return counted.step(now).total

    with pytest.raises(ConfigError) as caught:
        fit_kv_cache(asked, config, SPEC, memory.total, reserved_bytes(memory, scratch, config))
    message = caught.value.message
    assert "a block of 16 tokens needs 2 MiB while weights, a step, and others on the GPU need 8.38 GiB; 6.71 GiB" in (
        message
    )
    smaller = resolve_config(advised(message), info)
    assert reserved_bytes(memory, scratch, config)(smaller) < 7.2 * GB - BLOCK_BYTES
    assert reserved_bytes(memory, scratch, config)(config) == 9 * GB


def test_a_step_that_cannot_run_is_refused_with_a_smaller_one(folder: Path) -> None:
    with pytest.raises(ConfigError, match="a step of 2048 tokens and 256 sequences did not fit") as caught:
        EngineCore(on_gpu(folder), executor=OneGPU(None), info=load_model_info(folder))
    assert advised(caught.value.message).scheduler.max_num_batched_tokens == 512


def test_graphs_are_as_large_as_their_largest_step_and_some_more(folder: Path) -> None:
    config = resolve_config(
        on_gpu(folder, max_num_batched_tokens=1024, max_cudagraph_capture_size=256), load_model_info(folder)
    )
    assert graph_bytes(config, 400 * MIB, 8 * GIB) == 100 * MIB + 256 * MIB
    assert graph_bytes(config, 400 * MIB, 80 * GIB) == 100 * MIB + 512 * MIB
    assert (
        graph_bytes(resolve_config(on_gpu(folder, enforce_eager=True), load_model_info(folder)), 400 * MIB, 8 * GIB)
        == 0
    )


# Before anything is loaded


def test_a_plan_for_a_gpu_adds_up(folder: Path) -> None:
    info = load_model_info(folder)
    plan = make_plan(on_gpu(folder, max_num_seqs=1024), info, 8 * GIB)
    taken = GPU_RUNTIME_BYTES + plan.weights + plan.tables + plan.step.total + plan.graphs
    assert plan.budget == int(8 * GIB * 0.9) - taken
    assert plan.graphs == graph_bytes(resolve_config(on_gpu(folder), info), plan.step.total, 8 * GIB) > 256 * MIB
    assert (plan.step.threads, plan.step.programs) == (0, 0)
    assert plan.fit is not None
    assert plan.peak <= 8 * GIB
    assert plan.settings["device"] == "cuda"


def test_activations_on_a_gpu_are_of_the_models_type(folder: Path) -> None:
    info = load_model_info(folder)
    asked = EngineConfig.from_kwargs(model=str(folder), device="cuda", dtype="float32")
    wide = make_plan(asked, info, 8 * GIB).step
    narrow = make_plan(on_gpu(folder), info, 8 * GIB).step
    assert narrow.activations < wide.activations < 2 * narrow.activations + MIB
    assert narrow.sampling == wide.sampling == 2 * 256 * 1000 * 4


def test_an_engine_sees_what_the_gpu_has_free_before_it_loads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info, asked = load_model_info(folder), on_gpu(folder)
    monkeypatch.setattr(planning, "gpu_memory", lambda: DeviceMemory(8 * GIB, 8 * GIB - 500 * MIB))
    with pytest.raises(ConfigError, match=r"CUDA's own memory included, 500 MiB are available"):
        check_before_loading(asked, info)
    monkeypatch.setattr(planning, "gpu_memory", lambda: DeviceMemory(8 * GIB, GIB))
    assert check_before_loading(asked, info)(resolve_config(asked, info)) > 0


def test_a_gpu_that_is_not_here_is_planned_for_by_its_size(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(folder), "--device", "cuda", "--memory", "24GiB", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert (planned["available"], planned["settings"]["device"]) == (24 * GIB, "cuda")
    monkeypatch.setattr(probe, "interpreted", lambda: False)
    monkeypatch.setattr("quire.kernels.gpu.probe.interpreted", lambda: False)
    monkeypatch.setattr(probe, "find_gpus", list)
    monkeypatch.setattr("quire.kernels.gpu.probe.find_gpus", list)
    assert main(["plan", str(folder), "--device", "cuda"]) != 0
    assert "needs an NVIDIA GPU" in capsys.readouterr().err


def test_a_gpus_memory_is_what_it_has_and_what_all_have_taken_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "interpreted", lambda: False)
    monkeypatch.setattr(probe, "find_gpus", lambda: [GPU(0, "a card", 80 * GIB, (9, 0))])
    monkeypatch.setattr(probe, "used_memory", lambda: 3 * GIB)
    assert probe.gpu_memory() == DeviceMemory(80 * GIB, 3 * GIB)
    assert probe.gpu_memory().free == 77 * GIB
    monkeypatch.setattr(probe, "used_memory", lambda: None)
    assert probe.gpu_memory() == DeviceMemory(80 * GIB)
