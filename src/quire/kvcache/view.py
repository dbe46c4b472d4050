"""What the block manager holds, as JSON-like values and as text, for people who look at it between two steps.

Nothing is kept for this while the engine works: all of it is gathered when somebody asks, in time linear in the number
of blocks. Token ids, which are what users wrote, are only told on request. Queues are in `scheduler.view`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.kvcache.block_hash import group_of_hash
from quire.kvcache.block_pool import NULL_BLOCK, Block
from quire.kvcache.manager import KVCacheManager

TIERS = ("device", "host")
MOST_OWNERS = 8
MOST_IDS = 16  # block ids told of a node of the tree
MOST_TOKENS = 64  # token ids told of a node of the tree
ROW = 64  # blocks in a line of the drawing

Tables = Mapping[str, list[list[Block]]]


def describe_pools(kv: KVCacheManager, num_computed: Mapping[str, int]) -> dict[str, Any]:
    """Return the sizes of all tiers, how many blocks are in which state, and what the running sequences waste.

    Args:
        num_computed: for each sequence that holds blocks, how many tokens it has in them.
    """
    device = _count(kv.pool.blocks)
    loading = len(kv.loading_ids)
    return {
        "block_size": kv.block_size,
        "device": {
            "num_blocks": kv.pool.num_blocks,
            "used": device["used"] - loading,
            "cached": device["cached"],
            "free": device["free"],
            "loading": loading,
            "shared": sum(block.ref_count > 1 for block in kv.pool.blocks),
            "saved_by_sharing": sum(max(block.ref_count - 1, 0) for block in kv.pool.blocks),
        },
        "host": {"num_blocks": kv.host.pool.num_blocks, **_count(kv.host.pool.blocks)},
        "disk": {"num_blocks": kv.disk.num_slots, "cached": len(kv.disk), "free": kv.disk.num_slots - len(kv.disk)},
        "waste": _waste(kv, num_computed),
    }


def _count(blocks: Iterable[Block]) -> dict[str, int]:
    counts = {"used": 0, "cached": 0, "free": 0}
    for block in blocks:
        counts["used" if block.ref_count else "cached" if block.block_hash is not None else "free"] += 1
    return counts


def _waste(kv: KVCacheManager, num_computed: Mapping[str, int]) -> dict[str, Any]:
    """Return how many slots running sequences hold, how many of them have a token, and how many have none.

    Shared blocks count once. A block is only added when the last one is full, so a sequence wastes less than a block
    for each group of layers (Kwon et al. 2023, section 4.3).
    """
    filled: dict[int, int] = {}
    most = 0
    for sequence_id, tables in kv.tables.items():
        total = num_computed.get(sequence_id, 0)
        for table in tables:
            most = max(most, len(table) * kv.block_size - total)
            for index, block in enumerate(table):
                if block is not NULL_BLOCK:
                    count = _num_filled(total, index, kv.block_size)
                    filled[block.block_id] = max(filled.get(block.block_id, 0), count)
    reserved = len(filled) * kv.block_size
    used = sum(filled.values())
    return {
        "reserved_slots": reserved,
        "filled_slots": used,
        "wasted_slots": reserved - used,
        "most_in_a_table": most,
    }


def _num_filled(num_tokens: int, index: int, block_size: int) -> int:
    """Return how many slots of block `index` have a token in a sequence of so many."""
    return min(max(num_tokens - index * block_size, 0), block_size)


class _Place:
    """Who holds a block, and what for."""

    __slots__ = ("group", "index", "num_tokens", "owners")

    def __init__(self) -> None:
        self.owners: list[str] = []
        self.group = self.index = self.num_tokens = 0


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
    hold it, `owners` the first of these; `tokens` how many it has; `position` which token of its owners is the first;
    `group` which layers it is for; `parent` the device block with the prefix before it; `copies` the other tiers that
    have its content. What is not known is left out.

    Args:
        num_computed: as for `describe_pools`. tier: one of `TIERS`. tokens: whether to tell token ids, where kept.
    """
    pool, tables = (kv.host.pool, kv.swapped_tables) if tier == "host" else (kv.pool, kv.tables)
    chosen = pool.blocks[start : start + limit]
    places = _places(tables, num_computed, range(start, start + len(chosen)), kv.block_size)
    loading = kv.loading_ids if tier == "device" else frozenset[int]()
    rows = []
    for block in chosen:
        place = places.get(block.block_id)
        row: dict[str, Any] = {"id": block.block_id, "state": _state(block, loading), "refs": block.ref_count}
        if place is not None:
            row |= {"owners": place.owners, "tokens": place.num_tokens}
            row |= {"position": place.index * kv.block_size, "group": place.group}
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


