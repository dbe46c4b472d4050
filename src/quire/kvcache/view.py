"""Describes what the KV cache holds, for `/debug` and the playground: as JSON, as text, and as a map of cells.

All of it is gathered on request, in time linear in the number of blocks; nothing is kept for it between requests. Token
ids, which are what users wrote, are included on request only. Queues are in `scheduler.view`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from quire.kvcache.block_hash import group_of_hash
from quire.kvcache.block_pool import NULL_BLOCK, Block, BlockPool
from quire.kvcache.manager import BlockTables, KVCacheManager

TIERS = ("device", "host")
MAX_OWNERS = 8  # of one block
MAX_IDS = 16  # block ids of a node of the tree
MAX_TOKENS = 64  # token ids of a node of the tree
ROW = 64  # blocks in a line of the drawing

Tables = Mapping[str, BlockTables]


def describe_pools(kv: KVCacheManager, num_computed: Mapping[str, int]) -> dict[str, Any]:
    """Return the sizes of all tiers, how many blocks are in which state, and what the running sequences waste.

    Args:
        num_computed: for each sequence that has blocks, how many tokens are computed in them.
    """
    device = Counter(_state(block, kv.loads.block_ids) for block in kv.pool.blocks)
    host = Counter(_state(block) for block in kv.host.pool.blocks)
    return {
        "block_size": kv.block_size,
        "device": {
            "num_blocks": kv.pool.num_blocks,
            **{state: device[state] for state in ("used", "cached", "free", "loading")},
            "shared": sum(block.ref_count > 1 for block in kv.pool.blocks),
            "saved_by_sharing": sum(max(block.ref_count - 1, 0) for block in kv.pool.blocks),
        },
        "host": {
            "num_blocks": kv.host.pool.num_blocks,
            **{state: host[state] for state in ("used", "cached", "free")},
        },
        "disk": describe_disk(kv),
        "waste": _waste(kv, num_computed),
    }


def describe_disk(kv: KVCacheManager) -> dict[str, int]:
    """Return the size of the disk tier, and how much of it is used."""
    num_slots, num_stored = kv.disk.num_slots, len(kv.disk)
    return {"num_blocks": num_slots, "cached": num_stored, "free": num_slots - num_stored}


def _state(block: Block, loading: Set[int] = frozenset()) -> str:
    if block.ref_count:
        return "loading" if block.block_id in loading else "used"
    return "free" if block.block_hash is None else "cached"


def _tier(kv: KVCacheManager, tier: str) -> tuple[BlockPool, Tables, Set[int]]:
    """Return the pool of a tier, the block tables in it, and the ids of blocks that are being loaded."""
    if tier == "host":
        return kv.host.pool, kv.swapped_tables, frozenset()
    return kv.pool, kv.tables, kv.loads.block_ids


def _waste(kv: KVCacheManager, num_computed: Mapping[str, int]) -> dict[str, Any]:
    """Return how many slots running sequences have, how many of them have a token, and how many have none.

    Shared blocks count once. A block is only added when the last one is full, so a sequence wastes less than a block
    for each group of layers (Kwon et al. 2023, section 4.3).
    """
    uses = _uses(kv.tables, num_computed, range(kv.pool.num_blocks), kv.block_size)
    reserved, filled = len(uses) * kv.block_size, sum(use.num_tokens for use in uses.values())
    max_wasted = max(
        (
            len(table) * kv.block_size - num_computed.get(name, 0)
            for name, tables in kv.tables.items()
            for table in tables
        ),
        default=0,
    )
    return {
        "reserved_slots": reserved,
        "filled_slots": filled,
        "wasted_slots": reserved - filled,
        "most_in_a_table": max(max_wasted, 0),
    }


def _num_filled(num_tokens: int, index: int, block_size: int) -> int:
    """Return how many slots of block `index` have a token in a sequence of so many."""
    return min(max(num_tokens - index * block_size, 0), block_size)


@dataclass(slots=True)
class _Use:
    """Says which sequences have a block in their tables, and for which of their tokens."""

    owners: list[str] = field(default_factory=list)
    group: int = 0
    index: int = 0
    num_tokens: int = 0


def describe_blocks(
    kv: KVCacheManager,
    num_computed: Mapping[str, int],
    *,
    tier: str = "device",
    start: int = 0,
    limit: int = 1024,
    tokens: bool = False,
) -> list[dict[str, Any]]:
    """Return blocks `start` to `start + limit` - 1 of a tier, one dict each.

    `state` is "used", "cached" (free, and its content can be found), "free" or "loading"; `refs` how many block tables
    have it, `owners` the first of these; `tokens` how many it has; `position` which token of its owners is the first;
    `group` which layers it is for; `parent` the device block with the prefix before it; `copies` the other tiers that
    have its content. What is not known is left out.

    Args:
        num_computed: as for `describe_pools`. tier: one of `TIERS`. tokens: whether to include token ids, where known.
    """
    pool, tables, loading = _tier(kv, tier)
    chosen = pool.blocks[start : start + limit]
    uses = _uses(tables, num_computed, range(start, start + len(chosen)), kv.block_size)
    rows = []
    for block in chosen:
        use = uses.get(block.block_id)
        row: dict[str, Any] = {"id": block.block_id, "state": _state(block, loading), "refs": block.ref_count}
        if use is not None:
            row |= {"owners": use.owners, "tokens": use.num_tokens}
            row |= {"position": use.index * kv.block_size, "group": use.group}
        elif block.block_hash is not None:
            row |= {"tokens": len(block.token_ids), "group": group_of_hash(block.block_hash)}
        if block.block_hash is not None:
            parent = kv.pool.lookup(block.parent_hash)
            if parent is not None:
                row["parent"] = parent.block_id
            row["copies"] = _copies(kv, block.block_hash, tier)
            if tokens:
                row["token_ids"] = list(block.token_ids)
        rows.append(row)
    return rows


def _uses(tables: Tables, num_computed: Mapping[str, int], ids: range, block_size: int) -> dict[int, _Use]:
    """Return the uses of the blocks with these ids."""
    uses: dict[int, _Use] = {}
    for sequence_id, groups in tables.items():
        total = num_computed.get(sequence_id, 0)
        for group, table in enumerate(groups):
            for index, block in enumerate(table):
                if block is NULL_BLOCK or block.block_id not in ids:
                    continue
                use = uses.setdefault(block.block_id, _Use())
                use.group, use.index = group, index
                use.num_tokens = max(use.num_tokens, _num_filled(total, index, block_size))
                if len(use.owners) < MAX_OWNERS:
                    use.owners.append(sequence_id)
    return uses


def _copies(kv: KVCacheManager, block_hash: bytes, tier: str) -> list[str]:
    found_in = {
        "device": kv.pool.lookup(block_hash) is not None,
        "host": kv.host.lookup(block_hash),
        "disk": kv.disk.lookup(block_hash),
    }
    return [other for other, found in found_in.items() if found and other != tier]


def draw_blocks(rows: Iterable[Mapping[str, Any]], block_size: int) -> str:
    """Return a grid with one character for each row of `describe_blocks`, a legend first.

    Each line begins with the id of its first block.
    """
    lines = ["# full, + not full, 2-9 shared by so many or more, c cached, . free, ~ loading"]
    cells = [(row["id"], _character(row, block_size)) for row in rows]
    for first in range(0, len(cells), ROW):
        line = cells[first : first + ROW]
        lines.append(f"{line[0][0]:>8} {''.join(character for _, character in line)}")
    return "\n".join(lines)


def _character(row: Mapping[str, Any], block_size: int) -> str:
    if row["state"] != "used":
        return {"cached": "c", "free": ".", "loading": "~"}[row["state"]]
    if row["refs"] > 1:
        return str(min(row["refs"], 9))
    return "#" if row.get("tokens", 0) == block_size else "+"


def describe_prefixes(blocks: Iterable[Block], *, limit: int = 1024, tokens: bool = False) -> dict[str, Any]:
    """Return the radix tree over the cached prefixes in `blocks` as a list of at most `limit` nodes, depth first.

    A node is a run of blocks that nothing branches off from: `depth`, `parent` (its number in the list, None of a
    root), how many `tokens` in how many `blocks` it has, how many of these are `in_use`, and the first `block_ids`. Of
    equal blocks, one stands for all; a block whose prefix is no longer cached is a root of its own.

    Args:
        tokens: whether to include the first token ids of each node.
    """
    cached: dict[bytes, Block] = {}
    for block in blocks:
        if block.block_hash is not None and block.token_ids:
            cached.setdefault(block.block_hash, block)
    children: dict[bytes, list[Block]] = {}
    for block in cached.values():
        children.setdefault(block.parent_hash, []).append(block)
    rows: list[dict[str, Any]] = []
    num_nodes = num_roots = num_tokens = 0
    # Clients choose how deep the tree is, so nothing here recurses.
    pending: list[tuple[Block, int, int | None]] = [
        (block, 0, None) for block in reversed(cached.values()) if block.parent_hash not in cached
    ]
    while pending:
        block, depth, parent = pending.pop()
        run = [block]
        while len(below := children.get(run[-1].block_hash or b"", [])) == 1:
            run += below
        pending += [(child, depth + 1, num_nodes) for child in reversed(below)]
        token_ids = [token_id for block in run for token_id in block.token_ids]
        num_nodes, num_roots, num_tokens = num_nodes + 1, num_roots + (depth == 0), num_tokens + len(token_ids)
        if len(rows) < limit:
            row: dict[str, Any] = {
                "depth": depth,
                "parent": parent,
                "tokens": len(token_ids),
                "blocks": len(run),
                "in_use": sum(block.ref_count > 0 for block in run),
                "group": group_of_hash(run[0].block_hash or b""),
                "block_ids": [block.block_id for block in run[:MAX_IDS]],
            }
            if tokens:
                row["token_ids"] = token_ids[:MAX_TOKENS]
            rows.append(row)
    return {"num_roots": num_roots, "num_nodes": num_nodes, "num_tokens": num_tokens, "nodes": rows}


def draw_prefixes(tree: Mapping[str, Any], *, num_tokens: int = 8) -> str:
    """Return what `describe_prefixes` returned as text, a line for each node: its size, and its first token ids."""
    lines = []
    for node in tree["nodes"]:
        line = f"{'  ' * node['depth']}{node['tokens']} tokens in {node['blocks']} blocks, {node['in_use']} in use"
        if "token_ids" in node:
            line += f": {' '.join(map(str, node['token_ids'][:num_tokens]))}"
            line += " ..." if node["tokens"] > num_tokens else ""
        lines.append(line)
    if tree["num_nodes"] > len(lines):
        lines.append(f"and {tree['num_nodes'] - len(lines)} more")
    return "\n".join(lines)


FREE, CACHED, LOADING = ".", "c", "~"
REFS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # of a used cell: so many block tables hold it, the last one: or more
DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
MAX_SETS = len(DIGITS) ** 2
MAX_MAP_OWNERS = 16  # of one block
MIN_MAP_BLOCKS = 512


def map_blocks(kv: KVCacheManager, request_of: Mapping[str, int], *, tier: str, cells: int) -> dict[str, Any]:
    """Return the map of a tier.

    `counts` says how many blocks are used, cached, free and loading, and of the used ones shared. `states` draws them,
    with a character for each cell of `per_cell` blocks: `FREE`, `CACHED` (free, and its content can be found),
    `LOADING` or one of `REFS`. A cell of several blocks shows what most of them are, and of used ones the most
    references. `owners` has two digits to the base 64 for each used or loading cell, in order: which of `sets` owns it,
    a list of requests (at most `MAX_MAP_OWNERS`).

    A pool is allocated from its beginning. The map ends where all further blocks are free, since the few blocks of one
    request could hardly be seen in a map of all; and after a power of two of blocks, so that its scale seldom changes.

    Args:
        request_of: the number of the request that each sequence belongs to. tier: "device" or "host".
        cells: most cells of the map, at least one.
    """
    pool, tables, loading = _tier(kv, tier)
    owners = _owners(tables, request_of)
    states = "".join([_map_state(block, loading) for block in pool.blocks])
    counts = {"cached": states.count(CACHED), "free": states.count(FREE), "loading": states.count(LOADING)}
    counts |= {"used": len(states) - sum(counts.values())}
    counts["shared"] = counts["used"] - states.count(REFS[1])
    mapped = max(MIN_MAP_BLOCKS, 1 << (len(states.rstrip(FREE)) - 1).bit_length())
    states, blocks = states[:mapped], pool.blocks[:mapped]
    per_cell = max(1, -(-len(states) // cells))
    names = [owners.get(block.block_id, ()) if block.ref_count else None for block in blocks]
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


def _map_state(block: Block, loading: Iterable[int]) -> str:
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
        for block in (block for table in groups for block in table if block is not NULL_BLOCK):
            known = owners.get(block.block_id, ())
            if request not in known and len(known) < MAX_MAP_OWNERS:
                owners[block.block_id] = (*known, request)
    return owners


def _most_common_state(states: str) -> str:
    """Return the state of a cell: used if at least half of its blocks are, then with the most references of any."""
    others = {state: states.count(state) for state in (FREE, CACHED, LOADING)}
    if 2 * sum(others.values()) <= len(states):
        return max(state for state in states if state in REFS)  # digits come before letters, as in `REFS`
    return max(others, key=lambda state: others[state])


def _most_common(owners: Sequence[tuple[int, ...] | None]) -> tuple[int, ...] | None:
    known = [each for each in owners if each is not None]
    return Counter(known).most_common(1)[0][0] if known else None


def _intern(names: Iterable[tuple[int, ...]]) -> tuple[list[list[int]], str]:
    """Return the different tuples, and for each of `names` two digits that say which it is.

    There are two digits' worth of them; after those, blocks of several owners show one, or an owner shows none.
    """
    numbers: dict[tuple[int, ...], int] = {(): 0}
    digits = []
    for name in names:
        number = numbers.get(name)
        if number is None and len(numbers) < MAX_SETS:
            number = numbers[name] = len(numbers)
        elif number is None:
            number = numbers.get(name[:1], 0)
        digits.append(DIGITS[number >> 6] + DIGITS[number & 63])
    return [list(name) for name in numbers], "".join(digits)
