"""Thin blocks: blocks of which only the first layers' keys and values lie on the device, the others' on the host.

How much memory they take, how many there should be, and which models and options cannot have any. A *whole* block has
all layers on the device. The pool hands out thin ones when no whole one is free (`kvcache/block_pool.py`), so that more
requests run at once than the device has room for; what the host has of them passes through a window on the device,
where two layers at a time have room.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from quire.checkpoint.hf_config import ModelInfo
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.kernels.layer_stream import WINDOW_LAYERS
from quire.step import KVCacheSpec

OPTION = "kv_resident_layers"


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """Where the layers of blocks lie: `num_resident` of `num_layers` always on the device; bytes of a block in one."""

    layer_bytes: int
    num_layers: int
    num_resident: int

    @property
    def whole_bytes(self) -> int:
        """What a whole block takes on the device."""
        return self.num_layers * self.layer_bytes

    @property
    def thin_bytes(self) -> int:
        """What a thin block takes on the device, its places in the window included."""
        return (self.num_resident + WINDOW_LAYERS) * self.layer_bytes

    @property
    def host_bytes(self) -> int:
        """What a thin block takes on the host."""
        return (self.num_layers - self.num_resident) * self.layer_bytes

    def device_bytes(self, num_blocks: int, num_thin: int) -> int:
        """What `num_blocks` blocks, of them `num_thin` thin, take on the device."""
        return (num_blocks - num_thin) * self.whole_bytes + num_thin * self.thin_bytes

    def count(self, budget: int, most_thin: int, *, longest: int, most: int | None, asked: bool) -> tuple[int, int]:
        """Return how many blocks, and how many thin ones of them, `budget` bytes are for: at least one whole one.

        Of thin blocks nobody has said how many he wants unless `asked`: then they leave as many whole ones as one
        sequence of full length has, or where that is not possible, are as few as let it fit.

        Args:
            budget: enough for one whole block. most_thin: as many as the host has room for.
            longest: blocks of a sequence of full length. most: blocks that can be of use; None for any number.
        """
        if most is not None:
            # A thin block in the place of whole ones saves so much; more are not needed for `most` in all.
            saved = self.whole_bytes - self.thin_bytes
            most_thin = min(most_thin, max(0, -(-(most * self.whole_bytes - budget) // saved)))
        room = (budget - self.whole_bytes) // self.thin_bytes
        if not asked:
            beside = (budget - longest * self.whole_bytes) // self.thin_bytes
            needed = -(-(longest * self.whole_bytes - budget) // (self.whole_bytes - self.thin_bytes))
            room = min(room, beside if beside >= 0 else needed)
        num_thin = max(0, min(most_thin, room))
        num_whole = (budget - num_thin * self.thin_bytes) // self.whole_bytes
        return (num_whole if most is None else min(num_whole, most - num_thin)) + num_thin, num_thin


def split_of(config: EngineConfig, spec: KVCacheSpec) -> LayerSplit | None:
    """Return how layers are split, None where all are resident; `config` is resolved.

    Raises:
        ConfigError: the model's layers cannot be split, or not so.
    """
    resident = config.cache.kv_resident_layers
    if not resident:
        return None
    assert config.model.max_model_len is not None, "resolved"
    groups = spec.groups(config.model.max_model_len)
    if spec.states or spec.one_step:
        raise _refused(resident, "this model keeps more than the keys and values of tokens, or nothing between steps")
    shapes = {(layer.num_kv_heads, layer.head_size, layer.dtype, layer.latent) for layer in spec.layers}
    if len(groups) != 1 or len(shapes) != 1 or groups[0].sliding_window is not None:
        raise _refused(resident, "the attention layers of this model must be all alike and without sliding windows")
    most = len(spec.layers) - WINDOW_LAYERS - 1
    if resident > most:
        allowed = f"1 to {most} are possible" if most > 0 else "these are too few for any"
        raise _refused(resident, f"this model has {len(spec.layers)} attention layers, so that {allowed}")
    return LayerSplit(spec.layers[0].block_bytes(config.cache.block_size), len(spec.layers), resident)


def with_thin_blocks(config: EngineConfig, info: ModelInfo, device: str) -> EngineConfig:
    """Return the config with what thin blocks decide: preempted requests are computed again.

    Raises `ConfigError` if `device` or the model cannot have them.
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
    return dataclasses.replace(config, scheduler=dataclasses.replace(config.scheduler, preemption_mode="recompute"))


def _refused(value: int, why: str) -> ConfigError:
    return ConfigError(f"{OPTION}: {value} is not possible: {why}", param=OPTION)
