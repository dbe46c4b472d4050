"""What the reference makes of weights, inputs, keys and values that others hold as integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.kernels.backend import AttentionParams
from quire.kernels.create import create_backend
from quire.kernels.reference import ReferenceBackend
from quire.kernels.reference.backend import GROUP, round_rows
from quire.kernels.reference.quantize import quantize_weight
from tests.kernels.scenes import Paged, host, normal

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("quantization", ["int8", "int8-weight-only", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_are_those_of_the_rounded_numbers(quantization: str, dtype: str) -> None:
    backend = create_backend("reference", dtype, "float32", quantization=quantization)
    assert backend.quantization == quantization
    weight, bias, x = normal(RNG, 33, 130), normal(RNG, 33), normal(RNG, 5, 130)
    rounded = quantize_weight(torch.from_numpy(weight), 4 if quantization == "int4" else 8, GROUP).dequantized().numpy()
    inputs = x if quantization == "int8-weight-only" else round_rows(torch.from_numpy(x)).numpy()
    got = backend.linear(torch.from_numpy(x), backend.pack_linear([host(weight[:9]), host(weight[9:])], [host(bias)]))
    np.testing.assert_allclose(backend.to_numpy(got), inputs @ rounded.T + bias, rtol=1e-4, atol=1e-4)
    # Close to the exact product, and not equal to it.
    error = np.abs(backend.to_numpy(got) - (x @ weight.T + bias)).max()
    assert 1e-3 < error < (6.0 if quantization == "int4" else 0.4)


def test_tables_keep_eight_bits_and_exact_ones_all() -> None:
    backend = ReferenceBackend("float32", quantization="int4")
    table, ids = normal(RNG, 20, 70), torch.tensor([3, 0, 19])
    rows = backend.embedding(ids, backend.pack_linear([host(table)], table=True))
    torch.testing.assert_close(rows, round_rows(torch.from_numpy(table))[ids])
    exact = backend.pack_linear([host(table)], table=True, exact=True)
    np.testing.assert_array_equal(backend.embedding(ids, exact), table[ids])
    x = normal(RNG, 2, 70)
    np.testing.assert_allclose(backend.linear(torch.from_numpy(x), exact), x @ table.T, rtol=1e-4, atol=1e-5)


def test_keys_and_values_are_rounded_head_by_head() -> None:
    lengths, shape = [20, 3], (4, 2, 24)
    scene = Paged.random(0, lengths, 8, *shape)
    # One loud head must not cost the other its precision.
    scene.k[:, 0] *= 100
    params, chunks = AttentionParams(*shape, 0.02), [(0, 0, 20), (1, 0, 3)]
    backend = ReferenceBackend("float32", "int8")
    got = scene.attend(backend, scene.cache(backend), params, chunks)
    for x in (scene.k, scene.v):
        x[:] = round_rows(torch.from_numpy(x)).numpy()
    exact = ReferenceBackend("float32", "float32")
    np.testing.assert_allclose(got, scene.attend(exact, scene.cache(exact), params, chunks), rtol=1e-5, atol=1e-5)
