"""Tokens that stay on the device from one step to the next, and the time between two points of its work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.kernels.create import create_backend


@pytest.mark.parametrize("device", ["cpu", "reference", "cuda"])
def test_tokens_stay_where_they_are(device: str) -> None:
    backend = make_backend(device)
    put = backend.from_numpy
    last = backend.zeros((6,), "int64")
    finite = backend.rows_finite(put(np.array([[1.0], [np.nan], [2.0]], np.float32)))
    kept = backend.store_tokens(last, put(np.array([4, 1, 0])), put(np.array([7, 8, 0])), finite)
    assert backend.fetch(kept)().tolist() == [7, -1, 0]
    assert backend.to_numpy(last).tolist() == [0, 0, 0, 0, 7, 0]
    target = backend.zeros((4,), "int64")
    backend.gather_tokens(target[:3], last, put(np.array([4, 4, 1])))
    assert backend.to_numpy(target).tolist() == [7, 7, 0, 0]
    first, second = backend.record_event(), backend.record_event()
    assert 0.0 <= backend.elapsed_seconds(first, second) < 1.0


def make_backend(device: str) -> Any:
    if device != "cuda":
        return create_backend(device, "float32", "float32", 1)
    import torch

    from quire.kernels.gpu.backend import GPUBackend

    return GPUBackend("float32", "float32", "cuda" if torch.cuda.is_available() else "cpu")
