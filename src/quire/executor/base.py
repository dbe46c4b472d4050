"""`Executor`: the engine's interface to the ranks that run the model. `ranks.py` has the communication with ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Protocol

from quire.chrome_trace import ChromeTrace
from quire.engine_request import LoRARequest
from quire.errors import ErrorData
from quire.kernels.memory import DeviceMemory
from quire.step import AdapterResult, KVCacheSpec, ModelOutput, PendingOutput, SchedulerOutput, StoredBlocks


class Adapters(Protocol):
    """The LoRA adapters of an executor, reference-counted by their users (`lora.store.AdapterStore`)."""

    def prepare(self, request: LoRARequest, user: str) -> None:
        """Begin to load an adapter if necessary. Every call must be followed by one of `release`."""

    def poll(self, wait: float = 0.0) -> dict[str, AdapterResult]:
        """Return the outcome of finished loads by user; with none, wait up to `wait` seconds for one."""

    def release(self, number: int, user: str) -> None:
        """End one use of an adapter, or the wait for it."""

    def unload(self, number: int) -> None:
        """Unload an adapter as soon as no request uses it."""


class Grammars(Protocol):
    """The compiled grammars of an executor, reference-counted by their users (`sampling.grammars.GrammarStore`)."""

    def end_ids(self) -> list[int]:
        """Return the tokens that end a text which has a grammar; complete once a grammar was compiled."""

    def prepare(self, grammar: str) -> None:
        """Begin to compile a grammar if necessary. Every call must be followed by one of `release`."""

    def poll(self, wait: float = 0.0) -> dict[str, ErrorData | None]:
        """Return the grammars that became ready, each with its error or None; with none, wait up to `wait` seconds."""

    def release(self, grammar: str) -> None:
        """End one use of a grammar."""


class UnusedGrammars:
    """The grammars of an executor that ignores them: each is ready at once."""

    def __init__(self) -> None:
        self._ready: dict[str, ErrorData | None] = {}

    def end_ids(self) -> list[int]:
        return []

    def prepare(self, grammar: str) -> None:
        self._ready[grammar] = None

    def poll(self, wait: float = 0.0) -> dict[str, ErrorData | None]:
        ready, self._ready = self._ready, {}
        return ready

    def release(self, grammar: str) -> None:
        """See `Grammars`."""


class Executor(ABC):
    """Runs steps on `world_size` ranks. `kv_cache_spec` and `device_memory` are called first, then `allocate`.

    The defaults are those of an executor without adapters, grammars and disk tier.
    """

    world_size: int = 1

    def __init__(self) -> None:
        self._grammars: Grammars = UnusedGrammars()

    @property
    def adapters(self) -> Adapters | None:
        """The LoRA adapters; None where LoRA is off."""
        return None

    @property
    def grammars(self) -> Grammars:
        """The grammars of structured output."""
        return self._grammars

    @abstractmethod
    def kv_cache_spec(self) -> KVCacheSpec:
        """Return what the model's layers cache, on one rank."""

    @abstractmethod
    def available_memory(self) -> int:
        """Return the bytes free for the KV cache on the rank that has the fewest."""

    def device_memory(self) -> DeviceMemory:
        """Return the memory of the rank that has the least free; may run the largest step to measure its peak.

        To be called once, before `allocate`.
        """
        return DeviceMemory(self.available_memory())

    def allocate(  # noqa: B027 - executors without a model have nothing to allocate
        self, num_blocks: int, max_model_len: int, num_host_blocks: int = 0, num_layerwise_blocks: int = 0
    ) -> None:
        """Allocate the KV cache and the pool of host blocks, and open the disk tier if the config has one.

        Of the last `num_layerwise_blocks` blocks only the first `kv_resident_layers` layers are on the device. A call
        after `sleep` wakes the executor up.

        Raises:
            MemoryError: the KV cache does not fit.
            ConfigError: the host blocks do not, or another engine uses the disk tier.
            ModelError: weights that `sleep` has freed cannot be read again.
        """

    def sleep(self, level: int) -> int:
        """Free what `allocate` has allocated, at level 2 also the weights, between steps; return how many bytes.

        No step runs until the next `allocate`. An allocation that has failed halfway is freed as well.
        """
        return 0

    def stored_blocks(self) -> StoredBlocks:
        """Return what the disk tier held when `allocate` opened it; it has no slots where there is none."""
        return StoredBlocks()

    @abstractmethod
    def submit(self, plan: SchedulerOutput) -> PendingOutput:
        """Begin a step. One that does not overlap must be waited for before the next is submitted."""

    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        """Run one step and return its result."""
        return self.submit(plan).result()

    def idle(self) -> bool:
        """With no request to compute, warm up one graph for later steps; return whether there was one."""
        return False

    def start_profile(self, trace: ChromeTrace) -> None:  # noqa: B027 - an executor without a device has no profile
        """Add to `trace` what the devices do from now on; called between steps."""

    def stop_profile(self, path: Path) -> list[Path]:
        """End what `start_profile` began; return files written beside the trace, which will be at `path`."""
        return []

    def close(self) -> None:  # noqa: B027 - nor anything to release
        """Release model and memory."""
