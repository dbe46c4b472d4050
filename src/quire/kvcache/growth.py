"""How many blocks sequences hold: one at most, by its length, and several side by side for their next tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

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


def most_blocks(num_tokens: int, windows: Iterable[int | None], block_size: int, max_step_tokens: int) -> int:
    """Return the most blocks that a sequence of `num_tokens` tokens holds at a time, in groups of these windows.

    A windowed group needs what the queries of a step of `max_step_tokens` see, wherever in a block that begins.
    """
    step = min(num_tokens, max_step_tokens)
    count = 0
    for window in windows:
        whole = -(-num_tokens // block_size)
        count += whole if window is None else min(whole, (window + step - 2) // block_size + 2)
    return count


def longest_length(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest length up to `most` that `fits`; whatever is shorter than one that does fits, too."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
