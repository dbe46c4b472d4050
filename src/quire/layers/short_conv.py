"""Causal depthwise convolutions; the last inputs of each sequence are its state between steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.checkpoint.tensor import HostTensor
from quire.kernels.backend import Array, AttentionMetadata
from quire.layers.builder import Builder


class ShortConv:
    """A causal convolution of `taps` inputs for each channel, then `activation` (of the backend's) if there is one.

    `mine` are the ranges of the file's `channels` that this rank has, one after the other.
    """

    def __init__(
        self,
        builder: Builder,
        name: str,
        channels: int,
        taps: int,
        *,
        mine: Sequence[range],
        bias: bool = False,
        activation: str | None = None,
    ) -> None:
        self.backend, self.activation = builder.backend, activation
        weight = builder.get(f"{name}.weight", (channels, 1, taps)).to_float32()
        rows = np.concatenate([weight[part.start : part.stop, 0] for part in mine])
        self.weight = self.backend.vector(HostTensor(np.ascontiguousarray(rows.T), "float32"))
        self.bias = None
        if bias:
            shifts = builder.get(f"{name}.bias", (channels,)).to_float32()
            whole = np.concatenate([shifts[part.start : part.stop] for part in mine])
            self.bias = self.backend.vector(HostTensor(whole, "float32"))
        self.state_shape = (taps - 1, rows.shape[0])

    def __call__(self, x: Array, state: Array, metadata: AttentionMetadata) -> Array:
        """[T, this rank's channels] -> the same; state is [rows, *state_shape]."""
        return self.backend.causal_conv(x, self.weight, self.bias, state, metadata, self.activation)
