"""Block names agree exactly when everything their KV depends on agrees."""

from __future__ import annotations

from quire.kvcache.block_hash import DIGEST_BYTES, BlockHasher


def name(hasher: BlockHasher, tokens: list[int], salt: str | None = None, block_size: int = 2) -> bytes:
    digest = hasher.root(salt)
    for start in range(0, len(tokens), block_size):
        digest = hasher.extend(digest, tokens[start : start + block_size])
    return digest


def test_equal_prefixes_have_equal_names():
    hasher = BlockHasher()
    assert name(hasher, [1, 2, 3, 4]) == name(hasher, [1, 2, 3, 4])
    assert len(name(hasher, [1, 2])) == DIGEST_BYTES == 16


def test_every_token_its_place_and_the_salt_count():
    hasher = BlockHasher(b"key")
    variants = [
        name(hasher, [1, 2, 3, 4]),
        name(hasher, [9, 2, 3, 4]),
        name(hasher, [1, 2, 4, 3]),
        name(hasher, [3, 4]),
        name(hasher, [1, 2, 3, 4, 0, 0]),
        name(hasher, [1, 2, 3, 4 + 2**16]),
        name(hasher, [1, 2, 3, 4], salt="alice"),
        name(hasher, [1, 2, 3, 4], salt="bob"),
        name(hasher, [1, 2, 3, 4], salt=""),
    ]
    assert len(set(variants)) == len(variants)


def test_names_depend_on_the_key_and_random_keys_differ():
    assert name(BlockHasher(b"k"), [1, 2]) == name(BlockHasher(b"k"), [1, 2])
    assert name(BlockHasher(b"k"), [1, 2]) != name(BlockHasher(b"l"), [1, 2])
    assert name(BlockHasher(), [1, 2]) != name(BlockHasher(), [1, 2])


def test_thousands_of_blocks_have_as_many_names():
    hasher = BlockHasher(b"k")
    assert len({hasher.extend(b"\0" * 16, [i, j]) for i in range(60) for j in range(60)}) == 3600
