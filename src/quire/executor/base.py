"""The Executor interface: how the engine reaches whoever runs the model."""

from __future__ import annotations

from typing import Protocol

from quire.step import KVCacheSpec, ModelOutput, SchedulerOutput


class Executor(Protocol):
    """Runs steps. The engine calls `kv_cache_spec` and `available_memory`, then `allocate` once, then the rest."""

    def kv_cache_spec(self) -> KVCacheSpec:
        """Return what the model's layers cache."""

    def available_memory(self) -> int:
        """Return the bytes free for the KV cache."""

    def allocate(self, num_blocks: int, max_model_len: int, num_host_blocks: int = 0) -> None:
        """Allocate the KV cache, and as many blocks of host memory, and open the disk tier if the config asks for it.

        Raises:
            MemoryError: the KV cache does not fit.
            ConfigError: the host blocks do not, or the disk tier cannot be used.
        """

    def num_disk_blocks(self) -> int:
        """Return how many slots the disk tier has; 0 without one."""

    def stored_blocks(self) -> list[tuple[int, bytes]]:
        """Return (slot, header) of what the disk tier held when it was opened."""

    def hash_key(self) -> bytes | None:
        """Return the key that names of blocks must be made with, so that those on disk are found; None: any will do."""

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Run one step and return its result."""

    def close(self) -> None:
        """Release model and memory."""
