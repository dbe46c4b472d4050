"""How the prompts that compete for a step's tokens share them."""

from __future__ import annotations

OLDEST_SHARE = 4


def share_tokens(budget: int, wanted: list[int], most: int) -> list[int]:
    """Divide `budget` tokens among prompts that still want `wanted` tokens, oldest first; none gets more than `most`.

    The shortest go first, so that a short prompt does not wait behind a long one; but a fourth is kept for the oldest,
    so that every prompt is done in the end, however many short ones come: shortest remaining work first, with a bound
    on how long it can be overtaken. What one has no use for goes to the others.
    """
    if not wanted:
        return []
    shares = [0] * len(wanted)
    shares[0] = min(wanted[0], most, -(-budget // OLDEST_SHARE))
    left = budget - shares[0]
    for index in sorted(range(len(wanted)), key=wanted.__getitem__):
        extra = min(min(wanted[index], most) - shares[index], left)
        shares[index] += extra
        left -= extra
    return shares
