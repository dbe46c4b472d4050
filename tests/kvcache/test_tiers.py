"""Content that the device has no room for lives on in the host's pool and on disk, and comes back from there."""

from __future__ import annotations

import pytest

from quire.kvcache.block_hash import BlockHasher
from quire.kvcache.manager import KVCacheManager
from quire.kvcache.tiers import BlockHeader, TierHit
from quire.step import Tier, TransferOp
from tests.helpers.transfers import COPY, IN, OUT
from tests.kvcache.model import (
    BLOCK,
    Sequence,
    cached,
    fill,
    fork,
    free_ids,
    grow,
    manager,
    snapshot,
    start,
    table,
    take,
)
from tests.kvcache.model import transfers as moved

# ---- host ----


def evicted(kv: KVCacheManager, token_ids: list[int]) -> list[int]:
    """Compute `token_ids`, free them, and use all blocks for something else; return the device blocks they had."""
    sequence = Sequence("evicted", token_ids)
    start(kv, sequence)
    blocks = table(kv, sequence)
    kv.free(sequence)
    fill(kv)
    return blocks


def test_what_the_device_reuses_is_copied_out_first_and_comes_back():
    kv = manager(4, num_host_blocks=8)
    blocks = evicted(kv, list(range(9)))
    out = moved(kv)
    assert [kind for kind, _, _ in out] == [OUT, OUT]
    assert {source for _, source, _ in out} == set(blocks[:2])
    place = {source: host for _, source, host in out}
    b = Sequence("b", list(range(9)))
    kv.start_step()
    hit = kv.find_prefix(b)
    assert (hit.num_tokens, hit.count_tokens(BLOCK, ())[0]) == (8, 8)
    assert all(found == TierHit(kv.host, found.block_hash) for found in hit.tables[0])
    assert kv.allocate_slots(b, 1, hit) == ([table(kv, b)], [])
    assert moved(kv) == [(IN, place[block], table(kv, b)[i]) for i, block in enumerate(blocks[:2])]
    kv.check_integrity()
    assert kv.host.pool.num_free == 8  # nothing stays pinned


def test_restored_blocks_have_their_names_again_and_may_be_copied_in_the_next_step():
    kv = manager(4, num_host_blocks=8, prefix_match_unit=1)
    evicted(kv, list(range(9)))
    b = Sequence("b", list(range(9)))
    start(kv, b)
    take(kv)
    c = Sequence("c", [*range(6), 99])
    assert kv.find_prefix(c).num_tokens == 4  # copies are made beside the restoring ones: not in the same step
    assert start(kv, c) == 6
    assert moved(kv) == [(COPY, table(kv, b)[1], table(kv, c)[1])]


def test_a_hit_may_lie_in_both_tiers():
    kv = manager(6, num_host_blocks=8)
    a = Sequence("a", list(range(17)))
    start(kv, a)
    first, second, third = table(kv, a)[:3]
    kv.free(a)
    taken = kv.pool.get_new_blocks(3)  # the unnamed one, one never used, and the last of the prefix
    kv.pool.free(taken)
    b = Sequence("b", list(range(17)))
    kv.start_step()
    take(kv)
    hit = kv.find_prefix(b)
    assert hit.num_blocks_needed() == 4
    assert kv.allocate_slots(b, 1, hit) is not None
    assert table(kv, b)[:3] == [first, second, third]
    assert [kind for kind, _, _ in moved(kv)] == [IN]
    kv.check_integrity()


def test_without_room_for_what_must_be_restored_nothing_changes():
    kv = manager(4, num_host_blocks=8)
    evicted(kv, list(range(9)))
    start(kv, Sequence("x", list(range(50, 56))))
    b = Sequence("b", list(range(9)))
    hit = kv.find_prefix(b)
    assert hit.num_tokens == 8
    before = snapshot(kv)
    assert kv.allocate_slots(b, 1, hit) is None  # two to restore and a new one, of two free
    assert snapshot(kv) == before


