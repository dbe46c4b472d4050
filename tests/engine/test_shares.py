"""Sharing memory among several models: any of them fit together, and what cannot fit is refused with numbers."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config import EngineConfig
from quire.engine.plan import RUNTIME_BYTES
from quire.engine.resolve import load_info, resolve_config
from quire.engine.shares import Share, SharingModel, share_memory
from quire.errors import ConfigError, ModelError
from quire.worker.footprint import Footprint

MIB = 2**20
SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 64}


def sharing(name: str, *, pinned: bool = False, **options: Any) -> SharingModel:
    return SharingModel(name, EngineConfig.from_kwargs(**{**SMALL, **options}), pinned)


def needed(share: Share) -> int:
    """Return the most bytes that a model's engine takes with its share."""
    info = load_info(share.config)
    config = resolve_config(share.config, info)
    footprint = Footprint(config, info)
    cache = share.config.cache
    assert config.model.max_model_len is not None
    fixed = (
        RUNTIME_BYTES + footprint.weights + footprint.tables(config.model.max_model_len) + footprint.step(config).total
    )
    return fixed + (cache.kv_cache_memory_bytes or 0) + (cache.swap_space or 0)


def test_what_nobody_has_said_is_shared_out_equally() -> None:
    shares = share_memory([sharing("a"), sharing("b"), sharing("c", max_num_seqs=64)], 2, available=1000 * MIB)
    sizes = [(share.config.cache.kv_cache_memory_bytes or 0) + (share.config.cache.swap_space or 0) for share in shares]
    assert sizes[0] == sizes[1]
    assert sum(sorted(map(needed, shares))[-2:]) <= 900 * MIB
    assert all(share.max_model_len == 1024 for share in shares)


def test_with_fewer_loaded_each_gets_more() -> None:
    models = [sharing(name, max_num_seqs=256) for name in "abc"]
    one, three = (
        share_memory(models, count, available=1100 * MIB)[0].config.cache.kv_cache_memory_bytes or 0 for count in (1, 3)
    )
    assert one > 3 * three


def test_what_was_asked_for_stays_and_the_others_get_the_rest() -> None:
    fixed = sharing("a", kv_cache_memory_bytes=100 * MIB, swap_space=0)
    blocks = sharing("b", num_gpu_blocks_override=100)
    alone = share_memory([sharing("c", max_num_seqs=256)] * 1, 1, available=1500 * MIB)[0]
    shares = share_memory([fixed, blocks, sharing("c", max_num_seqs=256)], 3, available=1500 * MIB)
    assert shares[0].config.cache == fixed.config.cache
    assert shares[1].config.cache.num_gpu_blocks_override == 100
    assert shares[1].config.cache.swap_space == 0, "a quarter of little is nothing"
    assert 0 < (shares[2].config.cache.kv_cache_memory_bytes or 0) < (alone.config.cache.kv_cache_memory_bytes or 0)


def test_a_context_that_nobody_asked_for_shrinks_and_one_that_was_is_refused() -> None:
    least = share_memory([sharing("a")], 1, available=4000 * MIB)[0]
    little = int(
        (needed(least) - (least.config.cache.kv_cache_memory_bytes or 0) - (least.config.cache.swap_space or 0)) / 0.9
    )
    tight = little + 2 * MIB
    share = share_memory([sharing("a")], 1, available=tight)[0]
    assert 0 < share.max_model_len < 1024
    with pytest.raises(ConfigError, match=r"^a: max_model_len: 1024 tokens do not fit"):
        share_memory([sharing("a", max_model_len=1024)], 1, available=tight)


def test_models_that_do_not_fit_together_are_refused_with_numbers_and_a_way_out() -> None:
    models = [sharing("a", pinned=True), *(sharing(name, kv_cache_memory_bytes=200 * MIB) for name in "bcd")]
    with pytest.raises(ConfigError) as caught:
        share_memory(models, 4, available=1000 * MIB)
    message = caught.value.message
    assert caught.value.param == "max_loaded_models"
    assert "4 models at a time need 1." in message
    assert "900 MiB are available" in message
    assert "a 1" in message
    assert "b 4" in message
    assert message.endswith("max_loaded_models 2 would fit")
    share_memory(models, 2, available=1000 * MIB)
    with pytest.raises(ConfigError, match="would not fit with fewer loaded either"):
        share_memory(models, 4, available=100 * MIB)


def test_a_model_that_cannot_be_served_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^bad: "):
        share_memory([sharing("a"), sharing("bad", model=str(tmp_path))], 1, available=4000 * MIB)


@given(
    st.lists(
        st.tuples(
            st.booleans(),
            st.sampled_from(
                [{}, {"kv_cache_memory_bytes": 30 * MIB}, {"num_gpu_blocks_override": 400}, {"swap_space": 0}]
            ),
            st.sampled_from([4, 64]),
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 4),
    st.integers(400, 3000),
)
@settings(max_examples=15, deadline=None)
def test_any_models_that_may_be_loaded_together_fit(
    found: list[tuple[bool, dict[str, int], int]], most: int, megabytes: int
) -> None:
    most = min(most, len(found))
    models = [
        sharing(str(number), pinned=pinned and number < most - 1, max_num_seqs=seqs, **options)
        for number, (pinned, options, seqs) in enumerate(found)
    ]
    try:
        shares = share_memory(models, most, available=megabytes * MIB)
    except ConfigError:
        return
    pinned = {number for number, item in enumerate(models) if item.pinned}
    sizes = [
        needed(share) + 40960 * (model.config.cache.num_gpu_blocks_override or 0)
        for share, model in zip(shares, models, strict=True)
    ]
    for chosen in itertools.combinations(range(len(models)), most):
        if pinned <= set(chosen):
            assert sum(sizes[number] for number in chosen) <= megabytes * MIB
