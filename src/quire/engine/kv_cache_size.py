"""How many KV blocks are allocated on the device and the host, and the context length that they hold.

What the user did not request is fitted to the memory there is. What does not fit is refused with three numbers (needed,
available, what would fit) and a command line that works.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.config import EngineConfig
from quire.engine.advice import MIB, command_line, size_text
from quire.engine.layerwise import layer_split
from quire.errors import ConfigError
from quire.kernels.memory import DeviceMemory
from quire.kvcache.manager import max_blocks, max_fitting_length
from quire.step import KVCacheSpec

logger = logging.getLogger(__name__)

HOST_DEVICES = ("cpu", "reference")  # devices without memory of their own
SWAP_SPACE = 4 * 2**30  # of the host's pool by default
HOST_PART = 4  # where memory is the same, the pool has by default at most one part in so many of it
MIN_STEP = 64  # tokens; steps are not advised to be smaller
ROUNDS = 16  # changes of options that are tried one after the other

ReservedBytes = Callable[[EngineConfig], int]
"""Bytes of the device's memory that are not for blocks, by the config: those of steps, and on a GPU what is used."""


def nothing_reserved(config: EngineConfig) -> int:
    """Return 0: steps of an engine without a model take no memory worth counting."""
    return 0


def reserved_bytes(memory: DeviceMemory, step_bytes: ReservedBytes, config: EngineConfig) -> ReservedBytes:
    """Return what of `memory.total` is not for blocks: what is used, and what steps take.

    A step that was measured, with `config`, counts as measured; those of other configs in proportion to `step_bytes`.
    """
    measured = memory.step
    if measured is None:
        return lambda now: memory.used + step_bytes(now)
    counted = step_bytes(config)
    if not counted:
        return lambda now: memory.used + measured
    return lambda now: memory.used + measured * step_bytes(now) // counted


@dataclass(frozen=True, slots=True)
class KVCacheSize:
    """What there is room for: blocks on the device and in the host's pool, and the context length [tokens].

    Of the device's blocks the last `num_layerwise_blocks` are layer-wise offloaded (`engine/layerwise.py`).
    """

    num_blocks: int
    num_host_blocks: int
    max_model_len: int
    num_layerwise_blocks: int = 0


def device_bytes(config: EngineConfig, spec: KVCacheSpec, size: KVCacheSize) -> int:
    """Return what all blocks take of the device's memory, on a CPU the host's pool too; `config` is resolved."""
    split = layer_split(config, spec)
    if split is not None:
        return split.device_bytes(size.num_blocks, size.num_layerwise_blocks)
    shared = config.device.device in HOST_DEVICES
    num_blocks = size.num_blocks + (size.num_host_blocks if shared else 0)
    return num_blocks * spec.block_bytes(config.cache.block_size, config.max_model_len)


class DoesNotFitError(ConfigError):
    """Something does not fit. `text` begins with the option that requests it.

    `changes` are options that would help; they may not be enough.
    """

    def __init__(self, text: str, **changes: Any) -> None:
        advice = f"only a smaller model works: {command_line(EngineConfig(), {})}"
        super().__init__(f"{text}; {advice}", param=text.partition(":")[0])
        self.text, self.changes = text, changes


def fit_kv_cache(
    requested: EngineConfig,
    config: EngineConfig,
    spec: KVCacheSpec,
    available: int,
    reserved: ReservedBytes = nothing_reserved,
    *,
    quiet: bool = False,
) -> KVCacheSize:
    """Return how many blocks to allocate and the context length that they hold.

    Args:
        requested: the options as the user gave them; config: the same, resolved.
        spec: what the model's layers cache.
        available: free bytes, weights being loaded; on a GPU all that it has.
        reserved: bytes of these that are not for blocks.
        quiet: do not log that the context is shortened.

    Raises:
        ConfigError: what was requested does not fit. The message has what is needed, what is available, what would
            fit, and a command line that does. It is a `DoesNotFitError` if no change of options helps but one of those
            that change the weights.
    """
    try:
        found = _Sizing(requested, config, spec, available, reserved(config)).fit()
    except DoesNotFitError as error:
        changes = _changes_that_fit(error, requested, config, spec, available, reserved)
        if changes is None:
            raise
        message = f"{error.text}; this works: {command_line(requested, changes)}"
        raise ConfigError(message, param=error.param) from None
    if found.max_model_len != config.max_model_len and not quiet:
        logger.warning(
            "context limited to %d of %d tokens: the KV cache has %d blocks of %d",
            found.max_model_len,
            config.max_model_len,
            found.num_blocks,
            config.cache.block_size,
        )
    return found


