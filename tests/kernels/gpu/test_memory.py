"""A GPU's memory: what is measured, and what is given back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.gpu.kernels_blocks import cases

from quire import LLM, SamplingParams
from quire.checkpoint.hf_config import load_model_info
from quire.config import EngineConfig
from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.memory import DeviceMemory, as_memory_error
from quire.step import SchedulerOutput
from quire.worker.model_runner import ModelRunner
from quire.worker.worker import Worker
from tests.helpers.checkpoints import write_checkpoint, write_plain
from tests.kernels.gpu.common import DEVICE

MIB = 2**20
TOTAL = 8_000_000_000


class FakeGPU:
    """A device of 8 GB in the place of torch.cuda: of memory, `others` is somebody else's, and `held` PyTorch's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.others, self.held, self.used, self.peak = 700 * MIB, 0, 0, 0
        fakes = {
            "mem_get_info": lambda device: (TOTAL - self.others - self.held, TOTAL),
            "memory_reserved": lambda device: self.held,
            "memory_allocated": lambda device: self.used,
            "max_memory_reserved": lambda device: self.peak,
            "reset_peak_memory_stats": self.reset,
            "empty_cache": self.empty,
            "synchronize": lambda device: None,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def take(self, nbytes: int) -> None:
        self.used += nbytes
        self.held = max(self.held, self.used)
        self.peak = max(self.peak, self.held)

    def give(self, nbytes: int) -> None:
        self.used -= nbytes

    def empty(self) -> None:
        self.held = self.used

    def reset(self, device: object) -> None:
        self.peak = self.held


def backend_on(monkeypatch: pytest.MonkeyPatch) -> tuple[GPUBackend, FakeGPU]:
    backend = GPUBackend("float32", "float32", "cpu")
    backend.device = torch.device("cuda")
    return backend, FakeGPU(monkeypatch)


def test_a_step_is_measured_beside_weights_libraries_and_others(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, gpu = backend_on(monkeypatch)
    gpu.take(2000 * MIB)  # weights
    gpu.take(900 * MIB)
    gpu.give(900 * MIB)  # what loading them took does not count

    def step() -> None:
        gpu.take(300 * MIB)
        gpu.give(100 * MIB)
        gpu.take(50 * MIB)
        gpu.give(250 * MIB)
        gpu.others += 40 * MIB  # kernels are loaded

    measured = backend.measure(step)
    assert measured == DeviceMemory(TOTAL, 2740 * MIB, 300 * MIB)
    assert measured.free == TOTAL - 2740 * MIB
    assert gpu.held == gpu.used == 2000 * MIB
    assert backend.used_memory() == 2000 * MIB
    gpu.take(10 * MIB)
    gpu.give(10 * MIB)
    assert backend.available_memory() == TOTAL - 2740 * MIB


def test_only_what_memory_lacks_becomes_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="too much"), as_memory_error():
        raise torch.OutOfMemoryError("too much")
    with pytest.raises(RuntimeError, match="else"), as_memory_error():
        raise RuntimeError("else")


def test_what_is_measured_is_the_largest_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_plain(tmp_path)
    seen: list[tuple[int, int, int]] = []
    original = ModelRunner.submit

    def submit(runner: ModelRunner, plan: SchedulerOutput) -> object:
        pending = original(runner, plan)
        (blocks,) = {data.block_ids[0][0] for data in plan.new_sequences}
        seen.append((plan.total_num_scheduled_tokens, len(pending.result().sampled_token_ids), blocks))
        return pending

    monkeypatch.setattr(ModelRunner, "submit", submit)
    for tokens, sequences, length, expected in [
        (100, 7, 64, (100, 7, 0)),
        (5, 8, 64, (5, 5, 0)),  # no more sequences than tokens
        (100, 3, 9, (27, 3, 0)),  # nor tokens than prompts have room for
    ]:
        limits = {"max_model_len": length, "max_num_seqs": sequences, "max_num_batched_tokens": tokens}
        types = {"dtype": "float32", "kv_cache_dtype": "float32"}
        config = EngineConfig.from_kwargs(model=str(folder), device="reference", **types, **limits)
        worker = Worker(config, load_model_info(folder))

        def measure(work: object, backend: object = worker.backend) -> DeviceMemory:
            work()  # type: ignore[operator]
            return DeviceMemory(TOTAL, 1000, 500)

        monkeypatch.setattr(worker.backend, "measure", measure)
        memory = worker.device_memory()
        assert memory.step == 500
        assert memory.used == 1000 + 500 * min(512, tokens) // tokens + TOTAL // 32
        assert seen.pop() == expected
        worker.close()


@pytest.mark.gpu
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_closing_give_memory_back_to_the_driver(tmp_path: Path, level: int) -> None:
    folder = write_checkpoint(tmp_path, "llama")
    params = SamplingParams(temperature=0.0, max_tokens=8)
    prompts = [[5, 9, 77, 31, 8]] * 3
    llm = LLM(
        model=str(folder), device="cuda", kv_cache_memory_bytes=256 * MIB, swap_space=64 * MIB, skip_tokenizer_init=True
    )
    before = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    awake = torch.cuda.mem_get_info()[0]
    llm.sleep(level)
    assert torch.cuda.mem_get_info()[0] - awake >= 256 * MIB
    llm.wake_up()
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)] == before
    llm.close()
    assert torch.cuda.mem_get_info()[0] - awake >= 256 * MIB


@pytest.mark.gpu
def test_blocks_go_out_and_come_back_beside_a_running_device() -> None:
    backend = GPUBackend("bfloat16", "bfloat16", "cuda")
    caches = [backend.new_kv_cache(300, 16, 8, 128) for _ in range(4)]
    for cache in caches:
        cache.data.copy_(torch.randn_like(cache.data))
    before = [cache.data.clone() for cache in caches]
    host = backend.host_blocks(caches, 256)
    order = np.random.default_rng(0).permutation(300)[:256]
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):
        busy = torch.tanh(busy @ busy)
    host.copy_out(order, np.arange(256))
    for cache in caches:
        cache.data.zero_()
    host.copy_in(np.arange(256), order)
    for cache, data in zip(caches, before, strict=True):
        assert torch.equal(cache.data[torch.from_numpy(order).cuda()], data[torch.from_numpy(order).cuda()])
    host.close()


@pytest.mark.slow
def test_benchmarks_of_blocks_run_as_toys() -> None:
    seen = []
    for case in cases(GPUBackend("float16", "float16", DEVICE), scale=64):
        for run in (case.run, *case.against.values()):
            run(0)
            run(7)
        seen.append(case.name)
    assert len(seen) == len(set(seen)) == 2 * 3 * 4
