"""Makes the scheduler and the block manager that a config asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from quire.config import EngineConfig
from quire.kvcache.block_hash import BlockHasher
from quire.kvcache.manager import KVCacheManager
from quire.scheduler.base import BaseScheduler
from quire.scheduler.policy import make_policy
from quire.scheduler.prefill_first import PrefillFirstScheduler
from quire.scheduler.scheduler import Scheduler
from quire.step import KVCacheGroup


def create_scheduler(
    config: EngineConfig,
    groups: list[KVCacheGroup],
    *,
    num_blocks: int,
    max_model_len: int,
    clock: Callable[[], float],
    num_thin_blocks: int = 0,
    num_host_blocks: int = 0,
    num_disk_records: int = 0,
    stored: Iterable[tuple[int, bytes]] = (),
    hasher: BlockHasher | None = None,
    whole_prompts: bool = False,
) -> BaseScheduler:
    """Return a scheduler over a new block manager; `groups` are those of `KVCacheSpec.groups`.

    The others are as for `KVCacheManager` and `RequestLives`. Raises `ConfigError` naming the option.
    """
    cache, options = config.cache, config.scheduler
    kv = KVCacheManager(
        num_blocks,
        cache.block_size,
        windows=[group.sliding_window for group in groups],
        max_step_tokens=options.max_num_batched_tokens,
        enable_prefix_caching=cache.enable_prefix_caching is not False,
        prefix_match_unit=cache.prefix_match_unit,
        merge_duplicates=options.scheduler == "prefill-first",
        num_thin_blocks=num_thin_blocks,
        num_host_blocks=num_host_blocks,
        num_disk_records=num_disk_records,
        stored=stored,
        hasher=hasher,
    )
    common: dict[str, Any] = {
        "max_model_len": max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "policy": make_policy(
            options.scheduling_policy, ageing=options.priority_ageing, weights=options.tenant_weights
        ),
        "long_prefill_token_threshold": options.long_prefill_token_threshold,
        "watermark": options.watermark,
        "preemption_mode": options.preemption_mode,
        "whole_prompts": whole_prompts,
        "clock": clock,
        "max_loras": config.lora.max_loras if config.lora.enable_lora else 0,
    }
    if options.scheduler == "prefill-first":
        return PrefillFirstScheduler(kv, delay_factor=options.delay_factor, **common)
    return Scheduler(kv, max_overtake_seconds=options.max_overtake_seconds, **common)
