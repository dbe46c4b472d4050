"""Resolves what of a config depends on the model and the machine: every "auto", and options that the model excludes.

How large the KV cache is, is decided in `kv_cache_size.py`.
"""

from __future__ import annotations

import logging
from typing import Any

from quire.checkpoint.folder import resolve_model
from quire.checkpoint.hf_config import ModelInfo, load_model_info
from quire.checkpoint.open import is_packed
from quire.checkpoint.packed import packed_quantization
from quire.checkpoint.pooling import with_runner
from quire.config import STORED_QUANTIZATIONS, EngineConfig
from quire.engine.advice import size_text
from quire.engine.layerwise import with_layerwise_blocks
from quire.errors import ConfigError
from quire.kernels.backend import QUANTIZATIONS
from quire.kernels.gpu.probe import usable_gpu

logger = logging.getLogger(__name__)

STATES = "layers of this model keep a state, of which only the latest exists"
BOTH_WAYS = "tokens of this model see those that follow, so that texts are computed whole"


def load_info(config: EngineConfig) -> ModelInfo:
    """Find the model folder and read its config.json. Raises `ModelError` naming the file at fault."""
    path = resolve_model(config.model.model, revision=config.model.revision, download_dir=config.model.download_dir)
    info = load_model_info(path, config.model.hf_overrides, config.model.model_impl)
    return with_runner(info, config.model.runner, config.model.convert)


def resolve_config(config: EngineConfig, info: ModelInfo) -> EngineConfig:
    """Return a config without "auto": device, dtypes, the context length, and what the model allows to be kept.

    Raises:
        ConfigError: max_model_len exceeds what the model was made for, or an option cannot work with the model.
    """
    device = _device(config, info)
    config = with_layerwise_blocks(config, info, device)
    if info.keeps_states:
        config = _without_block_reuse(config, STATES)
    if not info.causal:
        config = _without_block_reuse(config, BOTH_WAYS)
    dtype = info.dtype if config.model.dtype == "auto" else config.model.dtype
    max_model_len = config.model.max_model_len
    if max_model_len is None:
        max_model_len = info.max_model_len
    elif max_model_len > info.longest_model_len:
        raise ConfigError(
            f"max_model_len: {max_model_len} exceeds the model's {info.longest_model_len} tokens "
            "(its position limit in config.json)",
            param="max_model_len",
        )
    changes: dict[str, Any] = {}
    if config.scheduler.async_scheduling is None:
        changes["async_scheduling"] = device == "cuda"
    if not info.causal:
        if config.scheduler.long_prefill_token_threshold:
            raise ConfigError(f"long_prefill_token_threshold: {BOTH_WAYS}", param="long_prefill_token_threshold")
        changes["max_num_batched_tokens"] = max(config.scheduler.max_num_batched_tokens, max_model_len)
    return config.replace(
        device=device,
        dtype=dtype,
        quantization=_quantization(config, info, device),
        kv_cache_dtype=dtype if config.cache.kv_cache_dtype == "auto" else config.cache.kv_cache_dtype,
        max_model_len=max_model_len,
        enable_prefix_caching=config.cache.enable_prefix_caching is not False,
        **changes,
    )


def _device(config: EngineConfig, info: ModelInfo) -> str:
    """Return where the model runs; packed weights are the CPU's."""
    if config.device.device != "auto":
        return config.device.device
    packed = config.model.load_format == "auto" and is_packed(info)
    gpu = None if packed else usable_gpu()
    if gpu is None:
        return "cpu"
    logger.info("device: cuda, %s with %s", gpu.name, size_text(gpu.total_memory))
    return "cuda"


def _quantization(config: EngineConfig, info: ModelInfo, device: str) -> str | None:
    """Return what weights are turned into; a name of what the checkpoint holds is checked, and turns them into nothing.

    Raises:
        ConfigError: the checkpoint holds something else, or the device cannot make that of it.
    """
    requested = config.model.quantization
    if requested not in STORED_QUANTIZATIONS:
        return requested or packed_quantization(info)
    stored = info.stored_format
    if stored is None and requested in QUANTIZATIONS:
        # fp8: a checkpoint may be stored in it, and a GPU makes it of others
        if device == "cpu":
            raise ConfigError(
                f"quantization: {requested} needs a GPU (--device cuda) to make it of weights that are not quantized, "
                "as these are",
                param="quantization",
            )
        return requested
    if stored is None or stored.name != requested:
        found = "is not quantized" if stored is None else f"is quantized with {stored.name}"
        raise ConfigError(
            f"quantization: {requested} names what a checkpoint holds; this one {found}", param="quantization"
        )
    return None


def _without_block_reuse(config: EngineConfig, why: str) -> EngineConfig:
    """Return the config for a model with layers that keep a state: what needs older states, or copies, is off.

    Blocks hold the past of a sequence at every length, a state only at its own: it cannot be brought back from a prefix
    or from what was swapped out, so that everything is computed again. Raises `ConfigError` for options that ask for
    more.
    """
    cache, scheduler = config.cache, config.scheduler
    refused: dict[str, tuple[Any, str]] = {
        "enable_prefix_caching": (cache.enable_prefix_caching, "no prefix can be reused"),
        "swap_space": (cache.swap_space, "nothing can be swapped, or kept for later"),
        "kv_disk_space": (cache.kv_disk_space, "no prefix can be kept"),
        "preemption_mode": (scheduler.preemption_mode, "preempted requests are computed again"),
        "scheduling_policy": (scheduler.scheduling_policy, "no prompt is cached for longer than another"),
    }
    for option, (value, consequence) in refused.items():
        if value in ("swap", "lpm") or (value and not isinstance(value, str)):
            raise ConfigError(f"{option}: {value} is not possible; {why}: {consequence}", param=option)
    if cache.enable_prefix_caching is None:
        logger.info("prefix caching is off: %s", why)
    return config.replace(enable_prefix_caching=False, swap_space=0, preemption_mode="recompute")
