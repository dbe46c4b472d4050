"""Weights in memory, for tests of single layers."""

from __future__ import annotations

import numpy as np

from quire.checkpoint.tensor import HostTensor


class Weights(dict[str, np.ndarray]):
    """Tensors in memory as a `WeightSource`."""

    def read(self, name: str, shape: tuple[int, ...]) -> HostTensor:
        """Return the tensor, which has this shape."""
        assert self[name].shape == shape
        return HostTensor(self[name], "float32")
