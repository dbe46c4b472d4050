"""`Block`: the bookkeeping of one block of the KV cache. No data lives here; the worker owns the memory."""

from __future__ import annotations


class Block:
    """One block: `block_size` slots of KV memory in every layer, known by its id.

    Attributes:
        block_id: index into the worker's KV storage.
        ref_count: sequences whose block table holds it; 0 means it stands in the free queue.
        block_hash: digest of the token prefix that the content stands for, once the block is full and may be shared;
            None otherwise. A free block keeps its hash, and so can be hit, until it is handed out again.
        prev_free, next_free: neighbours in the free queue; None while the block is in use.
    """

    __slots__ = ("block_hash", "block_id", "next_free", "prev_free", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.block_hash: bytes | None = None
        self.prev_free: Block | None = None
        self.next_free: Block | None = None

    def __repr__(self) -> str:
        digest = self.block_hash.hex()[:8] if self.block_hash else None
        return f"Block(id={self.block_id}, refs={self.ref_count}, hash={digest})"
