"""`BlockPool` knows which blocks are free, how many block tables use each of the others, and which hash finds which.

Bookkeeping only: the worker owns the memory. A free block keeps its content and its hash until it is allocated again,
so the free queue *is* the prefix cache, in LRU order. Sequences and tokens are the concern of `manager`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from quire.errors import QuireError


class Block:
    """A block stands for `block_size` slots of KV memory in each layer of a group; its id says which.

    Attributes:
        block_id: index into the worker's KV storage (or into the host's pool, see `tiers`).
        ref_count: block tables that have it; 0 means it is in the free queue.
        block_hash: of all tokens up to its end, once it is registered; None otherwise. A free block keeps its hash, and
            so can be hit, until it is allocated again.
        parent_hash, token_ids: of a registered block: the hash of the prefix before it, and its own tokens. A block
            with fewer tokens than slots is a *tail*, the last one of a sequence that has ended.
        step: in which step the content was or will be computed.
    """

    __slots__ = ("block_hash", "block_id", "parent_hash", "ref_count", "step", "token_ids")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
        self.parent_hash: bytes = b""
        self.token_ids: list[int] = []
        self.step = -1

    def __repr__(self) -> str:
        digest = self.block_hash.hex()[:8] if self.block_hash else None
        return f"Block(id={self.block_id}, refs={self.ref_count}, hash={digest})"


NULL_BLOCK = Block(0)
"""Placeholder in a block table where a sliding window has passed; the worker never reads there."""


class BlockPool:
    """Counts the references of a fixed number of blocks, and finds blocks by their hash.

    Several blocks may have the same content, where sequences generated the same text at the same time: block tables are
    append-only, so duplicates remain. `lookup` finds one of them, and another one when that is evicted.

    The last `num_layerwise_blocks` are layerwise (see `layerwise`), the others resident. Each kind is allocated in its
    own LRU order, resident ones first as a rule: their content is evicted before a layerwise block is taken, even one
    that holds nothing.

    Args:
        on_register, on_unregister: called with each block that is registered, and before it is unregistered.
        on_evict: called with a registered block that is about to be allocated again, while its content is there.

    Attributes:
        first_layerwise: id of the first layerwise block; as many as there are blocks if none is.
        blocks: all blocks, by id. num_freed, num_evicted: counters of blocks that became free, and of calls of
            `on_evict`.
    """

    def __init__(
        self,
        num_blocks: int,
        num_layerwise_blocks: int = 0,
        *,
        on_register: Callable[[Block], None] | None = None,
        on_unregister: Callable[[Block], None] | None = None,
        on_evict: Callable[[Block], None] | None = None,
    ) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.num_freed = 0
        self.num_evicted = 0
        self._on_register, self._on_unregister, self._on_evict = on_register, on_unregister, on_evict
        self.first_layerwise = num_blocks - num_layerwise_blocks
        self._free = _free_queue(self.blocks[: self.first_layerwise])
        self._free_layerwise = _free_queue(self.blocks[self.first_layerwise :])
        self._cached: dict[bytes, Block] = {}
        self._duplicates: dict[bytes, dict[int, Block]] = {}

    @property
    def num_blocks(self) -> int:
        """Number of all blocks, free or not."""
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        """Number of blocks in no block table; many of them can still be hit."""
        return len(self._free) + len(self._free_layerwise)

    @property
    def num_layerwise(self) -> int:
        """Number of layerwise blocks."""
        return len(self.blocks) - self.first_layerwise

    @property
    def num_free_layerwise(self) -> int:
        """Number of free layerwise blocks."""
        return len(self._free_layerwise)

    def free_blocks(self) -> Iterator[Block]:
        """Yield the free blocks in the order of allocation."""
        return chain(self._free.values(), self._free_layerwise.values())

    def get_new_blocks(self, count: int, *, prefer_layerwise: bool = False) -> list[Block]:
        """Allocate `count` blocks with one reference each, evicting their content.

        Resident blocks come before layerwise ones; with `prefer_layerwise` after them, while any of those is in use.
        The caller has checked `num_free`; `QuireError` otherwise, with nothing taken.
        """
        if count > self.num_free:
            raise QuireError(f"{count} blocks requested, {self.num_free} free")
        taken = []
        first, second = self._free, self._free_layerwise
        if prefer_layerwise and len(second) < self.num_layerwise:
            first, second = second, first
        for _ in range(count):
            _, block = (first or second).popitem(last=False)
            if block.block_hash is not None:
                if self._on_evict is not None:
                    self.num_evicted += 1
                    self._on_evict(block)
                self.unregister(block)
            block.ref_count = 1
            taken.append(block)
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        """Add one reference to each block, taking it out of the free queue if it is there."""
        for block in blocks:
            if block.ref_count == 0:
                del self._queue_of(block)[block.block_id]
            block.ref_count += 1

    def free(self, blocks: Iterable[Block]) -> None:
        """Drop one reference to each block; those without any left become free, in the order given.

        Registered blocks go to the back of the queue; the others, whose content is of no use, to the front, so that
        cached content lives longer and fewer memory pages are touched.
        """
        for block in blocks:
            if block.ref_count <= 0:
                raise QuireError(f"double free of {block!r}")
            block.ref_count -= 1
            if block.ref_count == 0:
                self.num_freed += 1
                queue = self._queue_of(block)
                queue[block.block_id] = block
                if block.block_hash is None:
                    queue.move_to_end(block.block_id, last=False)

    def _queue_of(self, block: Block) -> OrderedDict[int, Block]:
        return self._free if block.block_id < self.first_layerwise else self._free_layerwise

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
        """Let `lookup` find a block in use by its hash; the other arguments are as in `Block`."""
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
        """Undo `register`; no error if `block` is not registered."""
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
        """Unregister all blocks; return how many were registered."""
        count = 0
        for block in self.blocks:
            if block.block_hash is not None:
                count += 1
                self.unregister(block)
        return count

    def check_integrity(self, ref_counts: Sequence[int]) -> None:
        """Raise `QuireError` on a broken invariant; `ref_counts[block_id]` are the references of block tables."""
        in_queue = {block.block_id for block in self.free_blocks()}
        if max(self._free, default=-1) >= self.first_layerwise or any(
            block_id < self.first_layerwise for block_id in self._free_layerwise
        ):
            raise QuireError("a block is in the free queue of the other kind")
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
        num_entries = len(self._cached) + sum(len(others) for others in self._duplicates.values())
        if num_entries != registered or not all(self._duplicates.values()):
            raise QuireError(f"hash map: {num_entries} entries for {registered} blocks with content")


def _free_queue(blocks: Iterable[Block]) -> OrderedDict[int, Block]:
    """Return a queue of free blocks by id, of which the first is reused first; each is added and removed in O(1)."""
    return OrderedDict((block.block_id, block) for block in blocks)
