"""Layer-wise KV offloading (`--kv-resident-layers`): the memory it takes, how many blocks, and what excludes it.

A *resident* block has all layers on the device. Of a *layerwise* block only the first `kv_resident_layers` attention
layers are, the others are on the host and pass through a staging buffer on the device that has room for two layers at
a time. The scheduler allocates layerwise blocks when no resident one is free (`kvcache/layerwise.py`), so that more
requests run at once than the device has memory for.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.checkpoint.hf_config import ModelInfo
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.kernels.backend import STAGED_LAYERS
from quire.step import KVCacheSpec

OPTION = "kv_resident_layers"


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """Of `num_layers` attention layers the first `num_resident_layers` are resident; bytes of a block in one layer."""

    layer_bytes: int
    num_layers: int
    num_resident_layers: int

    @property
    def resident_bytes(self) -> int:
        """What a resident block takes on the device."""
        return self.num_layers * self.layer_bytes

    @property
    def layerwise_bytes(self) -> int:
        """What a layerwise block takes on the device, its places in the staging buffer included."""
        return (self.num_resident_layers + STAGED_LAYERS) * self.layer_bytes

    @property
    def host_bytes(self) -> int:
        """What a layerwise block takes on the host."""
        return (self.num_layers - self.num_resident_layers) * self.layer_bytes

    def device_bytes(self, num_blocks: int, num_layerwise: int) -> int:
        """What `num_blocks` blocks, of them `num_layerwise` layerwise, take on the device."""
        return (num_blocks - num_layerwise) * self.resident_bytes + num_layerwise * self.layerwise_bytes

    def count(
        self, budget: int, max_layerwise: int, *, blocks_per_sequence: int, max_blocks: int | None, explicit: bool
    ) -> tuple[int, int]:
        """Return how many blocks, and of these layerwise ones, `budget` bytes are for; one at least is resident.

        Unless the size of the host memory is `explicit`, layerwise blocks leave as many resident ones as one sequence
        of full length has, or where that is impossible, are as few as let it fit.

        Args:
            budget: enough for one resident block. max_layerwise: as many as the host has room for.
            blocks_per_sequence: of full length. max_blocks: as many as can be of use; None for any number.
        """
        saved = self.resident_bytes - self.layerwise_bytes
        if max_blocks is not None:
            max_layerwise = min(max_layerwise, max(0, -(-(max_blocks * self.resident_bytes - budget) // saved)))
        room = (budget - self.resident_bytes) // self.layerwise_bytes
        if not explicit:
            missing = blocks_per_sequence * self.resident_bytes - budget
            room = min(room, -missing // self.layerwise_bytes if missing <= 0 else -(-missing // saved))
        num_layerwise = max(0, min(max_layerwise, room))
        num_resident = (budget - num_layerwise * self.layerwise_bytes) // self.resident_bytes
        if max_blocks is not None:
            num_resident = min(num_resident, max_blocks - num_layerwise)
        return num_resident + num_layerwise, num_layerwise


def layer_split(config: EngineConfig, spec: KVCacheSpec) -> LayerSplit | None:
    """Return which layers are resident, None where all are; `config` is resolved.

    Raises:
        ConfigError: the model's layers cannot be split, or not so.
    """
    resident = config.cache.kv_resident_layers
    if not resident:
        return None
    groups = spec.groups(config.max_model_len)
    if spec.states or spec.one_step:
        raise _refused(resident, "this model keeps more than the keys and values of tokens, or nothing between steps")
    shapes = {(layer.num_kv_heads, layer.head_size, layer.dtype, layer.latent) for layer in spec.layers}
    if len(groups) != 1 or len(shapes) != 1 or groups[0].sliding_window is not None:
        raise _refused(resident, "the attention layers of this model must be all alike and without sliding windows")
    most = len(spec.layers) - STAGED_LAYERS - 1
    if resident > most:
        allowed = f"1 to {most} are possible" if most > 0 else "these are too few for any"
        raise _refused(resident, f"this model has {len(spec.layers)} attention layers, so that {allowed}")
    return LayerSplit(spec.layers[0].block_bytes(config.cache.block_size), len(spec.layers), resident)


def with_layerwise_blocks(config: EngineConfig, info: ModelInfo, device: str) -> EngineConfig:
    """Return the config with what layer-wise offloading decides: preempted requests are computed again.

    Raises:
        ConfigError: `device` or the model cannot have it.
    """
    resident = config.cache.kv_resident_layers
    if not resident:
        return config
    if device != "cuda":
        raise _refused(resident, "it needs a GPU (--device cuda); on a CPU the KV cache is in host memory anyway")
    if info.keeps_states:
        raise _refused(resident, "layers of this model keep a state beside keys and values")
    if not info.causal:
        raise _refused(resident, "this model keeps no keys and values between steps")
    return config.replace(preemption_mode="recompute")


def _refused(value: int, why: str) -> ConfigError:
    return ConfigError(f"{OPTION}: {value} is not possible: {why}", param=OPTION)
