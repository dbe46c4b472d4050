"""The control half of KV tiers: it knows which blocks the host's memory and the disk hold, and lists what must move.

A `TierManager` stores KV blocks under their hashes and evicts the least recently used ones. Whatever has to be moved is
appended to the list of the step's transfers, in the order decided; the worker half of each tier
(`worker/transfers.py`) moves the bytes. What a tier in another process or machine would need is in docs/tour.md. When
blocks are stored and loaded is decided in `manager`.
"""

from __future__ import annotations

import struct
from array import array
from collections import OrderedDict
from collections.abc import Collection, Container, Iterable, Iterator, Set
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol, cast

from quire.kvcache.block_hash import DIGEST_BYTES
from quire.kvcache.block_pool import Block, BlockPool
from quire.step import BlockTransfer, Tier, TransferOp

STORE_AHEAD = 64  # blocks copied to the host at a time, before the device evicts them
STORE_AHEAD_TRIGGER = 8  # of the next blocks to be evicted: one that the host lacks starts the next lot

# Enum attributes are slow to look up, and a block may move with every token.
_COPY, _STORE, _LOAD, _DROP, _CLEAR = TransferOp
_DEVICE, _HOST, _DISK = Tier

_FIXED = struct.Struct("<BBI")  # length of the hash, length of the parent's, number of tokens
HASH_BYTES = DIGEST_BYTES + 1  # hashes of groups of layers after the first have one byte more
TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """Identifies a stored block: its hash, that of the prefix before it, and its tokens.

    The disk keeps it beside each block, so that blocks are found after a restart.
    """

    block_hash: bytes
    parent_hash: bytes
    token_ids: list[int]

    def encode(self) -> bytes:
        """Return it as bytes."""
        tokens = array("I", self.token_ids)
        assert tokens.itemsize == TOKEN_BYTES
        sizes = _FIXED.pack(len(self.block_hash), len(self.parent_hash), len(tokens))
        return sizes + self.block_hash + self.parent_hash + tokens.tobytes()

    @classmethod
    def decode(cls, data: bytes) -> BlockHeader | None:
        """Return the header that `encode` made, zeros behind it ignored; None if these bytes are none."""
        if len(data) < _FIXED.size:
            return None
        hash_size, parent_size, count = _FIXED.unpack_from(data)
        parent = _FIXED.size + hash_size
        first = parent + parent_size
        end = first + TOKEN_BYTES * count
        if not DIGEST_BYTES <= hash_size <= HASH_BYTES or parent_size > HASH_BYTES or end > len(data):
            return None
        tokens = array("I")
        tokens.frombytes(data[first:end])
        return cls(data[_FIXED.size : parent], data[parent:first], list(tokens))


class TierManager(Protocol):
    """The control half of a tier. All calls answer at once, from the scheduler's own index of the tier."""

    tier: Tier

    def lookup(self, block_hash: bytes) -> bool:
        """Whether the tier has a block with this hash."""

    def store(self, block: Block) -> None:
        """Store a device block under its hash, evicting the least recently used block; no room is no error."""

    def load(self, block_hash: bytes, destination: Block) -> BlockHeader:
        """Load a block that `lookup` found into a device block; return what is known of it."""

    def headers(self) -> Iterable[BlockHeader]:
        """Yield what is known of every block that the tier has, also of those that only a later engine would find."""

    def drop(self, block_hashes: Set[bytes]) -> None:
        """Drop what there is of these blocks, whose content is bad; a later engine must not find it either."""

    def clear(self) -> None:
        """Drop all blocks."""


class AsyncTierManager(TierManager, Protocol):
    """A tier whose loads take some steps and may fail, which is the same as the block not being there."""

    def __len__(self) -> int:
        """Number of blocks that `lookup` finds."""

    def fail_load(self, block_hash: bytes) -> None:
        """Note that a block could not be loaded: `lookup` does not find it any more, unless it is stored again."""

    def fail_stores(self, keys: Collection[int]) -> None:
        """Note that nothing could be written to `keys`."""


class TierHit(NamedTuple):
    """A block that is not on the device but in a tier below it: the host, or an asynchronous one."""

    tier: TierManager
    block_hash: bytes


