"""`KVCacheManager`: block tables of the live sequences, and the prefix cache over them.

The scheduler asks it for slots before each step and hands them back at the end; it counts in blocks and tokens and
never sees data. Full blocks are registered for sharing when their slots are *allocated*, not when they are computed, so
that requests admitted in the same step share. This is sound because of the worker's side of the contract: in each layer
the keys and values of the whole step are written before any attention of that layer reads.

Blocks are taken one at a time as they are needed: with O(1) operations on the free queue, taking several ahead saves no
measurable time and only makes memory scarce earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.errors import QuireError
from quire.kvcache.block import Block
from quire.kvcache.block_hash import BlockHasher
from quire.kvcache.block_pool import BlockPool


class CachedSequence(Protocol):
    """What the manager needs to know of a sequence. It writes `block_hashes` and nothing else.

    Attributes:
        token_ids: prompt and output so far. num_computed_tokens: how many of them have their KV in the block table.
        block_hashes: names of the first full blocks, computed as far as they were needed; outlives the block table.
        reads_prefix_cache: False while the sequence needs the logits of its whole prompt, and so must compute it.
    """

    request_id: str
    token_ids: list[int]
    num_computed_tokens: int
    block_hashes: list[bytes]
    cache_salt: str | None

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether cached blocks may stand in for computing the sequence's first tokens."""


class KVCacheManager:
    """Allocates blocks to sequences, shares common prefixes, frees.

    Args:
        num_blocks, block_size: the pool; `block_size` is tokens per block.
        enable_prefix_caching: whether full blocks are registered and looked up at all.
        hash_key: key of the block hashes; None draws a random one.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True, hash_key: bytes | None = None
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self._hasher = BlockHasher(hash_key)
        self._tables: dict[str, list[Block]] = {}
        self._unshared: set[str] = set()  # sequences that held blocks when the prefix cache was reset

    @property
    def capacity(self) -> int:
        """Tokens that fit into the whole pool."""
        return self.pool.num_blocks * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.block_size)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` tokens fits when it has the pool to itself."""
        return num_tokens <= self.capacity

    def block_ids(self, request_id: str) -> list[int]:
        """Return the block table of a sequence; empty if it holds no blocks."""
        return [block.block_id for block in self._tables.get(request_id, ())]

    def get_computed_blocks(self, request: CachedSequence) -> tuple[list[Block], int]:
        """Return the longest run of cached blocks that `request` starts with, and the number of tokens in it.

        At least one token is left to compute, since the next one is sampled from its logits; the number is a multiple
        of the block size. Takes no references: use the result in `allocate_slots` before anything else is allocated.
        """
        blocks: list[Block] = []
        if self.enable_prefix_caching and request.reads_prefix_cache:
            for index in range((len(request.token_ids) - 1) // self.block_size):
                block = self.pool.lookup(self._block_hash(request, index))
                if block is None:
                    break
                blocks.append(block)
        return blocks, len(blocks) * self.block_size

    def allocate_slots(
        self,
        request: CachedSequence,
        num_new_tokens: int,
        computed_blocks: Sequence[Block] = (),
        num_reserved_blocks: int = 0,
    ) -> list[Block] | None:
        """Give `request` slots for its next `num_new_tokens` tokens.

        `computed_blocks`, fresh from `get_computed_blocks`, come first, for a sequence that holds no blocks yet.
        Returns the new blocks without them, or None, with no side effect at all, when fewer than
        `num_reserved_blocks` blocks would remain free.
        """
        size = self.block_size
        start = request.num_computed_tokens + len(computed_blocks) * size
        end = start + num_new_tokens
        table = self._tables.get(request.request_id)
        num_owned = len(table) if table is not None else 0
        num_needed = -(-end // size) - num_owned - len(computed_blocks)
        new_blocks: list[Block] = []
        if num_needed > 0:
            num_woken = sum(block.ref_count == 0 for block in computed_blocks)
            if num_needed + num_woken + num_reserved_blocks > self.pool.num_free:
                return None
            if table is None:
                table = self._tables[request.request_id] = []
            # The hits are referenced before new blocks are taken, which could otherwise reuse them.
            self.pool.touch(computed_blocks)
            new_blocks = self.pool.get_new_blocks(num_needed)
            table += computed_blocks
            table += new_blocks
        if self.enable_prefix_caching and end // size > start // size and request.request_id not in self._unshared:
            assert table is not None
            for index in range(start // size, end // size):
                self.pool.register(table[index], self._block_hash(request, index))
        return new_blocks

    def free(self, request: CachedSequence, *, forget: bool = False) -> None:
        """Give back all blocks of `request`, last one first, so that the ends of prefixes are reused before the starts.

        With `forget` their content cannot be found any more: it is known to be bad. No blocks held is no error.
        """
        table = self._tables.pop(request.request_id, None)
        if table is None:
            return
        self._unshared.discard(request.request_id)
        if forget:
            for block in table:
                self.pool.unregister(block)
        self.pool.free(reversed(table))

    def reset_prefix_cache(self) -> int:
        """Forget all cached content; return how many blocks had some.

        Nothing computed before the reset, or from that, can be hit afterwards: sequences that hold blocks keep them,
        but share neither these nor what they add to them.
        """
        self._unshared.update(self._tables)
        return self.pool.unregister_all()

    def check_integrity(self) -> None:
        """Raise `QuireError` on a broken invariant of tables, reference counts, free queue, or hash map; O(blocks)."""
        ref_counts = [0] * self.pool.num_blocks
        for request_id, table in self._tables.items():
            if not table or len({block.block_id for block in table}) != len(table):
                raise QuireError(f"block table of {request_id!r} is empty or holds a block twice")
            for block in table:
                ref_counts[block.block_id] += 1
        self.pool.check_integrity(ref_counts)

    def num_tables(self) -> int:
        """Sequences that hold blocks."""
        return len(self._tables)

    def _block_hash(self, request: CachedSequence, index: int) -> bytes:
        """Return the name of block `index`, which is full; blocks are asked for in order, each hashed once."""
        hashes = request.block_hashes
        if index == len(hashes):
            parent = hashes[-1] if hashes else self._hasher.root(request.cache_salt)
            start = index * self.block_size
            hashes.append(self._hasher.extend(parent, request.token_ids[start : start + self.block_size]))
        return hashes[index]
