"""Normalisation layers; every rank holds them whole."""

from __future__ import annotations

import numpy as np

from quire.checkpoint.tensor import HostTensor
from quire.kernels.backend import Array
from quire.layers.builder import Builder


class RMSNorm:
    """Root-mean-square norm with a learned scale (Zhang & Sennrich 2019)."""

    def __init__(self, builder: Builder, name: str, size: int, eps: float) -> None:
        self.backend, self.size, self.eps = builder.backend, size, eps
        self.weight = self.backend.vector(builder.get(f"{name}.weight", (size,)))

    def __call__(self, x: Array) -> Array:
        """Normalise the last axis, [T, size]."""
        return self.backend.rms_norm(x, self.weight, self.eps)

    def add(self, x: Array, residual: Array) -> Array:
        """Add `x` to `residual` in place and return the norm of the sum; both [T, size]."""
        return self.backend.add_rms_norm(x, residual, self.weight, self.eps)

    def each_head(self, x: Array) -> Array:
        """Normalise every head by itself: x [T, heads * size] -> the same shape."""
        tokens = x.shape[0]
        return self.backend.rms_norm(x.reshape(-1, self.size), self.weight, self.eps).reshape(tokens, -1)


class LayerNorm:
    """Layer norm (Ba et al. 2016), with a learned scale and shift unless `affine` is False."""

    def __init__(self, builder: Builder, name: str, size: int, eps: float, *, affine: bool = True) -> None:
        self.backend, self.eps = builder.backend, eps
        ones = HostTensor(np.ones(size, np.float32), "float32")
        self.weight = self.backend.vector(builder.get(f"{name}.weight", (size,)) if affine else ones)
        self.bias = self.backend.vector(builder.get(f"{name}.bias", (size,))) if affine else None

    def __call__(self, x: Array) -> Array:
        """Normalise the last axis, [T, size]."""
        return self.backend.layer_norm(x, self.weight, self.bias, self.eps)
