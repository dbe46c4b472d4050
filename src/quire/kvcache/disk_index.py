"""`RecordHeader`: what stands before the content of a block on disk, so that it can be found again after a restart."""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass

DIGEST_BYTES = 16
_FIXED = struct.Struct("<BBI")  # length of the name, length of the parent's, number of tokens
NAME_BYTES = DIGEST_BYTES + 1  # names of further groups of layers have one byte more
TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """The name of a block, that of the prefix before it, and its tokens."""

    name: bytes
    parent: bytes
    token_ids: list[int]

    @staticmethod
    def max_bytes(block_size: int) -> int:
        """Size of the longest header of blocks of `block_size` tokens."""
        return _FIXED.size + 2 * NAME_BYTES + TOKEN_BYTES * block_size

    def encode(self) -> bytes:
        """Return it as bytes, at most `max_bytes`."""
        tokens = array("I", self.token_ids)
        assert tokens.itemsize == TOKEN_BYTES
        return _FIXED.pack(len(self.name), len(self.parent), len(tokens)) + self.name + self.parent + tokens.tobytes()

    @classmethod
    def decode(cls, data: bytes) -> RecordHeader | None:
        """Return the header that `encode` made, zeros behind it ignored; None if these bytes are none."""
        if len(data) < _FIXED.size:
            return None
        name_size, parent_size, count = _FIXED.unpack_from(data)
        start = _FIXED.size
        end = start + name_size + parent_size + TOKEN_BYTES * count
        if not DIGEST_BYTES <= name_size <= NAME_BYTES or parent_size > NAME_BYTES or end > len(data):
            return None
        tokens = array("I")
        tokens.frombytes(data[start + name_size + parent_size : end])
        return cls(
            data[start : start + name_size], data[start + name_size : start + name_size + parent_size], list(tokens)
        )
