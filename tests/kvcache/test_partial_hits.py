"""Reuse of the first tokens of a block, and of tails: the last blocks, half full, of sequences that have ended."""

from __future__ import annotations

import pytest

from quire.kvcache.block_hash import BlockHasher
from quire.kvcache.manager import KVCacheManager
from tests.helpers.transfers import COPY
from tests.kvcache.model import BLOCK, Sequence, cached, fill, free_ids, grow, manager, start, table, take, transfers


def token_manager(num_blocks: int = 16, unit: int = 1, **options) -> KVCacheManager:
    return manager(num_blocks, prefix_match_unit=unit, **options)


def test_a_prompt_that_parts_inside_a_block_copies_it_and_computes_the_rest():
    kv = token_manager()
    a, b = Sequence("a", list(range(12))), Sequence("b", [*range(7), 70, 80, 90])
    start(kv, a)
    assert start(kv, b) == 7
    assert table(kv, b)[0] == table(kv, a)[0]
    assert table(kv, b)[1] not in table(kv, a)
    assert transfers(kv) == [(COPY, table(kv, a)[1], table(kv, b)[1])]
    assert kv.pool.blocks[table(kv, a)[1]].ref_count == 1  # it was held only until the copy was noted


def test_the_copy_becomes_the_prompts_own_block_with_a_name_of_its_own():
    kv = token_manager()
    start(kv, Sequence("a", list(range(12))))
    start(kv, Sequence("b", [*range(7), 70, 80, 90]))
    assert cached(kv, [*range(7), 70, 80]) == 8
    assert cached(kv, list(range(9))) == 8


def test_of_several_ways_to_go_on_the_longest_is_taken():
    kv = token_manager()
    for name, block in (("a", [4, 5, 60, 70]), ("b", [4, 5, 6, 70]), ("c", [4, 50, 6, 7])):
        start(kv, Sequence(name, [*range(4), *block]))
    hit = kv.find_prefix(Sequence("d", [*range(4), 4, 5, 6, 7, 8]))
    kv.start_step()
    hit = kv.find_prefix(Sequence("d", [*range(4), 4, 5, 6, 7, 8]))
    assert (hit.num_tokens, len(hit.tables[0])) == (7, 1)
    assert hit.partial is kv.pool.blocks[kv.block_ids("b")[0][1]]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 6, 7, 9])
def test_all_tokens_of_an_ended_sequence_are_found(length: int):
    kv = token_manager()
    a = Sequence("a", list(range(length)))
    start(kv, a)
    assert cached(kv, list(range(length + 1))) == length // BLOCK * BLOCK
    kv.free(a)
    assert cached(kv, list(range(length + 1))) == length
    assert cached(kv, list(range(length))) == length - 1  # one is left to compute


def test_the_next_turn_of_a_conversation_goes_on_from_the_token_where_the_last_one_ended():
    kv = token_manager()
    a = Sequence("a", [1, 2, 3])
    start(kv, a)
    grow(kv, a, 7, 8, 9, 10)
    a.token_ids.append(11)  # sampled, but never computed
    kv.free(a)
    assert cached(kv, [1, 2, 3, 7, 8, 9, 10, 11, 50, 51]) == 7


def test_a_tail_is_not_found_by_the_name_of_a_full_block():
    """[0, 1, 2] and [0, 1, 2, 0] would be one message if names did not tell lengths apart."""
    hasher = BlockHasher(b"test")
    root = hasher.root(None)
    names = {hasher.extend(root, tokens) for tokens in ([0, 1, 2], [0, 1, 2, 0], [0, 0, 1, 2], [0], [0, 0], [])}
    assert len(names) == 6
    kv = token_manager()
    a = Sequence("a", [0, 1, 2])
    start(kv, a)
    kv.free(a)
    assert cached(kv, [0, 1, 2, 0, 5]) == 3
    assert cached(kv, [0, 1, 2, 0, 5][:4]) == 3


