"""`Block`: the bookkeeping of one block of the KV cache. No data lives here; the worker owns the memory."""

from __future__ import annotations


class Block:
    """One block: `block_size` slots of KV memory in each layer of a group, known by its id.

    Attributes:
        block_id: index into the worker's KV storage (or into the host's pool, see `tiers`).
        ref_count: sequences whose block table holds it; 0 means it stands in the free queue.
        block_hash: name of the token prefix that the content stands for, once it may be shared; None otherwise. A free
            block keeps its name, and so can be hit, until it is handed out again.
        parent_hash, token_ids: of a named block: the name of the prefix before it, and its own tokens. A block whose
            tokens are fewer than its slots is a *tail*, the last one of a sequence that has left.
        step: in which step the content was or will be computed.
        prev_free, next_free: neighbours in the free queue; None while the block is in use.
    """

    __slots__ = (
        "block_hash",
        "block_id",
        "next_free",
        "parent_hash",
        "prev_free",
        "ref_count",
        "step",
        "token_ids",
    )

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
        self.parent_hash: bytes = b""
        self.token_ids: list[int] = []
        self.step = -1
        self.prev_free: Block | None = None
        self.next_free: Block | None = None

    def __repr__(self) -> str:
        digest = self.block_hash.hex()[:8] if self.block_hash else None
        return f"Block(id={self.block_id}, refs={self.ref_count}, hash={digest})"
