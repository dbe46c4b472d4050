"""Sharing a machine's memory among several models, so that any of them may be loaded together, up to a number.

What each takes beside its KV cache is predicted as `quire plan` does. The models that are pinned and the largest of the
others are what may have to fit at once. What is left is divided in equal parts among the caches whose
size the options leave open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.config import EngineConfig
from quire.engine.advice import MIB, size_text
from quire.engine.kv_cache_size import HOST_PART, fit_kv_cache
from quire.engine.plan import Candidate
from quire.engine.resolve import load_info
from quire.errors import ConfigError, QuireError
from quire.kernels.gpu.probe import gpu_memory
from quire.kernels.memory import available_memory


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
    """What a model takes beside its caches (`fixed`), and these (`caches`) if the options give their size."""

    model: SharingModel
    candidate: Candidate
    fixed: int
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
        candidate = Candidate(model.config, load_info(model.config))
        fixed = candidate.loaded + candidate.step_bytes(candidate.config)
    except QuireError as error:
        error.message = f"{model.name}: {error.message}"
        error.args = (error.message,)
        raise
    return _Need(model, candidate, fixed, _requested_caches(candidate))


def _free(needs: Sequence[_Need]) -> int:
    """Return what is free of the memory that the models share: a GPU's if all of them run there, or the host's."""
    if all(not need.candidate.on_host for need in needs):
        return gpu_memory().free
    return available_memory()


def _requested_caches(candidate: Candidate) -> int | None:
    """Return the bytes of KV cache and host pool, if the options give the size of the former."""
    cache = candidate.config.cache
    if cache.num_gpu_blocks_override is not None:
        size = cache.num_gpu_blocks_override * candidate.block_bytes
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
    config, candidate = need.model.config, need.candidate
    swap_space = candidate.config.cache.swap_space  # what was requested, or 0 for a model that cannot swap
    if need.caches is not None and swap_space is None:
        swap_space = _host_pool(need.caches * HOST_PART // (HOST_PART + 1))
        config = config.replace(swap_space=swap_space)
    step_bytes = candidate.footprint.step_bytes
    # Free memory with which exactly this is left after steps.
    enough = int((caches + step_bytes(candidate.config)) / config.cache.gpu_memory_utilization) + 1
    try:
        resolved = candidate.config.replace(swap_space=swap_space)
        fitted = fit_kv_cache(config, resolved, candidate.footprint.spec, enough, step_bytes, quiet=True)
    except ConfigError as error:
        raise ConfigError(f"{need.model.name}: {error.message}", param=error.param) from None
    if need.caches is None:
        host = fitted.num_host_blocks * candidate.block_bytes
        config = config.replace(
            kv_cache_memory_bytes=fitted.num_blocks * candidate.block_bytes, swap_space=host if host >= MIB else 0
        )
    return Share(config, fitted.max_model_len)
