"""`BlockPool`: which blocks are free, which are in use and by how many, and which content can be found again.

A pool of ids and counts: it moves no data, and knows neither sequences nor tokens (see `manager`). A free block keeps
its content until it is handed out again, so the free queue *is* the prefix cache, in least-recently-used order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from quire.errors import QuireError
from quire.kvcache.block import Block
from quire.kvcache.free_queue import FreeQueue


class BlockPool:
    """A fixed number of blocks with reference counts and a map from content hash to block.

    Several blocks may hold the same content (two sequences that generated the same text side by side): block tables
    are append-only, so duplicates are not merged. One of them is found by `lookup`; the others take over in turn when
    it is reused.

    The last `num_thin_blocks` are *thin*: keys and values of some of their layers lie on the host (`engine/thin.py`),
    so that steps with them may be slower. Each kind is handed out in its own order, whole ones first as a rule: their
    content is given up before a thin block is taken, even one that holds nothing.

    Args:
        on_register, on_unregister: told of each block that can be found from now on, and that no longer can.
        on_reuse: told of a block with content that is about to be handed out again, while the content is still there.

    Attributes:
        first_thin: id of the first thin block; as many as there are blocks if none is.
        blocks: all blocks, by id. num_released, num_reused: how many times a block became free, and how many times one
            with content to be kept was handed out again; they only grow.
    """

    def __init__(
        self,
        num_blocks: int,
        num_thin_blocks: int = 0,
        *,
        on_register: Callable[[Block], None] | None = None,
        on_unregister: Callable[[Block], None] | None = None,
        on_reuse: Callable[[Block], None] | None = None,
    ) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.num_released = 0
        self.num_reused = 0
        self._on_register, self._on_unregister, self._on_reuse = on_register, on_unregister, on_reuse
        self.first_thin = num_blocks - num_thin_blocks
        self._free = FreeQueue(self.blocks[: self.first_thin])
        self._free_thin = FreeQueue(self.blocks[self.first_thin :])
        self._cached: dict[bytes, Block] = {}
        self._duplicates: dict[bytes, dict[int, Block]] = {}

    @property
    def num_blocks(self) -> int:
        """All blocks, free or not."""
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        """Blocks no sequence holds; many of them still answer to prefix hits."""
        return len(self._free) + len(self._free_thin)

    @property
    def num_thin(self) -> int:
        """Of all blocks, the thin ones."""
        return len(self.blocks) - self.first_thin

    @property
    def num_free_thin(self) -> int:
        """Of the free blocks, the thin ones."""
        return len(self._free_thin)

    def free_blocks(self) -> Iterator[Block]:
        """Yield the free blocks in the order of reuse."""
        return chain(self._free, self._free_thin)

    def free_block_ids(self) -> list[int]:
        """Ids of the free blocks in the order of reuse; O(free), for tests and diagnosis."""
        return [block.block_id for block in self.free_blocks()]

    def get_new_blocks(self, count: int, *, sparing: bool = False) -> list[Block]:
        """Take `count` blocks out of the free queues, forgetting their content; each has one reference afterwards.

        Whole blocks come before thin ones, but with `sparing` after them while any thin one is in use. The caller has
        checked `num_free`; `QuireError` otherwise, with nothing taken.
        """
        if count > self.num_free:
            raise QuireError(f"{count} blocks wanted, {self.num_free} free")
        taken = []
        first, second = self._free, self._free_thin
        if sparing and len(second) < self.num_thin:
            first, second = second, first
        for _ in range(count):
            block = (first or second).popleft()
            if block.block_hash is not None:
                if self._on_reuse is not None:
                    self.num_reused += 1
                    self._on_reuse(block)
                self.unregister(block)
            block.ref_count = 1
            taken.append(block)
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        """Add one reference to each block, taking it out of the free queue if it stands there."""
        for block in blocks:
            if block.ref_count == 0:
                self._queue_of(block).remove(block)
            block.ref_count += 1

    def free(self, blocks: Iterable[Block]) -> None:
        """Drop one reference to each block; those without any left become free, in the order given.

        Blocks with findable content go to the back of the queue; the others hold nothing worth keeping and go to the
        front, so that cached content lives longer and fewer memory pages are touched.
        """
        for block in blocks:
            if block.ref_count <= 0:
                raise QuireError(f"double free of {block!r}")
            block.ref_count -= 1
            if block.ref_count == 0:
                self.num_released += 1
                if block.block_hash is None:
                    self._queue_of(block).prepend(block)
                else:
                    self._queue_of(block).append(block)

    def _queue_of(self, block: Block) -> FreeQueue:
        return self._free if block.block_id < self.first_thin else self._free_thin

    def lookup(self, block_hash: bytes) -> Block | None:
        """Return a block with this content, free or in use, or None."""
        return self._cached.get(block_hash)

    def register(
        self,
        block: Block,
        block_hash: bytes,
        parent_hash: bytes = b"",
        token_ids: list[int] | None = None,
        step: int = -1,
    ) -> None:
        """Let a block in use be found under `block_hash` from now on; the rest is noted on it, see `Block`."""
        if block.block_hash is not None:
            raise QuireError(f"{block!r} is registered already")
        block.block_hash = block_hash
        block.parent_hash, block.token_ids, block.step = parent_hash, token_ids or [], step
        if self._on_register is not None:
            self._on_register(block)
        if block_hash in self._cached:
            self._duplicates.setdefault(block_hash, {})[block.block_id] = block
        else:
            self._cached[block_hash] = block

    def unregister(self, block: Block) -> None:
        """Forget the content of `block`; a block without registered content is left as it is."""
        block_hash = block.block_hash
        if block_hash is None:
            return
        if self._on_unregister is not None:
            self._on_unregister(block)
        block.block_hash = None
        others = self._duplicates.get(block_hash)
        if self._cached[block_hash] is not block:
            assert others is not None
            del others[block.block_id]
        elif others is None:
            del self._cached[block_hash]
        else:
            self._cached[block_hash] = others.pop(next(iter(others)))
        if others is not None and not others:
            del self._duplicates[block_hash]

    def unregister_all(self) -> int:
        """Forget all content; return the number of blocks that had some."""
        count = 0
        for block in self.blocks:
            if block.block_hash is not None:
                count += 1
                self.unregister(block)
        return count

    def check_integrity(self, ref_counts: Sequence[int]) -> None:
        """Raise `QuireError` on a broken invariant; `ref_counts[block_id]` are the references that tables hold."""
        self._free.check_integrity()
        self._free_thin.check_integrity()
        in_queue = {block.block_id for block in self.free_blocks()}
        if any(block.block_id >= self.first_thin for block in self._free) or any(
            block.block_id < self.first_thin for block in self._free_thin
        ):
            raise QuireError("a block stands in the free queue of the other kind")
        registered = 0
        for block, expected in zip(self.blocks, ref_counts, strict=True):
            if block.ref_count != expected:
                raise QuireError(f"{block!r}: block tables hold {expected} references")
            if (block.ref_count == 0) != (block.block_id in in_queue):
                raise QuireError(f"{block!r}: in the free queue and in use, or neither")
            if block.block_hash is not None:
                registered += 1
                others = self._duplicates.get(block.block_hash, {})
                if self._cached.get(block.block_hash) is not block and others.get(block.block_id) is not block:
                    raise QuireError(f"{block!r}: not to be found under its hash")
        found = len(self._cached) + sum(len(others) for others in self._duplicates.values())
        if found != registered or not all(self._duplicates.values()):
            raise QuireError(f"hash map: {found} entries for {registered} blocks with content")
