"""Executors over workers, one worker a rank. Imports the data plane, which `base.py` and `null.py` do not."""

from __future__ import annotations

from abc import abstractmethod
from operator import attrgetter
from pathlib import Path
from typing import Any

from quire.checkpoint.hf_config import ModelInfo
from quire.chrome_trace import ChromeTrace
from quire.config import EngineConfig
from quire.errors import ErrorData
from quire.executor.base import Adapters, Executor
from quire.kernels.memory import DeviceMemory
from quire.step import KVCacheSpec, PendingOutput, SchedulerOutput, StoredBlocks
from quire.worker.worker import Worker


class RankedStore:
    """The adapters or the grammars of all ranks (`Adapters`, `Grammars`): ready once every rank has them ready.

    Args:
        name: of the store in `Worker`.
    """

    def __init__(self, executor: RankedExecutor, name: str) -> None:
        self._executor, self._name = executor, name
        self._results: dict[str, dict[int, Any]] = {}  # by what `poll` names, the result of each rank that has one

    def prepare(self, *args: Any) -> None:
        self._call("prepare", *args)

    def release(self, *args: Any) -> None:
        self._call("release", *args)

    def unload(self, number: int) -> None:
        self._call("unload", number)

    def end_ids(self) -> list[int]:
        ids: list[int] = self._call("end_ids")[0]
        return ids

    def poll(self, wait: float = 0.0) -> dict[str, Any]:
        for rank, results in enumerate(self._call("poll", wait)):
            for key, result in results.items():
                self._results.setdefault(key, {})[rank] = result
        ready = [key for key, results in self._results.items() if len(results) == self._executor.world_size]
        return {key: _worst(self._results.pop(key)) for key in ready}

    def _call(self, method: str, *args: Any) -> list[Any]:
        return self._executor.collective_rpc(f"{self._name}.{method}", *args)


def _worst(results: dict[int, Any]) -> Any:
    """Return an error if a rank has one, else the result of rank 0."""
    failed = [result for result in results.values() if isinstance(result, ErrorData) or getattr(result, "error", None)]
    return failed[0] if failed else results[0]


class RankedExecutor(Executor):
    """Reduces the answers of `world_size` workers. How they are called is left to subclasses.

    All ranks receive the same plans. They compute the same logits (collectives are ops of the backend) and sample the
    same tokens, so that a step's result is that of rank 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self._adapters, self._grammars = RankedStore(self, "adapters"), RankedStore(self, "grammars")

    @abstractmethod
    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `Worker`, or of a part of it ("grammars.prepare"), on all ranks; return the results.

        Raises what any rank raises, with a note (`BaseException.add_note`) that names the rank.
        """

    @abstractmethod
    def submit(self, plan: SchedulerOutput) -> PendingOutput:
        """See `Executor`; the result is there when all ranks have ended the step. Raises what `collective_rpc` does."""

    @property
    def adapters(self) -> Adapters | None:
        return self._adapters if self.collective_rpc("has_adapters")[0] else None

    def kv_cache_spec(self) -> KVCacheSpec:
        """See `Executor`; heads are split evenly, so that all ranks have the same."""
        spec: KVCacheSpec = self.collective_rpc("kv_cache_spec")[0]
        return spec

    def available_memory(self) -> int:
        return min(self.collective_rpc("backend.available_memory"))

    def device_memory(self) -> DeviceMemory:
        memories: list[DeviceMemory] = self.collective_rpc("device_memory")
        return min(memories, key=lambda memory: memory.free)

    def allocate(
        self, num_blocks: int, max_model_len: int, num_host_blocks: int = 0, num_layerwise_blocks: int = 0
    ) -> None:
        self.collective_rpc("allocate", num_blocks, max_model_len, num_host_blocks, num_layerwise_blocks)

    def sleep(self, level: int) -> int:
        return sum(self.collective_rpc("sleep", level))

    def stored_blocks(self) -> StoredBlocks:
        """See `Executor`; a block counts as stored if every rank has its part."""
        ranks: list[StoredBlocks] = self.collective_rpc("stored_blocks")
        others = [set(rank.blocks) for rank in ranks[1:]]
        blocks = [block for block in ranks[0].blocks if all(block in other for other in others)]
        return StoredBlocks(min(rank.num_slots for rank in ranks), ranks[0].hash_key, blocks)

    def start_profile(self, trace: ChromeTrace) -> None:
        self.collective_rpc("start_profile", trace)

    def stop_profile(self, path: Path) -> list[Path]:
        return [written for rank in self.collective_rpc("stop_profile", path) for written in rank]

    def idle(self) -> bool:
        return any(self.collective_rpc("idle"))

    def close(self) -> None:
        self.collective_rpc("close")


class InlineExecutor(RankedExecutor):
    """One rank in this process: its methods are called directly, and plans are not copied."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self.worker = worker

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        return [attrgetter(method)(self.worker)(*args)]

    def submit(self, plan: SchedulerOutput) -> PendingOutput:
        return self.worker.submit(plan)


def create_executor(config: EngineConfig, info: ModelInfo) -> Executor:
    """Return an executor with the model loaded; `config` is resolved: it has no "auto" left.

    Raises:
        ModelError: the checkpoint is broken. ConfigError: the device does not support an option.
    """
    return InlineExecutor(Worker(config, info))
