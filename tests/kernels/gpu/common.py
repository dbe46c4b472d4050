"""Where tests of the GPU's kernels run: on the device if there is one, otherwise in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ACTS = ("float32", "float16", "bfloat16")  # types of activations


def mostly_slow(values: Iterable[object], *quick: object) -> list[object]:
    """Return parameters of which all but the quick ones are for slow runs: a program is milliseconds to interpret."""
    values = list(values)
    assert all(value in values for value in quick)
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]
