"""How an engine fits itself to the memory there is, and what it says where that cannot be."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.checkpoint.hf_config import load_model_info
from quire.config import SERVER_GROUPS, CacheConfig, EngineConfig
from quire.engine.advice import command_line, size_text
from quire.engine.kv_cache_size import KVCacheSize, allocation_failed, blocks_needed, fit_kv_cache, longest_context
from quire.engine.resolve import resolve_config
from quire.errors import ConfigError
from quire.kvcache.manager import KVCacheManager
from quire.step import KVCacheSpec, LayerKVSpec
from tests.helpers.advice import advised

LAYER = LayerKVSpec(num_kv_heads=1, head_size=8, dtype="float32")  # 1 KiB a block of 16 tokens
SPEC = KVCacheSpec([LAYER])
MIB = 2**20


def fitted(folder: Path, available: int, scratch: int = 0, spec: KVCacheSpec = SPEC, **options: Any) -> KVCacheSize:
    asked = EngineConfig.from_kwargs(groups=SERVER_GROUPS, model=str(folder), **options)
    return fit_asked(asked, folder, available, scratch, spec)


def fit_asked(asked: EngineConfig, folder: Path, available: int, scratch: int, spec: KVCacheSpec) -> KVCacheSize:
    config = resolve_config(asked, load_model_info(folder))

    def scratch_of(config: EngineConfig) -> int:
        return scratch * config.scheduler.max_num_batched_tokens // 2048

    return fit_kv_cache(asked, config, spec, available, scratch_of)


# What fits by itself


def test_blocks_are_limited_by_what_all_sequences_could_use(folder: Path) -> None:
    assert fitted(folder, 2**30, max_num_seqs=4) == KVCacheSize(4 * 32, 4 * 32, 512)


def test_memory_limits_blocks_and_steps_and_the_hosts_pool_come_out_of_it(folder: Path) -> None:
    found = fitted(folder, 10 * MIB, 2 * MIB)
    assert found.num_blocks == (9 - 2) * 1024 * 3 // 4  # a tenth stays free, a quarter of the rest is the pool's
    assert found.num_host_blocks == (9 - 2) * 1024 // 4


def test_the_hosts_pool_takes_nothing_that_one_long_sequence_needs(folder: Path) -> None:
    assert fitted(folder, 40 * 1024) == KVCacheSize(32, 4, 512)  # 36 KiB, 32 of them for 512 tokens


def test_the_context_shrinks_to_what_fits_with_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert fitted(folder, 10 * 1024) == KVCacheSize(9, 0, 144)
    assert "context limited to 144 of 512 tokens" in caplog.text


def test_a_pool_that_was_asked_for_is_as_large_as_asked(folder: Path) -> None:
    found = fitted(folder, 64 * MIB, swap_space="24MiB")
    assert found.num_host_blocks == 24 * 1024
    assert fitted(folder, 64 * MIB, swap_space=0).num_host_blocks == 0


def test_explicit_numbers_win(folder: Path) -> None:
    assert fitted(folder, 2**30, num_gpu_blocks_override=77).num_blocks == 77
    assert fitted(folder, 2**30, kv_cache_memory_bytes="1MiB").num_blocks == 1024


def test_the_bytes_of_blocks_are_those_of_worked_examples() -> None:
    """Keys and values of every layer: 4 tokens x 4 layers x (2 x 8 x 128) x 2 bytes; one layer's pool of Qwen2.5."""
    layer = LayerKVSpec(num_kv_heads=8, head_size=128, dtype="bfloat16")
    assert KVCacheSpec([layer] * 4).block_bytes(4, 4096) == 65_536
    of_qwen = LayerKVSpec(num_kv_heads=2, head_size=128, dtype="bfloat16")
    assert of_qwen.block_bytes(16) * 153_259 == 2_510_995_456


