"""`KVCacheManager` owns the block tables of live sequences, with copy-on-write, and the prefix cache over them.

The scheduler allocates slots from it before each step. It counts blocks and tokens and never touches their data: what
must be moved (a block that is copied before it is written, swapped, or loaded from another tier) is appended to
`transfers` in the order decided, and leaves with the plan.

Full blocks are registered for sharing when their slots are *allocated*, not when they are computed, so that requests
admitted in the same step share. This is sound because of the worker's side of the contract: in each layer the keys and
values of the whole step are written before any attention of that layer reads. Copies, which are made before the model
runs, are only taken of what earlier steps computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Protocol

from quire.errors import QuireError
from quire.kvcache.block_hash import BlockHasher, CacheSalt, hash_of_group, hash_without_group
from quire.kvcache.block_pool import NULL_BLOCK, Block, BlockPool
from quire.kvcache.layerwise import STREAMED_TOKENS, LayerwiseBlocks
from quire.kvcache.prefix_cache import (
    CachedBlock,
    PrefixHit,
    PrefixTree,
    first_block_in_window,
    longest_hit,
)
from quire.kvcache.tiers import (
    AsyncLoads,
    AsyncTierManager,
    DiskTierManager,
    HostTierManager,
    TierHit,
    TierManager,
    headers_of,
)
from quire.step import BlockTransfer, Tier, TransferOp

MIN_PARTIAL_SHARE = 8  # a copy for less than this part of a block costs more than it saves

# What changed in a sequence's tables: blocks appended to each group's (or none at all), and entries (group, index,
# block id) that were replaced.
Allocation = tuple[Sequence[list[int]], Sequence[tuple[int, int, int]]]
UNCHANGED: Allocation = ((), ())

BlockTables = list[list[Block]]  # of one sequence, for each group of layers

_COPY, _DEVICE = TransferOp.COPY, Tier.DEVICE  # enum attributes are slow to look up


class CachedSequence(Protocol):
    """The manager reads all of this. It writes `block_hashes` and nothing else.

    Attributes:
        token_ids: prompt and output so far: its final tokens. num_tokens: these, and tentative ones after them.
        num_computed_tokens: how many of all these have their KV in the block tables.
        block_hashes: of the first full blocks, computed as far as they were needed; outlives the block tables.
        reads_prefix_cache: False while the sequence needs the logits of its whole prompt, and so must compute it.
    """

    sequence_id: str
    token_ids: list[int]
    num_computed_tokens: int
    block_hashes: list[bytes]

    @property
    def num_tokens(self) -> int:
        """Number of final and tentative tokens."""

    @property
    def cache_salt(self) -> CacheSalt:
        """What must be equal for sequences to share blocks, beside their tokens."""

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether cached blocks may stand in for computing the sequence's first tokens."""