def test_restoring_does_not_push_out_what_is_still_to_be_restored():
    """Each block taken on the device sends its own content to the host, which has no block to spare."""
    kv = manager(3, num_host_blocks=2)
    evicted(kv, list(range(9)))
    assert sum(block.block_hash is not None for block in kv.host.pool.blocks) == 2
    x = Sequence("x", list(range(50, 62)))
    start(kv, x)
    take(kv)
    kv.free(x)
    b = Sequence("b", list(range(9)))
    kv.start_step()
    hit = kv.find_prefix(b)
    assert hit.num_tokens == 8
    sources = [kv.host.pool.lookup(found.block_hash).block_id for found in hit.tables[0]]
    assert kv.allocate_slots(b, 1, hit) is not None
    content = {host: f"old{host}" for host in sources}
    device = {block: f"x{block}" for block in range(3)}
    for kind, source, destination in moved(kv):  # one after the other, as the worker does
        if kind == IN:
            device[destination] = content[source]
        elif kind == OUT:
            content[destination] = device[source]
    assert [device[block] for block in table(kv, b)[:2]] == [f"old{host}" for host in sources]
    kv.check_integrity()


def test_the_host_keeps_what_was_used_last():
    kv = manager(2, num_host_blocks=2)
    for first in (0, 100, 200):
        evicted(kv, list(range(first, first + 4)))
    assert [cached(kv, [*range(first, first + 4), 1]) for first in (0, 100, 200)] == [0, 4, 4]


def test_content_that_the_host_has_already_is_not_copied_again():
    kv = manager(2, num_host_blocks=4)
    evicted(kv, [0, 1, 2, 3])
    take(kv)
    start(kv, Sequence("b", [0, 1, 2, 3, 4]))
    kv.free(Sequence("b", []))
    fill(kv)
    assert [kind for kind, _, _ in moved(kv)] == [IN]


def test_no_free_host_block_means_that_content_is_lost():
    kv = manager(4, num_host_blocks=2)
    swapped = Sequence("s", list(range(50, 57)))
    start(kv, swapped)
    assert kv.swap_out([swapped])
    take(kv)
    evicted(kv, list(range(4)))
    assert moved(kv) == []
    assert cached(kv, list(range(5))) == 0


def test_a_reset_forgets_the_host_too():
    kv = manager(4, num_host_blocks=8)
    evicted(kv, list(range(9)))
    kv.reset_prefix_cache()
    assert cached(kv, list(range(9))) == 0
    assert all(block.block_hash is None for block in kv.host.pool.blocks)
    kv.check_integrity()


def test_windowed_groups_come_back_from_the_host_each_under_its_own_name():
    kv = manager(8, num_host_blocks=16, windows=(None, 5))
    evicted(kv, list(range(9)))
    take(kv)
    b = Sequence("b", list(range(9)))
    kv.start_step()
    hit = kv.find_prefix(b)
    assert (hit.num_tokens, hit.num_blocks_needed()) == (8, 3)  # 8 sees 4 .. 8 through the window
    assert kv.allocate_slots(b, 1, hit) is not None
    assert [kind for kind, _, _ in moved(kv)] == [IN] * 3
    names = [kv.pool.blocks[table(kv, b, group)[1]].block_hash for group in (0, 1)]
    assert names == [b.block_hashes[1], b.block_hashes[1] + b"\x01"]


# ---- disk ----


def disk_manager(num_blocks: int = 8, num_records: int = 8, **options) -> KVCacheManager:
    return manager(num_blocks, num_disk_slots=num_records, **options)


def saved(kv: KVCacheManager, token_ids: list[int]) -> None:
    """Compute, free, save, and use the device for something else."""
    sequence = Sequence("saved", token_ids)
    start(kv, sequence)
    kv.free(sequence)
    kv.start_step()
    fill(kv)


def load_all(kv: KVCacheManager, token_ids: list[int], succeeded: bool = True) -> dict[int, bytes]:
    kv.start_step()
    started = kv.loads.start(kv.find_prefix(Sequence("loads", token_ids)).loads)
    for block_id in started:
        kv.check_integrity()
        kv.finish_load(block_id, succeeded)
    kv.check_integrity()
    return started


