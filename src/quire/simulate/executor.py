"""`SimulatedExecutor`: takes the place of a model. A step costs virtual time and nothing else."""

from __future__ import annotations

from collections.abc import Callable

from quire.checkpoint.hf_config import ModelInfo
from quire.executor.base import NoGrammars
from quire.simulate.clock import VirtualClock
from quire.simulate.contents import StepContents, StepReader, windows_of
from quire.simulate.cost import CostModel
from quire.simulate.trace import OWN_TOKENS
from quire.step import KVCacheSpec, LayerKVSpec, ModelOutput, SchedulerOutput

SAMPLED_TOKENS = 3 * 2**30  # ids from here on are sampled ones: no prompt has them
assert SAMPLED_TOKENS > OWN_TOKENS

Observer = Callable[[SchedulerOutput, StepContents, float], None]

FULL_ATTENTION = "full_attention"  # as config.json calls layers that cache keys and values, where some do not


def kv_spec(info: ModelInfo, kv_dtype: str) -> KVCacheSpec:
    """Return what the layers of a model cache in blocks, without loading it."""
    if "kv_lora_rank" in info.raw:  # latent attention
        size = info.fields.integer("kv_lora_rank") + info.head_dim
        return KVCacheSpec([LayerKVSpec(1, size, kv_dtype, latent=True)] * info.num_hidden_layers)
    types = info.raw["layer_types"] if info.keeps_states else [FULL_ATTENTION] * info.num_hidden_layers
    return KVCacheSpec(
        [
            LayerKVSpec(info.num_key_value_heads, info.head_dim, kv_dtype, window)
            for window, layer_type in zip(info.layer_windows, types, strict=True)
            if layer_type == FULL_ATTENTION
        ]
    )


class SimulatedExecutor(NoGrammars):
    """Executes steps by moving `clock` on by what `cost` says.

    Blocks are moved, and loaded from disk, within the step that asks for it.

    Args:
        info: the model whose KV cache is counted. kv_dtype: settled type of cached keys and values.
        memory: bytes for the KV cache. num_disk_blocks: slots of the disk tier.
        observer: called after each step that has tokens, with its contents and its seconds.

    Attributes:
        busy_seconds: virtual time spent in steps. num_new_shapes: steps of a shape the worker had not recorded.
    """

    def __init__(
        self,
        info: ModelInfo,
        kv_dtype: str,
        cost: CostModel,
        clock: VirtualClock,
        memory: int,
        observer: Observer | None = None,
        num_disk_blocks: int = 0,
    ) -> None:
        super().__init__()
        self._spec = kv_spec(info, kv_dtype)
        self._memory = memory
        self._num_disk_blocks = num_disk_blocks
        self._cost = cost
        self._clock = clock
        self._observer = observer
        self._reader = StepReader(windows_of(info.layer_windows), cost.num_shapes, SAMPLED_TOKENS)
        self.busy_seconds = 0.0
        self.num_new_shapes = 0

    def kv_cache_spec(self) -> KVCacheSpec:
        """One entry per layer of the model."""
        return self._spec

    def available_memory(self) -> int:
        """The bytes given."""
        return self._memory

    def allocate(self, num_blocks: int, max_model_len: int, num_host_blocks: int = 0) -> None:
        """Nothing to allocate."""

    def sleep(self, level: int) -> int:
        """Nothing to free."""
        return 0

    def num_disk_blocks(self) -> int:
        """As given."""
        return self._num_disk_blocks

    def stored_blocks(self) -> list[tuple[int, bytes]]:
        """The disk is empty at first."""
        return []

    def hash_key(self) -> bytes | None:
        """The same in every run."""
        return b"simulation"

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        """Let the step's time pass; sample every sequence whose last known token is computed in it."""
        contents, sampled = self._reader.read(step)
        seconds = self._cost.seconds(contents)
        self._clock.advance(seconds)
        self.busy_seconds += seconds
        self.num_new_shapes += contents.is_new_shape
        if self._observer is not None:
            self._observer(step, contents, seconds)
        return ModelOutput(sampled_token_ids=sampled, loaded={load.block_id: True for load in step.loads})

    def close(self) -> None:
        """Nothing to release."""