class HostTierManager:
    """Keeps blocks in host memory: a pool like the device's, whose free blocks keep their content until evicted.

    The pool holds the blocks of swapped sequences as well, which have references and no hash.

    Attributes:
        pool: ids are the keys of transfers.
    """

    tier = Tier.HOST

    def __init__(self, num_blocks: int, transfers: list[BlockTransfer]) -> None:
        self.pool = BlockPool(num_blocks)
        self._transfers = transfers

    def lookup(self, block_hash: bytes) -> bool:
        return self.pool.lookup(block_hash) is not None

    def store(self, block: Block) -> None:
        assert block.block_hash is not None
        stored = self.pool.lookup(block.block_hash)
        if stored is not None:
            self.pool.touch((stored,))  # counts as a use
        elif self.pool.num_free:
            (stored,) = self.pool.get_new_blocks(1)
            self._transfers.append(BlockTransfer(_STORE, _HOST, block.block_id, stored.block_id))
            self.pool.register(stored, block.block_hash, block.parent_hash, block.token_ids)
        else:
            return
        self.pool.free((stored,))

    def store_ahead(self, free: Iterable[Block], block_size: int) -> None:
        """Store what the device will evict next, many blocks at a time: one by one costs several times as much.

        `free` are the device's free blocks in the order of eviction. Tails are left out: nothing looks them up here.
        """
        following = list(islice(free, min(STORE_AHEAD, self.pool.num_blocks // 2)))
        missing = [
            block
            for block in following
            if block.block_hash is not None
            and len(block.token_ids) == block_size
            and self.pool.lookup(block.block_hash) is None
        ]
        if missing and any(block in missing for block in following[:STORE_AHEAD_TRIGGER]):
            for block in missing:
                self.store(block)

    def pin(self, block_hash: bytes) -> None:
        """Keep a block that `lookup` found from being evicted until it is loaded."""
        block = self.pool.lookup(block_hash)
        assert block is not None
        self.pool.touch((block,))

    def load(self, block_hash: bytes, destination: Block) -> BlockHeader:
        """See `TierManager.load`; the block has been pinned, and is not any more."""
        block = self.pool.lookup(block_hash)
        assert block is not None
        self._transfers.append(BlockTransfer(_LOAD, _HOST, destination.block_id, block.block_id))
        self.pool.free((block,))
        return BlockHeader(block_hash, block.parent_hash, block.token_ids)

    def headers(self) -> Iterable[BlockHeader]:
        return headers_of(self.pool)

    def drop(self, block_hashes: Set[bytes]) -> None:
        for block in self.pool.blocks:
            if block.block_hash in block_hashes:
                self.pool.unregister(block)

    def clear(self) -> None:
        """See `TierManager.clear`; swapped blocks stay."""
        self.pool.unregister_all()

    def swap_out(self, blocks: Iterable[Block]) -> list[Block]:
        """Copy device blocks to host blocks with one reference each; the caller has checked that so many are free."""
        sources = list(blocks)
        destinations = self.pool.get_new_blocks(len(sources))
        for source, destination in zip(sources, destinations, strict=True):
            self._transfers.append(BlockTransfer(_STORE, _HOST, source.block_id, destination.block_id))
        return destinations

    def swap_in(self, source: Block, destination: Block) -> None:
        """Copy a host block to a device block."""
        self._transfers.append(BlockTransfer(_LOAD, _HOST, destination.block_id, source.block_id))


class DiskTierManager:
    """Keeps blocks on disk, in slots of equal size.

    Args:
        num_slots: records there is room for.
        stored: (slot, header) of what the store held when it was opened; headers that make no sense are ignored.
    """

    tier = Tier.DISK

    def __init__(self, num_slots: int, stored: Iterable[tuple[int, bytes]], transfers: list[BlockTransfer]) -> None:
        self.num_slots = num_slots
        self._transfers = transfers
        self._records: OrderedDict[bytes, tuple[int, bytes]] = OrderedDict()  # hash -> slot and header
        self._unlisted: dict[int, BlockHeader] = {}  # free slots whose records are still on disk
        taken = set()
        for slot, data in stored:
            header = BlockHeader.decode(data)
            if header is None or not 0 <= slot < num_slots:
                continue
            if header.block_hash in self._records:
                self._unlisted[slot] = header
            else:
                self._records[header.block_hash] = slot, data
                taken.add(slot)
        self._free_slots = [slot for slot in range(num_slots - 1, -1, -1) if slot not in taken]
        self._has_failed = False

    def __len__(self) -> int:
        return len(self._records)

    def lookup(self, block_hash: bytes) -> bool:
        return block_hash in self._records

    def store(self, block: Block) -> None:
        assert block.block_hash is not None
        block_hash = block.block_hash
        if block_hash in self._records:
            self._records.move_to_end(block_hash)
            return
        if self._has_failed or not self.num_slots:
            return
        if not self._free_slots:
            self._release(next(iter(self._records)))
        slot = self._free_slots.pop()
        self._unlisted.pop(slot, None)
        header = BlockHeader(block_hash, block.parent_hash, block.token_ids).encode()
        self._records[block_hash] = slot, header
        self._transfers.append(BlockTransfer(_STORE, _DISK, block.block_id, slot, header))

    def load(self, block_hash: bytes, destination: Block) -> BlockHeader:
        self._records.move_to_end(block_hash)
        slot, data = self._records[block_hash]
        self._transfers.append(BlockTransfer(_LOAD, _DISK, destination.block_id, slot, data))
        return _decoded(data)

    def headers(self) -> Iterable[BlockHeader]:
        for _, data in self._records.values():
            yield _decoded(data)
        yield from self._unlisted.values()

    def drop(self, block_hashes: Set[bytes]) -> None:
        """See `TierManager.drop`; the records are erased."""
        slots = [self._release(block_hash) for block_hash in list(self._records) if block_hash in block_hashes]
        unlisted = [slot for slot, header in self._unlisted.items() if header.block_hash in block_hashes]
        for slot in unlisted:
            del self._unlisted[slot]
        self._transfers += [BlockTransfer(_DROP, _DISK, key=slot) for slot in (*slots, *unlisted)]

    def _release(self, block_hash: bytes) -> int:
        """Forget a record; return its slot, which is free now."""
        slot, _ = self._records.pop(block_hash)
        self._free_slots.append(slot)
        return slot

    def fail_load(self, block_hash: bytes) -> None:
        """See `AsyncTierManager.fail_load`; the record stays on disk until its slot is used: it may be sound."""
        if block_hash in self._records:
            _, data = self._records[block_hash]
            self._unlisted[self._release(block_hash)] = _decoded(data)

    def fail_stores(self, keys: Collection[int]) -> None:
        """See `AsyncTierManager.fail_stores`; nothing is stored any more, for the disk is full, or broken."""
        self._has_failed = True
        for block_hash in [block_hash for block_hash, (slot, _) in self._records.items() if slot in keys]:
            self._release(block_hash)

    def clear(self) -> None:
        """See `TierManager.clear`; the files are truncated."""
        for block_hash in list(self._records):
            self._release(block_hash)
        self._unlisted.clear()
        if self.num_slots:
            self._transfers.append(BlockTransfer(_CLEAR, _DISK))


def _decoded(data: bytes) -> BlockHeader:
    header = BlockHeader.decode(data)
    assert header is not None, "checked when it was stored"
    return header


def headers_of(pool: BlockPool) -> Iterator[BlockHeader]:
    """Yield what is known of the registered blocks of a pool."""
    for block in pool.blocks:
        if block.block_hash is not None:
            yield BlockHeader(block.block_hash, block.parent_hash, block.token_ids)


@dataclass(slots=True)
class _Load:
    """A block that is being loaded, and the header it will be registered under; None if it must not be found."""

    block: Block
    tier: AsyncTierManager
    header: BlockHeader | None


class AsyncLoads:
    """Device blocks that are being loaded from asynchronous tiers.

    Such a block has one reference and no hash, so it is neither found nor allocated. Once loaded it is registered and
    free: a cached block like any other, which the request that waits for it finds at its next lookup.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._loads: dict[int, _Load] = {}

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def block_ids(self) -> Set[int]:
        """The blocks that are being loaded."""
        return self._loads.keys()

    def block_hashes(self) -> set[bytes]:
        """Return the hashes of what they are being loaded with."""
        return {header.block_hash for header in self.headers()}

    def headers(self) -> Iterator[BlockHeader]:
        """Yield the headers of what they are being loaded with, if that is to be registered."""
        return (load.header for load in self._loads.values() if load.header is not None)

    def start(self, hits: Iterable[TierHit], num_reserved_blocks: int = 0) -> dict[int, bytes]:
        """Begin to load, as far as blocks are free beside the reserved ones; return device block ids and hashes."""
        started = {}
        for tier, block_hash in hits:
            if self._pool.num_free <= num_reserved_blocks:
                break
            (block,) = self._pool.get_new_blocks(1)  # storing its old content may evict what was to be loaded
            if not tier.lookup(block_hash):
                self._pool.free((block,))
                continue
            self._loads[block.block_id] = _Load(block, cast(AsyncTierManager, tier), tier.load(block_hash, block))
            started[block.block_id] = block_hash
        return started

    def finish(self, block_id: int, succeeded: bool, step: int) -> None:
        """End a load; its content counts as computed in `step`."""
        load = self._loads.pop(block_id)
        header = load.header
        if header is not None and not succeeded:
            load.tier.fail_load(header.block_hash)
        elif header is not None and self._pool.lookup(header.block_hash) is None:
            self._pool.register(load.block, header.block_hash, header.parent_hash, header.token_ids, step)
        self._pool.free((load.block,))

    def forget(self, block_hashes: Container[bytes] | None = None) -> None:
        """Let the loads under way, all or those of these hashes, register nothing when they end."""
        for load in self._loads.values():
            if block_hashes is None or (load.header is not None and load.header.block_hash in block_hashes):
                load.header = None
