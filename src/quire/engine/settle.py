"""Settles what depends on the model and the machine: every "auto" of the config, and the number of KV blocks."""

from __future__ import annotations

import dataclasses
import logging

from quire.checkpoint.folder import resolve_model
from quire.checkpoint.hf_config import ModelInfo, load_model_info
from quire.config import CacheConfig, EngineConfig
from quire.errors import ConfigError
from quire.step import KVCacheSpec

logger = logging.getLogger(__name__)


def load_info(config: EngineConfig) -> ModelInfo:
    """Find the model folder and read its config.json. Raises `ModelError` naming the file at fault."""
    path = resolve_model(config.model.model, revision=config.model.revision, download_dir=config.model.download_dir)
    return load_model_info(path, config.model.hf_overrides)


def settle(config: EngineConfig, info: ModelInfo) -> EngineConfig:
    """Return a config without "auto": device, dtypes, and the context length.

    Raises:
        ConfigError: max_model_len exceeds what the model was made for.
    """
    device = "cpu" if config.device.device == "auto" else config.device.device
    dtype = info.dtype if config.model.dtype == "auto" else config.model.dtype
    kv_dtype = dtype if config.cache.kv_cache_dtype == "auto" else config.cache.kv_cache_dtype
    max_model_len = config.model.max_model_len
    if max_model_len is None:
        max_model_len = info.max_model_len
    elif max_model_len > info.longest_model_len:
        raise ConfigError(
            f"max_model_len: {max_model_len} exceeds the model's {info.longest_model_len} tokens "
            "(its position limit in config.json)",
            param="max_model_len",
        )
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, dtype=dtype, max_model_len=max_model_len),
        cache=dataclasses.replace(config.cache, kv_cache_dtype=kv_dtype),
        device=dataclasses.replace(config.device, device=device),
    )


def count_blocks(config: EngineConfig, spec: KVCacheSpec, available: int) -> int:
    """Return how many KV blocks to allocate.

    An explicit number wins; then explicit bytes; otherwise the free memory times `gpu_memory_utilization`, but no
    more than `max_num_seqs` sequences of full length could use.

    Raises:
        ConfigError: not one block fits, or what was asked for exceeds the free memory.
    """
    cache, limits = config.cache, config.scheduler
    assert config.model.max_model_len is not None, "settled before"
    block_bytes = spec.block_bytes(cache.block_size, config.model.max_model_len)
    if cache.num_gpu_blocks_override is not None:
        _check_free("num_gpu_blocks_override", cache.num_gpu_blocks_override * block_bytes, available)
        return cache.num_gpu_blocks_override
    per_sequence = -(-config.model.max_model_len // cache.block_size)
    if cache.kv_cache_memory_bytes is not None:
        _check_free("kv_cache_memory_bytes", cache.kv_cache_memory_bytes, available)
        num_blocks = cache.kv_cache_memory_bytes // block_bytes
        have = cache.kv_cache_memory_bytes
    else:
        have = int(available * cache.gpu_memory_utilization)
        num_blocks = min(have // block_bytes, limits.max_num_seqs * per_sequence)
    if num_blocks < 1:
        raise ConfigError(
            f"kv_cache_memory_bytes: one block of {cache.block_size} tokens needs {block_bytes} bytes, "
            f"{have} are available",
            param="kv_cache_memory_bytes",
        )
    return num_blocks


def _check_free(option: str, needed: int, available: int) -> None:
    if needed > available:
        raise ConfigError(
            f"{option}: the KV cache would take {needed} bytes, {available} are free beside the weights", param=option
        )


def fit_context(max_model_len: int, asked: int | None, num_blocks: int, cache: CacheConfig) -> int:
    """Return the context length that `num_blocks` can hold, at most `max_model_len` [tokens].

    Raises:
        ConfigError: the user asked for more than fits; the message has the three numbers.
    """
    capacity = num_blocks * cache.block_size
    if capacity >= max_model_len:
        return max_model_len
    if asked is not None and cache.num_gpu_blocks_override is None:
        raise ConfigError(
            f"max_model_len: {max_model_len} tokens do not fit the KV cache of {num_blocks} blocks x "
            f"{cache.block_size} = {capacity} tokens; pass --max-model-len {capacity} or more kv_cache_memory_bytes",
            param="max_model_len",
        )
    logger.warning("context limited to %d tokens: the KV cache has %d blocks", capacity, num_blocks)
    return capacity
