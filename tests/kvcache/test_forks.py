"""Forks share everything; a copy is made exactly when somebody writes into a block that others hold too."""

from __future__ import annotations

import pytest

from tests.helpers.transfers import COPY
from tests.kvcache.model import Sequence, cached, fork, grow, manager, start, table, transfers


def test_a_fork_shares_all_blocks_and_takes_none():
    kv = manager(4)
    a = Sequence("a", list(range(10)))
    start(kv, a)
    b = fork(kv, a, "b")
    assert table(kv, b) == table(kv, a)
    assert kv.pool.num_free == 1
    assert [kv.pool.blocks[block_id].ref_count for block_id in table(kv, a)] == [2, 2, 2]
    assert transfers(kv) == []


def test_the_first_to_write_copies_and_the_last_owner_writes_in_place():
    kv = manager()
    a = Sequence("a", list(range(10)))
    start(kv, a)
    b = fork(kv, a, "b")
    shared = table(kv, a)
    kv.start_step()
    a.token_ids.append(10)
    b.token_ids.append(11)
    allocation = kv.allocate_slots(a, 1)
    assert allocation is not None
    new_block_ids, replaced = allocation
    copy = table(kv, a)[2]
    assert (new_block_ids, replaced) == ((), [(0, 2, copy)])
    assert copy not in shared
    assert kv.allocate_slots(b, 1) == ((), [])
    assert table(kv, a) == [*shared[:2], copy]
    assert table(kv, b) == shared
    assert transfers(kv) == [(COPY, shared[2], copy)]
    kv.check_integrity()


@pytest.mark.parametrize("num_forks", [2, 5])
def test_n_sequences_make_n_minus_one_copies_of_the_last_block_only(num_forks: int):
    kv = manager(32)
    a = Sequence("a", list(range(10)))
    start(kv, a)
    sequences = [a] + [fork(kv, a, f"f{i}") for i in range(num_forks - 1)]
    source = table(kv, a)[2]
    for token, sequence in enumerate(sequences):
        grow(kv, sequence, 100 + token)
    made = transfers(kv)
    assert [(kind, origin) for kind, origin, _ in made] == [(COPY, source)] * (num_forks - 1)
    assert len({table(kv, sequence)[2] for sequence in sequences}) == num_forks
    assert table(kv, sequences[-1])[2] == source
    assert len({tuple(table(kv, sequence)[:2]) for sequence in sequences}) == 1
    for sequence in sequences:
        grow(kv, sequence, 1)
    assert transfers(kv) == []  # everybody has a block of their own now


def test_a_fork_at_the_end_of_a_block_needs_no_copy():
    kv = manager()
    a = Sequence("a", list(range(8)))
    start(kv, a)
    b = fork(kv, a, "b")
    grow(kv, a, 8)
    grow(kv, b, 9)
    assert transfers(kv) == []
    assert table(kv, a)[:2] == table(kv, b)[:2]
    assert table(kv, a)[2] != table(kv, b)[2]


def test_no_copy_is_made_once_the_others_are_gone():
    kv = manager()
    a = Sequence("a", list(range(6)))
    start(kv, a)
    b = fork(kv, a, "b")
    kv.free(a)
    before = table(kv, b)
    grow(kv, b, 6)
    assert transfers(kv) == []
    assert table(kv, b) == before


def test_a_copy_may_come_with_new_blocks():
    kv = manager()
    a = Sequence("a", list(range(6)))
    start(kv, a)
    b = fork(kv, a, "b")
    b.token_ids += range(50, 55)
    kv.start_step()
    allocation = kv.allocate_slots(b, 5)
    assert allocation is not None
    assert allocation == ([table(kv, b)[2:]], [(0, 1, table(kv, b)[1])])
    assert len(table(kv, b)) == 3
    kv.check_integrity()


def test_a_fork_names_what_it_fills_and_others_find_it():
    kv = manager()
    a = Sequence("a", list(range(6)))
    start(kv, a)
    b = fork(kv, a, "b")
    grow(kv, a, 10, 11)
    grow(kv, b, 20, 21)
    assert cached(kv, [*range(6), 10, 11, 0]) == 8
    assert cached(kv, [*range(6), 20, 21, 0]) == 8
    assert cached(kv, [*range(6), 10, 21, 0]) == 4


def test_forks_that_write_the_same_become_duplicates_that_take_over_from_each_other():
    kv = manager()
    a = Sequence("a", list(range(6)))
    start(kv, a)
    b = fork(kv, a, "b")
    for sequence in (a, b):
        grow(kv, sequence, 6, 7, 8)
    assert table(kv, a)[1] != table(kv, b)[1]
    kv.pool.unregister(kv.pool.lookup(a.block_hashes[1]))
    assert cached(kv, list(range(9))) == 8
    kv.pool.unregister(kv.pool.lookup(a.block_hashes[1]))
    assert cached(kv, list(range(9))) == 4


def test_the_tail_is_named_by_the_last_of_those_who_share_it():
    kv = manager(prefix_match_unit=1)
    a = Sequence("a", list(range(7)))
    start(kv, a)
    b = fork(kv, a, "b")
    kv.free(a)
    assert cached(kv, list(range(8))) == 4
    kv.free(b)
    assert cached(kv, list(range(8))) == 7


def test_every_group_of_layers_copies_its_own_block():
    kv = manager(windows=(None, 6))
    a = Sequence("a", list(range(6)))
    start(kv, a)
    b = fork(kv, a, "b")
    shared = [table(kv, a, group)[1] for group in (0, 1)]
    kv.start_step()
    b.token_ids.append(9)
    allocation = kv.allocate_slots(b, 1)
    assert allocation is not None
    assert allocation == ((), [(group, 1, table(kv, b, group)[1]) for group in (0, 1)])
    assert transfers(kv) == [(COPY, shared[group], table(kv, b, group)[1]) for group in (0, 1)]
    kv.check_integrity()
