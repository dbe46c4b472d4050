"""`Loading`: device blocks that are being read from disk, on nobody's account until they are done.

While a block is filled it has one reference and no name, so that nobody finds or takes it. Then it gets its name and
becomes free: a cached block like any other, which the request that asked for it finds when it looks again.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from quire.kvcache.block import Block
from quire.kvcache.block_pool import BlockPool
from quire.kvcache.tiers import DiskTier


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
