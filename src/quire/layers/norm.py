"""Normalization layers; every rank holds them whole."""

from __future__ import annotations

import numpy as np

from quire.checkpoint.tensor import HostTensor, Tensor
from quire.kernels.backend import Array
from quire.layers.builder import Builder


def shifted(scales: Tensor, offset: float) -> Tensor:
    """Return the numbers + `offset`, rounded to float32 only."""
    return HostTensor(scales.to_float32() + np.float32(offset), "float32") if offset else scales


class RMSNorm:
    """Root-mean-square norm with a learned scale (Zhang & Sennrich 2019), `offset` more than what the file holds.

    Wider rows are normalized piece by piece, `size` values each: so heads have a norm that shares its scale.
    """

    def __init__(self, builder: Builder, name: str, size: int, eps: float, *, offset: float = 0.0) -> None:
        self.backend, self.eps = builder.backend, eps
        self.weight = self.backend.vector(shifted(builder.get(f"{name}.weight", (size,)), offset))

    def __call__(self, x: Array) -> Array:
        """Normalize x [T, n * size]."""
        return self.backend.rms_norm(x, self.weight, self.eps)

    def add(self, x: Array, residual: Array) -> Array:
        """Add `x` to `residual` in place and return the norm of the sum; both [T, size]."""
        return self.backend.add_rms_norm(x, residual, self.weight, self.eps)


class ProjectionRMSNorm:
    """Root-mean-square norm over all heads of a projection that is split over ranks, as OLMo 2 has it.

    Where several ranks hold the same KV head, every head is counted as often, so that the mean is the same.
    """

    def __init__(self, builder: Builder, name: str, num_heads: int, size: int, eps: float, *, mine: range) -> None:
        self.backend, self.eps = builder.backend, eps
        scales = builder.get(f"{name}.weight", (num_heads * size,)).to_float32().reshape(num_heads, size)
        copies = len(mine) * self.backend.world_size // num_heads
        self.weight = self.backend.vector(HostTensor(np.repeat(scales, copies, axis=0).reshape(-1), "float32"))
        width = len(mine) * size
        self.start, self.stop = self.backend.rank * width, (self.backend.rank + 1) * width

    def __call__(self, x: Array) -> Array:
        """Normalize this rank's part x [T, its heads * size] of the projection."""
        return self.backend.rms_norm(self.backend.all_gather(x), self.weight, self.eps)[:, self.start : self.stop]


class LayerNorm:
    """Layer norm (Ba et al. 2016), with a learned scale and, if `bias`, shift; with neither unless `affine`.

    The scale is `offset` more than what the file holds.
    """

    def __init__(
        self,
        builder: Builder,
        name: str,
        size: int,
        eps: float,
        *,
        affine: bool = True,
        bias: bool = True,
        offset: float = 0.0,
    ) -> None:
        self.backend, self.eps = builder.backend, eps
        ones = HostTensor(np.ones(size, np.float32), "float32")
        self.weight = self.backend.vector(shifted(builder.get(f"{name}.weight", (size,)), offset) if affine else ones)
        self.bias = self.backend.vector(builder.get(f"{name}.bias", (size,))) if affine and bias else None

    def __call__(self, x: Array) -> Array:
        """Normalize the last axis, [T, size]."""
        return self.backend.layer_norm(x, self.weight, self.bias, self.eps)


class HeadLayerNorm:
    """Layer norm of every head by itself, each with a scale of its own and no shift.

    The file holds the scales of `num_heads` heads as a matrix, or one by one if `split`; a rank takes those of `mine`.
    """

    def __init__(
        self, builder: Builder, name: str, num_heads: int, size: int, eps: float, *, mine: range, split: bool
    ) -> None:
        self.backend, self.size, self.eps = builder.backend, size, eps
        if split:
            vectors = [builder.get(f"{name}.norms.{head}.weight", (size,)) for head in range(num_heads)]
            scales = np.concatenate([vectors[head].to_float32() for head in mine])
        else:
            matrix = builder.get(f"{name}.weight", (num_heads, size))
            scales = matrix.rows(mine.start, mine.stop).to_float32().reshape(-1)
        self.scales = self.backend.vector(HostTensor(scales, "float32"))
        self.ones = self.backend.vector(HostTensor(np.ones(size, np.float32), "float32"))

    def __call__(self, x: Array) -> Array:
        """Normalize the heads of x [T, heads * size]."""
        heads = self.backend.layer_norm(x.reshape(-1, self.size), self.ones, None, self.eps)
        return heads.reshape(x.shape[0], -1) * self.scales
