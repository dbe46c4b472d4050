"""`CachedSequence`: what the block manager needs to know of a sequence, whoever else it belongs to."""

from __future__ import annotations

from typing import Protocol

# What a request says, or (name of its LoRA adapter, what the request says).
CacheSalt = str | tuple[str, str | None] | None


class CachedSequence(Protocol):
    """The manager reads all of this. It writes `block_hashes` and nothing else.

    Attributes:
        token_ids: prompt and output so far. num_computed_tokens: how many of them have their KV in the block tables.
        block_hashes: names of the first full blocks, computed as far as they were needed; outlives the block tables.
        reads_prefix_cache: False while the sequence needs the logits of its whole prompt, and so must compute it.
    """

    sequence_id: str
    token_ids: list[int]
    num_computed_tokens: int
    block_hashes: list[bytes]

    @property
    def cache_salt(self) -> CacheSalt:
        """Blocks are shared only among sequences with the same one."""

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether cached blocks may stand in for computing the sequence's first tokens."""
