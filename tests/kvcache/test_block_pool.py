"""The pool: references, order of reuse, finding content again, and an integrity check that sees damage."""

from __future__ import annotations

import pytest

from quire.errors import QuireError
from quire.kvcache.block_pool import BlockPool


def cached(pool: BlockPool, names: str) -> list:
    """Take one block per letter, register it under that name, and free them all in order."""
    blocks = pool.get_new_blocks(len(names))
    for block, letter in zip(blocks, names, strict=True):
        pool.register(block, letter.encode())
    pool.free(blocks)
    return blocks


def test_blocks_are_handed_out_by_id_at_first():
    pool = BlockPool(4)
    assert [block.block_id for block in pool.get_new_blocks(3)] == [0, 1, 2]
    assert pool.num_free == 1


def test_taking_too_many_takes_none():
    pool = BlockPool(2)
    with pytest.raises(QuireError, match="3 blocks requested, 2 free"):
        pool.get_new_blocks(3)
    assert pool.num_free == 2


def test_double_free_is_an_error():
    pool = BlockPool(2)
    blocks = pool.get_new_blocks(1)
    pool.free(blocks)
    with pytest.raises(QuireError, match="double free"):
        pool.free(blocks)


def test_a_block_is_free_when_the_last_reference_goes():
    pool = BlockPool(2)
    blocks = pool.get_new_blocks(1)
    pool.touch(blocks)
    pool.free(blocks)
    assert pool.num_free == 1
    pool.free(blocks)
    assert pool.num_free == 2


def test_free_content_stays_findable_and_is_reused_oldest_first():
    pool = BlockPool(3)
    a, b, c = cached(pool, "abc")
    assert pool.lookup(b"b") is b
    pool.touch([a])
    pool.free([a])  # used again, so now the youngest
    assert pool.get_new_blocks(2) == [b, c]
    assert (pool.lookup(b"a"), pool.lookup(b"b"), pool.lookup(b"c")) == (a, None, None)


def test_blocks_without_content_are_reused_before_cached_ones():
    pool = BlockPool(3)
    blocks = pool.get_new_blocks(3)
    pool.register(blocks[1], b"full")
    pool.free(blocks)
    assert [block.block_id for block in pool.get_new_blocks(3)] == [2, 0, 1]


def test_a_hit_takes_a_block_out_of_the_middle_of_the_queue():
    pool = BlockPool(3)
    a, b, c = cached(pool, "abc")
    pool.touch([b])
    assert [block.block_id for block in pool.free_blocks()] == [a.block_id, c.block_id]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)])
def test_duplicates_take_over_until_the_last_is_gone(order: tuple[int, ...]):
    pool = BlockPool(3)
    blocks = pool.get_new_blocks(3)
    for block in blocks:
        pool.register(block, b"same")
    left = set(blocks)
    for index in order:
        assert pool.lookup(b"same") in left
        pool.unregister(blocks[index])
        left.remove(blocks[index])
        pool.check_integrity([1, 1, 1])
    assert pool.lookup(b"same") is None


def test_registering_twice_is_an_error():
    pool = BlockPool(1)
    (block,) = pool.get_new_blocks(1)
    pool.register(block, b"x")
    with pytest.raises(QuireError, match="registered already"):
        pool.register(block, b"y")


def test_unregister_all_counts_what_it_drops():
    pool = BlockPool(4)
    cached(pool, "ab")
    assert pool.unregister_all() == 2
    assert pool.lookup(b"a") is None
    pool.check_integrity([0, 0, 0, 0])


def lose_block(pool: BlockPool) -> None:
    pool._free.popitem()


def add_reference(pool: BlockPool) -> None:
    pool.blocks[0].ref_count += 1


def forget_hash(pool: BlockPool) -> None:
    pool.blocks[1].block_hash = None


def rename(pool: BlockPool) -> None:
    pool.blocks[1].block_hash = b"other"


def stale_entry(pool: BlockPool) -> None:
    pool._cached[b"stale"] = pool.blocks[2]


@pytest.mark.parametrize("damage", [lose_block, add_reference, forget_hash, rename, stale_entry])
def test_integrity_check_finds(damage):
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(2)
    pool.register(blocks[0], b"a")
    pool.register(blocks[1], b"b")
    pool.free(blocks[1:])
    pool.check_integrity([1, 0, 0, 0])
    damage(pool)
    with pytest.raises(QuireError):
        pool.check_integrity([1, 0, 0, 0])
