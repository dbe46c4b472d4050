"""Block tables, prefix sharing by whole blocks, sizes: what is allocated, what a failure leaves behind (nothing)."""

from __future__ import annotations

import random

import pytest

from quire.errors import QuireError
from quire.kvcache.block_hash import BlockHasher
from tests.kvcache.model import (
    BLOCK,
    Sequence,
    cached,
    fork,
    free_ids,
    grow,
    manager,
    snapshot,
    start,
    table,
    transfers,
)

# ---- tables ----


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(1, 1), (BLOCK - 1, 1), (BLOCK, 1), (BLOCK + 1, 2), (2 * BLOCK, 2)]
)
def test_blocks_follow_tokens(num_tokens: int, num_blocks: int):
    kv = manager()
    a = Sequence("a", list(range(num_tokens)))
    start(kv, a)
    assert len(table(kv, a)) == num_blocks == kv.num_blocks_for(num_tokens)
    assert kv.pool.num_free == 16 - num_blocks


def test_a_block_is_added_only_when_the_last_one_is_full():
    kv = manager()
    a = Sequence("a", [1, 2, 3])
    start(kv, a)
    added = []
    for token in range(6):
        a.token_ids.append(token)
        allocation = kv.allocate_slots(a, 1)
        assert allocation is not None
        new_block_ids, replaced = allocation
        added.append([len(ids) for ids in new_block_ids])
        assert replaced == []
        a.num_computed_tokens += 1
    assert added == [[], [1], [], [], [], [1]]  # no list at all where nothing changed
    assert transfers(kv) == []


def test_blocks_that_a_hit_needs_do_not_count_as_freed():
    kv = manager()
    a, b = Sequence("a", list(range(10))), Sequence("b", [*range(8), 99])
    start(kv, a)
    hit = kv.find_prefix(b)
    assert len(hit.tables[0]) == 2
    assert (kv.num_blocks_freed([a]), kv.num_blocks_freed([a], hit)) == (3, 1)
    start(kv, b)
    assert (kv.num_blocks_freed([a]), kv.num_blocks_freed([b]), kv.num_blocks_freed([a, b])) == (1, 1, 4)


def test_an_allocation_names_the_blocks_that_were_appended():
    kv = manager()
    a, b = Sequence("a", list(range(9))), Sequence("b", list(range(9)))
    hit = kv.find_prefix(a)
    assert kv.allocate_slots(a, 6, hit) == ([table(kv, a)], [])
    a.num_computed_tokens = 6
    assert kv.has_slot(a) and kv.allocate_slots(a, 1) == ((), [])
    a.num_computed_tokens = 7
    assert kv.allocate_slots(a, 2) == ([table(kv, a)[2:]], [])
    assert kv.allocate_slots(b, 1, kv.find_prefix(b)) == ([table(kv, b)], [])  # those of the hit, too


def test_who_holds_blocks_and_how_many():
    kv = manager()
    a, b = Sequence("a", list(range(9))), Sequence("b", list(range(9)))
    assert (kv.has_blocks(a), kv.block_ids("a"), len(kv.tables)) == (False, [[]], 0)
    start(kv, a)
    start(kv, b)
    assert kv.has_blocks(a)
    assert (kv.num_allocated_blocks([a]), kv.num_allocated_blocks([a, b]), len(kv.tables)) == (3, 4, 2)


# ---- sharing ----


@pytest.mark.parametrize(
    ("length", "num_cached"),
    [(1, 0), (BLOCK, 0), (BLOCK + 1, BLOCK), (3 * BLOCK - 1, 2 * BLOCK), (3 * BLOCK, 2 * BLOCK), (14, 12)],
)
def test_an_identical_prompt_hits_full_blocks_and_leaves_a_token_to_compute(length: int, num_cached: int):
    kv = manager()
    a, b = Sequence("a", list(range(length))), Sequence("b", list(range(length)))
    start(kv, a)
    assert start(kv, b) == num_cached
    shared = num_cached // BLOCK
    assert table(kv, b)[:shared] == table(kv, a)[:shared]
    assert not set(table(kv, b)[shared:]) & set(table(kv, a))


def test_what_is_computed_in_this_step_is_not_copied_in_it():
    """Copies are made before the model runs."""
    kv = manager(prefix_match_unit=1)
    kv.start_step()
    a, b = Sequence("a", list(range(9))), Sequence("b", [*range(7), 99, 99])
    assert kv.allocate_slots(a, 9, kv.find_prefix(a)) is not None
    assert kv.find_prefix(b).num_tokens == 4
    kv.start_step()
    assert kv.find_prefix(b).num_tokens == 7


def test_a_chunk_registers_only_the_blocks_it_fills():
    kv = manager()
    start(kv, Sequence("a", list(range(12))), num_tokens=7)
    assert cached(kv, list(range(12))) == 4


