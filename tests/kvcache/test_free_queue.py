"""The free queue behaves like an ordered dict, whatever is done to it, and notices when its links are broken."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import QuireError
from quire.kvcache.block import Block
from quire.kvcache.free_queue import FreeQueue

OPERATIONS_PER_EXAMPLE = 2000


def ids(queue: FreeQueue) -> list[int]:
    return [block.block_id for block in queue]


def test_starts_in_the_order_given():
    assert ids(FreeQueue(Block(i) for i in range(4))) == [0, 1, 2, 3]


@settings(max_examples=50, derandomize=True, deadline=None, database=None)
@given(num_blocks=st.integers(1, 24), seed=st.integers(0, 2**32))
def test_behaves_like_an_ordered_dict(num_blocks: int, seed: int):
    rng = random.Random(seed)
    blocks = [Block(i) for i in range(num_blocks)]
    queue, model = FreeQueue(blocks), OrderedDict.fromkeys(range(num_blocks))
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
        FreeQueue().popleft()


def test_a_block_cannot_be_queued_twice_or_removed_twice():
    block = Block(0)
    queue = FreeQueue([block])
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
    queue = FreeQueue(blocks)
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