def test_full_blocks_are_saved_in_the_step_after_they_became_free():
    kv = disk_manager()
    a = Sequence("a", list(range(10)))
    start(kv, a)
    first, second, _ = table(kv, a)
    kv.start_step()
    assert take(kv)[1] == []  # they are in use
    kv.free(a)
    assert take(kv)[1] == []
    kv.start_step()
    _, saves, _ = take(kv)
    assert {save.block_id for save in saves} == {first, second}
    headers = {save.block_id: BlockHeader.decode(save.header) for save in saves}
    assert headers[second] == BlockHeader(a.block_hashes[1], a.block_hashes[0], [4, 5, 6, 7])
    assert len({save.key for save in saves}) == 2
    kv.start_step()
    assert take(kv)[1] == []


def test_a_block_given_up_and_reused_in_one_step_is_saved_while_its_content_is_there():
    kv = disk_manager(2)
    a = Sequence("a", [0, 1, 2, 3])
    start(kv, a)
    kv.start_step()
    kv.free(a)  # preempted
    kv.pool.get_new_blocks(2)
    _, (save,), _ = take(kv)
    assert BlockHeader.decode(save.header).block_hash == a.block_hashes[0]
    kv.start_step()
    assert take(kv)[1] == []


def test_what_is_forgotten_before_it_was_saved_is_not_saved():
    kv = disk_manager()
    a, b = Sequence("a", list(range(9))), Sequence("b", list(range(9)))
    start(kv, a)
    kv.start_step()
    kv.free(a)  # preempted: to be saved with the next step
    assert kv.allocate_slots(b, 1, kv.find_prefix(b)) is not None
    kv.forget([b])
    kv.free(b)
    kv.start_step()
    assert take(kv)[1] == []


def test_a_block_that_comes_back_and_is_given_up_in_one_step_is_not_saved():
    """Saves are made before anything moves: its content would not be there yet."""
    kv = disk_manager(3, num_records=4, num_host_blocks=4)
    a = Sequence("a", list(range(8)))
    start(kv, a)
    assert kv.swap_out([a])
    fill(kv)
    kv.disk.clear()
    take(kv)
    kv.start_step()
    kv.swap_in([a])
    kv.free(a)
    kv.pool.get_new_blocks(3)
    assert take(kv)[1] == []


def test_a_record_is_offered_loaded_and_hit():
    kv = disk_manager()
    saved(kv, list(range(9)))
    take(kv)
    kv.start_step()
    b = Sequence("b", list(range(9)))
    hit = kv.find_prefix(b)
    assert (hit.num_tokens, hit.loading) == (0, False)
    assert hit.loads == [TierHit(kv.disk, each) for each in b.block_hashes[:2]]
    started = kv.loads.start(hit.loads)
    _, _, loads = take(kv)
    assert [load.block_id for load in loads] == list(started)
    assert [BlockHeader.decode(load.header).block_hash for load in loads] == b.block_hashes[:2]
    assert len(kv.loads) == 2
    kv.check_integrity()
    again = kv.find_prefix(Sequence("c", list(range(9))))
    assert (again.num_tokens, again.loads, again.loading) == (0, [], True)
    for block_id in started:
        kv.finish_load(block_id, succeeded=True)
    kv.check_integrity()
    hit = kv.find_prefix(b)
    assert (hit.num_tokens, hit.loads, hit.loading, len(kv.loads)) == (8, [], False, 0)
    assert kv.allocate_slots(b, 1, hit) is not None
    assert table(kv, b)[:2] == list(started)


def test_what_was_loaded_may_be_copied_in_the_next_step():
    kv = disk_manager(prefix_match_unit=1)
    saved(kv, list(range(9)))
    load_all(kv, list(range(9)))
    assert cached(kv, [*range(7), 99]) == 7


def test_a_damaged_record_is_forgotten_and_not_offered_again():
    kv = disk_manager()
    saved(kv, list(range(9)))
    assert len(load_all(kv, list(range(9)), succeeded=False)) == 2
    kv.start_step()
    hit = kv.find_prefix(Sequence("b", list(range(9))))
    assert (hit.num_tokens, hit.loads) == (0, [])
    assert len(kv.disk) == 0
    assert kv.pool.num_free == 8
    saved(kv, list(range(9)))  # computed again, it is saved again
    assert len(kv.disk) == 2


