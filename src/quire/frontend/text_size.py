"""`text_size`: how much text a JSON-like value holds; for bounds on what is kept, and on what the event loop does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def text_size(value: Any, enough: float = math.inf) -> int:
    """Return the number of characters in all texts of a JSON-like value, with some for each container and item.

    What is beyond `enough` need not be counted.
    """
    total = 0
    left = [value]
    while left and total <= enough:
        item = left.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping):
            total += 16 * (1 + len(item))
            left.extend(item.values())
        elif isinstance(item, list | tuple):
            total += 16 + 2 * len(item)
            left.extend(item)
    return total
