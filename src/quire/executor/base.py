"""The Executor interface: how the engine reaches whoever runs the model."""

from __future__ import annotations

from typing import Protocol

from quire.kernels.memory import DeviceMemory
from quire.lora.request import LoRARequest
from quire.step import AdapterNews, Done, KVCacheSpec, ModelOutput, Pending, SchedulerOutput


class Adapters(Protocol):
    """LoRA adapters of an executor, kept while somebody uses them. Methods are those of `lora.store.AdapterStore`."""

    def prepare(self, request: LoRARequest, user: str) -> None:
        """Begin to read an adapter, if need be; every call is to be followed by one of `release`."""

    def poll(self, wait: float = 0.0) -> dict[str, AdapterNews]:
        """Return, by user, what became of what was asked for; with nothing to tell wait so many seconds."""

    def release(self, number: int, user: str) -> None:
        """Say that one who asked for an adapter needs it no more, or waits for it no more."""

    def forget(self, number: int) -> None:
        """Let an adapter go as soon as no request needs it."""


class Executor(Protocol):
    """Runs steps. The engine calls `kv_cache_spec` and `device_memory`, then `allocate`, then the rest."""

    @property
    def adapters(self) -> Adapters | None:
        """LoRA adapters; None where there are none."""

    def kv_cache_spec(self) -> KVCacheSpec:
        """Return what the model's layers cache."""

    def available_memory(self) -> int:
        """Return the bytes free for the KV cache."""

    def device_memory(self) -> DeviceMemory:
        """Say what the device has, and what of it is not for the KV cache; may run the largest step to see.

        To be called once, before `allocate`.
        """

    def allocate(self, num_blocks: int, max_model_len: int, num_host_blocks: int = 0, num_thin_blocks: int = 0) -> None:
        """Allocate the KV cache, and as many blocks of host memory, and open the disk tier if the config asks for it.

        Of the last `num_thin_blocks` blocks some layers are on the host; `kv_resident_layers` says how many are not.
        Also after `sleep`, which it ends.

        Raises:
            MemoryError: the KV cache does not fit.
            ConfigError: the host blocks do not, or the disk tier cannot be used.
            ModelError: weights that `sleep` has let go of cannot be read again.
        """

    def sleep(self, level: int) -> int:
        """Free what `allocate` has allocated, at level 2 also the weights, between steps; return how many bytes.

        Nothing runs until the next `allocate`. An allocation that has failed halfway is freed as well.
        """

    def num_disk_blocks(self) -> int:
        """Return how many slots the disk tier has; 0 without one."""

    def stored_blocks(self) -> list[tuple[int, bytes]]:
        """Return (slot, header) of what the disk tier held when it was opened."""

    def hash_key(self) -> bytes | None:
        """Return the key that names of blocks must be made with, so that those on disk are found; None: any will do."""

    def prepare_grammar(self, grammar: str) -> None:
        """Begin to compile a grammar, if need be; every call is to be followed by one of `release_grammar`."""

    def prepared_grammars(self, wait: float = 0.0) -> dict[str, str | None]:
        """Return the grammars that became ready, with what is wrong with those that cannot be used.

        With none to tell it waits for one up to `wait` seconds.
        """

    def release_grammar(self, grammar: str) -> None:
        """Say that a request has ended for which it was prepared."""

    def end_ids(self) -> list[int]:
        """Return the tokens that end a text which has a grammar; complete once one was compiled."""

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Run one step and return its result."""

    def submit(self, step: SchedulerOutput) -> Pending:
        """Begin a step. One that does not overlap must be waited for before the next is begun."""

    def idle(self) -> bool:
        """With nothing to compute, do one small thing that makes later steps faster; say whether there was any."""

    def close(self) -> None:
        """Release model and memory."""


class _InTurn(Protocol):
    """What executes a step before it returns."""

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """See `Executor`."""


class NoGrammars:
    """For executors that pay no heed to grammars: all of them are ready at once. Adapters they have none.

    They compute one step at a time.
    """

    adapters: Adapters | None = None

    def __init__(self) -> None:
        self._prepared: dict[str, str | None] = {}

    def submit(self: _InTurn, step: SchedulerOutput) -> Pending:
        """See `Executor`; the step is computed before this returns."""
        return Done(self.execute(step))

    def idle(self) -> bool:
        """See `Executor`; there is nothing."""
        return False

    def prepare_grammar(self, grammar: str) -> None:
        """See `Executor`."""
        self._prepared[grammar] = None

    def prepared_grammars(self, wait: float = 0.0) -> dict[str, str | None]:
        """See `Executor`."""
        prepared, self._prepared = self._prepared, {}
        return prepared

    def release_grammar(self, grammar: str) -> None:
        """Nothing was kept."""

    def end_ids(self) -> list[int]:
        """None are known."""
        return []
