"""What is shown of a block manager: a known tree and a known pool, drawn, and the same as values."""

from __future__ import annotations

from typing import Any

import pytest

from quire.kvcache.block_pool import Block
from quire.kvcache.manager import KVCacheManager
from quire.kvcache.view import (
    DIGITS,
    MAX_OWNERS,
    REFS,
    describe_blocks,
    describe_pools,
    describe_prefixes,
    draw_blocks,
    draw_prefixes,
    map_blocks,
)
from tests.kvcache.model import BLOCK, Sequence


def start(kv: KVCacheManager, name: str, token_ids: list[int]) -> Sequence:
    """Compute a sequence in a step of its own."""
    kv.start_step()
    sequence = Sequence(name, token_ids)
    hit = kv.find_prefix(sequence)
    assert kv.allocate_slots(sequence, len(token_ids) - hit.num_tokens, hit) is not None
    sequence.num_computed_tokens = len(token_ids)
    return sequence


def computed(*sequences: Sequence) -> dict[str, int]:
    return {sequence.sequence_id: sequence.num_computed_tokens for sequence in sequences}


def small_tree() -> tuple[KVCacheManager, dict[str, int]]:
    """Of three sequences that begin alike one has left; another one has nothing in common with them."""
    kv = KVCacheManager(16, BLOCK, prefix_match_unit=BLOCK)
    common = [1, 2, 3, 4, 5, 6, 7, 8]
    one = start(kv, "one", [*common, 10, 11, 12, 13, 14])
    two = start(kv, "two", [*common, 20, 21, 22, 23, 24, 25, 26, 27])
    left = start(kv, "left", [*common, 30, 31, 32, 33])
    other = start(kv, "other", [90, 91, 92, 93])
    kv.free(left)
    return kv, computed(one, two, other)


def test_a_known_tree_is_drawn_as_it_is() -> None:
    blocks = small_tree()[0].pool.blocks
    assert draw_prefixes(describe_prefixes(blocks)) == (
        "8 tokens in 2 blocks, 2 in use\n"
        "  4 tokens in 1 blocks, 1 in use\n"
        "  8 tokens in 2 blocks, 2 in use\n"
        "  4 tokens in 1 blocks, 0 in use\n"
        "4 tokens in 1 blocks, 1 in use"
    )
    tree = describe_prefixes(blocks, limit=2, tokens=True)
    assert draw_prefixes(tree).splitlines() == [
        "8 tokens in 2 blocks, 2 in use: 1 2 3 4 5 6 7 8",
        "  4 tokens in 1 blocks, 1 in use: 10 11 12 13",
        "and 3 more",
    ]
    assert draw_prefixes(tree, num_tokens=2).splitlines()[0].endswith(": 1 2 ...")


def test_the_tree_as_a_list_says_who_is_below_whom() -> None:
    kv, _ = small_tree()
    tree = describe_prefixes(kv.pool.blocks)
    assert (tree["num_roots"], tree["num_nodes"], tree["num_tokens"]) == (2, 5, 28)
    assert [(node["depth"], node["parent"], node["tokens"], node["in_use"]) for node in tree["nodes"]] == [
        (0, None, 8, 2),
        (1, 0, 4, 1),
        (1, 0, 8, 2),
        (1, 0, 4, 0),
        (0, None, 4, 1),
    ]
    assert tree["nodes"][0]["block_ids"] == kv.block_ids("one")[0][:2]
    assert not any("token_ids" in node for node in tree["nodes"])
    shorter = describe_prefixes(kv.pool.blocks, limit=2, tokens=True)
    assert [node["token_ids"] for node in shorter["nodes"]] == [[1, 2, 3, 4, 5, 6, 7, 8], [10, 11, 12, 13]]
    assert shorter["num_nodes"] == 5


def test_a_tree_may_be_deeper_than_python_recurses() -> None:
    blocks = []
    for depth in range(3000):
        for name in (b"%d" % (depth + 1), b"%d'" % (depth + 1)):
            block = Block(len(blocks))
            block.block_hash, block.parent_hash, block.token_ids = name, b"%d" % depth, [depth]
            blocks.append(block)
    lines = draw_prefixes(describe_prefixes(blocks, limit=10_000)).splitlines()
    assert len(lines) == 6000
    assert max(len(line) - len(line.lstrip()) for line in lines) == 2 * 2999


