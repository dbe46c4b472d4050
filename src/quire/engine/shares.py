"""Sharing a machine's memory among several models, so that any of them may be loaded together, up to a number.

What each takes beside its KV cache is predicted as `quire plan` does. The models that are pinned and the largest of the
others are what may have to fit at once. What is left is divided in equal parts among the caches whose
size the options leave open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.config import EngineConfig
from quire.engine.advice import MIB, changed, size_text
from quire.engine.kv_cache_size import HOST_PART, fit_kv_cache
from quire.engine.plan import GPU_RUNTIME_BYTES, RUNTIME_BYTES
from quire.engine.resolve import load_info, resolve_config
from quire.errors import ConfigError, QuireError
from quire.kernels.gpu.probe import gpu_memory
from quire.kernels.memory import available_memory
from quire.worker.footprint import Footprint, graph_bytes


@dataclass(frozen=True, slots=True)
class SharingModel:
    """A model that shares the memory: its name for errors, its options, and whether it is always there."""

    name: str
    config: EngineConfig
    pinned: bool


@dataclass(frozen=True, slots=True)
class Share:
    """The options of a model with the size of its caches, and the context that they hold [tokens]."""

    config: EngineConfig
    max_model_len: int


@dataclass(frozen=True, slots=True)
class _Need:
    """What a model takes without its KV cache, of which `step_bytes` by steps, and its `caches` if they are given."""

    model: SharingModel
    resolved: EngineConfig
    footprint: Footprint
    fixed: int
    step_bytes: int
    caches: int | None

    @property
    def least(self) -> int:
        return self.fixed + (self.caches or 0)


def share_memory(models: Sequence[SharingModel], max_loaded: int, available: int | None = None) -> list[Share]:
    """Return the share of each model if at most `max_loaded` of them are in memory at a time.

    Args:
        available: bytes to share; what the machine has free now if None.

    Raises:
        ConfigError: they do not fit; the message has numbers. ModelError: one cannot be served at all.
    """
    needs = [_need(model) for model in models]
    free = _free(needs) if available is None else available
    room = int(free * min(model.config.cache.gpu_memory_utilization for model in models))
    together = _largest(needs, max_loaded)
    left = room - sum(need.least for need in together)
    if left < 0:
        raise _too_large(needs, max_loaded, room)
    num_open = min(max_loaded, sum(need.caches is None for need in needs))
    return [_share(need, left // num_open if need.caches is None else need.caches) for need in needs]


def _need(model: SharingModel) -> _Need:
    if model.config.cache.kv_resident_layers:
        raise ConfigError(
            f"{model.name}: kv_resident_layers is for a server with one model; leave it out where several share the "
            "memory",
            param="kv_resident_layers",
        )
    try:
        info = load_info(model.config)
        resolved = resolve_config(model.config, info)
        footprint = Footprint(resolved, info)
    except QuireError as error:
        error.message = f"{model.name}: {error.message}"
        error.args = (error.message,)
        raise
    assert resolved.model.max_model_len is not None
    step_bytes = footprint.step_bytes(resolved)
    own = RUNTIME_BYTES
    if resolved.device.device == "cuda":
        own = GPU_RUNTIME_BYTES + graph_bytes(resolved, step_bytes, gpu_memory().total)
    fixed = own + footprint.weights + footprint.tables(resolved.model.max_model_len) + step_bytes
    return _Need(model, resolved, footprint, fixed, step_bytes, _asked_caches(resolved, footprint))


def _free(needs: Sequence[_Need]) -> int:
    """Return what is free of the memory that the models share: a GPU's if all of them run there, or the host's."""
    if all(need.resolved.device.device == "cuda" for need in needs):
        return gpu_memory().free
    return available_memory()


def _asked_caches(config: EngineConfig, footprint: Footprint) -> int | None:
    """Return the bytes of KV cache and host pool, if the options give the size of the former."""
    cache = config.cache
    assert config.model.max_model_len is not None
    if cache.num_gpu_blocks_override is not None:
        block_bytes = footprint.spec.block_bytes(cache.block_size, config.model.max_model_len)
        size = cache.num_gpu_blocks_override * block_bytes
    elif cache.kv_cache_memory_bytes is not None:
        size = cache.kv_cache_memory_bytes
    else:
        return None
    return size + (_host_pool(size) if cache.swap_space is None else cache.swap_space)


def _host_pool(cache_bytes: int) -> int:
    """Return the size of the host's pool beside a cache of which the size is given."""
    size = cache_bytes // HOST_PART
    return size if size >= MIB else 0


def _largest(needs: Sequence[_Need], count: int) -> list[_Need]:
    """Return what may have to be in memory at once: all that is pinned, and the largest of the rest."""
    pinned = [need for need in needs if need.model.pinned]
    others = sorted((need for need in needs if not need.model.pinned), key=lambda need: -need.least)
    return pinned + others[: max(0, count - len(pinned))]


def _too_large(needs: Sequence[_Need], max_loaded: int, room: int) -> ConfigError:
    together = _largest(needs, max_loaded)
    sizes = ", ".join(f"{need.model.name} {size_text(need.least)}" for need in together)
    pinned = sum(need.model.pinned for need in needs)
    fewest = pinned + (pinned < len(needs))
    fitting = [
        count
        for count in range(max(1, fewest), max_loaded)
        if sum(need.least for need in _largest(needs, count)) <= room
    ]
    advice = f"max_loaded_models {fitting[-1]} would fit" if fitting else "they would not fit with fewer loaded either"
    return ConfigError(
        f"max_loaded_models: {len(together)} models at a time need {size_text(sum(need.least for need in together))} "
        f"({sizes}), {size_text(room)} are available; {advice}",
        param="max_loaded_models",
    )


def _share(need: _Need, caches: int) -> Share:
    """Return a model's options with `caches` bytes for its KV cache and the host's pool."""
    config, cache = need.model.config, need.model.config.cache
    swap_space = need.resolved.cache.swap_space  # what was requested, or 0 for a model that cannot swap
    if need.caches is not None and swap_space is None:
        size = need.caches * HOST_PART // (HOST_PART + 1)
        swap_space = _host_pool(size)
        config = changed(config, {"swap_space": swap_space})
    try:
        # Free memory with which exactly this is left after steps.
        enough = int((caches + need.step_bytes) / cache.gpu_memory_utilization) + 1
        resolved = changed(need.resolved, {"swap_space": swap_space})
        spec, step_bytes = need.footprint.spec, need.footprint.step_bytes
        fitted = fit_kv_cache(config, resolved, spec, enough, step_bytes, quiet=True)
    except ConfigError as error:
        raise ConfigError(f"{need.model.name}: {error.message}", param=error.param) from None
    assert need.resolved.model.max_model_len is not None
    block_bytes = need.footprint.spec.block_bytes(cache.block_size, need.resolved.model.max_model_len)
    if need.caches is None:
        host = fitted.num_host_blocks * block_bytes
        config = changed(
            config,
            {"kv_cache_memory_bytes": fitted.num_blocks * block_bytes, "swap_space": host if host >= MIB else 0},
        )
    return Share(config, fitted.max_model_len)
