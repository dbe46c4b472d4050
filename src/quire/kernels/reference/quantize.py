"""What quantizing means, in plain torch: the same integers and scales as the fast kernels, written to be read.

A row (or a group of a row) is scaled so that its largest number becomes the largest integer; everything rounds to the
nearest, ties to even. What is smaller than SMALLEST counts as 0; a row with a number that is not finite has a NaN
scale and so a NaN result. All arithmetic on the way to the integers is float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

SMALLEST = 2.0**-120
LIMIT = 127
FP8_LIMIT = 448  # the largest float8_e4m3fn


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """w[n, k] = scales[n] * group_scales[n, k // group] * q[n, k].

    q int8 [N, K]; scales float32 [N]; group_scales float16 [N, ceil(K/group)], None for all 1.
    """

    q: torch.Tensor
    scales: torch.Tensor
    group_scales: torch.Tensor | None
    group: int

    def dequantized(self) -> torch.Tensor:
        """Return w, float32 [N, K]."""
        return self.q.float() * self.scale_of_k()

    def scale_of_k(self) -> torch.Tensor:
        """Return the scale of every element, float32 [N, K]."""
        columns = self.scales[:, None]
        if self.group_scales is None:
            return columns.expand(self.q.shape)
        return self.group_scales.float().repeat_interleave(self.group, dim=1)[:, : self.q.shape[1]] * columns


def _over(numerator: float, x: torch.Tensor) -> torch.Tensor:
    """Return numerator / x, correctly rounded; 0 where x is smaller than SMALLEST or NaN."""
    usable = x.abs() >= SMALLEST
    return torch.where(usable, torch.full_like(x, numerator) / torch.where(usable, x, 1), 0)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return integers int8 [M, K] and scales float32 [M] of x [M, K]: the activations, or weights of 8 bits."""
    x = x.float()
    size = x.abs().amax(dim=1)
    finite = x.isfinite().all(dim=1)
    size = torch.where(finite, torch.where(size >= SMALLEST, size, 0), torch.nan)
    scaled = torch.nan_to_num(x * _over(LIMIT, size)[:, None], 0)
    return torch.round(scaled).to(torch.int8), size / torch.full_like(size, LIMIT)


def round_rows_fp8(x: torch.Tensor) -> torch.Tensor:
    """Round every row of x [..., K] to float8_e4m3fn and a scale, and return what they stand for, float32 [..., K].

    The largest number of a row becomes the largest of the format; a row that is not finite becomes NaN.
    """
    x = x.float()
    size = x.abs().amax(dim=-1, keepdim=True)
    size = torch.where(x.isfinite().all(dim=-1, keepdim=True), torch.where(size >= SMALLEST, size, 0), torch.nan)
    scaled = torch.nan_to_num(x * _over(FP8_LIMIT, size), 0).clamp(-FP8_LIMIT, FP8_LIMIT)
    return scaled.to(torch.float8_e4m3fn).float() * (size / torch.full_like(size, FP8_LIMIT))


def quantize_groups(w: torch.Tensor, group: int) -> QuantizedWeight:
    """Quantize w [N, K] to 4 bits, -8 .. 7, with a scale for every `group` neighbours of a row.

    The number of a group that is largest in size becomes -8, whatever its sign: the scale takes the sign. Group scales
    are float16 relative to the largest of the row, and integers are found with what that rounding leaves of them.
    """
    w = w.float()
    finite = w.isfinite().all(dim=1)
    rows, inputs = w.shape
    padded = F.pad(torch.where(finite[:, None], w, 0), (0, -inputs % group)).reshape(rows, -1, group)
    above, below = padded.amax(dim=2).clamp(min=0), (-padded).amax(dim=2).clamp(min=0)
    scales = torch.where(above >= below, above / -8, below / 8)  # exact: powers of two
    most = scales.abs().amax(dim=1)
    most = torch.where((most >= SMALLEST) & (padded.abs().amax(dim=(1, 2)) >= SMALLEST), most, 0)
    relative = torch.where(most[:, None] > 0, scales / torch.where(most > 0, most, 1)[:, None], 0).half()
    steps = _over(1, relative.float() * most[:, None])
    q = torch.round(padded * steps[:, :, None]).clamp(-8, 7).to(torch.int8).reshape(rows, -1)[:, :inputs]
    return QuantizedWeight(q, torch.where(finite, most, torch.nan), relative, group)


def quantize_weight(w: torch.Tensor, bits: int, group: int | None = None) -> QuantizedWeight:
    """Quantize w [N, K] to 8 bits by rows, or to 4 by groups of a row."""
    if bits == 8:
        return QuantizedWeight(*quantize_rows(w), None, w.shape[1])
    assert bits == 4
    assert group is not None
    return quantize_groups(w, group)
