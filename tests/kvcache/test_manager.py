"""Block tables and prefix sharing: what is allocated, what is shared, what a failure leaves behind (nothing)."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from quire.errors import QuireError
from quire.kvcache.manager import KVCacheManager

BLOCK = 4


@dataclass
class Sequence:
    request_id: str
    token_ids: list[int]
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    cache_salt: str | None = None
    reads_prefix_cache: bool = True


def manager(num_blocks: int = 16, caching: bool = True) -> KVCacheManager:
    return KVCacheManager(num_blocks, BLOCK, enable_prefix_caching=caching, hash_key=b"test")


def start(kv: KVCacheManager, sequence: Sequence, num_tokens: int | None = None) -> int:
    """Admit and compute `num_tokens` (all, by default); return how many came from the cache."""
    blocks, cached = kv.get_computed_blocks(sequence)
    end = len(sequence.token_ids) if num_tokens is None else num_tokens
    assert kv.allocate_slots(sequence, end - cached, blocks) is not None
    sequence.num_computed_tokens = end
    kv.check_integrity()
    return cached


def snapshot(kv: KVCacheManager) -> tuple:
    pool = kv.pool
    blocks = [(block.ref_count, block.block_hash) for block in pool.blocks]
    return pool.free_block_ids(), blocks, dict(kv._tables), pool.num_released


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(1, 1), (BLOCK - 1, 1), (BLOCK, 1), (BLOCK + 1, 2), (2 * BLOCK, 2)]
)
def test_blocks_follow_tokens(num_tokens: int, num_blocks: int):
    kv = manager()
    start(kv, Sequence("a", list(range(num_tokens))))
    assert len(kv.block_ids("a")) == num_blocks == kv.num_blocks_for(num_tokens)
    assert kv.pool.num_free == 16 - num_blocks


def test_a_block_is_added_only_when_the_last_one_is_full():
    kv = manager()
    sequence = Sequence("a", [1, 2, 3])
    start(kv, sequence)
    added = []
    for token in range(6):
        sequence.token_ids.append(token)
        new = kv.allocate_slots(sequence, 1)
        assert new is not None
        added.append(len(new))
        sequence.num_computed_tokens += 1
    assert added == [0, 1, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("length", "cached"),
    [(1, 0), (BLOCK, 0), (BLOCK + 1, BLOCK), (3 * BLOCK - 1, 2 * BLOCK), (3 * BLOCK, 2 * BLOCK), (14, 12)],
)
def test_an_identical_prompt_hits_full_blocks_and_leaves_a_token_to_compute(length: int, cached: int):
    kv = manager()
    start(kv, Sequence("a", list(range(length))))
    b = Sequence("b", list(range(length)))
    assert start(kv, b) == cached
    shared = cached // BLOCK
    assert kv.block_ids("b")[:shared] == kv.block_ids("a")[:shared]
    assert not set(kv.block_ids("b")[shared:]) & set(kv.block_ids("a"))


def test_full_blocks_are_shared_from_allocation_on():
    """Two prompts admitted in one step share, though nothing has been computed yet."""
    kv = manager()
    a, b = Sequence("a", list(range(10))), Sequence("b", list(range(10)))
    assert kv.allocate_slots(a, 10, kv.get_computed_blocks(a)[0]) is not None
    assert kv.get_computed_blocks(b)[1] == 8


def test_a_chunk_registers_only_the_blocks_it_fills():
    kv = manager()
    start(kv, Sequence("a", list(range(12))), num_tokens=7)
    assert kv.get_computed_blocks(Sequence("b", list(range(12))))[1] == 4


def test_generated_tokens_are_found_by_the_next_turn():
    kv = manager()
    a = Sequence("a", [1, 2, 3])
    start(kv, a)
    for token in (7, 8, 9, 10, 11, 12):
        a.token_ids.append(token)
        assert kv.allocate_slots(a, 1) is not None
        a.num_computed_tokens += 1
    kv.free(a)
    assert kv.get_computed_blocks(Sequence("b", [1, 2, 3, 7, 8, 9, 10, 11, 12, 50, 51]))[1] == 8
    assert kv.get_computed_blocks(Sequence("c", [1, 2, 3, 7, 8, 9, 99, 11, 12, 50, 51]))[1] == 4


def test_a_difference_anywhere_before_ends_the_match():
    kv = manager()
    start(kv, Sequence("a", list(range(13))))
    assert kv.get_computed_blocks(Sequence("b", [99, *range(1, 13)]))[1] == 0
    assert kv.get_computed_blocks(Sequence("c", [*range(5), 99, *range(6, 13)]))[1] == 4


def test_salts_separate():
    kv = manager()
    start(kv, Sequence("a", list(range(9)), cache_salt="alice"))
    assert kv.get_computed_blocks(Sequence("b", list(range(9)), cache_salt="bob"))[1] == 0
    assert kv.get_computed_blocks(Sequence("c", list(range(9))))[1] == 0
    assert kv.get_computed_blocks(Sequence("d", list(range(9)), cache_salt="alice"))[1] == 8


def test_a_sequence_that_needs_all_logits_writes_the_cache_but_does_not_read_it():
    kv = manager()
    assert start(kv, Sequence("a", list(range(9)), reads_prefix_cache=False)) == 0
    assert start(kv, Sequence("b", list(range(9)), reads_prefix_cache=False)) == 0
    assert kv.get_computed_blocks(Sequence("c", list(range(9))))[1] == 8


def test_without_caching_nothing_is_shared():
    kv = manager(caching=False)
    start(kv, Sequence("a", list(range(9))))
    assert start(kv, Sequence("b", list(range(9)))) == 0
    assert all(block.block_hash is None for block in kv.pool.blocks)


def test_a_failing_allocation_has_no_side_effects():
    kv = manager(num_blocks=4)
    start(kv, Sequence("a", list(range(9))))
    before = snapshot(kv)
    b = Sequence("b", list(range(100, 108)))
    assert kv.allocate_slots(b, 8, kv.get_computed_blocks(b)[0]) is None
    assert snapshot(kv) == before
    kv.check_integrity()


def test_a_failing_allocation_with_hits_leaves_their_references_alone():
    kv = manager(num_blocks=4)
    a = Sequence("a", list(range(9)))
    start(kv, a)
    kv.free(a)  # its two cached blocks are free now, and count as needed if they are hit
    c = Sequence("c", list(range(200, 204)))
    start(kv, c)
    before = snapshot(kv)
    b = Sequence("b", list(range(13)))  # two hits and two more, of three free
    blocks, cached = kv.get_computed_blocks(b)
    assert cached == 8
    assert kv.allocate_slots(b, 5, blocks) is None
    assert snapshot(kv) == before
    assert kv.allocate_slots(b, 1, blocks) is not None


def test_hits_are_not_reused_for_the_blocks_that_follow_them():
    """The free queue is down to the hits themselves and one block: the hits must be taken out first."""
    kv = manager(num_blocks=3)
    a = Sequence("a", list(range(9)))
    start(kv, a)
    kv.free(a)
    b = Sequence("b", list(range(12)))
    blocks, cached = kv.get_computed_blocks(b)
    hits = [block.block_id for block in blocks]
    assert start(kv, b) == cached == 8
    assert kv.block_ids("b")[:2] == hits
    assert len(set(kv.block_ids("b"))) == 3


@pytest.mark.parametrize(("reserved", "fits"), [(0, True), (1, True), (2, False)])
def test_reserved_blocks_stay_free(reserved: int, fits: bool):
    kv = manager(num_blocks=4)
    a = Sequence("a", list(range(12)))
    assert (kv.allocate_slots(a, 12, kv.get_computed_blocks(a)[0], reserved) is not None) is fits


def test_freed_blocks_are_reused_last_block_first():
    kv = manager(num_blocks=3)
    a = Sequence("a", list(range(12)))
    start(kv, a)
    table = kv.block_ids("a")
    kv.free(a)
    assert kv.pool.free_block_ids() == table[::-1]
    assert kv.get_computed_blocks(Sequence("b", list(range(13))))[1] == 12
    kv.pool.get_new_blocks(1)
    assert kv.get_computed_blocks(Sequence("c", list(range(13))))[1] == 8


def test_freeing_one_sharer_keeps_the_other_ones_blocks():
    kv = manager()
    a, b = Sequence("a", list(range(9))), Sequence("b", list(range(9)))
    start(kv, a)
    start(kv, b)
    kv.free(a)
    kv.check_integrity()
    assert all(kv.pool.blocks[block_id].ref_count == 1 for block_id in kv.block_ids("b"))
    kv.free(b)
    kv.free(b)  # nothing left to free: no error
    assert kv.pool.num_free == 16


def test_identical_sequences_computed_side_by_side_keep_their_own_blocks():
    kv = manager()
    a, b = Sequence("a", [1, 2, 3]), Sequence("b", [1, 2, 3])
    start(kv, a)
    start(kv, b)
    tables = kv.block_ids("a"), kv.block_ids("b")
    for sequence in (a, b):
        sequence.token_ids.append(4)
        assert kv.allocate_slots(sequence, 1) == []
        sequence.num_computed_tokens += 1
    kv.check_integrity()
    assert (kv.block_ids("a"), kv.block_ids("b")) == tables
    kv.free(a)
    kv.pool.get_new_blocks(kv.pool.num_free)  # a's copy is overwritten, b's still serves
    assert kv.get_computed_blocks(Sequence("c", [1, 2, 3, 4, 5]))[0] == [kv.pool.blocks[tables[1][0]]]


def test_forgotten_content_is_not_found_again():
    kv = manager()
    a = Sequence("a", list(range(9)))
    start(kv, a)
    kv.free(a, forget=True)
    kv.check_integrity()
    assert kv.get_computed_blocks(Sequence("b", list(range(9))))[1] == 0


def test_after_a_reset_nothing_computed_before_is_found():
    kv = manager()
    running, gone = Sequence("run", list(range(9))), Sequence("gone", list(range(50, 59)))
    start(kv, running)
    start(kv, gone)
    kv.free(gone)
    assert kv.reset_prefix_cache() == 4
    running.token_ids += [9, 10, 11]
    assert kv.allocate_slots(running, 3) is not None  # fills a block whose prefix is from before the reset
    running.num_computed_tokens += 3
    kv.check_integrity()
    assert start(kv, Sequence("b", list(range(9)))) == 0
    kv.free(running)
    assert kv.get_computed_blocks(running)[1] == 8  # only what b computed since
    assert kv.get_computed_blocks(gone)[1] == 0
    running.num_computed_tokens = 0
    assert start(kv, running) == 8  # begun anew, it shares again
    assert kv.get_computed_blocks(Sequence("c", list(range(13))))[1] == 12


@pytest.mark.parametrize(("num_tokens", "fits"), [(1, True), (16, True), (17, False)])
def test_can_ever_fit(num_tokens: int, fits: bool):
    assert manager(num_blocks=4).can_ever_fit(num_tokens) is fits


def test_integrity_check_compares_tables_with_reference_counts():
    kv = manager()
    start(kv, Sequence("a", list(range(9))))
    kv._tables["b"] = kv._tables["a"]
    with pytest.raises(QuireError, match="references"):
        kv.check_integrity()
    kv._tables["b"] = []
    with pytest.raises(QuireError, match="empty"):
        kv.check_integrity()
