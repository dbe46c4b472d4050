"""Which sizes of steps are recorded: a ladder of them, so that few recordings serve all steps."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from quire.kernels.steps import StepShape

# Steps of so many tokens and rows are recorded in pieces. A quarter of padding costs less than an op by itself does.
_TOKENS: Final = (8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
_ROWS: Final = (0, 8, 32, 64, 128)
_FINE, _COARSE = 128, 256  # steps of both ladders where they go on


def decode_sizes(most: int) -> list[int]:
    """Return the batch sizes that are recorded, up to `most`, which is one of them.

    Small ones are close to each other, since there every row counts; from 16 on they are multiples of 8, as products
    of matrices want them, and above 256 of 16.
    """
    sizes = [1, 2, 4, 8, 12, 16, *range(24, 257, 8), *range(272, most + 16, 16)]
    return [*(size for size in sizes if size < most), most]


def token_sizes(most: int) -> list[int]:
    """Return the numbers of tokens of other steps that are recorded, up to `most`, which is one of them."""
    sizes = [*_TOKENS, *range(_TOKENS[-1] + _FINE, most + _FINE, _FINE)]
    return [*(size for size in sizes if size < most), most]


class Ladder:
    """Rounds steps of up to `most` tokens up to sizes that are recorded."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._decode, self._tokens = decode_sizes(most), token_sizes(most)
        self._rows = [*_ROWS, *range(_COARSE, most + _COARSE, _COARSE)]

    def up(self, tokens: int, sequences: int, rows: int) -> StepShape:
        """Return the shape in which such a step is computed; see `Backend.step_shape`."""
        if tokens > self._most or (rows >= tokens and sequences != tokens):
            return StepShape(tokens, sequences, rows, "no")
        if tokens == sequences == rows:
            size = self._decode[bisect_left(self._decode, tokens)]
            return StepShape(size, size, size, "whole")
        size = self._tokens[bisect_left(self._tokens, tokens)]
        padded = min(self._rows[bisect_left(self._rows, rows)], size - 1)  # all rows would be taken in order
        return StepShape(size, sequences, padded, "pieces")
