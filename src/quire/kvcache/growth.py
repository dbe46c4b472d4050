"""How many blocks sequences that live side by side need for their next tokens, exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from quire.kvcache.block import Block
from quire.kvcache.cached_sequence import CachedSequence


def num_blocks_to_advance(
    sequences: Sequence[CachedSequence],
    tables_of: Callable[[str], list[list[Block]] | None],
    num_groups: int,
    block_size: int,
) -> int:
    """Return how many new blocks it takes to compute one more token of each sequence that has tokens left.

    A sequence needs one, in each group of layers, where its last block is full, or shared: of those that share a block
    all but one get a copy, or all if somebody else holds it as well.

    Args:
        tables_of: returns the block tables of a sequence by its id; None if it has none.
    """
    count = 0
    writers: Counter[int] = Counter()
    shared: dict[int, Block] = {}
    for sequence in sequences:
        index, offset = divmod(sequence.num_computed_tokens, block_size)
        if len(sequence.token_ids) == sequence.num_computed_tokens:
            continue
        tables = tables_of(sequence.sequence_id)
        for group in range(num_groups):
            if tables is None or index >= len(tables[group]):
                count += 1
            elif offset:
                block = tables[group][index]
                writers[block.block_id] += 1
                shared[block.block_id] = block
    return count + sum(min(number, shared[name].ref_count - 1) for name, number in writers.items())