def test_generated_tokens_are_found_by_the_next_turn():
    kv = manager()
    a = Sequence("a", [1, 2, 3])
    start(kv, a)
    grow(kv, a, 7, 8, 9, 10, 11, 12)
    kv.free(a)
    assert cached(kv, [1, 2, 3, 7, 8, 9, 10, 11, 12, 50, 51]) == 8
    assert cached(kv, [1, 2, 3, 7, 8, 9, 99, 11, 12, 50, 51]) == 4


def test_a_difference_anywhere_before_ends_the_match():
    kv = manager()
    start(kv, Sequence("a", list(range(13))))
    assert cached(kv, [99, *range(1, 13)]) == 0
    assert cached(kv, [*range(5), 99, *range(6, 13)]) == 4


def test_salts_separate():
    kv = manager(prefix_match_unit=1)
    a = Sequence("a", list(range(11)), cache_salt="alice")
    start(kv, a)
    kv.free(a)
    assert cached(kv, list(range(12)), "bob") == cached(kv, list(range(12))) == cached(kv, list(range(12)), "") == 0
    assert cached(kv, list(range(12)), "alice") == 11


def test_a_sequence_that_needs_all_logits_writes_the_cache_but_does_not_read_it():
    kv = manager()
    assert start(kv, Sequence("a", list(range(9)), reads_prefix_cache=False)) == 0
    assert start(kv, Sequence("b", list(range(9)), reads_prefix_cache=False)) == 0
    assert cached(kv, list(range(9))) == 8


def test_without_caching_nothing_is_shared_or_named():
    kv = manager(enable_prefix_caching=False, prefix_match_unit=1, num_host_blocks=8)
    a, b = Sequence("a", list(range(9))), Sequence("b", list(range(9)))
    start(kv, a)
    assert start(kv, b) == 0
    kv.free(a)
    assert all(block.block_hash is None for block in kv.pool.blocks)
    assert kv.swap_out([b])
    kv.swap_in([b])
    grow(kv, b, 9, 10, 11)
    assert all(block.block_hash is None for block in kv.pool.blocks)


def test_freed_blocks_are_reused_last_block_first():
    kv = manager(num_blocks=3)
    a = Sequence("a", list(range(12)))
    start(kv, a)
    blocks = table(kv, a)
    kv.free(a)
    assert free_ids(kv.pool) == blocks[::-1]
    assert cached(kv, list(range(13))) == 12
    kv.pool.get_new_blocks(1)
    assert cached(kv, list(range(13))) == 8


def test_freeing_one_sharer_keeps_the_other_ones_blocks():
    kv = manager()
    a, b = Sequence("a", list(range(9))), Sequence("b", list(range(9)))
    start(kv, a)
    start(kv, b)
    kv.free(a)
    kv.check_integrity()
    assert all(kv.pool.blocks[block_id].ref_count == 1 for block_id in table(kv, b))
    kv.free(b)
    kv.free(b)  # nothing left to free: no error
    assert kv.pool.num_free == 16


def test_identical_sequences_computed_side_by_side_keep_their_own_blocks():
    kv = manager()
    a, b = Sequence("a", [1, 2, 3]), Sequence("b", [1, 2, 3])
    start(kv, a)
    start(kv, b)
    tables = table(kv, a), table(kv, b)
    grow(kv, a, 4)
    grow(kv, b, 4)
    assert (table(kv, a), table(kv, b)) == tables
    kv.free(a)
    kv.pool.get_new_blocks(kv.pool.num_free)  # a's copy is overwritten, b's still serves
    assert kv.find_prefix(Sequence("c", [1, 2, 3, 4, 5])).tables == [[kv.pool.blocks[tables[1][0]]]]


def test_duplicates_are_merged_if_asked_once_the_block_is_full_and_computed():
    kv = manager(deduplicate_blocks=True)
    a, b = Sequence("a", [1, 2, 3]), Sequence("b", [1, 2, 3])
    start(kv, a)
    start(kv, b)
    grow(kv, a, 4)
    grow(kv, b, 4)
    assert table(kv, a) != table(kv, b)
    kv.start_step()
    b.token_ids.append(5)
    allocation = kv.allocate_slots(b, 1)
    assert allocation == ([table(kv, b)[1:]], [(0, 0, table(kv, a)[0])])
    assert transfers(kv) == []
    kv.check_integrity()


