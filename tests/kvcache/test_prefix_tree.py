"""The radix view of the cache: matches inside a block, what is listed and drawn; no shape of it is too deep."""

from __future__ import annotations

import random

import pytest

from quire.kvcache.block_pool import Block
from quire.kvcache.prefix_cache import MAX_CHILDREN, PrefixTree, common_length
from quire.kvcache.view import describe_prefixes, draw_prefixes
from tests.kvcache.model import Sequence, fork, grow, manager, start


def block(block_id: int, parent: str, name: str, *token_ids: int, step: int = 0, ref_count: int = 0) -> Block:
    made = Block(block_id)
    made.parent_hash, made.block_hash = parent.encode(), name.encode()
    made.token_ids, made.step, made.ref_count = list(token_ids), step, ref_count
    return made


def tree_of(*blocks: Block) -> PrefixTree:
    tree = PrefixTree()
    for each in blocks:
        tree.add(each)
    return tree


@pytest.mark.parametrize(
    ("left", "right", "length"),
    [([], [], 0), ([], [1], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 2], 2), ([1, 2], [1, 3], 1), ([2], [1], 0)],
)
def test_common_length(left, right, length):
    assert common_length(left, right) == common_length(right, left) == length


# ---- matches ----


def test_the_child_that_goes_on_longest_as_asked_is_found():
    blocks = [block(0, "p", "a", 1, 2, 9, 9), block(1, "p", "b", 1, 2, 3, 9), block(2, "p", "c", 1, 9, 3, 4)]
    tree = tree_of(*blocks)
    assert tree.match(b"p", [1, 2, 3, 4], 1) == (blocks[1], 3)
    tree.remove(blocks[1])
    assert tree.match(b"p", [1, 2, 3, 4], 1) == (blocks[0], 2)


def test_nothing_is_found_below_another_prefix_with_another_first_token_or_without_tokens():
    tree = tree_of(block(0, "p", "a", 1, 2, 3, 4))
    assert tree.match(b"q", [1, 2], 1) == (None, 0)
    assert tree.match(b"p", [2, 1], 1) == (None, 0)
    assert tree.match(b"p", [], 1) == (None, 0)


def test_a_tail_matches_as_far_as_it_goes():
    tail = block(0, "p", "a", 1, 2)
    assert tree_of(tail).match(b"p", [1, 2, 3, 4], 1) == (tail, 2)


@pytest.mark.parametrize(("before_step", "found"), [(5, False), (6, True)])
def test_only_what_was_computed_before_counts(before_step, found):
    made = block(0, "p", "a", 1, 2, step=5)
    assert tree_of(made).match(b"p", [1, 2], before_step) == ((made, 2) if found else (None, 0))


def test_of_thousands_of_children_only_the_latest_are_looked_at():
    class Tokens(list):
        """Notes which children are compared."""

        def __getitem__(self, index):
            compared.add(tuple(self))
            return super().__getitem__(index)

    compared: set[tuple[int, ...]] = set()

    tree = PrefixTree()
    for number in range(3000):
        child = block(number, "p", f"n{number}", 7, number, 0)
        child.token_ids = Tokens(child.token_ids)
        tree.add(child)
    compared.clear()
    match, length = tree.match(b"p", [7, 2999, 1], 1)
    assert match is not None and (match.block_id, length) == (2999, 2)
    assert compared == {(7, number, 0) for number in range(3000 - MAX_CHILDREN, 3000)}
    assert tree.match(b"p", [7, 0, 0], 1)[1] == 1  # the first child went on longer, but is too old to be looked at


def test_a_tree_from_which_everything_was_removed_is_empty():
    blocks = [block(i, "p", f"n{i}", i % 3, i) for i in range(30)]
    tree = tree_of(*blocks)
    for made in blocks[::-1]:
        tree.remove(made)
    assert tree._children == {}


def test_the_best_match_is_that_of_a_plain_search():
    rng = random.Random(0)
    for _ in range(300):
        blocks = [
            block(i, "p", f"n{i}", 1, *(rng.randint(0, 1) for _ in range(rng.randint(0, 5))))
            for i in range(rng.randint(1, MAX_CHILDREN))
        ]
        wanted = [1, *(rng.randint(0, 1) for _ in range(rng.randint(0, 6)))]
        match, length = tree_of(*blocks).match(b"p", wanted, 1)
        assert match is not None
        assert length == common_length(match.token_ids, wanted)
        assert length == max(common_length(each.token_ids, wanted) for each in blocks)


# ---- being looked at ----


def test_runs_without_branches_are_one_node():
    blocks = [
        block(0, "", "a", 1, 2, ref_count=1),
        block(1, "a", "b", 3, 4),
        block(2, "b", "c", 5, 6, ref_count=2),
        block(3, "b", "d", 7),
        block(4, "gone", "e", 8, 9),
        block(5, "a", "b", 3, 4),  # the same content twice
        Block(6),  # no content
    ]
    nodes = describe_prefixes(blocks, tokens=True)["nodes"]
    assert [(node["depth"], node["parent"], node["block_ids"], node["in_use"]) for node in nodes] == [
        (0, None, [0, 1], 1),
        (1, 0, [2], 1),
        (1, 0, [3], 0),
        (0, None, [4], 0),
    ]
    assert [node["token_ids"] for node in nodes] == [[1, 2, 3, 4], [5, 6], [7], [8, 9]]
    assert draw_prefixes(describe_prefixes([])) == ""


def test_the_managers_blocks_are_described_as_forks_made_them():
    kv = manager(prefix_match_unit=1)
    a = Sequence("a", list(range(6)))
    start(kv, a)
    b = fork(kv, a, "b")
    grow(kv, a, 6, 7)
    grow(kv, b, 60, 70, 80)
    kv.free(b)
    nodes = describe_prefixes(kv.pool.blocks, tokens=True)["nodes"]
    assert [(node["depth"], node["blocks"], node["in_use"], node["token_ids"]) for node in nodes] == [
        (0, 1, 1, [0, 1, 2, 3]),
        (1, 2, 0, [4, 5, 60, 70, 80]),
        (1, 1, 1, [4, 5, 6, 7]),
    ]
