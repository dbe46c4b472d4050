"""KV cache bookkeeping: blocks, reference counts, the free queue, prefix hashes. Ids and counts only, no data."""