def test_a_damaged_record_in_the_middle_ends_the_hit_there():
    kv = disk_manager()
    saved(kv, list(range(13)))
    kv.start_step()
    first, second, third = kv.loads.start(kv.find_prefix(Sequence("b", list(range(13)))).loads)
    kv.finish_load(third, True)
    kv.finish_load(second, False)
    kv.finish_load(first, True)
    assert cached(kv, list(range(13))) == 4
    kv.check_integrity()


def test_loads_are_limited_by_the_free_blocks():
    kv = disk_manager(8)
    saved(kv, list(range(13)))
    x = Sequence("x", list(range(50, 74)))
    start(kv, x)
    kv.start_step()
    hit = kv.find_prefix(Sequence("b", list(range(13))))
    assert len(hit.loads) == 3
    started = kv.loads.start(hit.loads)
    assert len(started) == 2
    assert kv.pool.num_free == 0
    kv.check_integrity()
    rest = kv.find_prefix(Sequence("c", list(range(13))))
    assert (rest.loads, rest.loading) == (hit.loads[2:], True)
    assert kv.loads.start(rest.loads) == {}


def test_a_record_dropped_for_a_newer_one_while_it_is_loading_does_no_harm():
    """The worker finds another header in the slot, and says that the record is not sound."""
    kv = disk_manager(4, num_records=1)
    saved(kv, [0, 1, 2, 3])
    kv.start_step()
    (block_id,) = kv.loads.start(kv.find_prefix(Sequence("b", [0, 1, 2, 3, 4])).loads)
    saved(kv, [50, 51, 52, 53])
    kv.finish_load(block_id, succeeded=False)
    kv.check_integrity()
    assert cached(kv, [0, 1, 2, 3, 4]) == 0
    assert kv.find_prefix(Sequence("c", [50, 51, 52, 53, 54])).loads != []  # the newer record was not dropped for it


def test_a_load_that_makes_room_for_itself_by_dropping_its_own_record_is_not_begun():
    """The block it takes has content to be saved, for which the oldest record goes: the very one wanted."""
    kv = disk_manager(1, num_records=1)
    saved(kv, [0, 1, 2, 3])
    x = Sequence("x", [50, 51, 52, 53])
    start(kv, x)
    kv.start_step()
    kv.free(x)  # preempted after the step has begun, so it is not saved yet
    take(kv)
    hit = kv.find_prefix(Sequence("b", [0, 1, 2, 3, 4]))
    assert len(hit.loads) == 1
    assert kv.loads.start(hit.loads) == {}
    kv.check_integrity()
    assert (kv.pool.num_free, len(kv.loads)) == (1, 0)
    _, saves, loads = take(kv)
    assert ([BlockHeader.decode(save.header).block_hash for save in saves], loads) == ([x.block_hashes[0]], [])


def test_a_block_computed_while_its_record_was_loading_keeps_its_name():
    kv = disk_manager()
    saved(kv, list(range(5)))
    kv.start_step()
    (block_id,) = kv.loads.start(kv.find_prefix(Sequence("b", list(range(5)))).loads)
    c = Sequence("c", list(range(5)))
    start(kv, c)
    kv.finish_load(block_id, succeeded=True)
    kv.check_integrity()
    assert kv.find_prefix(Sequence("d", list(range(5)))).tables[0][0].block_id == table(kv, c)[0]
    assert kv.pool.blocks[block_id].block_hash is None


