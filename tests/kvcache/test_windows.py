"""Groups of layers with windows: blocks are given back behind the window, and a hit needs only what is still seen."""

from __future__ import annotations

import pytest

from quire.kvcache.block_pool import NULL_BLOCK
from quire.kvcache.prefix_cache import first_block_in_window, longest_hit
from tests.kvcache.model import Sequence, cached, fork, grow, manager, start, table, transfers


@pytest.mark.parametrize(
    ("position", "window", "expected"), [(0, 4, 0), (3, 4, 0), (4, 4, 0), (6, 4, 0), (7, 4, 1), (8, 1, 2), (7, 1, 1)]
)
def test_first_block_in_window(position, window, expected):
    """With blocks of 4: a query at `position` sees position - window + 1 and everything after it."""
    assert first_block_in_window(position, window, 4) == expected


def test_blocks_behind_the_window_are_given_back_as_decoding_goes_on():
    kv = manager(windows=(6,))
    a = Sequence("a", list(range(8)))
    start(kv, a)
    held = []
    for token in range(8, 20):
        grow(kv, a, token)
        held.append(kv.num_allocated_blocks([a]))
    assert held == [3, 2, 2, 2, 3, 2, 2, 2, 3, 2, 2, 2]
    assert len(table(kv, a)) == 5  # the table keeps its length
    assert [block is NULL_BLOCK for block in kv.tables["a"][0]] == [True, True, True, False, False]
    assert max(held) <= kv.num_blocks_for(20)


def test_only_windowed_groups_give_blocks_back():
    kv = manager(32, windows=(None, 4))
    a = Sequence("a", list(range(8)))
    start(kv, a)
    grow(kv, a, *range(8, 17))
    assert kv.num_allocated_blocks([a]) == 5 + 2
    assert [block is NULL_BLOCK for block in kv.tables["a"][1]] == [True, True, True, False, False]
    assert NULL_BLOCK.ref_count == 0


def test_a_long_prompt_in_chunks_never_holds_more_than_window_and_chunk():
    kv = manager(5, windows=(6,), max_step_tokens=8)
    a = Sequence("a", list(range(100)))
    assert kv.can_ever_fit(100)
    kv.start_step()
    while a.num_computed_tokens < 100:
        num_new = min(8, 100 - a.num_computed_tokens)
        assert kv.allocate_slots(a, num_new) is not None
        a.num_computed_tokens += num_new
        kv.check_integrity()
    kv.free(a)
    assert kv.pool.num_free == 5


def test_blocks_given_back_can_be_hit_until_they_are_reused():
    kv = manager(windows=(4,))
    a = Sequence("a", list(range(8)))
    start(kv, a)
    grow(kv, a, *range(8, 13))
    assert cached(kv, [0, 1, 2, 3, 99]) == 4


def test_a_hit_needs_only_the_blocks_in_the_last_window():
    kv = manager(8, windows=(4,))
    a = Sequence("a", list(range(17)))
    start(kv, a)
    first, second, *rest = table(kv, a)
    kv.free(a)
    kv.pool.unregister(kv.pool.blocks[first])
    kv.pool.unregister(kv.pool.blocks[second])
    b = Sequence("b", list(range(17)))
    hit = kv.find_prefix(b)
    assert hit.num_tokens == 16
    assert hit.tables[0][:3] == [NULL_BLOCK] * 3  # position 16 sees 13 .. 16
    assert hit.tables[0][3].block_id == rest[1]
    kv.start_step()
    assert kv.allocate_slots(b, 1, hit) is not None
    kv.check_integrity()
    assert kv.num_allocated_blocks([b]) == 2


def test_a_hole_in_the_window_shortens_the_hit_to_where_the_window_is_whole():
    kv = manager(8, windows=(6,))
    a = Sequence("a", list(range(17)))
    start(kv, a)
    blocks = table(kv, a)
    kv.free(a)
    kv.pool.unregister(kv.pool.blocks[blocks[3]])
    assert cached(kv, list(range(17))) == 12
    kv.pool.unregister(kv.pool.blocks[blocks[1]])  # 12 sees 7 .. 12
    assert cached(kv, list(range(17))) == 4


def test_all_groups_must_agree_on_how_long_the_hit_is():
    kv = manager(32, windows=(None, 4, 8))
    a = Sequence("a", list(range(17)))
    start(kv, a)
    tables = kv.block_ids("a")
    kv.free(a)
    assert cached(kv, list(range(17))) == 16
    kv.pool.unregister(kv.pool.blocks[tables[0][3]])
    assert cached(kv, list(range(17))) == 12
    kv.pool.unregister(kv.pool.blocks[tables[1][2]])
    assert cached(kv, list(range(17))) == 8
    kv.pool.unregister(kv.pool.blocks[tables[2][0]])
    assert cached(kv, list(range(17))) == 0  # 8 sees 1 .. 8 through the third group's window


def test_groups_have_names_of_their_own():
    """The same tokens in two groups are two blocks; one never stands for the other."""
    kv = manager(16, windows=(None, 64))
    a = Sequence("a", list(range(9)))
    start(kv, a)
    names = [[kv.pool.blocks[block].block_hash for block in ids[:2]] for ids in kv.block_ids("a")]
    assert len({name for group in names for name in group}) == 4
    assert [name + b"\x01" for name in names[0]] == names[1]
    b = Sequence("b", list(range(9)))
    start(kv, b)
    assert [ids[:2] for ids in kv.block_ids("b")] == [ids[:2] for ids in kv.block_ids("a")]


def test_a_fork_keeps_what_its_parent_gives_back():
    kv = manager(windows=(4,))
    a = Sequence("a", list(range(8)))
    start(kv, a)
    b = fork(kv, a, "b")
    before = table(kv, a)
    grow(kv, a, *range(8, 16))
    assert table(kv, b) == before
    assert [kv.pool.blocks[block].ref_count for block in before] == [1, 1]
    assert transfers(kv) == []
    kv.free(b)
    kv.free(a)
    assert kv.pool.num_free == 16


def test_longest_hit_against_a_plain_search():
    """Every pattern of five cached blocks in two groups: the longest beginning that all groups hold."""
    size, limit = 4, 5
    for windows in ([None, 6], [6, 3], [3, None]):
        for pattern in range(1 << (2 * limit)):
            have = [[bool(pattern >> (group * limit + index) & 1) for index in range(limit)] for group in (0, 1)]
            marks = [[object() for _ in range(limit)] for _ in windows]

            def find(group, index, have=have, marks=marks):
                return marks[group][index] if have[group][index] else None

            def holds(length, have=have, windows=windows):
                firsts = [0 if w is None else first_block_in_window(length * size, w, size) for w in windows]
                return all(all(row[first:length]) for row, first in zip(have, firsts, strict=True))

            expected = max(length for length in range(limit + 1) if holds(length))
            tables = longest_hit(windows, size, limit, find)  # type: ignore[arg-type]
            assert [len(row) for row in tables] == [expected, expected]
            for group, row in enumerate(tables):
                assert all(found is NULL_BLOCK or found is marks[group][index] for index, found in enumerate(row))
