"""`ThinTables`: the thin blocks in block tables, and how whole ones take their place.

A thin block has the keys and values of some layers on the host (`engine/thin.py`), from where each step that reads it
brings them. Once there are whole blocks to spare it is copied to one: within the device, as far as the worker is told,
whose copies bring what is not there. Copies are made before the model runs, and of what earlier steps computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.errors import QuireError
from quire.kvcache.block_pool import Block, BlockPool
from quire.step import BlockTransfer, Tier, TransferOp


class ThinTables:
    """Where in block tables thin blocks stand; for models with one group of layers.

    Args:
        tables: block tables by sequence id, as the manager keeps them.

    Attributes:
        replaced: for sequences by id, entries (group, index, block id) of their tables that were replaced, and which
            the worker has not been told of; it reads no table of a sequence that computes nothing.
        step: the one that is being planned, as the manager counts them.
    """

    def __init__(
        self, pool: BlockPool, transfers: list[BlockTransfer], tables: Mapping[str, list[list[Block]]]
    ) -> None:
        self._pool, self._transfers, self._tables = pool, transfers, tables
        self._known: dict[str, tuple[int, list[int]]] = {}  # entries looked at, and which of them are thin
        self.replaced: dict[str, list[tuple[int, int, int]]] = {}
        self.step = 0

    @property
    def in_use(self) -> bool:
        """Whether any sequence holds a thin block."""
        return self._pool.num_free_thin < self._pool.num_thin

    def take_replaced(self, sequence_id: str) -> list[tuple[int, int, int]]:
        """Return what the worker is to be told of a sequence's table now, and take it for told."""
        return self.replaced.pop(sequence_id, []) if self.replaced else []

    def fork(self, parent_id: str, child_id: str) -> None:
        """The worker will copy the parent's table as it knows it."""
        if parent_id in self.replaced:
            self.replaced[child_id] = self.replaced[parent_id].copy()

    def forget(self, sequence_id: str) -> None:
        """Entries of a table were replaced by others than this class, or its sequence left."""
        self._known.pop(sequence_id, None)

    def ended(self, sequence_id: str) -> None:
        """A sequence holds no blocks any more."""
        self.forget(sequence_id)
        self.replaced.pop(sequence_id, None)

    def bring_back(self, sequence_ids: Sequence[str], most: int, num_reserved: int) -> tuple[int, int]:
        """Let whole blocks take the place of thin ones of some sequences, the first in their tables first.

        What they share goes on being shared among them. At most `most` blocks are copied, and `num_reserved` whole
        ones remain free. What was copied in this step is not copied again. Returns how many thin blocks are left, and
        how many were copied.
        """
        places = [self._places(sequence_id) for sequence_id in sequence_ids]
        room = min(most, self._pool.num_free - self._pool.num_free_thin - num_reserved)
        copies: dict[int, Block] = {}
        left: set[int] = set()
        for sequence_id, indices in zip(sequence_ids, places, strict=True):
            if not indices:
                continue
            (table,) = self._tables[sequence_id]
            remaining = []
            for index in indices:
                thin = table[index]
                whole = copies.get(thin.block_id)
                if whole is not None:
                    self._pool.touch((whole,))
                elif len(copies) < room and thin.step < self.step:
                    whole = copies[thin.block_id] = self._copy(thin)
                else:
                    remaining.append(index)
                    left.add(thin.block_id)
                    continue
                self._pool.free((thin,))
                table[index] = whole
                self.replaced.setdefault(sequence_id, []).append((0, index, whole.block_id))
            self._known[sequence_id] = len(table), remaining
        return len(left), len(copies)

    def send_out(self, sequence_ids: Sequence[str], most: int) -> int:
        """Let thin blocks take the place of whole ones of some sequences, of nobody else's and the last ones first.

        At most `most`, and as many as are free; returns how many whole blocks that has set free.
        """
        room = min(most, self._pool.num_free_thin)
        count = 0
        for sequence_id in sequence_ids:
            places = self._places(sequence_id)
            (table,) = self._tables.get(sequence_id) or [[]]
            if len(places) == len(table):
                continue
            first_thin = self._pool.first_thin
            for index in range(len(table) - 1, -1, -1):
                whole = table[index]
                if count == room:
                    break
                if whole.ref_count == 1 and whole.block_id < first_thin and whole.step < self.step:
                    table[index] = self._copy(whole)
                    self._pool.free((whole,))
                    self.replaced.setdefault(sequence_id, []).append((0, index, table[index].block_id))
                    count += 1
            self.forget(sequence_id)
        return count

    def check_integrity(self) -> None:
        """Raise `QuireError` if anything is noted of who holds no blocks, or a thin block is not known to be one."""
        for sequence_id in (*self._known, *self.replaced):
            if sequence_id not in self._tables:
                raise QuireError(f"thin blocks of {sequence_id!r}, which holds no blocks")
        for sequence_id, (known, places) in self._known.items():
            thin = [block.block_id >= self._pool.first_thin for block in self._tables[sequence_id][0][:known]]
            if places != [index for index, is_thin in enumerate(thin) if is_thin]:
                raise QuireError(f"thin blocks of {sequence_id!r} are not where they were noted")

    def _places(self, sequence_id: str) -> list[int]:
        """Return where in its table thin blocks stand, rising."""
        tables = self._tables.get(sequence_id)
        if not tables:
            return []
        (table,) = tables
        known, places = self._known.get(sequence_id, (0, []))
        if known < len(table):
            first_thin = self._pool.first_thin
            places += [index for index in range(known, len(table)) if table[index].block_id >= first_thin]
            self._known[sequence_id] = len(table), places
        return places

    def _copy(self, block: Block) -> Block:
        """Return a block of the other kind with the content of `block`, which is found in its place from now on."""
        (other,) = self._pool.get_new_blocks(1, sparing=block.block_id < self._pool.first_thin)
        self._transfers.append(BlockTransfer(TransferOp.COPY, Tier.DEVICE, block.block_id, other.block_id))
        name, parent, token_ids, step = block.block_hash, block.parent_hash, block.token_ids, block.step
        if name is not None:
            self._pool.unregister(block)
            self._pool.register(other, name, parent, token_ids, self.step)
            if block.ref_count > 1:
                self._pool.register(block, name, parent, token_ids, step)
        return other
