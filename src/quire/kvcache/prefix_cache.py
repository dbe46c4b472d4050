"""Prefix lookup finds what the tiers hold of the beginning of a sequence, by whole blocks and by tokens.

`longest_hit` searches for whole blocks over several groups of layers. `PrefixTree` finds the block that continues a
prefix and begins as a prompt does, so that reuse is token-granular, as in a radix tree (Zheng et al. 2024, SGLang,
section 3), while blocks stay blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import cast

from quire.kvcache.block_pool import NULL_BLOCK, Block
from quire.kvcache.tiers import TierHit

MAX_CHILDREN = 16  # looked at for one match: a prefix may have been continued in thousands of ways

CachedBlock = Block | TierHit


class PrefixHit:
    """The longest cached prefix of a sequence.

    It holds no references to its blocks, so it is valid until anything else is allocated.

    Attributes:
        tables: for each group of layers the blocks from the first on, of the device or to be loaded from the host
            within the step; `NULL_BLOCK` where the group's window has passed.
        num_tokens: tokens that need not be computed, those of `partial` included.
        partial: a device block whose first tokens continue the whole blocks; to be copied.
        loads: blocks of asynchronous tiers that would make the hit longer.
        loading: whether some of these are being loaded already, for another sequence.
    """

    __slots__ = ("loading", "loads", "num_tokens", "partial", "tables")

    def __init__(self, tables: list[list[CachedBlock]], num_tokens: int) -> None:
        self.tables = tables
        self.num_tokens = num_tokens
        self.partial: Block | None = None
        self.loads: list[TierHit] = []
        self.loading = False

    def num_blocks_needed(self) -> int:
        """Return how many free blocks the hit takes: its own that no sequence uses, new ones to load the rest into."""
        count = 0
        for table in self.tables:
            for cached in table:
                count += not isinstance(cached, Block) or (cached.ref_count == 0 and cached is not NULL_BLOCK)
        return count

    def count_tokens(self, block_size: int, loaded: Container[bytes]) -> tuple[int, int]:
        """Return how many tokens are on the host, and on the device in `loaded` blocks, by the first group of layers.

        Args:
            loaded: hashes of the blocks that were loaded from asynchronous tiers for this sequence.
        """
        num_host_blocks = sum(isinstance(cached, TierHit) for cached in self.tables[0])
        num_loaded = sum(isinstance(cached, Block) and cached.block_hash in loaded for cached in self.tables[0])
        return num_host_blocks * block_size, num_loaded * block_size


def longest_hit(
    windows: list[int | None], block_size: int, limit: int, find: Callable[[int, int], CachedBlock | None]
) -> list[list[CachedBlock]]:
    """Return for each group the blocks of the longest beginning, at most `limit` blocks, that all groups hold.

    A group without a window must hold all blocks of it; one with a window, those that the next token sees.

    Args:
        find: returns block `index` of group `group`, `find(group, index)`, or None.
    """
    columns: list[list[CachedBlock | None]] = [[] for _ in windows]
    for group, window in enumerate(windows):
        if window is None:
            for index in range(limit):
                cached = find(group, index)
                if cached is None:
                    limit = index
                    break
                columns[group].append(cached)
    runs: dict[int, list[int]] = {}  # for each windowed group: how many blocks in a row end at each index
    for group, window in enumerate(windows):
        if window is not None:
            columns[group] = [find(group, index) for index in range(limit)]
            run, lengths = 0, []
            for column in columns[group]:
                run = run + 1 if column is not None else 0
                lengths.append(run)
            runs[group] = lengths
    while limit and not all(
        lengths[limit - 1] >= limit - first_block_in_window(limit * block_size, windows[group] or 0, block_size)
        for group, lengths in runs.items()
    ):
        limit -= 1
    tables: list[list[CachedBlock | None]] = []
    for blocks, window in zip(columns, windows, strict=True):
        first = 0 if window is None else min(first_block_in_window(limit * block_size, window, block_size), limit)
        passed: list[CachedBlock | None] = [NULL_BLOCK] * first
        tables.append(passed + blocks[first:limit])
    return cast(list[list[CachedBlock]], tables)  # the blocks that are missing are none of these


def first_block_in_window(position: int, window: int, block_size: int) -> int:
    """Return the index of the first block that a query at `position` sees through `window`."""
    return max(position - window + 1, 0) // block_size


class PrefixTree:
    """Finds registered blocks by the prefix that they continue, and their first tokens."""

    __slots__ = ("_children",)

    def __init__(self) -> None:
        self._children: dict[tuple[bytes, int], dict[int, Block]] = {}

    def add(self, block: Block) -> None:
        """Add a block that was just registered."""
        if block.token_ids:
            self._children.setdefault((block.parent_hash, block.token_ids[0]), {})[block.block_id] = block

    def remove(self, block: Block) -> None:
        """Remove a block that is about to be unregistered."""
        if block.token_ids:
            key = (block.parent_hash, block.token_ids[0])
            siblings = self._children[key]
            del siblings[block.block_id]
            if not siblings:
                del self._children[key]

    def match(self, parent_hash: bytes, token_ids: list[int], before_step: int) -> tuple[Block | None, int]:
        """Return the block after the prefix `parent_hash` that shares most first tokens with `token_ids`, and how many.

        Only blocks computed before step `before_step` count; of many children the latest are compared.
        """
        if not token_ids:
            return None, 0
        best, best_length = None, 0
        siblings = self._children.get((parent_hash, token_ids[0]))
        if siblings is None:
            return None, 0
        for number, block in enumerate(reversed(siblings.values())):
            if number == MAX_CHILDREN:
                break
            # Most children diverge no later than the best so far, which takes one comparison to see.
            if block.step < before_step and block.token_ids[: best_length + 1] == token_ids[: best_length + 1]:
                length = common_length(block.token_ids, token_ids)
                if length > best_length:
                    best, best_length = block, length
        return best, best_length


def common_length(left: list[int], right: list[int]) -> int:
    """Return how many items two lists have in common at their beginnings."""
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length
    return next(index for index in range(length) if left[index] != right[index])
