"""What the block manager holds, as JSON-like values and as text, for people who look at it between two steps.

Nothing is kept for this while the engine works: all of it is gathered when somebody asks, in time linear in the number
of blocks. Token ids, which are what users wrote, are only told on request. Queues are in `scheduler.view`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from quire.kvcache.block import Block
from quire.kvcache.block_hash import DIGEST_BYTES
from quire.kvcache.manager import KVCacheManager
from quire.kvcache.prefix_hit import NO_BLOCK
from quire.kvcache.prefix_tree import PrefixNode, draw, prefix_nodes

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
                if block is not NO_BLOCK:
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
            row |= {"tokens": len(block.token_ids), "group": _group(block.block_hash)}
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
                if block is NO_BLOCK or block.block_id not in ids:
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


def _group(name: bytes) -> int:
    """Return the group of layers that a block's name is for: those after the first add a byte to it."""
    return name[DIGEST_BYTES] if len(name) > DIGEST_BYTES else 0


def _copies(kv: KVCacheManager, name: bytes, tier: str) -> list[str]:
    there = {"device": kv.pool.lookup(name), "host": kv.host.find(name), "disk": kv.disk.find(name)}
    return [other for other, found in there.items() if found is not None and other != tier]


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
        "group": _group(kv.pool.blocks[node.block_ids[0]].block_hash or b""),
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
