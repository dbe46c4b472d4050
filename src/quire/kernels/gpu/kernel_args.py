"""What kernels take together travels as one NamedTuple; Triton flattens it when a kernel is compiled and launched.

A field that is None is left out of the compiled kernel, which tests it (`if w.bias is not None`) at no cost. What a
kernel is compiled for is another NamedTuple, its `FORM`. No field may be called `type`, `value` or `values`, which are
attributes of Triton's own tuples, and `do_not_specialize` reaches no fields: numbers that differ from step to step are
arguments by themselves. Within a kernel a field of FORM is a plain number, which Triton takes almost
everywhere; shapes and `static_range` want it assigned to a name annotated as `tl.constexpr` first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Rows(NamedTuple):
    """A matrix [T, N] whose rows are contiguous and `stride` elements apart."""

    data: Any
    stride: Any


def rows_of(x: torch.Tensor) -> Rows:
    """Return x [T, N] as kernels take it."""
    return Rows(x, x.stride(0))


def whole_rows(x: torch.Tensor) -> Rows:
    """Return x [T, N] as kernels take it that write it in place, or that read parts of longer rows."""
    assert x.stride(1) == 1 or x.shape[1] == 1, "elements of a row are contiguous"
    return Rows(x, x.stride(0))


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`; Triton's own is for kernels, and slow here."""
    return 1 << max(0, number - 1).bit_length()
