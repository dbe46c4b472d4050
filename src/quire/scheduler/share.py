"""How the prompts that compete for a step's tokens share them."""

from __future__ import annotations

OLDEST_SHARE = 4
LEAST_SHARE = 16


def share_tokens(budget: int, wanted: list[int], most: int, long_chunk: int) -> list[int]:
    """Divide up to `budget` tokens among prompts that still want `wanted` tokens, oldest first, at most `most` each.

    The shortest go first, so that a short prompt does not wait behind a long one. Two things bound this:

    - A fourth is kept for the oldest, so that every prompt is done in the end, however many short ones come.
    - What does not end in this step makes those wait that do. So it gets a third of their tokens (or a sixteenth of the
      budget, if that is more). Prompts longer than the budget that nobody waits beside get `long_chunk` tokens
      together, so that the step is over soon for whoever comes meanwhile. Steps are shorter then, not emptier: no
      work is lost.
    """
    shares = [0] * len(wanted)
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    kept = min(wanted[0], most, -(-budget // OLDEST_SHARE))
    num_ending = 0
    for index in order:
        kept = 0 if index == 0 else kept
        if wanted[index] > min(most, budget - kept - num_ending):
            break
        shares[index] = wanted[index]
        num_ending += wanted[index]
    if num_ending:
        left = min(budget - num_ending, max(num_ending // (OLDEST_SHARE - 1), budget // LEAST_SHARE, 1))
    elif wanted[order[0]] > budget:
        left = min(budget, long_chunk)
    else:
        left = budget
    unfinished = [index for index in order if not shares[index]]
    if 0 in unfinished:
        part = left if num_ending or len(unfinished) == 1 else -(-left // OLDEST_SHARE)
        shares[0] = min(wanted[0], most, part)
        left -= shares[0]
    for index in unfinished:
        extra = min(min(wanted[index], most) - shares[index], left)
        shares[index] += extra
        left -= extra
    return shares
