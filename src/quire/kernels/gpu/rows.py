"""Ops on rows of activations: norms, rotation, activations.

The kernels of norms are in `norms.py`, of rotation in `rotary.py`; those of single elements are here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.gpu import norms
from quire.kernels.gpu.activations import activate, activation_number
from quire.kernels.gpu.arrays import ArrayOps
from quire.kernels.gpu.rotary import rotate

ELEMENTS = 1024  # that a program computes: 8 of each thread


@triton.jit
def _tanh(x):
    """tanh, as good near 0 as elsewhere."""
    square = x * x
    series = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0 - square * 62.0 / 2835.0))))
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(square < 0.0625, series, tl.where(x < 0.0, -far, far))


@triton.jit
def activation_kernel(x, out, x_stride, width, count, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Apply activation KIND to `count` elements; rows of x are `width` wide and may be apart, those of out are not."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    values = tl.load(x + at // width * x_stride + at % width, mask=mask, other=0).to(tl.float32)
    tl.store(out + at, activate(values, KIND).to(out.dtype.element_ty), mask=mask)


@triton.jit
def softcap_kernel(x, stride, width, count, cap, BLOCK: tl.constexpr):
    """x = cap * tanh(x / cap) of `count` elements in rows that may be apart."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    place = x + at // width * stride + at % width
    values = tl.load(place, mask=mask, other=0).to(tl.float32)
    tl.store(place, (cap * _tanh(values / cap)).to(x.dtype.element_ty), mask=mask)


class RowOps(ArrayOps):
    """Norms, rotation, activations."""

    def take_rows(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, ids)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return norms.rms_norm(x, None, weight, eps, self.act, pdl=self.pdl)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """The norm is that of the sum as it is rounded in `residual`."""
        return norms.rms_norm(x, residual, weight, eps, self.act, pdl=self.pdl)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        return norms.layer_norm(x, weight, bias, eps, self.act)

    def rotary_embedding(
        self,
        positions: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        cos_sin: torch.Tensor,
        head_size: int,
        interleaved: bool,
    ) -> None:
        rotate(positions, q, k, cos_sin, head_size, interleaved)

    def activation(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        """What is float32 stays so: gates of states are, and are too fine for less."""
        number, source = activation_number(kind, gated=False), norms.as_rows(x)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        count = source.numel()
        if count:
            activation_kernel[(triton.cdiv(count, ELEMENTS),)](
                source, out, source.stride(0), source.shape[1], count, KIND=number, BLOCK=ELEMENTS
            )
        return out

    def softcap(self, x: torch.Tensor, cap: float) -> None:
        assert x.stride(1) == 1, "what is changed in place has whole rows"
        count = x.numel()
        if count:
            softcap_kernel[(triton.cdiv(count, ELEMENTS),)](
                x, x.stride(0), x.shape[1], count, float(cap), BLOCK=ELEMENTS
            )
