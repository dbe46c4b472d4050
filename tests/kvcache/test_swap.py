"""Swapping moves the blocks of some sequences to the host and back, what they share once, and nothing else changes."""

from __future__ import annotations

import pytest

from quire.kvcache.block_pool import NULL_BLOCK
from tests.helpers.transfers import IN, OUT
from tests.kvcache.model import Sequence, cached, fill, fork, grow, manager, snapshot, start, table, take, transfers


def test_blocks_go_out_once_and_come_back_in_order():
    kv = manager(4, num_host_blocks=4, enable_prefix_caching=False)
    a = Sequence("a", list(range(10)))
    start(kv, a)
    before = table(kv, a)
    assert kv.swap_out([a])
    assert (kv.pool.num_free, kv.host.pool.num_free, kv.has_blocks(a)) == (4, 1, False)
    out = transfers(kv)
    assert [(kind, source) for kind, source, _ in out] == [(OUT, block) for block in before]
    kv.check_integrity()
    assert kv.num_blocks_to_swap_in([a]) == 4  # three, and one to go on with
    kv.swap_in([a])
    assert transfers(kv) == [(IN, host, table(kv, a)[i]) for i, (_, _, host) in enumerate(out)]
    assert kv.host.pool.num_free == 4
    kv.check_integrity()
    grow(kv, a, 10, 11, 12)
    assert len(table(kv, a)) == 4


def test_forks_share_as_before_when_they_are_back():
    kv = manager(16, num_host_blocks=16)
    a = Sequence("a", list(range(10)))
    start(kv, a)
    b, c = fork(kv, a, "b"), fork(kv, a, "c")
    grow(kv, b, 10)
    take(kv)
    before = [table(kv, s) for s in (a, b, c)]
    assert kv.swap_out([a, b, c])
    kv.check_integrity()
    assert len(transfers(kv)) == 4  # 2 shared, 1 shared by two, 1 of b's own
    assert kv.num_blocks_to_swap_in([a, b, c]) == 4 + 3
    fill(kv)
    kv.swap_in([a, b, c])
    kv.check_integrity()
    after = [table(kv, s) for s in (a, b, c)]
    mapping = {old: new for rows in zip(before, after, strict=True) for old, new in zip(*rows, strict=True)}
    assert [[mapping[block] for block in row] for row in before] == after
    assert len(set(mapping.values())) == len(mapping) == 4
    take(kv)
    grow(kv, a, 20)
    assert len(transfers(kv)) == 1  # a and c still share their last block
    grow(kv, c, 30)
    assert transfers(kv) == []


def test_no_room_on_the_host_changes_nothing():
    kv = manager(4, num_host_blocks=2)
    a = Sequence("a", list(range(10)))
    start(kv, a)
    before = snapshot(kv)
    assert not kv.swap_out([a])
    assert snapshot(kv) == before
    assert not manager(4).swap_out([a])


def test_sequences_without_blocks_cannot_be_swapped_and_beside_others_do_not_count():
    kv = manager(4, num_host_blocks=4)
    a, b = Sequence("a", list(range(5))), Sequence("b", [1])
    assert not kv.swap_out([b])
    start(kv, a)
    assert kv.swap_out([a, b])
    assert kv.num_blocks_to_swap_in([a, b]) == 3
    kv.swap_in([a, b])
    assert kv.has_blocks(a) and not kv.has_blocks(b)
    kv.check_integrity()


def test_what_others_share_stays_with_them():
    kv = manager(8, num_host_blocks=8)
    a, b = Sequence("a", list(range(9))), Sequence("b", list(range(9)))
    start(kv, a)
    start(kv, b)
    before = table(kv, b)
    assert kv.swap_out([a])
    assert table(kv, b) == before
    kv.check_integrity()
    assert kv.pool.num_free == 5
    kv.swap_in([a])
    kv.check_integrity()
    assert not set(table(kv, a)) & set(before)


def test_swapped_blocks_are_found_again_when_they_are_back():
    kv = manager(4, num_host_blocks=4, prefix_match_unit=1)
    a = Sequence("a", list(range(10)))
    start(kv, a)
    assert kv.swap_out([a])
    assert cached(kv, list(range(11))) == 10  # they are still on the device, the tail too
    fill(kv)
    assert cached(kv, list(range(11))) == 4  # the host had but one block left over
    kv.swap_in([a])
    assert cached(kv, list(range(11))) == 8


def test_cached_content_does_not_push_out_swapped_blocks():
    kv = manager(4, num_host_blocks=3)
    a = Sequence("a", list(range(9)))
    start(kv, a)
    assert kv.swap_out([a])
    take(kv)
    x = Sequence("x", list(range(50, 66)))
    start(kv, x)
    kv.free(x)
    fill(kv)
    assert transfers(kv) == []
    assert kv.host.pool.num_free == 0
    kv.check_integrity()


def test_a_swapped_sequence_may_end():
    kv = manager(8, num_host_blocks=8)
    a = Sequence("a", list(range(9)))
    start(kv, a)
    b = fork(kv, a, "b")
    assert kv.swap_out([a, b])
    kv.free(a)
    kv.check_integrity()
    assert kv.host.pool.num_free == 5
    kv.swap_in([b])
    kv.check_integrity()
    assert kv.host.pool.num_free == 8
    kv.free(b)
    assert kv.pool.num_free == 8


@pytest.mark.parametrize("when", ["before", "while"])
def test_a_reset_concerns_swapped_sequences_too(when: str):
    kv = manager(8, num_host_blocks=8, prefix_match_unit=1)
    a = Sequence("a", list(range(10)))
    start(kv, a)
    if when == "before":
        kv.reset_prefix_cache()
    assert kv.swap_out([a])
    if when == "while":
        kv.reset_prefix_cache()
    kv.swap_in([a])
    grow(kv, a, 10, 11, 12)
    assert cached(kv, list(range(14))) == 0
    kv.free(a)
    assert cached(kv, list(range(14))) == 0
    assert start(kv, Sequence("a", list(range(10)))) == 0  # the name is free for a sequence begun anew
    assert cached(kv, list(range(10))) == 8


def test_windows_and_groups_are_swapped_with_their_holes():
    kv = manager(16, num_host_blocks=16, windows=(None, 4))
    a = Sequence("a", list(range(8)))
    start(kv, a)
    grow(kv, a, *range(8, 13))
    held = kv.num_allocated_blocks([a])
    assert held == 4 + 2
    assert kv.swap_out([a])
    assert kv.num_blocks_to_swap_in([a]) == held + 2
    kv.swap_in([a])
    kv.check_integrity()
    assert kv.num_allocated_blocks([a]) == held
    assert [block is NULL_BLOCK for block in kv.tables["a"][1]] == [True, True, False, False]
