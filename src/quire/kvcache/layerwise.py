"""`LayerwiseBlocks` finds layer-wise offloaded blocks in block tables and decides who may decode with them.

Of a *layerwise* block only the first layers' keys and values are resident on the device; the other layers' are on the
host, and each step that reads the block loads them (LayerKV, Xiong et al. 2024). How many layers that concerns is in
`engine/layerwise.py`, how they are loaded in `kernels/gpu/layerwise.py`. When resident blocks become free, layerwise
blocks are copied to them: within the device as far as transfers say, where the worker's copies load what is not there.
Like all transfers, these copies precede the model and read what earlier steps computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from quire.errors import QuireError
from quire.kvcache.block_pool import Block, BlockPool
from quire.step import BlockTransfer, Tier, TransferOp

STREAMED_TOKENS = 1024  # a step computes for longer than it takes to load their blocks: see docs/memory.md


class LayerwiseBlocks:
    """Knows where in block tables layerwise blocks are; for models with one group of layers.

    Args:
        tables, replaced: the manager's block tables by sequence id, and the entries of them that were replaced.

    Attributes:
        max_streamed_blocks: most layerwise blocks that a step loads for decodes, beside those of its first request.
    """

    def __init__(
        self,
        pool: BlockPool,
        transfers: list[BlockTransfer],
        tables: Mapping[str, list[list[Block]]],
        replaced: dict[str, list[tuple[int, int, int]]],
        max_streamed_blocks: int,
    ) -> None:
        self._pool, self._transfers, self._tables, self._replaced = pool, transfers, tables, replaced
        self._indices: dict[str, tuple[int, list[int]]] = {}  # entries looked at, and which of them are layerwise
        self.max_streamed_blocks = max_streamed_blocks
        self._num_streamed = 0  # blocks loaded for decodes in this step, or copied to resident ones
        self._step = 0

    @property
    def in_use(self) -> bool:
        """Whether any sequence holds a layerwise block."""
        return self._pool.num_free_layerwise < self._pool.num_layerwise

    def start_step(self, step: int) -> None:
        """Begin a step, as the manager counts them."""
        self._step, self._num_streamed = step, 0

    def can_decode(
        self,
        sequence_ids: Sequence[str],
        behind: Iterable[Sequence[str]],
        *,
        is_first: bool,
        num_reserved: int,
    ) -> bool:
        """Make layerwise blocks of a request resident, as far as there is room; return whether it may decode now.

        A prefill may always be scheduled: its layers are loaded while others compute. A decode with many layerwise
        blocks would slow down every step. So it waits, while some of them become resident in each step, until no more
        are left than each step may load; the last few are exchanged for resident blocks of the requests behind. The
        first request of a step never waits: no request before it would free blocks.

        Args:
            sequence_ids: of the request. behind: those of requests later in the order, last first.
            num_reserved: resident blocks that remain free.
        """
        if any(sequence_id not in self._tables for sequence_id in sequence_ids):
            return True
        room = max(0, self.max_streamed_blocks - self._num_streamed)
        left, copied = self.make_resident(sequence_ids, self._pool.num_blocks if is_first else room, num_reserved)
        if 0 < left <= room - copied:
            freed = 0
            for victims in behind:
                if freed == left:
                    break
                freed += self.offload(victims, left - freed)
            left, more = self.make_resident(sequence_ids, freed, 0)
            copied += more
        self._num_streamed += copied
        if not is_first and left > room - copied:
            return False
        self._num_streamed += left
        return True

    def make_resident(self, sequence_ids: Sequence[str], max_blocks: int, num_reserved: int) -> tuple[int, int]:
        """Replace layerwise blocks of some sequences by resident ones, the first of their tables first.

        Blocks that they share stay shared. At most `max_blocks` are copied, none that was copied in this step, and
        `num_reserved` resident blocks remain free. Returns how many layerwise blocks are left, and how many copied.
        """
        room = min(max_blocks, self._pool.num_free - self._pool.num_free_layerwise - num_reserved)
        copies: dict[int, Block] = {}
        left: set[int] = set()
        for sequence_id, indices in [(each, self._find(each)) for each in sequence_ids]:
            if not indices:
                continue
            (table,) = self._tables[sequence_id]
            remaining = []
            for index in indices:
                block = table[index]
                resident = copies.get(block.block_id)
                if resident is not None:
                    self._pool.touch((resident,))
                elif len(copies) < room and block.step < self._step:
                    resident = copies[block.block_id] = self._copy(block)
                else:
                    remaining.append(index)
                    left.add(block.block_id)
                    continue
                self._replace(sequence_id, table, index, resident)
            self._indices[sequence_id] = len(table), remaining
        return len(left), len(copies)

    def offload(self, sequence_ids: Sequence[str], max_blocks: int) -> int:
        """Replace unshared resident blocks of some sequences by layerwise ones, the last of their tables first.

        At most `max_blocks`, and as many as are free; returns how many resident blocks that has freed.
        """
        room = min(max_blocks, self._pool.num_free_layerwise)
        count = 0
        for sequence_id in sequence_ids:
            indices = self._find(sequence_id)
            (table,) = self._tables.get(sequence_id) or [[]]
            if len(indices) == len(table):
                continue
            for index in range(len(table) - 1, -1, -1):
                block = table[index]
                if count == room:
                    break
                if block.ref_count == 1 and block.block_id < self._pool.first_layerwise and block.step < self._step:
                    self._replace(sequence_id, table, index, self._copy(block))
                    count += 1
            self.forget(sequence_id)
        return count

    def forget(self, sequence_id: str) -> None:
        """Note that entries of a table were replaced elsewhere, or that it is gone."""
        self._indices.pop(sequence_id, None)

    def check_integrity(self) -> None:
        """Raise `QuireError` if layerwise blocks are not where they were noted."""
        for sequence_id, (known, indices) in self._indices.items():
            table = self._tables[sequence_id][0][:known]
            first = self._pool.first_layerwise
            if indices != [index for index, block in enumerate(table) if block.block_id >= first]:
                raise QuireError(f"layerwise blocks of {sequence_id!r} are not where they were noted")

    def _find(self, sequence_id: str) -> list[int]:
        """Return where in its table layerwise blocks are, rising."""
        tables = self._tables.get(sequence_id)
        if not tables:
            return []
        (table,) = tables
        known, indices = self._indices.get(sequence_id, (0, []))
        if known < len(table):
            first = self._pool.first_layerwise
            indices += [index for index in range(known, len(table)) if table[index].block_id >= first]
            self._indices[sequence_id] = len(table), indices
        return indices

    def _replace(self, sequence_id: str, table: list[Block], index: int, block: Block) -> None:
        self._pool.free((table[index],))
        table[index] = block
        self._replaced.setdefault(sequence_id, []).append((0, index, block.block_id))

    def _copy(self, block: Block) -> Block:
        """Return a block of the other kind with the content of `block`, which is found there from now on."""
        to_layerwise = block.block_id < self._pool.first_layerwise
        (copy,) = self._pool.get_new_blocks(1, prefer_layerwise=to_layerwise)
        self._transfers.append(BlockTransfer(TransferOp.COPY, Tier.DEVICE, block.block_id, copy.block_id))
        block_hash, parent_hash, token_ids, step = block.block_hash, block.parent_hash, block.token_ids, block.step
        if block_hash is not None:
            self._pool.unregister(block)
            self._pool.register(copy, block_hash, parent_hash, token_ids, self._step)
            if block.ref_count > 1:
                self._pool.register(block, block_hash, parent_hash, token_ids, step)
        return copy