class KVCacheManager:
    """Allocates blocks to sequences, shares, copies on write, swaps, frees.

    Args:
        num_blocks, num_layerwise_blocks: the device's pool, see `BlockPool`. block_size: tokens per block.
        windows: for each group of layers (`KVCacheSpec.groups`) the tokens a query looks back, or None for all.
        max_step_tokens: most tokens of one sequence in a step; bounds what a windowed group holds.
        enable_prefix_caching: whether blocks are registered and looked up at all.
        prefix_match_unit: hits that end inside a block are rounded down to a multiple of so many tokens; with the block
            size or more, only whole blocks are hit.
        deduplicate_blocks: whether a block that fills up is replaced by one in use with the same content, so that
            sequences that generate the same text share it. Ids in a block table change then.
        streamed_tokens: see `LayerwiseBlocks.max_streamed_blocks`.
        num_host_blocks: size of the host's pool, for swapped sequences and for content that the device evicts.
        num_disk_slots: slots of the disk tier. stored: (slot, header) of the blocks that are there already.
        hasher: computes block hashes; by default with a random key.

    Attributes:
        tables: block tables by sequence id, to be read only, with `NULL_BLOCK` where a window has passed.
        swapped_tables: the same of swapped sequences; the blocks are the host's.
        loads: device blocks that are being loaded from asynchronous tiers.
        transfers: of the step being planned, in the order decided.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        windows: Sequence[int | None] = (None,),
        max_step_tokens: int = 2048,
        enable_prefix_caching: bool = True,
        prefix_match_unit: int = 1,
        deduplicate_blocks: bool = False,
        num_layerwise_blocks: int = 0,
        streamed_tokens: int = STREAMED_TOKENS,
        num_host_blocks: int = 0,
        num_disk_slots: int = 0,
        stored: Iterable[tuple[int, bytes]] = (),
        hasher: BlockHasher | None = None,
    ) -> None:
        self.block_size = block_size
        self.windows = list(windows)
        self._has_single_table = self.windows == [None]
        self.max_step_tokens = max_step_tokens
        self.enable_prefix_caching = enable_prefix_caching
        self.transfers: list[BlockTransfer] = []
        self.host = HostTierManager(num_host_blocks, self.transfers)
        self.disk = DiskTierManager(num_disk_slots, stored, self.transfers)
        self._async_tiers: list[AsyncTierManager] = [self.disk] if num_disk_slots else []
        self._tiers: list[TierManager] = [self.host, *self._async_tiers]
        self.tree = PrefixTree()
        self.pool = BlockPool(
            num_blocks,
            num_layerwise_blocks,
            on_register=self.tree.add,
            on_unregister=self._unregistered,
            on_evict=self._evicted if num_host_blocks or self._async_tiers else None,
        )
        self._match_unit = prefix_match_unit
        self._deduplicates = deduplicate_blocks and enable_prefix_caching
        self._hasher = hasher or BlockHasher()
        self.tables: dict[str, BlockTables] = {}
        # Entries (group, index, block id) of tables that were replaced and that the worker does not know of yet; it
        # reads no table of a sequence that computes nothing.
        self._replaced: dict[str, list[tuple[int, int, int]]] = {}
        self.layerwise = LayerwiseBlocks(
            self.pool, self.transfers, self.tables, self._replaced, streamed_tokens // block_size
        )
        self.swapped_tables: dict[str, BlockTables] = {}
        self.loads = AsyncLoads(self.pool)
        # Of the sequences that have blocks, on the device or swapped: all, and those that register none of them any
        # more, because the prefix cache was reset or their content forgotten.
        self._live: dict[str, CachedSequence] = {}
        self._uncacheable: set[str] = set()
        # KV passes from one sequence to another where they share whole blocks, or the first is copied within its last
        # block. So whatever depends on a sequence's KV begins with at least so many of its tokens.
        self._fewest_shared_tokens = block_size
        self._unstored: dict[int, Block] = {}  # full blocks that became free, for the asynchronous tiers
        self._step = 0
        self._num_evicted = 0

    # ---- sizes ----

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the most blocks that a sequence of `num_tokens` tokens holds at a time."""
        return max_blocks(num_tokens, self.windows, self.block_size, self.max_step_tokens)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` tokens fits when it has the pool to itself."""
        return self.num_blocks_for(num_tokens) <= self.pool.num_blocks

    def longest_sequence(self, limit: int) -> int:
        """Return the most tokens, up to `limit`, of a sequence that has the pool to itself."""
        return max_fitting_length(limit, self.can_ever_fit)

    def block_ids(self, sequence_id: str) -> list[list[int]]:
        """Return the block tables of a sequence, one for each group of layers; empty ones if it has no blocks."""
        tables = self.tables.get(sequence_id)
        return [[block.block_id for block in table] for table in tables] if tables else [[] for _ in self.windows]

    def has_blocks(self, sequence: CachedSequence) -> bool:
        """Whether `sequence` has block tables."""
        return sequence.sequence_id in self.tables

    def num_allocated_blocks(self, sequences: Iterable[CachedSequence], *, swapped: bool = False) -> int:
        """Return how many device blocks, or host blocks, these sequences have together; shared ones count once."""
        tables = self.swapped_tables if swapped else self.tables
        return len(_unique(tables.get(sequence.sequence_id, []) for sequence in sequences))

    def num_blocks_freed(self, sequences: Iterable[CachedSequence], hit: PrefixHit | None = None) -> int:
        """Return how many device blocks become free with these sequences: those that no others hold.

        Blocks of `hit` do not count: whoever takes it does not need free ones for them now, and would need them then.
        """
        holders = Counter(block for s in sequences for block in _blocks(self.tables.get(s.sequence_id, [])))
        kept = set() if hit is None else {cached for table in hit.tables for cached in table}
        return sum(block.ref_count == count and block not in kept for block, count in holders.items())

    # ---- steps ----

    def start_step(self) -> None:
        """Begin a step: what earlier steps computed may be copied now, and blocks that became free are stored."""
        self._step += 1
        self.layerwise.start_step(self._step)
        if self.pool.num_evicted != self._num_evicted:
            self._num_evicted = self.pool.num_evicted
            self.host.store_ahead(self.pool.free_blocks(), self.block_size)
        if self._unstored:
            for block in self._unstored.values():
                self._store(block)
            self._unstored.clear()

    # ---- the prefix cache ----

    def find_prefix(self, sequence: CachedSequence) -> PrefixHit:
        """Return what the caches hold of the beginning of `sequence`.

        At least one token is left to compute, since the next one is sampled from its logits.
        """
        if not (self.enable_prefix_caching and sequence.reads_prefix_cache):
            return PrefixHit([[] for _ in self.windows], 0)
        limit = _max_hit(sequence) // self.block_size
        loads: list[TierHit] = []
        if any(map(len, self._async_tiers)):
            loading = self.loads.block_hashes()
            tables = self._longest_hit(sequence, limit, lambda each: self._lookup_with_loads(each, loading))
            tier_hits = (cached for table in tables for cached in table if isinstance(cached, TierHit))
            loads = [each for each in tier_hits if each.tier is not self.host]
            if loads:
                tables = self._longest_hit(sequence, limit, self._lookup)
        else:
            tables = self._longest_hit(sequence, limit, self._lookup)
        hit = PrefixHit(tables, len(tables[0]) * self.block_size)
        if loads:
            hit.loads = [each for each in loads if each.block_hash not in loading]
            hit.loading = len(hit.loads) < len(loads)
        if len(self.windows) == 1 and self._match_unit < self.block_size:
            self._find_partial(sequence, hit)
        return hit

    def _longest_hit(
        self, sequence: CachedSequence, limit: int, lookup: Callable[[bytes], CachedBlock | None]
    ) -> list[list[CachedBlock]]:
        """Return the longest beginning of `sequence` that `lookup` finds by its hashes, see `longest_hit`."""
        return longest_hit(
            self.windows, self.block_size, limit, lambda group, index: lookup(self._block_hash(sequence, index, group))
        )

    def _lookup(self, block_hash: bytes) -> CachedBlock | None:
        """Return the block with this hash on the device, or else on the host."""
        block = self.pool.lookup(block_hash)
        if block is None and self.host.lookup(block_hash):
            return TierHit(self.host, block_hash)
        return block

    def _lookup_with_loads(self, block_hash: bytes, loading: Container[bytes]) -> CachedBlock | None:
        """Return the block with this hash on the device, or else in a tier; those that are being loaded count."""
        cached = self._lookup(block_hash)
        if cached is None:
            for tier in self._async_tiers:
                if block_hash in loading or tier.lookup(block_hash):
                    return TierHit(tier, block_hash)
        return cached

    def _find_partial(self, sequence: CachedSequence, hit: PrefixHit) -> None:
        """Extend `hit` into a block whose first tokens continue the sequence."""
        start = hit.num_tokens
        index = start // self.block_size
        parent = self._parent_hash(sequence, index)
        following = sequence.token_ids[start : min(start + self.block_size, _max_hit(sequence))]
        block, count = self.tree.match(parent, following, self._step)
        count -= count % self._match_unit
        if block is not None and count and count * MIN_PARTIAL_SHARE >= self.block_size:
            hit.partial = block
            hit.num_tokens += count

    def forget(self, sequences: Collection[CachedSequence]) -> None:
        """Let no tier find what was computed of `sequences`, which is bad, nor anything that may depend on it.

        Where in a sequence the bad KV begins is not known, nor what other sequences took it from or passed it on to,
        by sharing blocks or copying them. All of these begin alike (`_fewest_shared_tokens`) under the same salt: so
        everything cached that begins like that goes, whether a sequence still has it or not, and live sequences that do
        keep their blocks but register nothing more. It takes time linear in the blocks of all tiers.

        What a cached block begins with is known by the chain of its parents. Of a sequence that has ended, a block
        stays whose chain is broken because all tiers have evicted one between.
        """
        count = self._fewest_shared_tokens
        beginnings = {  # of all lengths, for tails
            (self._hasher.root(sequence.cache_salt), tuple(sequence.token_ids[:length]))
            for sequence in sequences
            for length in range(1, count + 1)
        }
        pending = {block_hash for sequence in sequences for block_hash in sequence.block_hashes}
        for sequence_id, live in self._live.items():
            if (self._hasher.root(live.cache_salt), tuple(live.token_ids[:count])) in beginnings:
                self._uncacheable.add(sequence_id)
                pending.update(live.block_hashes)
        children: dict[bytes, list[bytes]] = {}  # hashes in the first group of layers
        for header in chain(headers_of(self.pool), self.loads.headers(), *(tier.headers() for tier in self._tiers)):
            block_hash = hash_without_group(header.block_hash)
            children.setdefault(hash_without_group(header.parent_hash), []).append(block_hash)
            if (header.parent_hash, tuple(header.token_ids[:count])) in beginnings:
                pending.add(block_hash)
        forgotten: set[bytes] = set()
        while pending:
            block_hash = pending.pop()
            forgotten.update(hash_of_group(block_hash, group) for group in range(len(self.windows)))
            pending.update(children.pop(block_hash, ()))
        for block in self.pool.blocks:
            if block.block_hash in forgotten:
                self.pool.unregister(block)
        for tier in self._tiers:
            tier.drop(forgotten)
        self.loads.forget(forgotten)

    def reset_prefix_cache(self) -> int:
        """Forget all cached content, in every tier; return how many device blocks had some.

        Nothing that was computed before the reset, or depends on it, can be hit afterwards: live sequences keep their
        blocks, but neither these nor the ones they add are registered.
        """
        self._uncacheable.update(self._live)
        self._unstored.clear()
        self.loads.forget()
        for tier in self._tiers:
            tier.clear()
        return self.pool.unregister_all()

    # ---- slots ----

    def has_slot(self, sequence: CachedSequence) -> bool:
        """Whether the next token of `sequence` has a slot in an unshared block that it does not fill.

        Then nothing has to be allocated or registered for it.
        """
        tables = self.tables.get(sequence.sequence_id)
        if tables is None or self._replaced or not self._has_single_table:
            return False
        start, size = sequence.num_computed_tokens, self.block_size
        table, index = tables[0], start // size
        return (start + 1) % size != 0 and index < len(table) and table[index].ref_count == 1

    def allocate_slots(
        self,
        sequence: CachedSequence,
        num_new_tokens: int,
        hit: PrefixHit | None = None,
    ) -> Allocation | None:
        """Give `sequence` slots for its next `num_new_tokens` tokens.

        `hit`, fresh from `find_prefix`, comes first, for a sequence that holds no blocks yet; its blocks are among
        those returned. A shared block that is about to be written is copied, and replaced in the table; what windows
        have passed is freed. Returns None, with nothing allocated, if fewer blocks are free than `num_blocks_needed`.
        """
        self.free_out_of_windows((sequence,))
        if self.num_blocks_needed((sequence,), num_new_tokens, hit) > self.pool.num_free:
            return None
        size = self.block_size
        start = sequence.num_computed_tokens
        if hit is not None:
            start += hit.num_tokens
        end = start + num_new_tokens
        tables = self.tables.get(sequence.sequence_id)
        if tables is None:
            tables = self.tables[sequence.sequence_id] = [[] for _ in self.windows]
            self._live[sequence.sequence_id] = sequence
        replaced = self._replaced.pop(sequence.sequence_id, [])
        index, offset = divmod(start, size)
        if offset:
            for group, table in enumerate(tables):
                if index < len(table) and table[index].ref_count > 1:
                    replaced.append(self._copy_on_write(tables, group, index))
        if self._deduplicates and start and start % size == 0 and hit is None:
            replaced += self._deduplicate(tables, start // size - 1)
        if replaced:
            self.layerwise.forget(sequence.sequence_id)
        new_block_ids = self._append_blocks(tables, hit, end, prefer_layerwise=num_new_tokens > 1)
        self._register(sequence, tables, start, end)
        return (new_block_ids if any(new_block_ids) else (), replaced)

    def free_out_of_windows(self, sequences: Iterable[CachedSequence]) -> None:
        """Free the blocks of these sequences that their windows have passed; `num_blocks_needed` counts on that."""
        if self._has_single_table:
            return
        for sequence in sequences:
            # A query may come back to a tentative token, but not to one before.
            position = min(sequence.num_computed_tokens, len(sequence.token_ids))
            for table, window in zip(self.tables.get(sequence.sequence_id, ()), self.windows, strict=False):
                if window is None:
                    continue
                first = min(first_block_in_window(position, window, self.block_size), len(table))
                for index in range(first - 1, -1, -1):
                    block = table[index]
                    if block is NULL_BLOCK:
                        break
                    table[index] = NULL_BLOCK
                    self._free((block,))

    def num_blocks_needed(
        self,
        sequences: Iterable[CachedSequence],
        num_new_tokens: int,
        hit: PrefixHit | None = None,
        *,
        swapped: bool = False,
    ) -> int:
        """Return how many free blocks it takes for each of these sequences to compute its next tokens.

        These are new blocks, in each group of layers, and copies of shared blocks that are about to be written: of the
        sequences that share a block all but one get a copy, or all if another sequence has it as well. With a `hit`
        they are also those of its blocks that are free, and new ones to load the others into.

        Args:
            num_new_tokens: most tokens that each sequence computes.
            hit: what the caches hold of a single sequence, which has no blocks.
            swapped: count for the tables of swapped sequences.
        """
        size, count = self.block_size, 0
        writers: dict[Block, int] = {}  # of shared blocks
        for sequence in sequences:
            start = sequence.num_computed_tokens
            tables = (self.swapped_tables if swapped else self.tables).get(sequence.sequence_id)
            if hit is not None:
                start += hit.num_tokens
                count += hit.num_blocks_needed()
            end = min(start + num_new_tokens, sequence.num_tokens)
            if end == start:
                continue
            last = -(-end // size)
            if tables is None:
                num_found = 0 if hit is None else sum(map(len, hit.tables))
                count += last * len(self.windows) - num_found
                continue
            index, offset = divmod(start, size)
            for table in tables:
                count += max(last - len(table), 0)
                if offset and index < len(table) and table[index].ref_count > 1:
                    writers[table[index]] = writers.get(table[index], 0) + 1
        return count + sum(min(number, block.ref_count - 1) for block, number in writers.items())

    def _copy_on_write(self, tables: BlockTables, group: int, index: int) -> tuple[int, int, int]:
        """Copy a shared block before this sequence writes to it."""
        block = tables[group][index]
        (copy,) = self.pool.get_new_blocks(1)
        self.transfers.append(BlockTransfer(_COPY, _DEVICE, block.block_id, copy.block_id))
        self.pool.free((block,))
        tables[group][index] = copy
        return group, index, copy.block_id

    def _deduplicate(self, tables: BlockTables, index: int) -> list[tuple[int, int, int]]:
        """Replace block `index`, full and computed, by one in use with the same content; takes no free block."""
        replaced = []
        for group, table in enumerate(tables):
            block = table[index]
            other = None if block.block_hash is None else self.pool.lookup(block.block_hash)
            if other is not None and other is not block and other.ref_count and other.step < self._step:
                self.pool.touch((other,))
                self._free((block,))
                table[index] = other
                replaced.append((group, index, other.block_id))
        return replaced

    def _append_blocks(
        self, tables: BlockTables, hit: PrefixHit | None, end: int, prefer_layerwise: bool
    ) -> list[list[int]]:
        """Append the blocks of `hit`, if any, and new ones up to token `end`; return the ids appended."""
        # What the hit consists of is referenced before new blocks are taken, which could otherwise reuse it.
        if hit is not None:
            for cached in (cached for table in hit.tables for cached in table):
                if isinstance(cached, TierHit):
                    self.host.pin(cached.block_hash)
                elif isinstance(cached, Block) and cached is not NULL_BLOCK:
                    self.pool.touch((cached,))
        appended = []
        for group, table in enumerate(tables):
            first = len(table)
            if hit is not None:
                copies = self._copy_partial(hit)
                for cached in hit.tables[group]:
                    table.append(self._load(cached) if isinstance(cached, TierHit) else cached)
                table += copies
            table += self.pool.get_new_blocks(
                max(-(-end // self.block_size) - len(table), 0), prefer_layerwise=prefer_layerwise
            )
            appended.append([block.block_id for block in table[first:]])
        return appended

    def _copy_partial(self, hit: PrefixHit) -> list[Block]:
        """Return a new block with the content of `hit.partial`, if it has one.

        The source is read before anything else is written, so that it may itself be reused in this step. It keeps its
        place in the free queue: a partial hit is worth less than a whole one.
        """
        if hit.partial is None:
            return []
        self._fewest_shared_tokens = min(self._fewest_shared_tokens, hit.num_tokens)
        (copy,) = self.pool.get_new_blocks(1)
        if copy is not hit.partial:
            self.transfers.append(BlockTransfer(_COPY, _DEVICE, hit.partial.block_id, copy.block_id))
        return [copy]

    def _load(self, hit: TierHit) -> Block:
        """Return a new device block with the content of a pinned host block, registered like it."""
        (block,) = self.pool.get_new_blocks(1)
        header = self.host.load(hit.block_hash, block)
        self.pool.register(block, header.block_hash, header.parent_hash, header.token_ids, self._step)
        return block

    def commit(self, sequence: CachedSequence, start: int) -> None:
        """Register the full blocks of final tokens from `start` on, as far as they are computed.

        To be called when tokens became final after slots were allocated for them.
        """
        tables = self.tables.get(sequence.sequence_id)
        if tables is not None:
            self._register(sequence, tables, start, sequence.num_computed_tokens)

    def _register(self, sequence: CachedSequence, tables: BlockTables, start: int, end: int) -> None:
        """Register the blocks that final ones of the tokens start .. end - 1 fill up."""
        size = self.block_size
        first, last = start // size, min(end, len(sequence.token_ids)) // size
        if first >= last or not self.enable_prefix_caching or sequence.sequence_id in self._uncacheable:
            return
        parent = self._parent_hash(sequence, first)
        hashes = sequence.block_hashes
        for index in range(first, last):
            token_ids = sequence.token_ids[index * size : index * size + size]
            if index == len(hashes):
                hashes.append(self._hasher.extend(parent, token_ids))
            block_hash = hashes[index]
            for group, table in enumerate(tables):
                block = table[index]
                if block.block_hash is None and block is not NULL_BLOCK:
                    above = hash_of_group(parent, group) if index else parent
                    self.pool.register(block, hash_of_group(block_hash, group), above, token_ids, self._step)
            parent = block_hash

    # ---- forks, swaps, ends ----

    def fork(self, parent: CachedSequence, child: CachedSequence) -> None:
        """Let `child` share all blocks of `parent`; the last one is copied when either writes to it."""
        tables = self.tables[parent.sequence_id]
        self.pool.touch(_blocks(tables))
        self.tables[child.sequence_id] = [list(table) for table in tables]
        self._live[child.sequence_id] = child
        self._fewest_shared_tokens = min(self._fewest_shared_tokens, len(parent.token_ids))
        if parent.sequence_id in self._replaced:  # the worker will copy the parent's table as it knows it
            self._replaced[child.sequence_id] = self._replaced[parent.sequence_id].copy()
        if parent.sequence_id in self._uncacheable:
            self._uncacheable.add(child.sequence_id)

    def swap_out(self, sequences: Sequence[CachedSequence]) -> bool:
        """Move all blocks of `sequences` to the host's pool, shared ones once; False if there is no room."""
        blocks = _unique(self.tables.get(sequence.sequence_id, []) for sequence in sequences)
        if not blocks or len(blocks) > self.host.pool.num_free:
            return False
        moved = dict(zip(blocks, self.host.swap_out(blocks.values()), strict=True))
        swapped = {
            sequence.sequence_id: _substitute(self.tables[sequence.sequence_id], moved)
            for sequence in sequences
            if sequence.sequence_id in self.tables
        }
        for sequence in sequences:
            self._free_tables(sequence)
        self.swapped_tables |= swapped
        # A host block has one reference for each table that holds it, like any other; it was taken with one.
        for tables in swapped.values():
            self.host.pool.touch(_blocks(tables))
        self.host.pool.free(moved.values())
        return True

    def num_blocks_to_swap_in(self, sequences: Sequence[CachedSequence]) -> int:
        """Return how many device blocks `swap_in` takes, and one more for each sequence to go on with.

        Where the pool has not so many, those that are not needed yet do not count.
        """
        tables = [self.swapped_tables[s.sequence_id] for s in sequences if s.sequence_id in self.swapped_tables]
        num_swapped = len(_unique(tables))
        if num_swapped + len(tables) * len(self.windows) <= self.pool.num_blocks:
            return num_swapped + len(tables) * len(self.windows)
        return num_swapped + self.num_blocks_needed(sequences, 1, swapped=True)

    def swap_in(self, sequences: Sequence[CachedSequence]) -> None:
        """Bring back what `swap_out` moved; the caller has checked that the blocks are there."""
        swapped = [
            (s, self.swapped_tables.pop(s.sequence_id)) for s in sequences if s.sequence_id in self.swapped_tables
        ]
        sources = _unique(tables for _, tables in swapped)
        # All at once: what they held goes out before anything comes in, so that the worker moves each in one batch.
        moved = dict(zip(sources, self.pool.get_new_blocks(len(sources)), strict=True))
        for block_id, source in sources.items():
            self.host.swap_in(source, moved[block_id])
        for sequence, host_tables in swapped:
            tables = self.tables[sequence.sequence_id] = _substitute(host_tables, moved)
            self.host.pool.free(_blocks(host_tables))
            self.pool.touch(_blocks(tables))
            self._register(sequence, tables, 0, sequence.num_computed_tokens)
        self.pool.free(moved.values())  # they were taken with one reference each, and have one for each table now

    def free(self, sequence: CachedSequence) -> None:
        """Free all blocks of `sequence`, last one first, so that ends of prefixes are evicted before their starts.

        Having no blocks is no error.
        """
        swapped = self.swapped_tables.pop(sequence.sequence_id, None)
        if swapped is not None:
            self.host.pool.free(_blocks(reversed(table) for table in swapped))
        self._free_tables(sequence)
        self._live.pop(sequence.sequence_id, None)
        self._uncacheable.discard(sequence.sequence_id)

    def _free_tables(self, sequence: CachedSequence) -> None:
        """Free the device blocks of `sequence`, if it has any."""
        tables = self.tables.pop(sequence.sequence_id, None)
        if tables is None:
            return
        if len(tables) == 1:
            self._register_tail(sequence, tables[0])
        self._replaced.pop(sequence.sequence_id, None)
        self.layerwise.forget(sequence.sequence_id)
        self._free(list(_blocks(reversed(table) for table in tables)))

    def _free(self, blocks: Sequence[Block]) -> None:
        self.pool.free(blocks)
        if self._async_tiers:
            for block in blocks:
                if block.ref_count == 0 and block.block_hash is not None and len(block.token_ids) == self.block_size:
                    self._unstored[block.block_id] = block

    def _register_tail(self, sequence: CachedSequence, table: list[Block]) -> None:
        """Register the last block, which is not full, for prompts that continue from it."""
        num_final = min(sequence.num_computed_tokens, len(sequence.token_ids))
        index, count = divmod(num_final, self.block_size)
        if not count or index >= len(table) or self._match_unit >= self.block_size or not self.enable_prefix_caching:
            return
        block = table[index]
        if block.ref_count > 1 or block.block_hash is not None or sequence.sequence_id in self._uncacheable:
            return
        start = index * self.block_size
        tokens = sequence.token_ids[start : start + count]
        parent = self._parent_hash(sequence, index)
        block_hash = self._hasher.extend(parent, tokens)
        if self.pool.lookup(block_hash) is None:
            self.pool.register(block, block_hash, parent, tokens, self._step - 1)

    def _unregistered(self, block: Block) -> None:
        """The device is about to forget the hash of `block`."""
        self.tree.remove(block)
        self._unstored.pop(block.block_id, None)

    def _evicted(self, block: Block) -> None:
        """The device is about to reuse `block`: store its content in the next tiers."""
        if self._unstored.pop(block.block_id, None) is not None and block.step < self._step:
            self._store(block)  # else its content comes in this very step
        if self.host.pool.num_blocks and len(block.token_ids) == self.block_size:  # tails are found on the device only
            self.host.store(block)

    def _store(self, block: Block) -> None:
        for tier in self._async_tiers:
            tier.store(block)

    # ---- asynchronous tiers ----

    def start_loads(self, hit: PrefixHit, num_reserved_blocks: int) -> dict[int, bytes]:
        """Begin to load `hit.loads`, as far as blocks are free beside the reserved ones.

        Returns which device blocks are being loaded, with the hash of each.

        The device blocks of `hit` are not evicted for that: what is loaded would be of no use without them.
        """
        cached_blocks = (cached for table in hit.tables for cached in table)
        kept = [block for block in cached_blocks if isinstance(block, Block) and block is not NULL_BLOCK]
        self.pool.touch(kept)
        started = self.loads.start(hit.loads, num_reserved_blocks)
        self.pool.free(reversed(kept))
        return started

    def finish_load(self, block_id: int, succeeded: bool) -> None:
        """Note that a load has ended; the tokens of one that failed are computed again."""
        self.loads.finish(block_id, succeeded, self._step - 1)

    @property
    def has_async_tiers(self) -> bool:
        """Whether there is any tier whose stores and loads may fail."""
        return bool(self._async_tiers)

    def fail_stores(self, keys: Mapping[Tier, Collection[int]]) -> None:
        """Note which keys of asynchronous tiers could not be written."""
        for tier in self._async_tiers:
            if tier.tier in keys:
                tier.fail_stores(keys[tier.tier])

    def store_all(self) -> None:
        """Store everything worth keeping in the asynchronous tiers, before the engine ends."""
        if self._async_tiers:
            for block in self.pool.blocks:
                if block.block_hash is not None and len(block.token_ids) == self.block_size:
                    self._store(block)

    def take_transfers(self) -> list[BlockTransfer]:
        """Return the transfers of the step being planned, and start afresh."""
        if not self.transfers:
            return []
        taken = self.transfers.copy()
        self.transfers.clear()
        return taken

    # ---- views ----

    def check_integrity(self) -> None:
        """Raise `QuireError` on a broken invariant of tables, references, free queues, or hash maps; O(blocks)."""
        counts = [0] * self.pool.num_blocks
        for sequence_id, tables in self.tables.items():
            for table in tables:
                ids = [block.block_id for block in table if block is not NULL_BLOCK]
                if not table or len(set(ids)) != len(ids):
                    raise QuireError(f"block table of {sequence_id!r} is empty or holds a block twice")
                for block_id in ids:
                    counts[block_id] += 1
        for block_id in self.loads.block_ids:
            counts[block_id] += 1
        self.pool.check_integrity(counts)
        self.layerwise.check_integrity()
        host_counts = [0] * self.host.pool.num_blocks
        for tables in self.swapped_tables.values():
            for block in _blocks(tables):
                host_counts[block.block_id] += 1
        self.host.pool.check_integrity(host_counts)

    def _block_hash(self, sequence: CachedSequence, index: int, group: int) -> bytes:
        """Return the hash of block `index`, which is full, in a group of layers; each is computed once."""
        hashes = sequence.block_hashes
        while index >= len(hashes):
            parent = hashes[-1] if hashes else self._hasher.root(sequence.cache_salt)
            start = len(hashes) * self.block_size
            hashes.append(self._hasher.extend(parent, sequence.token_ids[start : start + self.block_size]))
        return hash_of_group(hashes[index], group)

    def _parent_hash(self, sequence: CachedSequence, index: int) -> bytes:
        """Return the hash, in the first group of layers, of what precedes block `index`."""
        return self._block_hash(sequence, index - 1, 0) if index else self._hasher.root(sequence.cache_salt)


def _max_hit(sequence: CachedSequence) -> int:
    """Return how many tokens a prefix hit may have: final ones, and all but one."""
    return min(len(sequence.token_ids), sequence.num_tokens - 1)


def _blocks(tables: Iterable[Iterable[Block]]) -> Iterator[Block]:
    """Yield the blocks of tables in order, without `NULL_BLOCK`."""
    return (block for table in tables for block in table if block is not NULL_BLOCK)


def _unique(tables_of_sequences: Iterable[BlockTables]) -> dict[int, Block]:
    """Return the distinct blocks of some sequences by id, in the order of their tables."""
    return {block.block_id: block for tables in tables_of_sequences for block in _blocks(tables)}


def _substitute(tables: BlockTables, moved: Mapping[int, Block]) -> BlockTables:
    """Return the tables with the blocks that `moved` has for the ids in them."""
    return [[NULL_BLOCK if block is NULL_BLOCK else moved[block.block_id] for block in table] for table in tables]


def max_blocks(num_tokens: int, windows: Iterable[int | None], block_size: int, max_step_tokens: int) -> int:
    """Return the most blocks that a sequence of `num_tokens` tokens holds at a time, in groups of these windows.

    A windowed group needs what the queries of a step of `max_step_tokens` see, wherever in a block that begins.
    """
    step = min(num_tokens, max_step_tokens)
    count = 0
    for window in windows:
        whole = -(-num_tokens // block_size)
        count += whole if window is None else min(whole, (window + step - 2) // block_size + 2)
    return count


def max_fitting_length(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the largest length up to `limit` that `fits`; whatever is shorter than one that does fits, too."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
