"""`BlockHasher`: identifies the content of a block by a chain of keyed hashes over the whole token prefix.

The KV of a block depends on every token before it, so its hash is H(hash of its parent, its tokens). The first parent
is a root that stands for everything else that must agree (the cache salt). Hashes are 128-bit keyed BLAKE2b digests
(RFC 7693): without the key nobody can construct two prefixes with the same hash, and by chance it does not happen.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array

DIGEST_BYTES = 16

# The salt of a request, or (name of its LoRA adapter, salt of the request).
CacheSalt = str | tuple[str, str | None] | None


class BlockHasher:
    """Computes block hashes under one key.

    Args:
        key: up to 64 bytes; None draws a random one. Processes that share blocks must have the same.
    """

    __slots__ = ("_key",)

    def __init__(self, key: bytes | None = None) -> None:
        self._key = secrets.token_bytes(32) if key is None else key

    def root(self, cache_salt: CacheSalt) -> bytes:
        """Return the parent of a sequence's first block; sequences share blocks only below the same root."""
        if isinstance(cache_salt, tuple):  # keys and values depend on the adapter
            adapter, cache_salt = cache_salt
            name = adapter.encode("utf-8", "surrogatepass")
            message = b"lora:%d:" % len(name) + name
        else:
            message = b""
        if cache_salt is not None:
            message += b"salt:" + cache_salt.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(message, digest_size=DIGEST_BYTES, key=self._key, person=b"root").digest()

    def extend(self, parent: bytes, token_ids: list[int]) -> bytes:
        """Return the hash of the block with `token_ids` that follows the block, or root, with the hash `parent`.

        A block that is not full, the tail of a sequence, has fewer tokens, and so a hash of its own.
        """
        message = parent + array("I", token_ids).tobytes()
        return hashlib.blake2b(message, digest_size=DIGEST_BYTES, key=self._key).digest()


def hash_of_group(block_hash: bytes, group: int) -> bytes:
    """Return the hash of the same tokens' block in another group of layers: those after the first add a byte."""
    return block_hash + bytes((group,)) if group else block_hash


def hash_without_group(block_hash: bytes) -> bytes:
    """Return the hash of the same tokens' block in the first group of layers; undoes `hash_of_group`."""
    return block_hash[:DIGEST_BYTES]


def group_of_hash(block_hash: bytes) -> int:
    """Return the group of layers that a block's hash is for."""
    return block_hash[DIGEST_BYTES] if len(block_hash) > DIGEST_BYTES else 0
