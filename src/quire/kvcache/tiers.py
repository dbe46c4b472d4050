"""Where blocks go when the device has no room: a pool in host memory, and records on disk. Ids and names only.

Both tiers hold content under its name (`block_hash`) and answer the same two questions: `find` says whether a name is
there, `keep` takes in a device block that is about to lose its content, or just became free. They differ in how content
comes back: from the host within the step (`HostTier.restore`), from disk some steps later (`DiskTier.load`). The host's
pool also holds the blocks of sequences that were swapped out, which nobody else finds.

What is to be moved is noted in `Movements`, in order, and leaves with the next plan.
"""

from __future__ import annotations

import struct
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import islice

from quire.kvcache.block_hash import DIGEST_BYTES
from quire.kvcache.block_pool import Block, BlockPool
from quire.step import BlockLoad, BlockSave, TransferKind

AHEAD = 64  # blocks copied to the host at a time, before they are reused
SOON = 8  # of which one that is not kept yet starts that

# Looked up once: enum attributes are slow, and a block may move with every token.
_COPY, _OUT, _IN = int(TransferKind.COPY), int(TransferKind.OUT), int(TransferKind.IN)


class Movements:
    """What the worker will be told to move, in the order decided.

    Saves happen before transfers: their sources are read before anything of this step overwrites them.
    """

    __slots__ = ("erase_stored", "loads", "saves", "transfers")

    def __init__(self) -> None:
        self.transfers: list[tuple[int, int, int]] = []
        self.saves: list[BlockSave] = []
        self.loads: list[BlockLoad] = []
        self.erase_stored = False

    def copy(self, source: Block, destination: Block) -> None:
        """Copy a block within the device."""
        self.transfers.append((_COPY, source.block_id, destination.block_id))

    def take(self) -> tuple[list[tuple[int, int, int]], list[BlockSave], list[BlockLoad]]:
        """Return transfers, saves and loads, and start afresh."""
        taken = self.transfers, self.saves, self.loads
        self.transfers, self.saves, self.loads = [], [], []
        return taken

    def take_erasure(self) -> bool:
        """Return whether the disk store is to forget everything, before the saves; once."""
        erase, self.erase_stored = self.erase_stored, False
        return erase