def test_merging_takes_no_free_block():
    """The other copy is free, and one's own stays with a fork: to merge would cost a block that nobody counted."""
    kv = manager(3, deduplicate_blocks=True)
    a, b = Sequence("a", [1, 2, 3]), Sequence("b", [1, 2, 3])
    start(kv, a)
    start(kv, b)
    grow(kv, a, 4)
    grow(kv, b, 4)
    fork(kv, b, "c")
    kv.free(a)
    start(kv, Sequence("x", [9]))
    assert kv.pool.num_free == 1
    grow(kv, b, 5)
    assert kv.pool.num_free == 0
    kv.check_integrity()


def test_each_block_is_hashed_once_and_its_tokens_are_read_once():
    class Tokens(list):
        slices = 0

        def __getitem__(self, index):
            self.slices += isinstance(index, slice)
            return super().__getitem__(index)

    class Counting(BlockHasher):
        __slots__ = ("count",)

        def extend(self, parent, token_ids):
            self.count = getattr(self, "count", 0) + 1
            return super().extend(parent, token_ids)

    hasher = Counting(b"test")
    kv = manager(hasher=hasher)
    a = Sequence("a", Tokens(range(3)))
    start(kv, a)
    grow(kv, a, *range(3, 21))
    assert hasher.count == 5
    assert a.token_ids.slices == 5


# ---- failures ----


def test_a_failing_allocation_with_hits_leaves_their_references_alone():
    kv = manager(num_blocks=4)
    a = Sequence("a", list(range(9)))
    start(kv, a)
    kv.free(a)  # its two cached blocks are free now, and count as needed if they are hit
    start(kv, Sequence("c", list(range(200, 204))))
    before = snapshot(kv)
    b = Sequence("b", list(range(13)))  # two hits and two more, of three free
    hit = kv.find_prefix(b)
    assert hit.num_tokens == 8
    assert kv.allocate_slots(b, 5, hit) is None
    assert snapshot(kv) == before
    assert kv.allocate_slots(b, 1, hit) is not None


def test_hits_are_not_reused_for_the_blocks_that_follow_them():
    """The free queue is down to the hits themselves and one block: the hits must be taken out first."""
    kv = manager(num_blocks=3)
    a = Sequence("a", list(range(9)))
    start(kv, a)
    kv.free(a)
    b = Sequence("b", list(range(12)))
    hits = [block.block_id for block in kv.find_prefix(b).tables[0]]
    assert start(kv, b) == 8
    assert table(kv, b)[:2] == hits
    assert len(set(table(kv, b))) == 3


# ---- forgetting ----


def test_forgotten_content_is_not_found_again():
    kv = manager(prefix_match_unit=1, num_host_blocks=16, num_disk_slots=16)
    a = Sequence("a", list(range(11)))
    start(kv, a)
    kv.forget([a])
    kv.free(a)
    kv.check_integrity()
    assert cached(kv, list(range(12))) == 0
    kv.start_step()
    kv.store_all()
    assert kv.take_transfers() == []


def test_forgetting_makes_shared_blocks_unfindable_but_leaves_them_to_the_others():
    kv = manager()
    a, b = Sequence("a", list(range(9))), Sequence("b", list(range(9)))
    start(kv, a)
    start(kv, b)
    kv.forget([a])
    kv.free(a)
    kv.check_integrity()
    assert cached(kv, list(range(9))) == 0
    grow(kv, b, 9, 10, 11)
    assert len(table(kv, b)) == 3


def test_what_a_sharer_registered_before_is_not_found_on_top_of_what_is_computed_again():
    kv = manager()
    a, b = Sequence("a", list(range(9))), Sequence("b", list(range(13)))
    start(kv, a)
    assert start(kv, b) == 8
    kv.forget([a])
    kv.free(a)
    start(kv, Sequence("c", list(range(9))))
    assert cached(kv, list(range(14))) == 8  # b's third block is not found
    kv.free(b)
    assert cached(kv, list(range(14))) == 8


@pytest.mark.parametrize("copier_ends", [False, True])
@pytest.mark.parametrize("num_whole", [0, 4])
def test_what_was_copied_from_it_within_a_block_is_forgotten(copier_ends: bool, num_whole: int):
    kv = manager(prefix_match_unit=1)
    beginning = list(range(num_whole))
    a, b = Sequence("a", [*beginning, 50, 51, 52, 53, 54]), Sequence("b", [*beginning, 50, 51, 62, 63, 64])
    start(kv, a)
    assert start(kv, b) == num_whole + 2
    if copier_ends:
        kv.free(b)
    kv.forget([a])
    kv.free(a)
    start(kv, Sequence("c", [*beginning, 99]))
    assert cached(kv, [*b.token_ids, 65]) == num_whole


def test_what_a_fork_copied_before_it_wrote_is_forgotten():
    kv = manager(prefix_match_unit=1)
    a = Sequence("a", [1, 2])
    start(kv, a)
    b = fork(kv, a, "b")
    grow(kv, a, 3, 4)
    grow(kv, b, 5, 6, 7)
    kv.forget([a])
    kv.free(a)
    assert cached(kv, [*b.token_ids, 8]) == 0
    kv.free(b)
    assert cached(kv, [*b.token_ids, 8]) == 0


