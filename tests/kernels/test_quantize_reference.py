"""What the reference makes of weights, inputs, keys and values that others hold as integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.errors import ConfigError
from quire.kernels.backend import AttentionParams
from quire.kernels.cpu.linear_int import pack_int4, pack_int8
from quire.kernels.cpu.threads import Launcher
from quire.kernels.create import create_backend
from quire.kernels.reference import ReferenceBackend
from quire.kernels.reference.quantize import GROUP, round_groups, round_rows
from tests.kernels.scenes import Paged, host, normal

RNG = np.random.default_rng(0)


def test_rows_become_127_steps_each_way() -> None:
    x = torch.tensor([[1.27, -0.635, 0.004, 0.0051], [0, 0, 0, 0], [1e-37, 0, 0, 0], [1, torch.nan, 0, 0]])
    x = torch.cat([x, torch.tensor([[1, -torch.inf, 0, 0]])])
    got = round_rows(x)
    torch.testing.assert_close(got[0], torch.tensor([1.27, -0.64, 0, 0.01]), atol=1e-6, rtol=0)
    assert not got[1:3].any()
    assert got[3:].isnan().all()


@pytest.mark.parametrize("inputs", [1, 64, 65, 200])
def test_groups_become_sixteen_steps(inputs: int) -> None:
    weight = torch.from_numpy(normal(RNG, 7, inputs))
    weight[3] = 0
    weight[4, 0] = torch.nan
    got = round_groups(weight)
    assert got[4].isnan().all()
    for row in (0, 1, 2, 3, 5, 6):
        for start in range(0, inputs, GROUP):
            group, rounded = weight[row, start : start + GROUP], got[row, start : start + GROUP]
            step = float(group.abs().max()) / 8
            assert len(rounded.unique()) <= 16
            # Half a step, a whole one where the other side ends at 7, and the rounding of the scale itself.
            assert float((group - rounded).abs().max()) <= step * 1.01
            inside = (group.abs() < 7 * step) | (group.abs() == group.abs().max())
            assert float((group - rounded)[inside].abs().max()) <= step * 0.51


@pytest.mark.parametrize("quantization", ["int8", "int8-weight-only", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_are_those_of_the_rounded_numbers(quantization: str, dtype: str) -> None:
    backend = create_backend("reference", dtype, "float32", quantization=quantization)
    assert backend.quantization == quantization
    weight, bias, x = normal(RNG, 33, 130), normal(RNG, 33), normal(RNG, 5, 130)
    round_w = round_groups if quantization == "int4" else round_rows
    rounded = round_w(torch.from_numpy(weight)).numpy()
    inputs = x if quantization == "int8-weight-only" else round_rows(torch.from_numpy(x)).numpy()
    got = backend.linear(torch.from_numpy(x), backend.pack_linear([host(weight[:9]), host(weight[9:])], [host(bias)]))
    np.testing.assert_allclose(backend.to_numpy(got), inputs @ rounded.T + bias, rtol=1e-4, atol=1e-4)
    # Close to the exact product, and not equal to it.
    error = np.abs(backend.to_numpy(got) - (x @ weight.T + bias)).max()
    assert 1e-3 < error < (6.0 if quantization == "int4" else 0.4)


@pytest.mark.parametrize(("rows", "inputs"), [(1, 64), (40, 130), (33, 17)])
def test_the_cpu_packs_the_same_numbers(rows: int, inputs: int) -> None:
    weight, launcher = normal(RNG, rows, inputs), Launcher(1)
    weight[0, :5] = 0
    ids = np.arange(rows)
    for pack, round_w in ((pack_int8, round_rows), (pack_int4, round_groups)):
        packed = pack([host(weight)], None, launcher).rows(ids)
        np.testing.assert_allclose(packed, round_w(torch.from_numpy(weight)), rtol=1e-6)


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


def test_an_unknown_kind_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="'int2'; allowed: int8, int8-weight-only, int4") as caught:
        create_backend("cpu", "float32", "float32", quantization="int2")
    assert caught.value.param == "quantization"
