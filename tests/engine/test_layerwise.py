"""Layerwise blocks: how many there are of what memory, and which options and models cannot have any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.checkpoint.hf_config import load_model_info
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.kv_cache_size import KVCacheSize, device_bytes, fit_kv_cache
from quire.engine.layerwise import LayerSplit, layer_split
from quire.engine.plan import make_plan
from quire.engine.resolve import resolve_config
from quire.engine.shares import SharingModel, share_memory
from quire.errors import ConfigError
from quire.executor.null import NullExecutor
from quire.kernels.memory import DeviceMemory
from quire.step import KVCacheSpec, LayerKVSpec, LayerStateSpec
from tests.engine.conftest import CONFIG
from tests.helpers.advice import advised

GIB, MIB, KIB = 2**30, 2**20, 2**10
LAYER = LayerKVSpec(num_kv_heads=8, head_size=128, dtype="bfloat16")  # 64 KiB a block of 16 tokens
SPEC = KVCacheSpec([LAYER] * 32)
WHOLE, LAYERWISE, HOST = 2 * MIB, 640 * KIB, 1536 * KIB  # with 8 of 32 layers resident


def asked_for(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig.from_kwargs(
        **{"model": str(folder), "device": "cuda", "dtype": "bfloat16", "kv_resident_layers": 8, **options}
    )


def fitted(folder: Path, memory: int, spec: KVCacheSpec = SPEC, **options: Any) -> KVCacheSize:
    asked = asked_for(folder, gpu_memory_utilization=1.0, **options)
    return fit_kv_cache(asked, resolve_config(asked, load_model_info(folder)), spec, memory)


# How many


def test_blocks_take_the_memory_that_there_is_and_no_more(folder: Path) -> None:
    for memory in (GIB, 3 * GIB + 12345, 5 * GIB):
        for swap_space in ("96MiB", "600MiB", "2GiB"):
            found = fitted(folder, memory, swap_space=swap_space)
            whole = found.num_blocks - found.num_layerwise_blocks
            left = memory - whole * WHOLE - found.num_layerwise_blocks * LAYERWISE
            assert 0 <= left < WHOLE
            assert (
                found.num_layerwise_blocks * HOST
                <= resolve_config(asked_for(folder, swap_space=swap_space), load_model_info(folder)).cache.swap_space
            )
            assert found.num_host_blocks == 0


def test_the_hosts_memory_says_how_many_are_layerwise(folder: Path) -> None:
    assert fitted(folder, 4 * GIB, swap_space="150MiB").num_layerwise_blocks == 100
    assert fitted(folder, 8 * GIB).num_layerwise_blocks == 4 * GIB // HOST  # unless asked for


def test_what_nobody_asked_for_leaves_whole_blocks_for_one_long_sequence(folder: Path) -> None:
    found = fitted(folder, 32 * WHOLE + 10 * LAYERWISE)  # 512 tokens are 32 blocks
    assert (found.num_blocks, found.num_layerwise_blocks) == (42, 10)
    assert fitted(folder, 32 * WHOLE).num_layerwise_blocks == 0
    asked = fitted(folder, 32 * WHOLE, swap_space="4GiB")
    assert asked.num_layerwise_blocks == asked.num_blocks - 1, "what was asked for is as much as it can be"


def test_a_context_that_whole_blocks_do_not_hold_is_held_with_as_few_layerwise_ones_as_it_takes(folder: Path) -> None:
    found = fitted(folder, 20 * WHOLE)
    assert (found.num_blocks, found.max_model_len) == (32, 512)
    fewer = found.num_layerwise_blocks - 1
    assert (20 * WHOLE - fewer * LAYERWISE) // WHOLE + fewer < 32
    assert fitted(folder, 20 * WHOLE, kv_resident_layers=0).max_model_len == 320


def test_there_are_no_more_blocks_than_sequences_can_use(folder: Path) -> None:
    most = 4 * 32
    assert fitted(folder, 4 * GIB, max_num_seqs=4) == KVCacheSize(most, 0, 512)
    found = fitted(folder, 100 * WHOLE, max_num_seqs=4)
    assert found.num_blocks == most
    assert 0 < found.num_layerwise_blocks < 68


def test_numbers_and_bytes_that_were_asked_for_include_layerwise_blocks(folder: Path) -> None:
    found = fitted(folder, 4 * GIB, num_gpu_blocks_override=100)
    assert (found.num_blocks, found.num_layerwise_blocks) == (100, 68)
    found = fitted(folder, 4 * GIB, num_gpu_blocks_override=100, swap_space="30MiB")
    assert (found.num_blocks, found.num_layerwise_blocks) == (100, 20)
    room = 60 * WHOLE + 40 * LAYERWISE
    assert fitted(folder, room, num_gpu_blocks_override=100, swap_space="60MiB").num_layerwise_blocks == 40
    with pytest.raises(ConfigError, match=r"num_gpu_blocks_override: .* would take 145 MiB"):
        fitted(folder, room - 1, num_gpu_blocks_override=100, swap_space="60MiB")
    found = fitted(folder, 4 * GIB, kv_cache_memory_bytes=room, swap_space="60MiB")
    assert (found.num_blocks, found.num_layerwise_blocks) == (100, 40)


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("resident", [1, 8, 29])
def test_no_division_leaves_less_than_a_whole_block_or_more_than_the_budget(resident: int, asked: bool) -> None:
    split = LayerSplit(64 * KIB, 32, resident)
    for whole in (1, 2, 10, 31, 32, 33, 100, 1000):
        for rest in (0, split.layer_bytes, split.resident_bytes - 1):
            budget = whole * split.resident_bytes + rest
            for most_layerwise in (1, 7, 5000):
                for most in (None, 33, 500):
                    count, layerwise = split.count(
                        budget, most_layerwise, blocks_per_sequence=32, max_blocks=most, explicit=asked
                    )
                    assert 0 <= layerwise <= most_layerwise and count - layerwise >= 1
                    assert split.device_bytes(count, layerwise) <= budget
                    assert count >= min(whole, most or whole), "there are never fewer blocks for it"
                    assert most is None or count <= most


def test_too_little_host_memory_is_refused_with_a_command_that_works(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"need 1.5 MiB, 1 MiB are given") as caught:
        fitted(folder, 4 * GIB, swap_space="1MiB")
    asked = advised(caught.value.message)
    assert fit_kv_cache(asked, resolve_config(asked, load_model_info(folder)), SPEC, 4 * GIB).num_layerwise_blocks == 32


def test_an_engine_allocates_them_and_says_how_many_are_in_use(folder: Path) -> None:
    class GPU(NullExecutor):
        def kv_cache_spec(self) -> KVCacheSpec:
            return SPEC

        def device_memory(self) -> DeviceMemory:
            return DeviceMemory(40 * WHOLE)

        def available_memory(self) -> int:
            return 40 * WHOLE

        def allocate(
            self, num_blocks: int, max_model_len: int, num_host_blocks: int = 0, num_layerwise_blocks: int = 0
        ) -> None:
            self.allocated = num_blocks, num_host_blocks, num_layerwise_blocks

    executor, info = GPU(), load_model_info(folder)
    core = EngineCore(asked_for(folder, gpu_memory_utilization=1.0), executor=executor, info=info)
    found = fitted(folder, 40 * WHOLE)
    assert executor.allocated == (found.num_blocks, 0, found.num_layerwise_blocks)
    stats = core.call("stats")
    assert stats["num_thin_blocks"] == stats["num_free_thin_blocks"] == found.num_layerwise_blocks > 0
    core.call("sleep", {"level": 1})
    executor.allocated = (0, 0, 0)
    core.call("wake_up")  # what layerwise blocks save counts: all of them whole would not fit
    assert executor.allocated == (found.num_blocks, 0, found.num_layerwise_blocks)


# What is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preemption_mode": "swap"}, "contradicts preemption_mode swap"),
        ({"kv_disk_space": "1GiB"}, "contradicts kv_disk_space"),
        ({"swap_space": 0}, "needs swap_space, such as 4GiB"),
        ({"scheduler": "prefill-first"}, "needs scheduler unified"),
    ],
)
def test_options_that_exclude_it_are_named(folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        asked_for(folder, **options)
    assert caught.value.param == "kv_resident_layers"


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_devices_in_the_hosts_memory_have_none(folder: Path, device: str) -> None:
    asked = asked_for(folder, device=device)
    with pytest.raises(ConfigError, match=r"8 is not possible: it needs a GPU .* in host memory anyway") as caught:
        resolve_config(asked, load_model_info(folder))
    assert caught.value.param == "kv_resident_layers"


def test_preempted_requests_are_computed_again(folder: Path) -> None:
    assert resolve_config(asked_for(folder), load_model_info(folder)).scheduler.preemption_mode == "recompute"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (KVCacheSpec([LAYER] * 10), r"8 is not possible: this model has 10 attention layers, so that 1 to 7 are"),
        (KVCacheSpec([LAYER] * 3), "these are too few for any"),
        (KVCacheSpec([LAYER, LayerKVSpec(4, 128, "bfloat16")] * 16), "must be all alike"),
        (KVCacheSpec([LAYER, LayerKVSpec(8, 128, "bfloat16", sliding_window=64)] * 16), "without sliding windows"),
        (KVCacheSpec([LayerKVSpec(8, 128, "bfloat16", sliding_window=64)] * 32), "without sliding windows"),
        (KVCacheSpec([LAYER] * 32, [LayerStateSpec(((4, 4),))]), "keeps more than the keys and values"),
        (KVCacheSpec([LAYER] * 32, one_step=True), "or nothing between steps"),
    ],
)
def test_models_whose_layers_cannot_be_split_are_refused(folder: Path, spec: KVCacheSpec, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        fitted(folder, 4 * GIB, spec)
    assert caught.value.param == "kv_resident_layers"


def test_windows_as_long_as_the_context_are_none(folder: Path) -> None:
    layer = LayerKVSpec(8, 128, "bfloat16", sliding_window=512)
    assert fitted(folder, 8 * GIB, KVCacheSpec([LAYER, layer] * 16)) == fitted(folder, 8 * GIB)


def test_several_models_cannot_share_a_gpu_with_it(folder: Path) -> None:
    with pytest.raises(ConfigError, match="one: kv_resident_layers is for a server with one model"):
        share_memory([SharingModel("one", asked_for(folder), pinned=False)], 1, GIB)


# Plans


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    """A folder of a model with twelve layers."""
    path = tmp_path / "deep"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(json.loads(CONFIG) | {"num_hidden_layers": 12}))
    return path


def test_a_plan_says_what_lies_where(deep: Path) -> None:
    options: dict[str, Any] = {"max_num_seqs": 16, "enforce_eager": True}
    asked = asked_for(deep, kv_resident_layers=2, swap_space="10MiB", **options)
    info = load_model_info(deep)
    taken = int(GIB * 0.9) - make_plan(asked, info, GIB).budget
    memory = int((taken + 10 * MIB) / 0.9) + 1
    plan = make_plan(asked, info, memory)
    assert plan.problem is None and plan.fit is not None
    split = layer_split(resolve_config(asked, info), KVCacheSpec([LayerKVSpec(4, 16, "bfloat16")] * 12))
    assert split is not None
    assert (plan.layerwise_device_bytes, plan.layerwise_host_bytes) == (split.layerwise_bytes, split.host_bytes)
    assert plan.fit.num_layerwise_blocks == plan.settings["num_thin_blocks"] > 0
    assert plan.cache == split.device_bytes(plan.fit.num_blocks, plan.fit.num_layerwise_blocks) <= plan.budget
    without = make_plan(asked_for(deep, kv_resident_layers=0, **options), info, memory)
    assert without.fit is not None and without.fit.num_blocks < plan.fit.num_blocks
    assert without.cache == without.fit.num_blocks * without.block_bytes


def test_bytes_of_blocks_on_a_cpu_include_the_hosts_pool(folder: Path) -> None:
    config = resolve_config(EngineConfig.from_kwargs(model=str(folder), device="cpu"), load_model_info(folder))
    spec = KVCacheSpec([LAYER])
    assert device_bytes(config, spec, KVCacheSize(10, 4, 512)) == 14 * 64 * KIB
