"""Settles what depends on the model and the machine: every "auto" of the config, KV blocks, and the context length.

What the user did not ask for is fitted to the memory there is. What does not fit is refused with three numbers (needed,
available, what would fit) and a command line that works.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.checkpoint.folder import resolve_model
from quire.checkpoint.hf_config import ModelInfo, load_model_info
from quire.checkpoint.open import is_packed
from quire.checkpoint.packed import packed_quantization
from quire.checkpoint.pooling import with_runner
from quire.config import STORED_QUANTIZATIONS, CacheConfig, EngineConfig
from quire.engine.advice import MIB, changed, command_line, size_text
from quire.engine.thin import LayerSplit, split_of, with_thin_blocks
from quire.errors import ConfigError
from quire.kernels.backend import QUANTIZATIONS
from quire.kernels.gpu.probe import usable_gpu
from quire.kernels.memory import DeviceMemory
from quire.kvcache.manager import longest_length, most_blocks
from quire.step import KVCacheSpec

logger = logging.getLogger(__name__)

HOST_DEVICES = ("cpu", "reference")  # whose memory is the host's
SWAP_SPACE = 4 * 2**30  # of the host's pool, unless asked for
HOST_PART = 4  # where memory is the same, the pool has at most one part in so many of it, unless asked for
LEAST_STEP = 64  # tokens; steps are not advised to be smaller
STATES = "layers of this model keep a state, of which only the latest exists"
BOTH_WAYS = "tokens of this model see those that follow, so that texts are computed whole"
ROUNDS = 16  # changes of options that are tried one after the other

Scratch = Callable[[EngineConfig], int]


def no_scratch(config: EngineConfig) -> int:
    """Steps take no memory worth counting: an engine without a model."""
    return 0


def beside_blocks(memory: DeviceMemory, scratch: Scratch, config: EngineConfig) -> Scratch:
    """Return what of `memory.total` is not for blocks, by the config: what is taken, and what steps take.

    A step that was measured, with `config`, counts as measured; those of other configs in proportion to `scratch`.
    """
    measured = memory.step
    if measured is None:
        return lambda now: memory.used + scratch(now)
    counted = scratch(config)
    if not counted:
        return lambda now: memory.used + measured
    return lambda now: memory.used + measured * scratch(now) // counted


def load_info(config: EngineConfig) -> ModelInfo:
    """Find the model folder and read its config.json. Raises `ModelError` naming the file at fault."""
    path = resolve_model(config.model.model, revision=config.model.revision, download_dir=config.model.download_dir)
    info = load_model_info(path, config.model.hf_overrides, config.model.model_impl)
    return with_runner(info, config.model.runner, config.model.convert)


def settle(config: EngineConfig, info: ModelInfo) -> EngineConfig:
    """Return a config without "auto": device, dtypes, the context length, and what the model allows to be kept.

    Raises:
        ConfigError: max_model_len exceeds what the model was made for, or an option cannot work with the model.
    """
    device = _device(config, info)
    config = with_thin_blocks(config, info, device)
    if info.keeps_states:
        config = _without_copies(config, STATES)
    if not info.causal:
        config = _without_copies(config, BOTH_WAYS)
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
    scheduler = config.scheduler
    if scheduler.async_scheduling is None:
        scheduler = dataclasses.replace(scheduler, async_scheduling=device == "cuda")
    if not info.causal:
        if scheduler.long_prefill_token_threshold:
            raise ConfigError(f"long_prefill_token_threshold: {BOTH_WAYS}", param="long_prefill_token_threshold")
        most = max(scheduler.max_num_batched_tokens, max_model_len)
        scheduler = dataclasses.replace(scheduler, max_num_batched_tokens=most)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(
            config.model, dtype=dtype, max_model_len=max_model_len, quantization=_quantization(config, info, device)
        ),
        scheduler=scheduler,
        cache=dataclasses.replace(
            config.cache,
            kv_cache_dtype=kv_dtype,
            enable_prefix_caching=config.cache.enable_prefix_caching is not False,
        ),
        device=dataclasses.replace(config.device, device=device),
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
    asked = config.model.quantization
    if asked not in STORED_QUANTIZATIONS:
        return asked or packed_quantization(info)
    stored = info.stored_format
    if stored is None and asked in QUANTIZATIONS:  # fp8: what a checkpoint may hold, and what a GPU makes of another
        if device == "cpu":
            raise ConfigError(
                f"quantization: {asked} needs a GPU (--device cuda) to make it of weights that are not quantized, as "
                "these are",
                param="quantization",
            )
        return asked
    if stored is None or stored.name != asked:
        found = "is not quantized" if stored is None else f"is quantized with {stored.name}"
        raise ConfigError(
            f"quantization: {asked} names what a checkpoint holds; this one {found}", param="quantization"
        )
    return None


def _without_copies(config: EngineConfig, why: str) -> EngineConfig:
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
    changes = {"enable_prefix_caching": False, "swap_space": 0, "preemption_mode": "recompute"}
    return changed(config, changes)


# Blocks


@dataclass(frozen=True, slots=True)
class Fit:
    """What there is room for: blocks on the device and in the host's pool, and the context length [tokens].

    Of the device's blocks the last `num_thin_blocks` are thin (`engine/thin.py`).
    """

    num_blocks: int
    num_host_blocks: int
    max_model_len: int
    num_thin_blocks: int = 0


def device_bytes(config: EngineConfig, spec: KVCacheSpec, fitted: Fit) -> int:
    """Return what all blocks take of the device's memory, on a CPU the host's pool too; `config` is settled."""
    split = split_of(config, spec)
    if split is not None:
        return split.device_bytes(fitted.num_blocks, fitted.num_thin_blocks)
    assert config.model.max_model_len is not None
    shared = config.device.device in HOST_DEVICES
    num_blocks = fitted.num_blocks + (fitted.num_host_blocks if shared else 0)
    return num_blocks * spec.block_bytes(config.cache.block_size, config.model.max_model_len)


class NothingHelpsError(ConfigError):
    """Something does not fit, whatever options are changed that do not change the weights; `text` says what."""

    text = ""


class _Misfit(Exception):
    """Something does not fit. `changes` are options that would help, as far as one look can tell."""

    def __init__(self, option: str, text: str, **changes: Any) -> None:
        super().__init__(text)
        self.option, self.text, self.changes = option, text, changes


def fit(
    asked: EngineConfig,
    config: EngineConfig,
    spec: KVCacheSpec,
    available: int,
    scratch: Scratch = no_scratch,
    *,
    quiet: bool = False,
) -> Fit:
    """Return how many blocks to allocate and the context length that they hold.

    Args:
        asked: the options as the user gave them; config: the same, settled.
        spec: what the model's layers cache.
        available: free bytes, weights being loaded; on a GPU all that it has.
        scratch: bytes of these that are not for blocks, by the config: what steps take beside weights and KV cache, and
            on a GPU what is taken already (`beside_blocks`).
        quiet: say nothing where the context is made shorter.

    Raises:
        ConfigError: what was asked for does not fit. The message has what is needed, what is available, what would
            fit, and a command line that does.
    """
    try:
        found = _fit(asked, config, spec, available, scratch(config))
    except _Misfit as misfit:
        changes = _working(misfit, asked, config, spec, available, scratch)
        if changes is not None:
            advice = f"this works: {command_line(asked, changes)}"
            raise ConfigError(f"{misfit.text}; {advice}", param=misfit.option) from None
        error = NothingHelpsError(
            f"{misfit.text}; only a smaller model works: {command_line(EngineConfig(), {})}", param=misfit.option
        )
        error.text = misfit.text
        raise error from None
    if found.max_model_len != config.model.max_model_len and not quiet:
        logger.warning(
            "context limited to %d of %d tokens: the KV cache has %d blocks of %d",
            found.max_model_len,
            config.model.max_model_len,
            found.num_blocks,
            config.cache.block_size,
        )
    return found


def _working(
    misfit: _Misfit, asked: EngineConfig, config: EngineConfig, spec: KVCacheSpec, available: int, scratch: Scratch
) -> dict[str, Any] | None:
    """Return changes with which everything fits, or None; one change can make the next necessary."""
    changes: dict[str, Any] = {}
    for _ in range(ROUNDS):
        if not misfit.changes:
            return None
        changes.update(misfit.changes)
        now = changed(config, {"max_model_len": config.model.max_model_len, **changes})
        try:
            _fit(changed(asked, changes), now, spec, available, scratch(now))
        except _Misfit as another:
            misfit = another
        else:
            return changes
    return None


def _fit(asked: EngineConfig, config: EngineConfig, spec: KVCacheSpec, available: int, scratch: int) -> Fit:
    limit = config.model.max_model_len
    assert limit is not None, "settled before"
    block_bytes = spec.block_bytes(config.cache.block_size, limit)
    split = split_of(config, spec)
    num_blocks = _count(config, spec, block_bytes, available, scratch, split)
    if split is not None:
        num_blocks, num_thin = _count_thin(config, spec, split, num_blocks, budget_of(config, available, scratch))
        taken = split.device_bytes(num_blocks, num_thin)
        return Fit(num_blocks, 0, _context(asked, config, spec, block_bytes, num_blocks, taken), num_thin)
    taken = num_blocks * block_bytes
    share = min(_host_share(config, spec, budget_of(config, available, scratch)), available - scratch - taken)
    return Fit(
        num_blocks,
        _count_host(config, block_bytes, available - scratch - taken, share, num_blocks),
        _context(asked, config, spec, block_bytes, num_blocks, taken),
    )


def budget_of(config: EngineConfig, available: int, scratch: int) -> int:
    """Return the bytes that blocks may take, on the device and, where it is the same memory, on the host."""
    return max(0, int(available * config.cache.gpu_memory_utilization) - scratch)


def _host_share(config: EngineConfig, spec: KVCacheSpec, budget: int) -> int:
    """Return the bytes of the budget that the host's pool takes.

    What nobody asked for is at most a part of it, and never at the expense of one sequence of full length.
    """
    shared, asked, limit = config.device.device in HOST_DEVICES, config.cache.swap_space, config.model.max_model_len
    if asked is not None or not shared:
        return asked or 0 if shared else 0
    assert limit is not None
    longest = blocks_of(config, spec, limit) * spec.block_bytes(config.cache.block_size, limit)
    return max(0, min(SWAP_SPACE, budget // HOST_PART, budget - longest))


def _count(
    config: EngineConfig,
    spec: KVCacheSpec,
    block_bytes: int,
    available: int,
    scratch: int,
    split: LayerSplit | None = None,
) -> int:
    cache = config.cache
    room, budget = max(0, available - scratch), budget_of(config, available, scratch)
    if cache.num_gpu_blocks_override is not None:
        fits = budget // block_bytes
        needed = cache.num_gpu_blocks_override * block_bytes
        if split is not None:
            num_blocks, num_thin = _count_thin(config, spec, split, cache.num_gpu_blocks_override, budget)
            needed = split.device_bytes(num_blocks, num_thin)
        if needed > room:
            changes = {"num_gpu_blocks_override": fits} if fits else _smaller(config, spec)
            raise _too_large("num_gpu_blocks_override", needed, room, fits * cache.block_size, **changes)
        return cache.num_gpu_blocks_override
    if cache.kv_cache_memory_bytes is not None:
        return _count_in_bytes(cache, config, spec, block_bytes, room, budget)
    host = _host_share(config, spec, budget)
    if host and host + block_bytes > budget and cache.swap_space:
        fits = budget // HOST_PART // MIB * MIB
        raise _Misfit(
            "swap_space",
            f"swap_space: {size_text(host)} for the host's pool and at least {size_text(block_bytes)} for a block are "
            f"needed, {size_text(budget)} are available; {size_text(fits)} would leave enough",
            swap_space=fits,
        )
    assert config.model.max_model_len is not None
    most = config.scheduler.max_num_seqs * blocks_of(config, spec, config.model.max_model_len)
    if spec.one_step:  # nobody holds any between steps
        limits = config.scheduler
        most = min(most, limits.max_num_batched_tokens // cache.block_size + limits.max_num_seqs)
    num_blocks = min((budget - host) // block_bytes, most)
    if num_blocks < 1:
        share = size_text(available * cache.gpu_memory_utilization)
        taken = (
            f"and a step {size_text(scratch)}, {share} are available beside the weights"
            if config.device.device in HOST_DEVICES
            else f"while weights, a step, and others on the GPU need {size_text(scratch)}; {share} may be used in all"
        )
        raise _Misfit(
            "gpu_memory_utilization",
            f"no room for the KV cache: a block of {cache.block_size} tokens needs {size_text(block_bytes)} {taken}, "
            "so that 0 blocks would fit",
            **_smaller(config, spec),
        )
    return num_blocks


def _count_thin(
    config: EngineConfig, spec: KVCacheSpec, split: LayerSplit, num_blocks: int, budget: int
) -> tuple[int, int]:
    """Return how many blocks there are, and how many of them are thin, where `num_blocks` whole ones fit."""
    cache, limit = config.cache, config.model.max_model_len
    assert limit is not None
    asked, longest = cache.swap_space is not None, blocks_of(config, spec, limit)
    most_thin = (SWAP_SPACE if cache.swap_space is None else cache.swap_space) // split.host_bytes
    if not most_thin:
        raise _Misfit(
            "swap_space",
            f"swap_space: the layers of a thin block that are not on the GPU need {size_text(split.host_bytes)}, "
            f"{size_text(cache.swap_space or 0)} are given",
            swap_space=_rounded_up(longest * split.host_bytes),
        )
    if cache.num_gpu_blocks_override is not None:
        return num_blocks, max(0, min(most_thin, num_blocks - (1 if asked else longest)))
    if cache.kv_cache_memory_bytes is not None:
        return split.count(cache.kv_cache_memory_bytes, most_thin, longest=longest, most=None, asked=asked)
    most = config.scheduler.max_num_seqs * longest
    return split.count(budget, most_thin, longest=longest, most=most, asked=asked)


def _count_in_bytes(
    cache: CacheConfig, config: EngineConfig, spec: KVCacheSpec, block_bytes: int, room: int, budget: int
) -> int:
    """Count the blocks of `kv_cache_memory_bytes`."""
    assert cache.kv_cache_memory_bytes is not None and config.model.max_model_len is not None
    if cache.kv_cache_memory_bytes > room:
        fits = budget // block_bytes * cache.block_size
        changes = {"kv_cache_memory_bytes": _rounded(budget, block_bytes)} if fits else _smaller(config, spec)
        raise _too_large("kv_cache_memory_bytes", cache.kv_cache_memory_bytes, room, fits, **changes)
    num_blocks = cache.kv_cache_memory_bytes // block_bytes
    if num_blocks < 1:
        wanted = blocks_of(config, spec, config.model.max_model_len) * block_bytes
        enough = min(wanted, budget // block_bytes * block_bytes)
        raise _Misfit(
            "kv_cache_memory_bytes",
            f"kv_cache_memory_bytes: one block of {cache.block_size} tokens needs {size_text(block_bytes)}, "
            f"{size_text(cache.kv_cache_memory_bytes)} are given; {size_text(enough)} would hold a context of "
            f"{longest_context(config, spec, enough // block_bytes)} tokens",
            **({"kv_cache_memory_bytes": enough} if enough else {}),
        )
    return num_blocks


def _too_large(option: str, needed: int, room: int, tokens: int, **changes: Any) -> _Misfit:
    return _Misfit(
        option,
        f"{option}: the KV cache would take {size_text(needed)}, {size_text(room)} are free beside weights and steps, "
        f"enough for {tokens} tokens",
        **changes,
    )


def _rounded(size: int, block_bytes: int) -> int:
    """Return a number of bytes that reads well, at most `size` and at least a block."""
    return size // MIB * MIB if size // MIB * MIB >= block_bytes else size


def _rounded_up(size: int) -> int:
    """Return a number of bytes that reads well, at least `size`."""
    return -(-size // MIB) * MIB


def _smaller(config: EngineConfig, spec: KVCacheSpec) -> dict[str, Any]:
    """Return a change that makes steps smaller, or takes more of the memory; nothing where that is done already."""
    limits = config.scheduler
    if limits.max_num_batched_tokens > LEAST_STEP:
        tokens = max(LEAST_STEP, limits.max_num_batched_tokens // 2)
        return {"max_num_batched_tokens": tokens, "max_num_seqs": min(limits.max_num_seqs, tokens)}
    if limits.max_num_seqs > 1:
        return {"max_num_seqs": max(1, limits.max_num_seqs // 8)}
    if config.cache.gpu_memory_utilization < 1.0:
        return {"gpu_memory_utilization": 1.0}
    return {}


def _count_host(config: EngineConfig, block_bytes: int, left: int, share: int, num_blocks: int) -> int:
    """Return the blocks of the host's pool; `left` bytes are free, and it gets `share` if nobody asked for more."""
    asked = config.cache.swap_space
    shared = config.device.device in HOST_DEVICES
    if asked is None:
        # No more than the device has: all of it can be swapped out then.
        return min(max(0, share if shared else SWAP_SPACE) // block_bytes, num_blocks)
    if shared and asked > left:
        fits = max(0, left) // 2 // MIB * MIB
        raise _Misfit(
            "swap_space",
            f"swap_space: the host's pool would take {size_text(asked)}, {size_text(max(0, left))} are free beside "
            f"weights and KV cache; {size_text(fits)} would leave enough",
            swap_space=fits,
        )
    return asked // block_bytes


def allocation_refused(asked: EngineConfig, fitted: Fit, block_bytes: int, available: int) -> ConfigError:
    """Return the error for blocks that fit by the numbers and were refused by the system all the same."""
    half = max(1, fitted.num_blocks // 2)
    changes: dict[str, Any] = {"num_gpu_blocks_override": half, "kv_cache_memory_bytes": None, "swap_space": 0}
    if asked.model.max_model_len is not None:
        changes["max_model_len"] = None
    return ConfigError(
        f"kv_cache_memory_bytes: {fitted.num_blocks} blocks, {fitted.num_blocks * block_bytes} bytes, could not be "
        f"allocated, though {size_text(available)} seemed free; half of them, {size_text(half * block_bytes)}, may "
        f"fit; this works: {command_line(asked, changes)}",
        param="kv_cache_memory_bytes",
    )


def step_refused(asked: EngineConfig, config: EngineConfig, available: int) -> ConfigError:
    """Return the error for a largest step, of `config`, that did not fit beside the weights when it was tried."""
    limits = config.scheduler
    tokens = max(1, min(limits.max_num_batched_tokens // 2, max(LEAST_STEP, limits.max_num_batched_tokens // 4)))
    changes = {"max_num_batched_tokens": tokens, "max_num_seqs": min(limits.max_num_seqs, tokens)}
    return ConfigError(
        f"max_num_batched_tokens: a step of {limits.max_num_batched_tokens} tokens and {limits.max_num_seqs} sequences "
        f"did not fit beside the weights, with {size_text(available)} free; one of {tokens} may; this works: "
        f"{command_line(asked, changes)}",
        param="max_num_batched_tokens",
    )


def count_blocks(config: EngineConfig, spec: KVCacheSpec, available: int, scratch: int = 0) -> int:
    """Return how many KV blocks `fit` would allocate on the device.

    An explicit number wins; then explicit bytes; otherwise the free memory times `gpu_memory_utilization`, less what
    steps and the host's pool take, but no more than `max_num_seqs` sequences of full length could use.

    Raises:
        ConfigError: not one block fits, or what was asked for exceeds the free memory.
    """
    return fit(_any_length(config), config, spec, available, lambda _: scratch).num_blocks


def count_host_blocks(config: EngineConfig, block_bytes: int, available: int) -> int:
    """Return the blocks of the host's pool if `available` bytes are free for it.

    Raises:
        ConfigError: `swap_space` was asked for and exceeds them.
    """
    try:
        share = min(SWAP_SPACE, available // HOST_PART)
        return _count_host(config, block_bytes, available, share, available // block_bytes)
    except _Misfit as misfit:
        raise ConfigError(
            f"{misfit.text}; this works: {command_line(config, misfit.changes)}", param=misfit.option
        ) from None


def _any_length(config: EngineConfig) -> EngineConfig:
    return changed(config, {"max_model_len": None})


# Lengths


def blocks_of(config: EngineConfig, spec: KVCacheSpec, length: int) -> int:
    """Return the most blocks that a sequence of `length` tokens holds at a time, in all groups of layers."""
    assert config.model.max_model_len is not None
    windows = [group.sliding_window for group in spec.groups(config.model.max_model_len)]
    return most_blocks(length, windows, config.cache.block_size, config.scheduler.max_num_batched_tokens)


def longest_context(config: EngineConfig, spec: KVCacheSpec, num_blocks: int) -> int:
    """Return the length of the longest sequence that `num_blocks` hold, at most max_model_len [tokens]."""
    assert config.model.max_model_len is not None
    return longest_length(config.model.max_model_len, lambda length: blocks_of(config, spec, length) <= num_blocks)


def _context(
    asked: EngineConfig, config: EngineConfig, spec: KVCacheSpec, block_bytes: int, num_blocks: int, taken: int
) -> int:
    """Return the context length: what was settled, or what fits if nobody asked for more.

    The blocks that there are have `taken` bytes.
    """
    wanted, cache = config.model.max_model_len, config.cache
    assert wanted is not None
    fits = longest_context(config, spec, num_blocks)
    if fits == wanted:
        return wanted
    needed = blocks_of(config, spec, wanted)
    if fits and asked.model.max_model_len is None:
        return fits
    if fits:
        raise _Misfit(
            "max_model_len",
            f"max_model_len: {wanted} tokens do not fit the KV cache: they need {needed} blocks of {cache.block_size} "
            f"tokens, {size_text(needed * block_bytes)}; there are {num_blocks}, "
            f"{size_text(taken)}, which hold {fits} tokens",
            max_model_len=fits,
        )
    least = blocks_of(config, spec, 1)
    option = "num_gpu_blocks_override" if cache.num_gpu_blocks_override is not None else "kv_cache_memory_bytes"
    enough = {"num_gpu_blocks_override": needed, "kv_cache_memory_bytes": needed * block_bytes}
    raise _Misfit(
        option,
        f"{option}: one token needs {least} blocks, one for each group of layers; there are {num_blocks}, "
        f"and {needed} would hold {wanted} tokens",
        **{option: enough[option]},
    )
