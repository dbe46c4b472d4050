"""Executors over workers, one worker a rank. Imports the data plane, which `base.py` and `null.py` do not."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from quire.checkpoint.hf_config import ModelInfo
from quire.config import EngineConfig
from quire.executor.base import Adapters, Executor, Grammars
from quire.kernels.memory import DeviceMemory
from quire.step import KVCacheSpec, ModelOutput, Pending, SchedulerOutput
from quire.worker.worker import Worker


class RankedExecutor(Executor):
    """Reduces the answers of `world_size` workers. How they are called is left to subclasses.

    All ranks receive the same plans. They compute the same logits (collectives are ops of the backend) and sample the
    same tokens, so that a step's result is that of rank 0.
    """

    @abstractmethod
    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `Worker` on all ranks; return the results in rank order. Raises what any rank raises."""

    @abstractmethod
    def submit(self, step: SchedulerOutput) -> Pending:
        """See `Executor`; the result is there when all ranks have ended the step."""

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        return self.submit(step).result()

    def kv_cache_spec(self) -> KVCacheSpec:
        """See `Executor`; heads are split evenly, so that all ranks have the same."""
        spec: KVCacheSpec = self.collective_rpc("kv_cache_spec")[0]
        return spec

    def available_memory(self) -> int:
        return min(self.collective_rpc("available_memory"))

    def device_memory(self) -> DeviceMemory:
        memories: list[DeviceMemory] = self.collective_rpc("device_memory")
        return min(memories, key=lambda memory: memory.free)

    def allocate(
        self, num_blocks: int, max_model_len: int, num_host_blocks: int = 0, num_layerwise_blocks: int = 0
    ) -> None:
        self.collective_rpc("allocate", num_blocks, max_model_len, num_host_blocks, num_layerwise_blocks)

    def sleep(self, level: int) -> int:
        return sum(self.collective_rpc("sleep", level))

    def num_disk_blocks(self) -> int:
        return min(self.collective_rpc("num_disk_blocks"))

    def stored_blocks(self) -> list[tuple[int, bytes]]:
        """See `Executor`; a block counts as stored if every rank has its part."""
        first, *others = self.collective_rpc("stored_blocks")
        return [record for record in first if all(record in other for other in others)]

    def hash_key(self) -> bytes | None:
        key: bytes | None = self.collective_rpc("hash_key")[0]
        return key

    def idle(self) -> bool:
        return any(self.collective_rpc("idle"))

    def close(self) -> None:
        self.collective_rpc("close")


class InlineExecutor(RankedExecutor):
    """One rank in this process: its methods are called directly, and plans are not copied."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self.worker = worker

    @property
    def adapters(self) -> Adapters | None:
        return self.worker.adapters

    @property
    def grammars(self) -> Grammars:
        return self.worker.grammars

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self.worker, method)(*args)]

    def submit(self, step: SchedulerOutput) -> Pending:
        return self.worker.submit(step)

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        return self.worker.execute(step)


def create_executor(config: EngineConfig, info: ModelInfo) -> Executor:
    """Return an executor with the model loaded; `config` is resolved: it has no "auto" left.

    Raises:
        ModelError: the checkpoint is broken. ConfigError: the device does not support an option.
    """
    return InlineExecutor(Worker(config, info))
