"""`SimulatedExecutor` takes the place of a model. A step costs virtual time and nothing else."""

from __future__ import annotations

from collections.abc import Callable

from quire.executor.base import Executor
from quire.simulate.contents import StepContents, StepReader, windows_of
from quire.simulate.cost import CostModel
from quire.simulate.driver import VirtualClock
from quire.simulate.trace import OWN_TOKENS
from quire.step import KVCacheSpec, ModelOutput, PendingOutput, SchedulerOutput, StoredBlocks

SAMPLED_TOKENS = 3 * 2**30  # ids from here on are sampled ones: no prompt has them
assert SAMPLED_TOKENS > OWN_TOKENS

Observer = Callable[[SchedulerOutput, StepContents, float], None]


class SimulatedExecutor(Executor):
    """Executes steps by moving `clock` on by what `cost` says.

    Blocks are moved, and loaded from disk, within the step that asks for it.

    Args:
        spec: what the model keeps of sequences.
        memory: bytes for the KV cache. num_disk_slots: slots of the disk tier.
        block_size: tokens of a block. streamed_share: of the layers of a layerwise block, those that are on the host.
        observer: called after each step that has tokens, with its contents and its seconds.

    Attributes:
        busy_seconds: virtual time spent in steps. num_new_shapes: steps of a shape the worker had not recorded.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        cost: CostModel,
        clock: VirtualClock,
        memory: int,
        observer: Observer | None = None,
        num_disk_slots: int = 0,
        *,
        block_size: int = 16,
        streamed_share: float = 0.0,
    ) -> None:
        super().__init__()
        self._spec = spec
        self._memory = memory
        self._num_disk_slots = num_disk_slots
        self._block_size, self._streamed_share = block_size, streamed_share
        self._cost = cost
        self._clock = clock
        self._observer = observer
        self._reader = StepReader(
            windows_of([layer.sliding_window for layer in spec.layers]), cost.num_shapes, SAMPLED_TOKENS
        )
        self.busy_seconds = 0.0
        self.num_new_shapes = 0

    def kv_cache_spec(self) -> KVCacheSpec:
        """Return what the model keeps of sequences."""
        return self._spec

    def available_memory(self) -> int:
        """Return the bytes given."""
        return self._memory

    def allocate(
        self, num_blocks: int, max_model_len: int, num_host_blocks: int = 0, num_layerwise_blocks: int = 0
    ) -> None:
        """Follow layerwise blocks from now on; there is nothing to allocate."""
        if num_layerwise_blocks:
            self._reader.follow_layerwise(num_blocks - num_layerwise_blocks, self._block_size, self._streamed_share)

    def stored_blocks(self) -> StoredBlocks:
        """Return the given number of slots, all empty."""
        return StoredBlocks(self._num_disk_slots)

    def submit(self, plan: SchedulerOutput) -> PendingOutput:
        """Let the step's time pass; sample every sequence whose last known token is computed in it."""
        contents, sampled = self._reader.read(plan)
        seconds = self._cost.seconds(contents)
        self._clock.advance(seconds)
        self.busy_seconds += seconds
        self.num_new_shapes += contents.is_new_shape
        if self._observer is not None:
            self._observer(plan, contents, seconds)
        return ModelOutput(sampled_token_ids=sampled, loaded=dict.fromkeys(plan.loading_block_ids, True))

    def close(self) -> None:
        """There is nothing to release."""