def test_a_reset_forgets_records_and_what_is_being_read():
    kv = disk_manager()
    saved(kv, list(range(9)))
    a = Sequence("a", list(range(50, 59)))
    start(kv, a)
    kv.free(a)  # not saved yet
    take(kv)
    hit = kv.find_prefix(Sequence("b", list(range(9))))
    started = kv.loads.start(hit.loads)
    kv.reset_prefix_cache()
    for block_id in started:
        kv.finish_load(block_id, succeeded=True)
    kv.start_step()
    assert take(kv)[1] == []
    for tokens in (list(range(9)), list(range(50, 59))):
        hit = kv.find_prefix(Sequence("c", tokens))
        assert (hit.num_tokens, hit.loads, hit.loading) == (0, [], False)
    assert (kv.pool.num_free, len(kv.disk), len(kv.loads)) == (8, 0, 0)
    kv.check_integrity()


def test_the_least_recently_used_record_makes_room():
    kv = disk_manager(8, num_records=3)
    for first in (0, 100, 200):
        saved(kv, list(range(first, first + 4)))
    load_all(kv, [0, 1, 2, 3, 4])
    saved(kv, list(range(300, 304)))
    fill(kv)
    loads = [len(kv.find_prefix(Sequence("q", [*range(first, first + 4), 9])).loads) for first in (0, 100, 200, 300)]
    assert loads == [1, 0, 1, 1]


def test_a_restart_finds_what_was_saved():
    kv = disk_manager()
    a, b = Sequence("a", list(range(10))), Sequence("b", list(range(50, 55)))
    start(kv, a)
    start(kv, b)
    kv.free(b)
    kv.store_all()  # what is in use, too
    _, saves, _ = take(kv)
    stored = [(save.key, save.header) for save in saves]
    assert len(stored) == 3
    later = disk_manager(stored=stored)
    assert load_all(later, list(range(10)))
    assert cached(later, list(range(10))) == 8
    assert load_all(disk_manager(stored=stored, hasher=BlockHasher(b"other model")), list(range(10))) == {}


@pytest.mark.parametrize("slot", [-1, 8, 100])
def test_stored_records_outside_the_room_there_is_are_ignored(slot):
    header = BlockHeader(b"n" * 16, b"p" * 16, [1, 2, 3, 4]).encode()
    assert len(disk_manager(stored=[(slot, header)]).disk) == 0


def test_stored_records_that_make_no_sense_are_ignored_and_equal_ones_count_once():
    header = BlockHeader(b"n" * 16, b"p" * 16, [1, 2, 3, 4]).encode()
    kv = disk_manager(stored=[(0, b""), (1, b"\xff" * 40), (2, header[:-1]), (3, header), (4, header), (5, bytes(60))])
    assert len(kv.disk) == 1
    assert kv.disk._records[b"n" * 16] == (3, header)


def test_a_taken_slot_is_not_given_to_another_record():
    header = BlockHeader(b"n" * 16, b"p" * 16, [1, 2, 3, 4]).encode()
    kv = disk_manager(num_records=2, stored=[(0, header)])
    a = Sequence("a", list(range(4)))
    start(kv, a)
    kv.free(a)
    kv.start_step()
    assert [save.key for save in take(kv)[1]] == [1]


def test_content_goes_down_both_tiers_and_the_nearer_one_is_hit():
    kv = disk_manager(4, num_host_blocks=4)
    saved(kv, list(range(9)))
    kv.start_step()
    hit = kv.find_prefix(Sequence("b", list(range(9))))
    assert (hit.num_tokens, hit.count_tokens(BLOCK, ())[0], hit.loads) == (8, 8, [])


def test_blocks_passed_by_a_window_are_saved_too():
    kv = disk_manager(windows=(4,))
    a = Sequence("a", list(range(8)))
    start(kv, a)
    grow(kv, a, 8, 9)
    kv.start_step()
    _, saves, _ = take(kv)
    assert [BlockHeader.decode(save.header).token_ids for save in saves] == [[0, 1, 2, 3]]


@pytest.mark.parametrize("num_tokens", [0, 1, 16])
@pytest.mark.parametrize("sizes", [(16, 0), (16, 16), (17, 16), (17, 17)])
def test_headers_survive_the_way_to_the_disk_and_back(num_tokens, sizes):
    header = BlockHeader(b"n" * sizes[0], b"p" * sizes[1], [2**32 - 1 - i for i in range(num_tokens)])
    data = header.encode()
    assert BlockHeader.decode(data) == header
    assert BlockHeader.decode(data + bytes(9)) == header  # records are padded
    for length in range(len(data)):
        assert BlockHeader.decode(data[:length]) is None


