"""Maps of a tier: each cell is what its block is, and its owners are the requests that hold it."""

from __future__ import annotations

from typing import Any

from quire.kvcache.block_map import DIGITS, REFS, map_blocks
from quire.kvcache.manager import KVCacheManager
from tests.kvcache.test_view import BLOCK, small_tree, start

REQUEST_OF = {"one": 0, "two": 1, "other": 2}


def owners(item: dict[str, Any]) -> list[list[int] | None]:
    """Return the requests that own each cell, None of cells that are not in use."""
    pairs = iter([item["owners"][place : place + 2] for place in range(0, len(item["owners"]), 2)])
    found: list[list[int] | None] = []
    for state in item["states"]:
        pair = next(pairs) if state in REFS + "~" else None
        found.append(None if pair is None else item["sets"][DIGITS.index(pair[0]) * 64 + DIGITS.index(pair[1])])
    assert next(pairs, None) is None
    return found


def test_each_cell_is_what_its_block_is() -> None:
    kv, _ = small_tree()
    item = map_blocks(kv, REQUEST_OF, tier="device", cells=100)
    assert (item["num_blocks"], item["per_cell"]) == (16, 1)
    assert item["counts"] == {"used": 7, "cached": 1, "free": 8, "loading": 0, "shared": 2}
    for block, state, owner in zip(kv.pool.blocks, item["states"], owners(item), strict=True):
        holders = {REQUEST_OF[name] for name, [table] in kv.tables.items() if block in table}
        assert (set(owner) if owner is not None else set()) == holders
        expected = str(block.ref_count) if block.ref_count else "." if block.block_hash is None else "c"
        assert state == expected
    assert [1, 0] in owners(item) or [0, 1] in owners(item)


def test_requests_that_are_not_told_own_nothing() -> None:
    kv, _ = small_tree()
    item = map_blocks(kv, {"two": 0}, tier="device", cells=100)
    assert item["states"] == map_blocks(kv, REQUEST_OF, tier="device", cells=100)["states"]
    assert sorted(owner for owner in owners(item) if owner is not None) == [[]] * 3 + [[0]] * 4


def test_a_large_pool_has_a_map_of_few_cells() -> None:
    kv = KVCacheManager(1000, BLOCK)
    start(kv, "long", list(range(4 * 401)))
    item = map_blocks(kv, {"long": 0}, tier="device", cells=300)
    assert item["per_cell"] == 4 and len(item["states"]) == 250
    assert sum(state in REFS for state in item["states"]) in (100, 101)
    assert all(owner == [0] for owner in owners(item) if owner is not None)
    assert sum(item["counts"][name] for name in ("used", "cached", "free", "loading")) == 1000


def test_a_map_of_the_host_shows_who_was_swapped_out() -> None:
    kv = KVCacheManager(8, BLOCK, num_host_blocks=6)
    sequence = start(kv, "away", list(range(10)))
    assert kv.swap_out([sequence])
    item = map_blocks(kv, {"away": 0}, tier="host", cells=100)
    assert item["num_blocks"] == 6 and item["counts"]["used"] == 3
    assert [owner for owner in owners(item) if owner is not None] == [[0]] * 3
    assert map_blocks(kv, {"away": 0}, tier="device", cells=100)["counts"]["used"] == 0


def test_the_map_of_many_blocks_is_small() -> None:
    kv = KVCacheManager(16384, BLOCK)
    for number in range(64):
        start(kv, f"s{number}", list(range(1000 * number, 1000 * number + 4 * 200)))
    item = map_blocks(kv, {f"s{number}": number for number in range(64)}, tier="device", cells=16384)
    assert item["counts"]["used"] == 64 * 200
    assert len(item["states"]) + len(item["owners"]) + 8 * len(item["sets"]) < 50_000