def _places(tables: Tables, num_computed: Mapping[str, int], ids: range, block_size: int) -> dict[int, _Place]:
    """Return who holds the blocks with these ids."""
    places: dict[int, _Place] = {}
    for sequence_id, groups in tables.items():
        total = num_computed.get(sequence_id, 0)
        for group, table in enumerate(groups):
            for index, block in enumerate(table):
                if block is NULL_BLOCK or block.block_id not in ids:
                    continue
                place = places.setdefault(block.block_id, _Place())
                place.group, place.index = group, index
                place.num_tokens = max(place.num_tokens, _num_filled(total, index, block_size))
                if len(place.owners) < MOST_OWNERS:
                    place.owners.append(sequence_id)
    return places


def _state(block: Block, loading: Iterable[int]) -> str:
    if block.ref_count:
        return "loading" if block.block_id in loading else "used"
    return "free" if block.block_hash is None else "cached"


def _copies(kv: KVCacheManager, name: bytes, tier: str) -> list[str]:
    there = {"device": kv.pool.lookup(name) is not None, "host": kv.host.lookup(name), "disk": kv.disk.lookup(name)}
    return [other for other, found in there.items() if found and other != tier]


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


def describe_prefixes(kv: KVCacheManager, *, limit: int = 1024, tokens: bool = False) -> dict[str, Any]:
    """Return the radix tree of the device's cached prefixes as a list of at most `limit` nodes, parents first.

    A node is a run of tokens that nothing branches off from: `depth`, `parent` (its number in the list, None of a
    root), how many `tokens` in how many `blocks` it has, how many of these are `in_use`, and the first `block_ids`.

    Args:
        tokens: whether to tell the first token ids of each node too.
    """
    roots = prefix_nodes(kv.pool.blocks)
    nodes: list[dict[str, Any]] = []
    total = num_tokens = 0
    path: list[int] = []  # the numbers of the nodes above the next one
    for root in roots:
        for depth, node in root.walk():
            total += 1
            num_tokens += node.num_tokens
            if len(nodes) < limit:
                del path[depth:]
                parent = path[-1] if path else None
                path.append(len(nodes))
                nodes.append(_describe_node(kv, node, depth, parent, tokens))
    return {"num_roots": len(roots), "num_nodes": total, "num_tokens": num_tokens, "nodes": nodes}


def _describe_node(
    kv: KVCacheManager, node: PrefixNode, depth: int, parent: int | None, tokens: bool
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "depth": depth,
        "parent": parent,
        "tokens": node.num_tokens,
        "blocks": len(node.block_ids),
        "in_use": node.num_in_use,
        "group": group_of_hash(kv.pool.blocks[node.block_ids[0]].block_hash or b""),
        "block_ids": node.block_ids[:MOST_IDS],
    }
    if tokens:
        row["token_ids"] = node.token_ids[:MOST_TOKENS]
    return row


def draw_prefixes(kv: KVCacheManager, *, limit: int = 1024, tokens: bool = False) -> str:
    """Return the tree of `describe_prefixes` as text, one line a node."""
    lines = draw(prefix_nodes(kv.pool.blocks), most_tokens=8 if tokens else 0).splitlines()
    more = [f"and {len(lines) - limit} more"] if len(lines) > limit else []
    return "\n".join(lines[:limit] + more)


@dataclass(slots=True)
class PrefixNode:
    """A run of cached tokens that nothing branches off from: one edge of the radix tree.

    `block_ids` are the blocks that hold it, `num_tokens` their tokens, `num_in_use` those that sequences hold now.
    """

    block_ids: list[int]
    num_tokens: int
    num_in_use: int
    token_ids: list[int]
    children: list[PrefixNode] = field(repr=False)

    def walk(self) -> Iterator[tuple[int, PrefixNode]]:
        """Yield (depth, node) of this node and all below, parents first."""
        pending = [(0, self)]
        while pending:
            depth, node = pending.pop()
            yield depth, node
            pending += [(depth + 1, child) for child in reversed(node.children)]