def test_what_is_reused_next_goes_to_the_host_many_blocks_at_a_time():
    """Once reuse has begun, a step copies out ahead what the next ones will take, and these copy nothing."""
    kv = manager(8, num_host_blocks=16)
    a = Sequence("a", list(range(32)))
    start(kv, a)
    kv.free(a)  # eight blocks with content, the last one to be reused first
    b = Sequence("b", [*range(100, 104)])
    start(kv, b)
    assert [kind for kind, _, _ in moved(kv)] == [OUT]
    kv.start_step()
    ahead = moved(kv)
    assert [kind for kind, _, _ in ahead] == [OUT] * 7
    assert {source for _, source, _ in ahead} == set(free_ids(kv.pool))
    grow(kv, b, *range(104, 109))
    assert moved(kv) == []
    kv.check_integrity()


def test_which_tokens_came_from_disk_is_told_by_their_content_not_by_where_it_lies():
    kv = disk_manager()
    saved(kv, list(range(9)))
    kv.start_step()
    asks = Sequence("asks", list(range(9)))
    loaded = kv.start_loads(kv.find_prefix(asks), 0)
    for block_id in loaded:
        kv.finish_load(block_id, True)
    kv.start_step()
    assert kv.find_prefix(asks).count_tokens(BLOCK, loaded.values()) == (0, 8)
    fill(kv)
    others = [Sequence(f"o{first}", list(range(first, first + 9))) for first in (50, 70)]
    for other in others:
        start(kv, other)
    assert loaded.keys() & {block_id for other in others for block_id in table(kv, other)}
    for other in others:
        again = Sequence("again", other.token_ids)
        assert kv.find_prefix(again).count_tokens(BLOCK, loaded.values()) == (0, 0)


# ---- content that is known to be bad ----


def hit_and_forgotten(kv: KVCacheManager, token_ids: list[int]) -> None:
    """A sequence that is given what is cached of `token_ids`, and of which all of that turns out to be bad."""
    sequence = Sequence("bad", token_ids)
    assert start(kv, sequence) > 0
    kv.forget([sequence])
    kv.free(sequence)


def test_what_is_forgotten_is_not_found_on_the_host():
    kv = manager(4, num_host_blocks=8)
    evicted(kv, list(range(9)))
    hit_and_forgotten(kv, list(range(9)))
    assert cached(kv, list(range(9))) == 0
    kv.check_integrity()


def test_what_is_forgotten_is_not_found_on_disk_now_or_after_a_restart():
    kv = disk_manager()
    saved(kv, list(range(9)))
    slots = [each.key for each in take(kv)[1]]
    load_all(kv, list(range(9)))
    take(kv)
    hit_and_forgotten(kv, list(range(9)))
    assert cached(kv, list(range(9))) == 0 and not kv.find_prefix(Sequence("asks", list(range(9)))).loads
    dropped = [each for each in kv.take_transfers() if each.op is TransferOp.DROP]
    assert sorted(each.key for each in dropped) == sorted(slots) and len(slots) == 2
    assert {each.tier for each in dropped} == {Tier.DISK}


def test_what_is_forgotten_while_it_is_being_loaded_is_not_found_afterwards():
    kv = disk_manager()
    a = Sequence("a", list(range(9)))
    start(kv, a)
    kv.store_all()
    a_again = Sequence("a2", list(range(9)))
    hits = [TierHit(kv.disk, block_hash) for block_hash in a.block_hashes[:2]]
    started = kv.loads.start(hits)
    kv.forget([a])
    kv.free(a)
    for block_id in started:
        kv.finish_load(block_id, True)
    assert len(started) == 2 and kv.find_prefix(a_again).num_tokens == 0
    kv.check_integrity()