class HostTier:
    """Blocks in host memory: a pool like the device's, whose free blocks keep their content until reused.

    Attributes:
        pool: ids are indices into the worker's host memory.
    """

    def __init__(self, num_blocks: int, movements: Movements) -> None:
        self.pool = BlockPool(num_blocks)
        self._movements = movements

    def find(self, name: bytes) -> Block | None:
        """Return the host block with this content, or None."""
        return self.pool.lookup(name)

    def keep(self, block: Block) -> None:
        """Copy a device block's content out, reusing the least recently used host block; no room is no error."""
        assert block.block_hash is not None
        known = self.pool.lookup(block.block_hash)
        if known is not None:
            self.pin(known)  # counts as a use
        elif self.pool.num_free:
            (known,) = self.pool.get_new_blocks(1)
            self._movements.transfers.append((_OUT, block.block_id, known.block_id))
            self.pool.register(known, block.block_hash, block.parent_hash, block.token_ids)
        else:
            return
        self.unpin(known)

    def keep_ahead(self, free: Iterable[Block], block_size: int) -> None:
        """Copy out what the device will reuse next, many blocks at a time: one by one it costs several times as much.

        `free` are the device's free blocks, the next to be reused first. Tails are left out: nothing finds them here.
        """
        most = min(AHEAD, self.pool.num_blocks // 2)
        following = list(islice(free, most))
        wanted = [
            block
            for block in following
            if block.block_hash is not None
            and len(block.token_ids) == block_size
            and self.pool.lookup(block.block_hash) is None
        ]
        # Only when one of the next few is not kept yet: then it is time for the next lot.
        if wanted and any(block in wanted for block in following[:SOON]):
            for block in wanted:
                self.keep(block)

    def pin(self, block: Block) -> None:
        """Protect a host block from reuse until `unpin`."""
        self.pool.touch((block,))

    def unpin(self, block: Block) -> None:
        """Undo `pin`; the block becomes the last to be reused."""
        self.pool.free((block,))

    def restore(self, source: Block, destination: Block) -> None:
        """Copy a host block's content to a device block."""
        self._movements.transfers.append((_IN, source.block_id, destination.block_id))

    def swap_out(self, blocks: Iterable[Block]) -> list[Block]:
        """Copy device blocks to host blocks with one reference each; the caller has checked that so many are free."""
        sources = list(blocks)
        places = self.pool.get_new_blocks(len(sources))
        for source, place in zip(sources, places, strict=True):
            self._movements.transfers.append((_OUT, source.block_id, place.block_id))
        return places


_FIXED = struct.Struct("<BBI")  # length of the name, length of the parent's, number of tokens
NAME_BYTES = DIGEST_BYTES + 1  # names of further groups of layers have one byte more
TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """The name of a block, that of the prefix before it, and its tokens."""

    name: bytes
    parent: bytes
    token_ids: list[int]

    @staticmethod
    def max_bytes(block_size: int) -> int:
        """Size of the longest header of blocks of `block_size` tokens."""
        return _FIXED.size + 2 * NAME_BYTES + TOKEN_BYTES * block_size

    def encode(self) -> bytes:
        """Return it as bytes, at most `max_bytes`."""
        tokens = array("I", self.token_ids)
        assert tokens.itemsize == TOKEN_BYTES
        return _FIXED.pack(len(self.name), len(self.parent), len(tokens)) + self.name + self.parent + tokens.tobytes()

    @classmethod
    def decode(cls, data: bytes) -> RecordHeader | None:
        """Return the header that `encode` made, zeros behind it ignored; None if these bytes are none."""
        if len(data) < _FIXED.size:
            return None
        name_size, parent_size, count = _FIXED.unpack_from(data)
        start = _FIXED.size
        end = start + name_size + parent_size + TOKEN_BYTES * count
        if not DIGEST_BYTES <= name_size <= NAME_BYTES or parent_size > NAME_BYTES or end > len(data):
            return None
        tokens = array("I")
        tokens.frombytes(data[start + name_size + parent_size : end])
        return cls(
            data[start : start + name_size], data[start + name_size : start + name_size + parent_size], list(tokens)
        )


class DiskTier:
    """Records on disk by name, least recently used first.

    Args:
        num_slots: records there is room for.
        stored: (slot, header) of what the store held when it was opened; headers that make no sense are ignored.

    Attributes:
        num_slots: as given. len(): how many of them hold a record.
    """

    def __init__(self, num_slots: int, stored: Iterable[tuple[int, bytes]], movements: Movements) -> None:
        self.num_slots = num_slots
        self._movements = movements
        self._records: OrderedDict[bytes, int] = OrderedDict()
        self._headers: dict[bytes, bytes] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        taken = set()
        for slot, data in stored:
            header = RecordHeader.decode(data)
            if header is not None and 0 <= slot < num_slots and header.name not in self._records:
                self._records[header.name] = slot
                self._headers[header.name] = data
                taken.add(slot)
        if taken:
            self._free = [slot for slot in self._free if slot not in taken]

    def __len__(self) -> int:
        return len(self._records)

    def find(self, name: bytes) -> int | None:
        """Return the slot of the record with this content, or None."""
        return self._records.get(name)

    def header(self, name: bytes) -> RecordHeader:
        """Return what is known of a record that `find` found."""
        header = RecordHeader.decode(self._headers[name])
        assert header is not None, "checked when it came"
        return header

    def keep(self, block: Block) -> None:
        """Write a device block's content, reusing the least recently used record if there is no free one."""
        assert block.block_hash is not None
        name = block.block_hash
        if name in self._records:
            self._records.move_to_end(name)
            return
        if not self._free:
            if not self._records:
                return
            self.drop(next(iter(self._records)))
        slot = self._free.pop()
        header = RecordHeader(name, block.parent_hash, block.token_ids).encode()
        self._records[name] = slot
        self._headers[name] = header
        self._movements.saves.append(BlockSave(block.block_id, slot, header))

    def load(self, name: bytes, destination: Block) -> None:
        """Begin to read a record into a device block; `ModelOutput.loaded` will tell how it went."""
        self._records.move_to_end(name)
        self._movements.loads.append(BlockLoad(destination.block_id, self._records[name], self._headers[name]))

    def drop(self, name: bytes) -> None:
        """Forget a record: its slot is needed, or it is damaged."""
        slot = self._records.pop(name, None)
        if slot is not None:
            del self._headers[name]
            self._free.append(slot)

    def clear(self) -> int:
        """Forget all records, on the disk as well; return how many there were."""
        count = len(self._records)
        for name in list(self._records):
            self.drop(name)
        if self.num_slots:
            self._movements.saves.clear()
            self._movements.erase_stored = True
        return count


@dataclass(slots=True)
class _Load:
    """What a block will be; no name if that was forgotten meanwhile."""

    block: Block
    name: bytes
    parent: bytes
    token_ids: list[int]


class Loading:
    """Loads from `disk` into blocks of `pool`."""

    def __init__(self, pool: BlockPool, disk: DiskTier) -> None:
        self._pool, self._disk = pool, disk
        self._loads: dict[int, _Load] = {}

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def block_ids(self) -> Set[int]:
        """The blocks that are being filled."""
        return self._loads.keys()

    def names(self) -> set[bytes]:
        """Return what they are being filled with."""
        return {load.name for load in self._loads.values()}

    def start(self, names: Sequence[bytes], num_reserved_blocks: int) -> list[int]:
        """Begin to read records, as many as there are blocks for beyond the reserved ones; return the block ids."""
        started = []
        for name in names:
            if self._pool.num_free <= num_reserved_blocks:
                break
            (block,) = self._pool.get_new_blocks(1)  # whose content may go to disk, in the place of an older record
            if self._disk.find(name) is None:
                self._pool.free((block,))
                continue
            header = self._disk.header(name)
            self._disk.load(name, block)
            self._loads[block.block_id] = _Load(block, name, header.parent, header.token_ids)
            started.append(block.block_id)
        return started

    def finish(self, block_id: int, sound: bool, step: int) -> None:
        """A load has ended; what was read counts as computed in `step`. A damaged record is forgotten."""
        load = self._loads.pop(block_id)
        if load.name and not sound:
            self._disk.drop(load.name)
        elif load.name and self._pool.lookup(load.name) is None:
            self._pool.register(load.block, load.name, load.parent, load.token_ids, step)
        self._pool.free((load.block,))

    def forget(self) -> None:
        """Whatever comes of the loads under way, nobody may find it."""
        for load in self._loads.values():
            load.name = b""
