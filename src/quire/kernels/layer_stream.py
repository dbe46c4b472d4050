"""`LayerStream`: layers whose part of some blocks lies in the host's memory, and is on the device for their turn only.

Blocks from number `first_thin` on are *thin*. Of a thin block the first layers of a model have their keys and values on
the device; the others', the streamed layers', are on the host, and pass through a window on the device that two layers
share at a time: while one attends, the next one's part is under way. Other blocks are whole: all of them is on the
device. Who gets thin blocks is the scheduler's business (`kvcache/block_pool.py`), how bytes move is a backend's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from quire.kernels.backend import AttentionMetadata, KVCache

WINDOW_LAYERS = 2  # that share the window


class StreamedLayer(Protocol):
    """One layer's part of all blocks. `cache` is where it writes and reads, by what `enter` says."""

    @property
    def cache(self) -> KVCache:
        """Whole blocks have their own numbers in it, and thin ones, while the layer is entered, those of the window."""

    def enter(self, metadata: AttentionMetadata) -> AttentionMetadata:
        """Return what the layer goes by in `cache`: `metadata` itself in a step without thin blocks.

        Between this and `leave` come all ops on the cache. Layers are entered one after the other, in their order.
        """

    def leave(self) -> None:
        """Let go of the window; what was written there is on its way to the host."""


class LayerStream(Protocol):
    """The streamed layers of a model. Calls take effect in their order and in that of the backend's ops; nobody waits.

    Attributes:
        layers: in the model's order. first_thin: number of the first thin block. block_size: tokens of a block.
    """

    layers: Sequence[StreamedLayer]
    first_thin: int
    block_size: int

    def begin(self, loads: np.ndarray, stores: np.ndarray) -> None:
        """Begin a step in which every layer is entered once, and left.

        Thin blocks `loads` are there, as they were stored last, when a layer is entered; `stores` is what the step
        writes to. Both are int64 numpy [n], rising.
        """

    def copy_blocks(self, pairs: np.ndarray) -> None:
        """See `Backend.copy_blocks`: in all layers, between thin and whole blocks alike. Not within a step."""

    def close(self) -> None:
        """Wait for what is under way, and give the memory back. Once more is no error."""


def thin_blocks(
    block_tables: np.ndarray, query_lens: np.ndarray, seq_lens: np.ndarray, block_size: int, first_thin: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the thin blocks that a step reads from the host, and those that it writes: int64 [n], rising.

    Those with tokens from before the step are read, and those that get tokens in it are written; some are both.

    Args:
        block_tables: int [S, most blocks], at least as many as there are tokens for.
        query_lens, seq_lens: int [S], tokens of this step, and of the context with them; see `AttentionMetadata`.
    """
    row, place = np.nonzero(block_tables >= first_thin)
    numbers, first = block_tables[row, place].astype(np.int64), place * block_size
    computed = (seq_lens - query_lens)[row]
    read = first < computed
    written = (first + block_size > computed) & (first < seq_lens[row])
    return np.unique(numbers[read]), np.unique(numbers[written])


def runs(numbers: np.ndarray, most: int | None = None) -> list[tuple[int, int]]:
    """Return runs (first, behind the last) of neighbours among rising `numbers`, int64 [n].

    With `most` there are at most so many: the smallest gaps are taken in where there would be more.
    """
    if not len(numbers):
        return []
    gaps = np.diff(numbers) - 1
    cuts = np.flatnonzero(gaps)
    if most is not None and len(cuts) >= most:
        cuts = np.sort(cuts[np.argsort(-gaps[cuts], kind="stable")[: most - 1]])
    starts, stops = numbers[[0, *(cuts + 1)]], numbers[[*cuts, -1]] + 1
    return list(zip(starts.tolist(), stops.tolist(), strict=True))