@pytest.mark.parametrize("swapped_before", [False, True])
def test_what_is_forgotten_does_not_come_back_with_a_sequence_that_shared_it(swapped_before: bool):
    kv = manager(8, num_host_blocks=8)
    a, b = Sequence("a", list(range(9))), Sequence("b", list(range(10)))
    start(kv, a)
    start(kv, b)
    if swapped_before:
        assert kv.swap_out([b])
        kv.forget([a])
        kv.free(a)
    else:
        kv.forget([a])
        kv.free(a)
        assert kv.swap_out([b])
    kv.start_step()
    kv.swap_in([b])
    grow(kv, b, 11, 12)  # fills its third block
    kv.commit(b, 0)
    kv.free(b)
    assert cached(kv, list(range(9))) == 0
    kv.check_integrity()


def test_a_shared_block_that_is_filled_after_it_was_forgotten_is_not_found():
    kv = manager(8)
    a = Sequence("a", list(range(6)))
    start(kv, a)
    b = fork(kv, a, "b")
    kv.forget([a])
    kv.free(a)
    grow(kv, b, 6, 7, 8)
    start(kv, Sequence("c", list(range(5))))
    assert cached(kv, list(range(9))) == 4


def test_what_a_window_has_passed_is_forgotten_too():
    kv = manager(8, windows=(5,))
    a = Sequence("a", list(range(5)))
    start(kv, a)
    grow(kv, a, *range(5, 17))
    kv.forget([a])
    kv.free(a)
    assert [block for block in kv.pool.blocks if block.block_hash is not None] == []


def test_what_a_sharer_computed_from_it_is_forgotten_in_every_tier_even_if_the_sharer_has_ended():
    kv = disk_manager(12, num_host_blocks=12)
    saved(kv, list(range(9)))
    start(kv, Sequence("a", list(range(9))))
    saved(kv, list(range(13)))  # its third block is its own, and on all three
    a = Sequence("a", list(range(9)))
    assert cached(kv, list(range(14))) == 12
    kv.forget([a])
    kv.start_step()
    hit = kv.find_prefix(Sequence("asks", list(range(14))))
    assert (hit.num_tokens, hit.loads, len(kv.disk)) == (0, [], 0)
    start(kv, Sequence("good", list(range(9))))
    assert cached(kv, list(range(14))) == 8
    kv.check_integrity()


def test_what_begins_otherwise_or_has_another_salt_is_not_forgotten():
    kv = disk_manager(12, num_host_blocks=12)
    saved(kv, list(range(20, 29)))
    fill(kv)
    take(kv)
    others = [Sequence("salted", list(range(9)), cache_salt="x"), Sequence("other", [9, *range(1, 9)])]
    for other in others:
        start(kv, other)
    a = Sequence("a", list(range(9)))
    start(kv, a)
    kv.free(a)
    kv.forget([a])
    assert [cached(kv, other.token_ids, other.cache_salt) for other in others] == [8, 8]
    assert cached(kv, list(range(20, 29))) == 8 and len(kv.disk) == 2
    assert cached(kv, list(range(9))) == 0
    grow(kv, others[0], 9, 10, 11)
    assert cached(kv, list(range(13)), "x") == 12  # it still registers what it fills


def test_a_block_that_could_not_be_loaded_is_found_after_a_restart_unless_it_turns_out_to_be_bad():
    kv = disk_manager()
    saved(kv, list(range(9)))
    slots = sorted(each.key for each in take(kv)[1])
    assert len(load_all(kv, list(range(9)), succeeded=False)) == 2
    assert TransferOp.DROP not in [each.op for each in kv.take_transfers()]
    kv.forget([Sequence("a", list(range(9)))])
    dropped = [each for each in kv.take_transfers() if each.op is TransferOp.DROP]
    assert sorted(each.key for each in dropped) == slots


def test_of_two_records_of_a_block_both_are_erased():
    """The first could not be loaded for a moment, so that the block was stored again."""
    before = disk_manager()
    saved(before, list(range(5)))
    (store,) = take(before)[1]
    kv = disk_manager(stored=[(3, store.header), (7, store.header)])
    assert len(kv.disk) == 1
    kv.forget([Sequence("a", list(range(5)))])
    assert sorted(each.key for each in kv.take_transfers()) == [3, 7]
