"""The states of layers that keep one for each sequence instead of keys and values: a row each, that of the batch.

A sequence keeps its row as long as the worker knows it (`input_batch.py`), so that no block, no table and no word of
the control plane is needed. What a row held before does not matter: a sequence without computed tokens starts from
zeros, by the ops themselves (`AttentionMetadata.state_rows`), and one that the worker did not know has none, since
nothing of it can be reused (`engine/resolve.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from quire.kernels.backend import Arrays, Backend
from quire.step import ForkData, KVCacheSpec


class SequenceStates:
    """The states of up to `max_num_seqs` sequences; memory is touched where rows are used, if the system allows.

    `arrays` has for each layer with states, in order, its arrays [max_num_seqs, ...], and one row more if the backend
    pads steps: that of sequences that are none.
    """

    def __init__(self, spec: KVCacheSpec, backend: Backend, max_num_seqs: int) -> None:
        self._backend = backend
        rows = max_num_seqs + backend.pads
        self.arrays: list[Arrays] = [
            tuple(backend.zeros((rows, *shape)) for shape in layer.shapes) for layer in spec.states
        ]

    def fork(self, forks: Sequence[ForkData], row_of: Mapping[str, int], *, samples: bool) -> None:
        """Give forks their parents' states as they are now.

        That is before the step for those of running sequences, and after it for those that sample in it.
        """
        pairs = [(row_of[fork.parent_id], row_of[fork.sequence_id]) for fork in forks if fork.samples == samples]
        if pairs and self.arrays:
            rows = np.array(pairs, np.int64)
            for layer in self.arrays:
                for state in layer:
                    self._backend.copy_states(state, rows)
