"""The pool: references, order of reuse, finding content again, and an integrity check that sees damage."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import QuireError
from quire.kvcache.block_pool import Block, BlockPool, FreeBlockQueue


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
    pool._free.popleft()


def add_reference(pool: BlockPool) -> None:
    pool.blocks[0].ref_count += 1


def forget_hash(pool: BlockPool) -> None:
    pool.blocks[1].block_hash = None


def rename(pool: BlockPool) -> None:
    pool.blocks[1].block_hash = b"other"


def stale_entry(pool: BlockPool) -> None:
    pool._cached[b"stale"] = pool.blocks[2]


def break_link(pool: BlockPool) -> None:
    pool.blocks[3].prev_free = pool.blocks[1]


@pytest.mark.parametrize("damage", [lose_block, add_reference, forget_hash, rename, stale_entry, break_link])
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


OPERATIONS_PER_EXAMPLE = 2000


def ids(queue: FreeBlockQueue) -> list[int]:
    return [block.block_id for block in queue]


def test_starts_in_the_order_given():
    assert ids(FreeBlockQueue(Block(i) for i in range(4))) == [0, 1, 2, 3]


@settings(max_examples=50, derandomize=True, deadline=None, database=None)
@given(num_blocks=st.integers(1, 24), seed=st.integers(0, 2**32))
def test_behaves_like_an_ordered_dict(num_blocks: int, seed: int):
    rng = random.Random(seed)
    blocks = [Block(i) for i in range(num_blocks)]
    queue, model = FreeBlockQueue(blocks), OrderedDict.fromkeys(range(num_blocks))
    outside: list[int] = []
    for step in range(OPERATIONS_PER_EXAMPLE):
        operation = rng.choice(("popleft", "remove", "append", "prepend"))
        if operation == "popleft" and model:
            expected, _ = model.popitem(last=False)
            assert queue.popleft() is blocks[expected]
            outside.append(expected)
        elif operation == "remove" and model:
            chosen = rng.choice(list(model))
            del model[chosen]
            queue.remove(blocks[chosen])
            outside.append(chosen)
        elif operation in ("append", "prepend") and outside:
            chosen = outside.pop(rng.randrange(len(outside)))
            model[chosen] = None
            model.move_to_end(chosen, last=operation == "append")
            getattr(queue, operation)(blocks[chosen])
        assert len(queue) == len(model)
        assert ids(queue) == list(model)
        if step % 50 == 0:
            queue.check_integrity()


def test_popping_an_empty_queue_is_an_error():
    with pytest.raises(QuireError, match="empty"):
        FreeBlockQueue().popleft()


def test_a_block_cannot_be_queued_twice_or_removed_twice():
    block = Block(0)
    queue = FreeBlockQueue([block])
    with pytest.raises(QuireError, match="already"):
        queue.append(block)
    with pytest.raises(QuireError, match="already"):
        queue.prepend(block)
    queue.remove(block)
    with pytest.raises(QuireError, match="not in the free queue"):
        queue.remove(block)


@pytest.mark.parametrize("damage", ["next", "prev", "cycle", "short"])
def test_integrity_check_finds_broken_links(damage: str):
    blocks = [Block(i) for i in range(4)]
    queue = FreeBlockQueue(blocks)
    queue.check_integrity()
    if damage == "next":
        blocks[1].next_free = None
    elif damage == "prev":
        blocks[2].prev_free = blocks[0]
    elif damage == "cycle":
        blocks[2].next_free, blocks[1].prev_free = blocks[1], blocks[2]
    else:
        blocks[0].next_free, blocks[2].prev_free = blocks[2], blocks[0]
    with pytest.raises(QuireError):
        queue.check_integrity()
