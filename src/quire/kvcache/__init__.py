"""Keeps the books of the KV cache: blocks, reference counts, hashes, tiers. It never touches the data of blocks."""