def test_a_device_of_8_gib_is_filled_by_the_formula(folder: Path) -> None:
    """num_gpu_blocks = int((total * gpu_memory_utilization - peak) // block_bytes), and no pool on the host."""
    total, peak = 8 * 2**30, 5 * 2**30 + 12_345
    spec = KVCacheSpec([LayerKVSpec(num_kv_heads=8, head_size=128, dtype="bfloat16")] * 32)
    block_bytes = 16 * 32 * (2 * 8 * 128) * 2
    for utilization in (0.9, 0.75):
        found = fitted(folder, total, peak, spec, gpu_memory_utilization=utilization, swap_space=0)
        assert found.num_blocks == int((int(total * utilization) - peak) // block_bytes)


# Windows


def test_a_window_needs_blocks_for_what_a_step_sees_only(folder: Path) -> None:
    windowed = LayerKVSpec(num_kv_heads=1, head_size=8, dtype="float32", sliding_window=64)
    spec = KVCacheSpec([LAYER, windowed])
    options = {"max_num_batched_tokens": 32}
    config = resolve_config(EngineConfig.from_kwargs(model=str(folder), **options), load_model_info(folder))
    assert blocks_needed(config, spec, 16) == 2
    assert blocks_needed(config, spec, 512) == 32 + -(-(63 + 32 + 15) // 16)
    assert longest_context(config, spec, 32 + 7) == 512
    assert longest_context(config, spec, 32 + 6) < 512
    assert fitted(folder, 2**30, spec=spec, max_num_seqs=2, **options).num_blocks == 2 * (32 + 7)


@pytest.mark.parametrize("size", [1, 5, 16])
def test_lengths_are_counted_as_the_block_manager_counts_them(folder: Path, size: int) -> None:
    windowed = [msgspec.structs.replace(LAYER, sliding_window=window) for window in (7, 64)]
    spec = KVCacheSpec([LAYER, *windowed])
    options = {"max_num_batched_tokens": 32, "block_size": size}
    config = resolve_config(EngineConfig.from_kwargs(model=str(folder), **options), load_model_info(folder))
    windows = [group.sliding_window for group in spec.groups(512)]
    manager = KVCacheManager(600, size, windows=windows, max_step_tokens=32)
    for length in (1, 2, 7, 31, 64, 100, 511, 512):
        assert blocks_needed(config, spec, length) == manager.num_blocks_for(length)
    assert longest_context(config, spec, 50) == KVCacheManager(
        50, size, windows=windows, max_step_tokens=32
    ).longest_sequence(512)


# What does not fit

REFUSED: dict[str, tuple[dict[str, Any], int, int]] = {
    "blocks": ({"num_gpu_blocks_override": 10**6}, 8 * MIB, MIB),
    "blocks for a context": ({"num_gpu_blocks_override": 20, "max_model_len": 500}, 8 * MIB, MIB),
    "bytes": ({"kv_cache_memory_bytes": "1GiB"}, 8 * MIB, MIB),
    "bytes for a block": ({"kv_cache_memory_bytes": 1000}, 8 * MIB, MIB),
    "bytes for a block and a context": ({"kv_cache_memory_bytes": 1000, "max_model_len": 512}, 8 * MIB, MIB),
    "bytes for a context": ({"kv_cache_memory_bytes": 4096, "max_model_len": 512}, 8 * MIB, MIB),
    "context": ({"max_model_len": 512}, 30 * 1024, 0),
    "pool": ({"swap_space": "1GiB"}, 80 * MIB, MIB),
    "pool beside blocks": ({"swap_space": "4MiB", "num_gpu_blocks_override": 5000}, 8 * MIB, 0),
    "pool and context": ({"swap_space": "8MiB", "max_model_len": 512}, 8 * MIB, MIB),
    "step": ({}, 8 * MIB, 64 * MIB),
    "step and bytes": ({"kv_cache_memory_bytes": "1MiB"}, 8 * MIB, 64 * MIB),
    "utilization": ({"gpu_memory_utilization": 0.01, "max_num_seqs": 1, "max_num_batched_tokens": 64}, 99 * 1024, 0),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_with_three_numbers_and_a_command_that_works(folder: Path, case: str) -> None:
    options, available, scratch = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        fitted(folder, available, scratch, **options)
    message = caught.value.message
    assert "this works: quire serve " in message
    numbers = re.findall(r"\d+(?:\.\d+)?", message.partition("this works")[0])
    assert len(numbers) >= 3, message
    found = fit_asked(advised(message), folder, available, scratch, SPEC)
    assert found.num_blocks >= 1
    assert found.max_model_len >= 1


def test_the_command_keeps_what_else_was_asked_for(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        fitted(folder, 30 * 1024, max_model_len=512, max_num_seqs=3, enable_prefix_caching=False, api_key=["secret"])
    assert "secret" not in caught.value.message
    config = advised(caught.value.message)
    assert (config.scheduler.max_num_seqs, config.cache.enable_prefix_caching) == (3, False)
    assert config.model.max_model_len == 16 * 27


def test_what_the_system_refuses_all_the_same_is_advised_to_be_half(folder: Path) -> None:
    asked = EngineConfig.from_kwargs(model=str(folder), kv_cache_memory_bytes="8MiB", max_model_len=512)
    message = allocation_failed(asked, KVCacheSize(8192, 0, 512), 1024, 9 * MIB).message
    assert "8192 blocks, 8388608 bytes, could not be allocated, though 9 MiB seemed free" in message
    assert fit_asked(advised(message), folder, 9 * MIB, 0, SPEC) == KVCacheSize(4096, 0, 512)


def test_where_nothing_helps_a_smaller_model_does(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"only a smaller model works: quire serve quire-demo$"):
        fitted(folder, 1000)


# Command lines


def test_a_command_line_reads_back_as_what_it_was_made_from() -> None:
    asked = EngineConfig.from_kwargs(
        model="my model", hf_overrides={"a": {"b": 1}}, swap_space="2GiB", enable_prefix_caching=False, dtype="float16"
    )
    changes = {"max_model_len": 77, "kv_cache_memory_bytes": 12345}
    assert advised("works: " + command_line(asked, changes)) == asked.replace(**changes)


def test_sizes_are_readable() -> None:
    assert [size_text(size) for size in (0, 1023, 1536, 5 * MIB, 1000 * MIB, 1.5 * 2**30)] == [
        "0 bytes", "1023 bytes", "1.5 KiB", "5 MiB", "1000 MiB", "1.5 GiB",
    ]  # fmt: skip


# The options


@pytest.mark.parametrize(
    ("given", "size"),
    [("4", 4 * 2**30), (4, 4 * 2**30), (0.5, 2**29), ("0.5", 2**29), ("512MiB", 2**29), (0, 0), (2**32, 2**32)],
)
def test_pools_are_sized_in_gib_or_with_a_unit(given: object, size: int) -> None:
    assert EngineConfig.from_kwargs(swap_space=given).cache.swap_space == size
    assert EngineConfig.from_kwargs(kv_disk_space=given).cache.kv_disk_space == size
    assert EngineConfig.from_kwargs(swap_space=size).cache.swap_space == size


@pytest.mark.parametrize("given", [-1, "512KiB", "x", True, float("nan"), float("inf")])
def test_other_sizes_are_refused(given: object) -> None:
    with pytest.raises(ConfigError, match="swap_space"):
        EngineConfig.from_kwargs(swap_space=given)


def test_options_of_the_disk_need_each_other() -> None:
    assert CacheConfig().kv_disk_space == 0
    with pytest.raises(ConfigError, match="kv_disk_dir needs kv_disk_space"):
        EngineConfig.from_kwargs(kv_disk_dir="somewhere")
    with pytest.raises(ConfigError, match="kv_disk_space needs enable_prefix_caching"):
        EngineConfig.from_kwargs(kv_disk_space=20, enable_prefix_caching=False)
