"""`PrefixTree`: the cached blocks as a tree of prefixes, for matches that end inside a block, and for being looked at.

The map from names to blocks (`block_pool`) answers whether a *whole* block is cached. Here the children of each prefix
are kept by their first token, so that the block that goes on longest as a prompt does can be found, and copied up to
where they part. That makes reuse token-granular, as in a radix tree (Zheng et al. 2024, SGLang, section 3), while
blocks stay blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from quire.kvcache.block import Block

MOST_CHILDREN = 16  # looked at for one match: a prefix may have been continued in thousands of ways


class PrefixTree:
    """Named blocks below their prefixes."""

    __slots__ = ("_children",)

    def __init__(self) -> None:
        self._children: dict[tuple[bytes, int], dict[int, Block]] = {}

    def add(self, block: Block) -> None:
        """Take in a block that was just named."""
        if block.token_ids:
            self._children.setdefault((block.parent_hash, block.token_ids[0]), {})[block.block_id] = block

    def remove(self, block: Block) -> None:
        """Forget a block that is about to lose its name."""
        if block.token_ids:
            key = (block.parent_hash, block.token_ids[0])
            siblings = self._children[key]
            del siblings[block.block_id]
            if not siblings:
                del self._children[key]

    def match(self, parent_hash: bytes, token_ids: list[int], before_step: int) -> tuple[Block | None, int]:
        """Return the block after the prefix `parent_hash` that begins as `token_ids` do for longest, and how long.

        Only blocks computed before step `before_step` count; of many children the latest are looked at.
        """
        if not token_ids:
            return None, 0
        best, most = None, 0
        siblings = self._children.get((parent_hash, token_ids[0]))
        if siblings is None:
            return None, 0
        for number, block in enumerate(reversed(siblings.values())):
            if number == MOST_CHILDREN:
                break
            # Most children part from the prompt no later than the best so far, which one comparison tells.
            if block.step < before_step and block.token_ids[: most + 1] == token_ids[: most + 1]:
                length = common_length(block.token_ids, token_ids)
                if length > most:
                    best, most = block, length
        return best, most


def common_length(left: list[int], right: list[int]) -> int:
    """Return how many items two lists have in common at their beginnings."""
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length
    return next(index for index in range(length) if left[index] != right[index])


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