def prefix_nodes(blocks: Iterable[Block]) -> list[PrefixNode]:
    """Return the roots of the radix tree over all named blocks; of equal ones, one stands for all.

    A block whose prefix is no longer cached is a root of its own: nothing can reach it but itself.
    """
    named: dict[bytes, Block] = {}
    for block in blocks:
        if block.block_hash is not None and block.token_ids:
            named.setdefault(block.block_hash, block)
    children: dict[bytes, list[Block]] = {}
    for block in named.values():
        children.setdefault(block.parent_hash, []).append(block)
    roots: list[PrefixNode] = []
    # Clients choose how deep the tree is, so nothing here recurses.
    pending = [(block, roots) for block in reversed(named.values()) if block.parent_hash not in named]
    while pending:
        block, siblings = pending.pop()
        node, below = _run(block, children)
        siblings.append(node)
        pending += [(child, node.children) for child in reversed(below)]
    return roots


def _run(block: Block, children: dict[bytes, list[Block]]) -> tuple[PrefixNode, list[Block]]:
    """Make one node of `block` and those that follow it as single children; return it and what branches off its end."""
    node = PrefixNode([], 0, 0, [], [])
    while True:
        node.block_ids.append(block.block_id)
        node.num_tokens += len(block.token_ids)
        node.num_in_use += block.ref_count > 0
        node.token_ids += block.token_ids
        below = children.get(block.block_hash or b"", [])
        if len(below) != 1:
            return node, below
        block = below[0]


def draw(roots: Iterable[PrefixNode], most_tokens: int = 8) -> str:
    """Return the tree as text, one line a node: number of tokens, blocks in use, and its first tokens (unless 0)."""
    lines = []
    for root in roots:
        for depth, node in root.walk():
            line = f"{'  ' * depth}{node.num_tokens} tokens in {len(node.block_ids)} blocks, {node.num_in_use} in use"
            if most_tokens:
                tokens = " ".join(str(token) for token in node.token_ids[:most_tokens])
                line += f": {tokens}{' ...' if len(node.token_ids) > most_tokens else ''}"
            lines.append(line)
    return "\n".join(lines)


FREE, CACHED, LOADING = ".", "c", "~"
REFS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # of a used cell: so many block tables hold it, the last one: or more
DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
MOST_SETS = len(DIGITS) ** 2
MOST_MAP_OWNERS = 16  # of one block that are told


def map_blocks(kv: KVCacheManager, request_of: Mapping[str, int], *, tier: str, cells: int) -> dict[str, Any]:
    """Return the map of a tier.

    `counts` says how many blocks are used, cached, free and loading, and of the used ones shared. All are drawn as
    `states`, a character for each cell of `per_cell` blocks: `FREE`, `CACHED` (free, and its content can be found),
    `LOADING` or one of `REFS`. A cell of several blocks shows what most of them are, and of used ones the most
    references. `owners` has two digits to the base 64 for each used or loading cell, in order: which of `sets` owns it,
    a list of requests (at most `MOST_MAP_OWNERS`).

    Args:
        request_of: the number of the request that each sequence belongs to. tier: "device" or "host".
        cells: most cells of the map, at least one.
    """
    pool, tables = (kv.host.pool, kv.swapped_tables) if tier == "host" else (kv.pool, kv.tables)
    loading = kv.loading_ids if tier == "device" else frozenset[int]()
    owners = _owners(tables, request_of)
    per_cell = max(1, -(-pool.num_blocks // cells))
    states = "".join([_map_state(block, loading) for block in pool.blocks])
    counts = {"cached": states.count(CACHED), "free": states.count(FREE), "loading": states.count(LOADING)}
    counts |= {"used": len(states) - sum(counts.values())}
    counts["shared"] = counts["used"] - states.count(REFS[1])
    names = [owners.get(block.block_id, ()) if block.ref_count else None for block in pool.blocks]
    if per_cell > 1:
        starts = range(0, len(states), per_cell)
        states, names = (
            "".join([_most_common_map_state(states[start : start + per_cell]) for start in starts]),
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
        for table in groups:
            for block in table:
                if block is NULL_BLOCK:
                    continue
                known = owners.get(block.block_id, ())
                if request not in known and len(known) < MOST_MAP_OWNERS:
                    owners[block.block_id] = (*known, request)
    return owners


def _most_common_map_state(states: str) -> str:
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