def test_the_tail_of_a_sequence_that_has_ended_is_forgotten_with_it():
    kv = manager(prefix_match_unit=1)
    short, long = Sequence("short", [1, 2, 3]), Sequence("long", list(range(20, 27)))
    for sequence in (short, long):
        start(kv, sequence)
        kv.free(sequence)
    assert cached(kv, [1, 2, 3, 4]) == 3 and cached(kv, [*range(20, 27), 1]) == 7
    kv.forget([short, long])
    assert cached(kv, [1, 2, 3, 4]) == 0 and cached(kv, [*range(20, 27), 1]) == 0


def test_after_a_reset_nothing_computed_before_is_found():
    kv = manager()
    running, gone = Sequence("run", list(range(9))), Sequence("gone", list(range(50, 59)))
    start(kv, running)
    start(kv, gone)
    kv.free(gone)
    assert kv.reset_prefix_cache() == 4
    grow(kv, running, 9, 10, 11)  # fills a block whose prefix is from before the reset
    assert start(kv, Sequence("b", list(range(9)))) == 0
    kv.free(running)
    assert cached(kv, list(range(12))) == 8  # only what b computed since
    assert cached(kv, list(range(50, 59))) == 0
    running.num_computed_tokens = 0
    assert start(kv, running) == 8  # begun anew, it shares again
    assert cached(kv, list(range(13))) == 12


def test_after_a_reset_forks_and_tails_of_what_was_before_are_not_found_either():
    kv = manager(prefix_match_unit=1)
    a = Sequence("a", list(range(6)))
    start(kv, a)
    kv.reset_prefix_cache()
    b = fork(kv, a, "b")
    kv.free(a)
    grow(kv, b, 6, 7, 8, 9)
    kv.free(b)
    assert all(block.block_hash is None for block in kv.pool.blocks)
    c = Sequence("c", list(range(6)))
    assert start(kv, c) == 0
    kv.free(c)
    assert cached(kv, list(range(6))) == 5


# ---- sizes ----


@pytest.mark.parametrize(("num_tokens", "fits"), [(1, True), (16, True), (17, False)])
def test_can_ever_fit(num_tokens: int, fits: bool):
    assert manager(num_blocks=4).can_ever_fit(num_tokens) is fits


@pytest.mark.parametrize("windows", [(None,), (5,), (None, 5), (1, 9, None), (4, 8)])
@pytest.mark.parametrize("num_blocks", [3, 7, 20])
def test_the_longest_sequence_is_the_last_that_fits(windows, num_blocks):
    kv = manager(num_blocks, windows=windows, max_step_tokens=6)
    longest = kv.longest_sequence(200)
    assert longest == max((n for n in range(1, 201) if kv.can_ever_fit(n)), default=0)
    assert kv.longest_sequence(longest // 2) == longest // 2


@pytest.mark.parametrize("window", [1, 2, 4, 5, 9])
@pytest.mark.parametrize("max_step_tokens", [1, 3, 8])
def test_no_way_to_compute_a_sequence_takes_more_blocks_than_num_blocks_for(window, max_step_tokens):
    """Whatever the size of the steps; and one block of slack at most is counted for a windowed group."""
    rng = random.Random(window * 100 + max_step_tokens)
    num_tokens = 24
    for windows in ((window,), (None, window)):
        most = 0
        for _ in range(25):
            kv = manager(64, windows=windows, max_step_tokens=max_step_tokens)
            a = Sequence("a", list(range(num_tokens)))
            while a.num_computed_tokens < num_tokens:
                num_new = rng.randint(1, min(max_step_tokens, num_tokens - a.num_computed_tokens))
                assert kv.allocate_slots(a, num_new) is not None
                a.num_computed_tokens += num_new
                assert kv.num_allocated_blocks([a]) <= kv.num_blocks_for(a.num_computed_tokens)
                most = max(most, kv.num_allocated_blocks([a]))
        assert kv.num_blocks_for(num_tokens) - 1 <= most <= kv.num_blocks_for(num_tokens)


# ---- the check itself ----


def test_integrity_check_compares_tables_with_reference_counts():
    kv = manager()
    start(kv, Sequence("a", list(range(9))))
    kv.tables["b"] = kv.tables["a"]
    with pytest.raises(QuireError, match="references"):
        kv.check_integrity()
    kv.tables["b"] = []
    kv.check_integrity()
    kv.tables["b"] = [[]]
    with pytest.raises(QuireError, match="empty"):
        kv.check_integrity()
