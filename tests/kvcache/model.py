"""What the tests of the block manager share: sequences, a small manager, and steps without any scheduler or worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.kvcache.block_hash import BlockHasher
from quire.kvcache.block_pool import BlockPool
from quire.kvcache.manager import KVCacheManager
from quire.step import BlockTransfer
from tests.helpers.transfers import Move, disk_loads, disk_stores, moves

BLOCK = 4


@dataclass
class Sequence:
    """The least that the manager must know of a sequence."""

    sequence_id: str
    token_ids: list[int]
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    cache_salt: str | None = None
    reads_prefix_cache: bool = True

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def fork(self, sequence_id: str) -> Sequence:
        return Sequence(
            sequence_id,
            self.token_ids.copy(),
            self.num_computed_tokens,
            self.block_hashes.copy(),
            self.cache_salt,
            self.reads_prefix_cache,
        )


def manager(num_blocks: int = 16, **options) -> KVCacheManager:
    """Blocks of `BLOCK` tokens, and reuse by whole blocks unless asked otherwise."""
    options = {"prefix_match_unit": BLOCK, "hasher": BlockHasher(b"test")} | options
    return KVCacheManager(num_blocks, BLOCK, **options)


def start(kv: KVCacheManager, sequence: Sequence, num_tokens: int | None = None) -> int:
    """In a step of its own, admit `sequence` and compute it up to `num_tokens` (all); return how many were cached."""
    kv.start_step()
    hit = kv.find_prefix(sequence)
    end = len(sequence.token_ids) if num_tokens is None else num_tokens
    assert kv.allocate_slots(sequence, end - hit.num_tokens, hit) is not None
    sequence.num_computed_tokens = end
    kv.check_integrity()
    return hit.num_tokens


def grow(kv: KVCacheManager, sequence: Sequence, *token_ids: int) -> None:
    """Compute `token_ids` after the rest, each in a step of its own."""
    for token_id in token_ids:
        kv.start_step()
        sequence.token_ids.append(token_id)
        assert kv.allocate_slots(sequence, 1) is not None
        sequence.num_computed_tokens += 1
    kv.check_integrity()


def fork(kv: KVCacheManager, parent: Sequence, sequence_id: str) -> Sequence:
    child = parent.fork(sequence_id)
    kv.fork(parent, child)
    kv.check_integrity()
    return child


def cached(kv: KVCacheManager, token_ids: list[int], salt: str | None = None) -> int:
    """How many tokens of a prompt could be taken from the cache now."""
    kv.start_step()
    return kv.find_prefix(Sequence("asks", token_ids, cache_salt=salt)).num_tokens


def table(kv: KVCacheManager, sequence: Sequence, group: int = 0) -> list[int]:
    return kv.block_ids(sequence.sequence_id)[group]


def free_ids(pool: BlockPool) -> list[int]:
    """Ids of the free blocks in the order of allocation."""
    return [block.block_id for block in pool.free_blocks()]


def take(kv: KVCacheManager) -> tuple[list[Move], list[BlockTransfer], list[BlockTransfer]]:
    """What was to be transferred since the last call: within memory, to the disk, from the disk."""
    transfers = kv.take_transfers()
    return moves(transfers), disk_stores(transfers), disk_loads(transfers)


def transfers(kv: KVCacheManager) -> list[Move]:
    """What was to be moved within memory since the last call."""
    return take(kv)[0]


def fill(kv: KVCacheManager) -> None:
    """Take every free block and free it again, so that nothing on the device can be hit; tiers take what they can."""
    kv.start_step()
    kv.pool.free(kv.pool.get_new_blocks(kv.pool.num_free))


def snapshot(kv: KVCacheManager) -> tuple:
    """Everything a failing operation must leave as it was."""
    pools = [
        (free_ids(pool), [(block.ref_count, block.block_hash) for block in pool.blocks], pool.num_freed)
        for pool in (kv.pool, kv.host.pool)
    ]
    tables = {name: [table.copy() for table in tables] for name, tables in kv.tables.items()}
    return pools, tables, list(kv.transfers)
