"""The Executor interface: how the engine reaches whoever runs the model."""

from __future__ import annotations

from typing import Protocol

from quire.step import KVCacheSpec, ModelOutput, SchedulerOutput


class Executor(Protocol):
    """Runs steps. The engine calls `kv_cache_spec` and `available_memory`, then `allocate` once, then `execute`."""

    def kv_cache_spec(self) -> KVCacheSpec:
        """Return what the model's layers cache."""

    def available_memory(self) -> int:
        """Return the bytes free for the KV cache."""

    def allocate(self, num_blocks: int, max_model_len: int) -> None:
        """Allocate the KV cache."""

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Run one step and return its result."""

    def close(self) -> None:
        """Release model and memory."""
