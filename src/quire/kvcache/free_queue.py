"""`FreeQueue`: the free blocks, least recently used first, as a doubly linked list through the blocks themselves.

Because a prefix hit takes a block out of the middle, the links live in the blocks: every operation is O(1) and
allocates nothing. Knows nothing of hashes or reference counts; `block_pool` decides which end a block goes to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from quire.errors import QuireError
from quire.kvcache.block import Block


class FreeQueue:
    """An intrusive doubly linked list of free blocks. A block may stand in one queue at most."""

    __slots__ = ("_head", "_length", "_tail")

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        # Two sentinels spare every operation the cases of an empty queue and of its ends.
        self._head = Block(-1)
        self._tail = Block(-1)
        self._head.next_free = self._tail
        self._tail.prev_free = self._head
        self._length = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Block]:
        """Yield the blocks in the order in which `popleft` would return them."""
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free

    def popleft(self) -> Block:
        """Remove and return the block at the front; raise `QuireError` when the queue is empty."""
        block = self._head.next_free
        if block is None or block is self._tail:
            raise QuireError("the free queue is empty: a caller took a block without checking that one is free")
        self.remove(block)
        return block

    def append(self, block: Block) -> None:
        """Add `block` at the back, to be reused last."""
        assert self._tail.prev_free is not None
        self._insert(self._tail.prev_free, block, self._tail)

    def prepend(self, block: Block) -> None:
        """Add `block` at the front, to be reused first."""
        assert self._head.next_free is not None
        self._insert(self._head, block, self._head.next_free)

    def remove(self, block: Block) -> None:
        """Take `block` out, wherever it stands; raise `QuireError` if it stands in no queue."""
        before, after = block.prev_free, block.next_free
        if before is None or after is None:
            raise QuireError(f"{block!r} is not in the free queue")
        before.next_free = after
        after.prev_free = before
        block.prev_free = block.next_free = None
        self._length -= 1

    def check_integrity(self) -> None:
        """Walk the list; raise `QuireError` if a link or the length is wrong."""
        count = 0
        before = self._head
        while before is not self._tail:
            after = before.next_free
            if after is None or after.prev_free is not before:
                raise QuireError(f"free queue: broken link after {before!r}")
            count += after is not self._tail
            if count > self._length:
                raise QuireError(f"free queue: more than the {self._length} blocks it counts")
            before = after
        if count != self._length:
            raise QuireError(f"free queue: {count} blocks linked, {self._length} counted")

    def _insert(self, before: Block, block: Block, after: Block) -> None:
        if block.prev_free is not None:
            raise QuireError(f"{block!r} is already in the free queue")
        before.next_free = block
        block.prev_free = before
        block.next_free = after
        after.prev_free = block
        self._length += 1
