"""Attention's constants: the slopes of ALiBi. Attention itself is tested with the kernels and the models."""

from __future__ import annotations

import numpy as np
import pytest

from quire.layers.attention import alibi_slopes


@pytest.mark.parametrize(
    ("heads", "span", "exponents"),
    [
        (1, 8.0, [8]),
        (4, 8.0, [2, 4, 6, 8]),
        (8, 8.0, [1, 2, 3, 4, 5, 6, 7, 8]),
        (6, 8.0, [2, 4, 6, 8, 1, 3]),
        (3, 8.0, [4, 8, 2]),
        (4, 4.0, [1, 2, 3, 4]),
    ],
)
def test_slopes_of_alibi(heads: int, span: float, exponents: list[int]) -> None:
    slopes = alibi_slopes(heads, span)
    assert slopes.dtype == np.float32
    assert slopes.tolist() == [2.0**-exponent for exponent in exponents]
