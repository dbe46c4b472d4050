"""What backends agree on about LoRA adapters (Hu et al. 2021): what one changes, and which rows of a step have which.

An adapter in use is in a *slot*, and so are its changes to each layer: a step's arrays have slot numbers only. How a
slot stores its factors is up to the backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


@dataclass(frozen=True, slots=True)
class LoRAChange:
    """The change that an adapter makes to a linear layer [N, K], or to a table of N rows of K; float32 arrays.

    Attributes:
        a, b: factors [r, K] and [N, r]: b @ a is added to the weight, their scale being part of b. Of a table they are
            [r, N] and [K, r]: row i gets b @ a[:, i].
        whole: takes the place of the weight, [N, K]. N may be larger than the weight's.
    """

    a: np.ndarray | None = None
    b: np.ndarray | None = None
    whole: np.ndarray | None = None

    @property
    def rank(self) -> int:
        """Rows of `a`; 0 without."""
        return 0 if self.a is None else int(self.a.shape[0])


class LoRARows(NamedTuple):
    """The slots of the adapters of all rows, as arrays of the backend.

    slots: int64 [T], -1 for rows without an adapter. order: int64 [T], of which the first are the rows that have one,
    those of slot 0 first. starts: int64 [slots + 1]; order[starts[s] : starts[s + 1]] are the rows of slot s.
    """

    slots: Any
    order: Any
    starts: Any