def test_blocks_say_who_holds_them_and_what_for() -> None:
    kv, tokens = small_tree()
    rows = {row["id"]: row for row in describe_blocks(kv, tokens)}
    assert len(rows) == 16
    first, second, third, last = kv.block_ids("one")[0]
    assert rows[first]["owners"] == rows[second]["owners"] == ["one", "two"]
    assert (rows[third]["refs"], rows[third]["owners"], rows[third]["position"]) == (1, ["one"], 8)
    assert (rows[last]["tokens"], rows[third]["tokens"], rows[third]["parent"]) == (1, 4, second)
    assert [row["state"] for row in rows.values()].count("cached") == 1
    assert not any("token_ids" in row for row in rows.values())
    shown = {row["id"]: row for row in describe_blocks(kv, tokens, tokens=True, start=third, limit=1)}
    assert list(shown) == [third]
    assert shown[third]["token_ids"] == [10, 11, 12, 13]


def test_many_owners_are_counted_and_some_are_named() -> None:
    kv = KVCacheManager(16, BLOCK)
    parent = start(kv, "parent", [1, 2, 3])
    children = [Sequence(f"child-{index}", [1, 2, 3], 3) for index in range(20)]
    for child in children:
        kv.fork(parent, child)
    (row,) = describe_blocks(kv, computed(parent, *children), limit=1)
    assert row["refs"] == 21
    assert row["owners"] == ["parent", *(f"child-{index}" for index in range(MAX_OWNERS - 1))]
    assert draw_blocks([row], BLOCK).splitlines()[1] == "       0 9"


def test_a_known_pool_is_drawn_as_it_is() -> None:
    kv, tokens = small_tree()
    rows = describe_blocks(kv, tokens)
    assert draw_blocks(rows, BLOCK).splitlines()[1] == "       0 22#+##c#........"
    assert draw_blocks(rows[6:], BLOCK).splitlines()[1] == "       6 c#........"


def test_waste_counts_what_is_shared_once() -> None:
    kv, tokens = small_tree()
    pools = describe_pools(kv, tokens)
    device = pools["device"]
    assert (device["used"], device["cached"], device["free"], device["loading"]) == (7, 1, 8, 0)
    assert (device["shared"], device["saved_by_sharing"]) == (2, 2)
    assert pools["waste"] == {"reserved_slots": 28, "filled_slots": 25, "wasted_slots": 3, "most_in_a_table": 3}


def test_blocks_of_the_host_are_shown_too() -> None:
    kv = KVCacheManager(2, BLOCK, num_host_blocks=4, prefix_match_unit=BLOCK)
    kv.free(start(kv, "gone", [1, 2, 3, 4, 5]))
    gone = start(kv, "next", [9] * 7)
    assert kv.swap_out([gone])
    pools = describe_pools(kv, computed(gone))
    assert pools["host"] == {"num_blocks": 4, "used": 2, "cached": 1, "free": 1}
    rows = describe_blocks(kv, computed(gone), tier="host")
    assert sorted((row["state"], row.get("tokens")) for row in rows) == [
        ("cached", 4),
        ("free", None),
        ("used", 3),
        ("used", 4),
    ]
    assert {owner for row in rows for owner in row.get("owners", [])} == {"next"}


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
    start(kv, "long", list(range(4 * 601)))
    item = map_blocks(kv, {"long": 0}, tier="device", cells=300)
    assert item["per_cell"] == 4 and len(item["states"]) == 250
    assert sum(state in REFS for state in item["states"]) in (150, 151)
    assert all(owner == [0] for owner in owners(item) if owner is not None)
    assert sum(item["counts"][name] for name in ("used", "cached", "free", "loading")) == 1000


@pytest.mark.parametrize(("num_used", "num_cells"), [(0, 512), (3, 512), (512, 512), (513, 1024), (1025, 2000)])
def test_the_map_ends_where_all_blocks_are_free(num_used: int, num_cells: int) -> None:
    kv = KVCacheManager(2000, BLOCK)
    if num_used:
        start(kv, "one", list(range(BLOCK * num_used)))
    item = map_blocks(kv, {"one": 0}, tier="device", cells=16384)
    assert (item["num_blocks"], item["per_cell"], len(item["states"])) == (2000, 1, num_cells)
    assert item["counts"]["used"] == num_used == len(item["states"].rstrip("."))
    assert item["counts"]["free"] == 2000 - num_used


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