@pytest.mark.parametrize(("unit", "expected"), [(1, 7), (2, 6), (3, 7), (4, 4), (8, 4)])
def test_matches_are_rounded_down_to_the_unit_and_a_whole_block_means_none(unit: int, expected: int):
    kv = token_manager(unit=unit)
    start(kv, Sequence("a", list(range(12))))
    assert cached(kv, [*range(7), 99, 99]) == expected


@pytest.mark.parametrize(("shared", "expected"), [(15, 0), (16, 16), (17, 17)])
def test_a_match_of_less_than_an_eighth_of_a_block_is_not_worth_a_copy(shared: int, expected: int):
    kv = KVCacheManager(4, 128, prefix_match_unit=1)
    kv.start_step()
    a = Sequence("a", list(range(200)))
    assert kv.allocate_slots(a, 200, kv.find_prefix(a)) is not None
    a.num_computed_tokens = 200
    kv.start_step()
    assert kv.find_prefix(Sequence("b", [*range(shared), 900, 900])).num_tokens == expected


def test_a_source_that_is_the_last_free_block_is_taken_over():
    kv = token_manager(3)
    a, b = Sequence("a", [1, 2, 3]), Sequence("b", list(range(50, 58)))
    start(kv, a)
    start(kv, b)
    kv.free(a)
    (source,) = free_ids(kv.pool)
    kv.start_step()
    c = Sequence("c", [1, 2, 3, 4])
    hit = kv.find_prefix(c)
    assert hit.num_tokens == 3
    assert kv.allocate_slots(c, 1, hit) == ([[source]], [])
    assert transfers(kv) == []  # its content is there already
    c.num_computed_tokens = 4
    kv.check_integrity()


def test_a_source_that_is_the_next_to_be_reused_is_taken_over_and_the_other_block_kept():
    """The free queue holds the source and one more block, and the source stands first."""
    kv = token_manager(3)
    a = Sequence("a", [1, 2, 3])
    start(kv, a)
    kv.free(a)
    kv.pool.touch([kv.pool.blocks[1]])
    source = next(block for block in kv.pool.blocks if block.block_hash)
    other = kv.pool.blocks[2]
    kv.pool.touch([other])
    kv.pool.register(other, b"o" * 16)
    kv.pool.free([other])
    assert free_ids(kv.pool)[0] == source.block_id
    kv.start_step()
    c = Sequence("c", [1, 2, 3, 4])
    hit = kv.find_prefix(c)
    assert hit.partial is source
    assert kv.allocate_slots(c, 1, hit) == ([[source.block_id]], [])
    assert transfers(kv) == []
    assert kv.pool.lookup(b"o" * 16) is other


def test_a_source_in_use_costs_one_block_only():
    kv = token_manager(3)
    a = Sequence("a", list(range(8)))
    start(kv, a)
    assert start(kv, Sequence("b", [0, 1, 2, 99])) == 3
    assert kv.pool.num_free == 0


def test_a_tail_that_was_reused_is_gone():
    kv = token_manager()
    a = Sequence("a", list(range(7)))
    start(kv, a)
    kv.free(a)
    fill(kv)
    assert cached(kv, list(range(8))) == 0


def test_two_equal_sequences_leave_one_tail():
    kv = token_manager()
    for name in "ab":
        sequence = Sequence(name, [1, 2, 3])
        start(kv, sequence)
        kv.free(sequence)
    assert sum(block.block_hash is not None for block in kv.pool.blocks) == 1


def test_a_tail_is_kept_on_the_device_only():
    """It could not be found in the other tiers, and would take the place of what can."""
    kv = token_manager(num_host_blocks=8, num_disk_slots=8)
    a = Sequence("a", list(range(6)))
    start(kv, a)
    kv.free(a)
    kv.start_step()
    fill(kv)
    kv.store_all()
    moved, saves, _ = take(kv)
    assert len(moved) == len(saves) == 1  # the whole block
    assert kv.host.pool.num_free == 8
    assert sum(block.block_hash is not None for block in kv.host.pool.blocks) == 1


def test_tails_are_not_named_with_several_groups_of_layers():
    kv = token_manager(windows=(None, 6))
    a = Sequence("a", list(range(7)))
    start(kv, a)
    kv.free(a)
    assert cached(kv, list(range(8))) == 4