def _changes_that_fit(
    error: DoesNotFitError,
    requested: EngineConfig,
    config: EngineConfig,
    spec: KVCacheSpec,
    available: int,
    reserved: ReservedBytes,
) -> dict[str, Any] | None:
    """Return changes with which everything fits, or None; one change can make the next necessary."""
    changes: dict[str, Any] = {}
    for _ in range(ROUNDS):
        if not error.changes:
            return None
        changes.update(error.changes)
        now = config.replace(**changes)
        try:
            _Sizing(requested.replace(**changes), now, spec, available, reserved(now)).fit()
        except DoesNotFitError as another:
            error = another
        else:
            return changes
    return None


def block_budget(config: EngineConfig, available: int, reserved: int) -> int:
    """Return the bytes that blocks may take, on the device and, where it is the same memory, on the host."""
    return max(0, int(available * config.cache.gpu_memory_utilization) - reserved)


class _Sizing:
    """The arithmetic of `fit_kv_cache` for one config; every method raises `DoesNotFitError`.

    Attributes:
        room: bytes beside weights and steps. budget: of these, what blocks may take.
        longest: blocks of a sequence of full length.
        shared: whether the host's pool is in the device's memory.
    """

    def __init__(
        self, requested: EngineConfig, config: EngineConfig, spec: KVCacheSpec, available: int, reserved: int
    ) -> None:
        self.requested_len, self.max_model_len = requested.model.max_model_len, config.max_model_len
        self.config, self.cache, self.limits, self.spec = config, config.cache, config.scheduler, spec
        self.available, self.reserved = available, reserved
        self.room, self.budget = max(0, available - reserved), block_budget(config, available, reserved)
        self.block_bytes = spec.block_bytes(config.cache.block_size, self.max_model_len)
        self.longest = blocks_needed(config, spec, self.max_model_len)
        self.split = layer_split(config, spec)
        self.shared = config.device.device in HOST_DEVICES

    def fit(self) -> KVCacheSize:
        """Return what there is room for."""
        num_blocks, num_layerwise, num_host = self._count(), 0, 0
        if self.split is not None:
            num_blocks, num_layerwise = self._count_layerwise(num_blocks)
            taken = self.split.device_bytes(num_blocks, num_layerwise)
        else:
            taken = num_blocks * self.block_bytes
            num_host = self._count_host(self.available - self.reserved - taken, num_blocks)
        return KVCacheSize(num_blocks, num_host, self._context(num_blocks, taken), num_layerwise)

    def _host_share(self) -> int:
        """Return the bytes of the budget that the host's pool takes.

        By default it is at most a part of it, and never at the expense of one sequence of full length.
        """
        if not self.shared:
            return 0
        if self.cache.swap_space is not None:
            return self.cache.swap_space
        return max(0, min(SWAP_SPACE, self.budget // HOST_PART, self.budget - self.longest * self.block_bytes))

    def _count(self) -> int:
        """Return the number of the device's blocks, all of them whole."""
        cache = self.cache
        if cache.num_gpu_blocks_override is not None:
            fits = self.budget // self.block_bytes
            needed = cache.num_gpu_blocks_override * self.block_bytes
            if self.split is not None:
                needed = self.split.device_bytes(*self._count_layerwise(cache.num_gpu_blocks_override))
            if needed > self.room:
                changes = {"num_gpu_blocks_override": fits} if fits else self._smaller_steps()
                raise self._too_large("num_gpu_blocks_override", needed, fits, **changes)
            return cache.num_gpu_blocks_override
        if cache.kv_cache_memory_bytes is not None:
            return self._count_in_bytes(cache.kv_cache_memory_bytes)
        host = self._host_share()
        if host and host + self.block_bytes > self.budget and cache.swap_space:
            fits = self.budget // HOST_PART // MIB * MIB
            raise DoesNotFitError(
                f"swap_space: {size_text(host)} for the host's pool and at least {size_text(self.block_bytes)} for a "
                f"block are needed, {size_text(self.budget)} are available; {size_text(fits)} would leave enough",
                swap_space=fits,
            )
        most = self.limits.max_num_seqs * self.longest
        if self.spec.one_step:  # no sequence has any between steps
            most = min(most, self.limits.max_num_batched_tokens // cache.block_size + self.limits.max_num_seqs)
        num_blocks = min((self.budget - host) // self.block_bytes, most)
        if num_blocks < 1:
            share = size_text(self.available * cache.gpu_memory_utilization)
            taken = (
                f"and a step {size_text(self.reserved)}, {share} are available beside the weights"
                if self.shared
                else f"while weights, a step, and others on the GPU need {size_text(self.reserved)}; {share} may be "
                "used in all"
            )
            error = DoesNotFitError(
                f"no room for the KV cache: a block of {cache.block_size} tokens needs {size_text(self.block_bytes)} "
                f"{taken}, so that 0 blocks would fit",
                **self._smaller_steps(),
            )
            error.param = "gpu_memory_utilization"
            raise error
        return num_blocks

    def _count_in_bytes(self, given: int) -> int:
        """Return the number of blocks of `kv_cache_memory_bytes`."""
        option = "kv_cache_memory_bytes"
        fits = self.budget // self.block_bytes
        if given > self.room:
            rounded = self.budget // MIB * MIB  # reads well
            rounded = rounded if rounded >= self.block_bytes else self.budget
            raise self._too_large(option, given, fits, **({option: rounded} if fits else self._smaller_steps()))
        if given < self.block_bytes:
            enough = min(self.longest, fits)
            raise DoesNotFitError(
                f"{option}: one block of {self.cache.block_size} tokens needs {size_text(self.block_bytes)}, "
                f"{size_text(given)} are given; {size_text(enough * self.block_bytes)} would hold a context of "
                f"{longest_context(self.config, self.spec, enough)} tokens",
                **({option: enough * self.block_bytes} if enough else {}),
            )
        return given // self.block_bytes

    def _count_layerwise(self, num_blocks: int) -> tuple[int, int]:
        """Return how many blocks, and of these layerwise ones, there are where `num_blocks` resident ones fit."""
        cache, split = self.cache, self.split
        assert split is not None
        max_layerwise = (SWAP_SPACE if cache.swap_space is None else cache.swap_space) // split.host_bytes
        if not max_layerwise:
            raise DoesNotFitError(
                f"swap_space: the layers of a block that are not on the GPU need {size_text(split.host_bytes)}, "
                f"{size_text(cache.swap_space or 0)} are given",
                swap_space=-(-self.longest * split.host_bytes // MIB) * MIB,
            )
        explicit = cache.swap_space is not None
        if cache.num_gpu_blocks_override is not None:
            return num_blocks, max(0, min(max_layerwise, num_blocks - (1 if explicit else self.longest)))
        budget, most = cache.kv_cache_memory_bytes, None
        if budget is None:
            budget, most = self.budget, self.limits.max_num_seqs * self.longest
        return split.count(budget, max_layerwise, blocks_per_sequence=self.longest, max_blocks=most, explicit=explicit)

    def _count_host(self, left: int, num_blocks: int) -> int:
        """Return the number of blocks of the host's pool; `left` bytes are free beside the device's."""
        size = self.cache.swap_space
        if size is None:
            # No more than the device has: all of it can be swapped out then.
            share = min(self._host_share(), left) if self.shared else SWAP_SPACE
            return min(max(0, share) // self.block_bytes, num_blocks)
        if self.shared and size > left:
            fits = max(0, left) // 2 // MIB * MIB
            raise DoesNotFitError(
                f"swap_space: the host's pool would take {size_text(size)}, {size_text(max(0, left))} are free beside "
                f"weights and KV cache; {size_text(fits)} would leave enough",
                swap_space=fits,
            )
        return size // self.block_bytes

    def _context(self, num_blocks: int, taken: int) -> int:
        """Return the context length: that of the config, or what fits if the user requested none.

        The blocks that there are have `taken` bytes.
        """
        fits = longest_context(self.config, self.spec, num_blocks)
        if fits == self.max_model_len or (fits and self.requested_len is None):
            return fits
        if fits:
            raise DoesNotFitError(
                f"max_model_len: {self.max_model_len} tokens do not fit the KV cache: they need {self.longest} "
                f"blocks of {self.cache.block_size} tokens, {size_text(self.longest * self.block_bytes)}; there are "
                f"{num_blocks}, {size_text(taken)}, which hold {fits} tokens",
                max_model_len=fits,
            )
        least = blocks_needed(self.config, self.spec, 1)
        by_number = self.cache.num_gpu_blocks_override is not None
        option = "num_gpu_blocks_override" if by_number else "kv_cache_memory_bytes"
        raise DoesNotFitError(
            f"{option}: one token needs {least} blocks, one for each group of layers; there are {num_blocks}, and "
            f"{self.longest} would hold {self.max_model_len} tokens",
            **{option: self.longest if by_number else self.longest * self.block_bytes},
        )

    def _too_large(self, option: str, needed: int, fits: int, **changes: Any) -> DoesNotFitError:
        return DoesNotFitError(
            f"{option}: the KV cache would take {size_text(needed)}, {size_text(self.room)} are free beside weights "
            f"and steps, enough for {fits * self.cache.block_size} tokens",
            **changes,
        )

    def _smaller_steps(self) -> dict[str, Any]:
        """Return a change that makes steps smaller, or uses more of the memory; nothing where that is done already."""
        limits = self.limits
        if limits.max_num_batched_tokens > MIN_STEP:
            tokens = max(MIN_STEP, limits.max_num_batched_tokens // 2)
            return {"max_num_batched_tokens": tokens, "max_num_seqs": min(limits.max_num_seqs, tokens)}
        if limits.max_num_seqs > 1:
            return {"max_num_seqs": max(1, limits.max_num_seqs // 8)}
        return {"gpu_memory_utilization": 1.0} if self.cache.gpu_memory_utilization < 1.0 else {}


def allocation_failed(requested: EngineConfig, size: KVCacheSize, block_bytes: int, available: int) -> ConfigError:
    """Return the error for blocks that fit by the numbers and were refused by the system all the same."""
    half = max(1, size.num_blocks // 2)
    changes: dict[str, Any] = {"num_gpu_blocks_override": half, "kv_cache_memory_bytes": None, "swap_space": 0}
    if requested.model.max_model_len is not None:
        changes["max_model_len"] = None
    return ConfigError(
        f"kv_cache_memory_bytes: {size.num_blocks} blocks, {size.num_blocks * block_bytes} bytes, could not be "
        f"allocated, though {size_text(available)} seemed free; half of them, {size_text(half * block_bytes)}, may "
        f"fit; this works: {command_line(requested, changes)}",
        param="kv_cache_memory_bytes",
    )


def step_failed(requested: EngineConfig, config: EngineConfig, available: int) -> ConfigError:
    """Return the error for a largest step, of `config`, that did not fit beside the weights when it was tried."""
    limits = config.scheduler
    tokens = max(1, min(limits.max_num_batched_tokens // 2, max(MIN_STEP, limits.max_num_batched_tokens // 4)))
    changes = {"max_num_batched_tokens": tokens, "max_num_seqs": min(limits.max_num_seqs, tokens)}
    return ConfigError(
        f"max_num_batched_tokens: a step of {limits.max_num_batched_tokens} tokens and {limits.max_num_seqs} sequences "
        f"did not fit beside the weights, with {size_text(available)} free; one of {tokens} may; this works: "
        f"{command_line(requested, changes)}",
        param="max_num_batched_tokens",
    )


def blocks_needed(config: EngineConfig, spec: KVCacheSpec, length: int) -> int:
    """Return the most blocks that a sequence of `length` tokens holds at a time, in all groups of layers."""
    windows = [group.sliding_window for group in spec.groups(config.max_model_len)]
    return max_blocks(length, windows, config.cache.block_size, config.scheduler.max_num_batched_tokens)


def longest_context(config: EngineConfig, spec: KVCacheSpec, num_blocks: int) -> int:
    """Return the length of the longest sequence that `num_blocks` hold, at most max_model_len [tokens]."""
    return max_fitting_length(config.max_model_len, lambda length: blocks_needed(config, spec, length) <= num_blocks)
