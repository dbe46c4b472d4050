"""The blocks of a tier as a map of small cells, for a picture that is drawn again and again.

Everything is text of one or two characters a cell, so that a map of 16384 blocks is some tens of kilobytes and takes
the engine a few milliseconds. One block after the other, in words, is in `view`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire.kvcache.block import Block
from quire.kvcache.manager import KVCacheManager
from quire.kvcache.prefix_hit import NO_BLOCK

FREE, CACHED, LOADING = ".", "c", "~"
REFS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # of a used cell: so many block tables hold it, the last one: or more
DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
MOST_SETS = len(DIGITS) ** 2
MOST_OWNERS = 16  # of one block that are told

Tables = Mapping[str, list[list[Block]]]


def map_blocks(kv: KVCacheManager, request_of: Mapping[str, int], *, tier: str, cells: int) -> dict[str, Any]:
    """Return the map of a tier.

    `counts` says how many blocks are used, cached, free and loading, and of the used ones shared. All are drawn as
    `states`, a character for each cell of `per_cell` blocks: `FREE`, `CACHED` (free, and its content can be found),
    `LOADING` or one of `REFS`. A cell of several blocks shows what most of them are, and of used ones the most
    references. `owners` has two digits to the base 64 for each used or loading cell, in order: which of `sets` owns it,
    a list of requests (at most `MOST_OWNERS`).

    Args:
        request_of: the number of the request that each sequence belongs to. tier: "device" or "host".
        cells: most cells of the map, at least one.
    """
    pool, tables = (kv.host.pool, kv.swapped_tables) if tier == "host" else (kv.pool, kv.tables)
    loading = kv.loading_ids if tier == "device" else frozenset[int]()
    owners = _owners(tables, request_of)
    per_cell = max(1, -(-pool.num_blocks // cells))
    states = "".join([_state(block, loading) for block in pool.blocks])
    counts = {"cached": states.count(CACHED), "free": states.count(FREE), "loading": states.count(LOADING)}
    counts |= {"used": len(states) - sum(counts.values())}
    counts["shared"] = counts["used"] - states.count(REFS[1])
    names = [owners.get(block.block_id, ()) if block.ref_count else None for block in pool.blocks]
    if per_cell > 1:
        starts = range(0, len(states), per_cell)
        states, names = (
            "".join([_most_common_state(states[start : start + per_cell]) for start in starts]),
            [_most_common(names[start : start + per_cell]) for start in starts],
        )
    # What most blocks of a cell are and who owns most of them are counted apart; only cells in use have an owner.
    held = [name or () for name, state in zip(names, states, strict=True) if state not in (FREE, CACHED)]
    sets, digits = _intern(held)
    return {
        "tier": tier,
        "num_blocks": pool.num_blocks,
        "counts": counts,
        "per_cell": per_cell,
        "states": states,
        "sets": sets,
        "owners": digits,
    }


def _state(block: Block, loading: Iterable[int]) -> str:
    if not block.ref_count:
        return FREE if block.block_hash is None else CACHED
    if loading and block.block_id in loading:
        return LOADING
    return REFS[min(block.ref_count, len(REFS) - 1)]


def _owners(tables: Tables, request_of: Mapping[str, int]) -> dict[int, tuple[int, ...]]:
    """Return the requests that hold each block, each once."""
    owners: dict[int, tuple[int, ...]] = {}
    for sequence_id, groups in tables.items():
        request = request_of.get(sequence_id)
        if request is None:
            continue
        for table in groups:
            for block in table:
                if block is NO_BLOCK:
                    continue
                known = owners.get(block.block_id, ())
                if request not in known and len(known) < MOST_OWNERS:
                    owners[block.block_id] = (*known, request)
    return owners


def _most_common_state(states: str) -> str:
    """Return the state of a cell: used if at least half of its blocks are, then with the most references of any."""
    others = {state: states.count(state) for state in (FREE, CACHED, LOADING)}
    if 2 * sum(others.values()) <= len(states):
        return max(state for state in states if state in REFS)  # digits come before letters, as in `REFS`
    return max(others, key=lambda state: others[state])


def _most_common(names: Sequence[tuple[int, ...] | None]) -> tuple[int, ...] | None:
    held = [name for name in names if name is not None]
    return Counter(held).most_common(1)[0][0] if held else None


def _intern(names: Iterable[tuple[int, ...]]) -> tuple[list[list[int]], str]:
    """Return the different tuples, and for each of `names` two digits that say which it is.

    There are two digits' worth of them; after those, blocks of several owners show one, or an owner shows none.
    """
    numbers: dict[tuple[int, ...], int] = {(): 0}
    digits = []
    for name in names:
        number = numbers.get(name)
        if number is None:
            number = len(numbers)
            if number < MOST_SETS:
                numbers[name] = number
            else:
                number = numbers.get(name[:1], 0)
        digits.append(DIGITS[number >> 6] + DIGITS[number & 63])
    return [list(name) for name in numbers], "".join(digits)
