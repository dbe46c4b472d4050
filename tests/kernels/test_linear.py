"""Packing weights, looking them up, multiplying by them."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from quire.checkpoint.tensor import HostTensor
from quire.kernels.cpu import formats
from quire.kernels.cpu.backend import CPUBackend
from quire.kernels.cpu.simd import HAS_BF16_DOT
from tests.kernels.scenes import DTYPES, LINEARS, host, normal, pair, round_to


@pytest.mark.parametrize(("dtype", "dots"), LINEARS)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 5, 7), (3, 64, 33), (9, 40, 1), (6, 32, 2), (70, 97, 64)])
def test_linear_is_the_product_with_rounded_weights(
    dtype: str, dots: bool, rows: int, outputs: int, inputs: int
) -> None:
    rng = np.random.default_rng(rows)
    weight, bias, x = normal(rng, outputs, inputs), normal(rng, outputs), normal(rng, rows, inputs)
    factors = round_to(x, "bfloat16" if dots else "float32")
    expected = factors.astype(np.float64) @ round_to(weight, dtype).T.astype(np.float64)
    for backend in pair(dtype, dot_products=dots):
        plain = backend.pack_linear([host(weight)])
        biased = backend.pack_linear([host(weight)], [host(bias)])
        put = backend.from_numpy
        np.testing.assert_allclose(backend.to_numpy(backend.linear(put(x), plain)), expected, atol=3e-5)
        np.testing.assert_allclose(backend.to_numpy(backend.linear(put(x), biased)), expected + bias, atol=3e-5)


@pytest.mark.parametrize(("dtype", "dots"), LINEARS)
def test_a_row_is_the_same_alone_and_in_any_batch(dtype: str, dots: bool) -> None:
    rng = np.random.default_rng(1)
    backend = CPUBackend(dtype, dot_products=dots)
    weight = backend.pack_linear([host(normal(rng, 40, 129))], [host(normal(rng, 40))])
    x = normal(rng, 85, 129)
    alone = np.concatenate([backend.linear(row[None], weight) for row in x])
    for rows in (2, 3, 4, 5, 7, 8, 9, 12, 15, 63, 64, 65, 85):
        np.testing.assert_array_equal(backend.linear(x[:rows], weight), alone[:rows])
        np.testing.assert_array_equal(backend.linear(x[-rows:], weight), alone[-rows:])


@pytest.mark.usefixtures("always_parallel")
@pytest.mark.parametrize(("dtype", "dots"), LINEARS)
def test_a_row_is_the_same_with_any_number_of_threads(dtype: str, dots: bool) -> None:
    rng = np.random.default_rng(2)
    one, two = (CPUBackend(dtype, num_threads=threads, dot_products=dots) for threads in (1, None))
    weight, x = host(normal(rng, 200, 65)), normal(rng, 90, 65)
    for rows in (1, 9, 90):
        expected = one.linear(x[:rows], one.pack_linear([weight]))
        np.testing.assert_array_equal(two.linear(x[:rows], two.pack_linear([weight])), expected)


@pytest.mark.parametrize(("dtype", "dots"), LINEARS)
@pytest.mark.parametrize("stored", DTYPES)
def test_parts_are_stacked_and_rows_are_found_again(
    dtype: str, dots: bool, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "STAGED_ELEMENTS", 7 * 48)  # several groups, none ending where a part does
    rng = np.random.default_rng(3)
    parts = [normal(rng, count, 7) for count in (3, 50, 16, 31, 1)]
    expected = round_to(round_to(np.concatenate(parts), stored), dtype)
    ids = np.array([100, 0, 2, 3, 52, 53, 99, 3])
    for backend in pair(dtype, dot_products=dots):
        weight = backend.pack_linear([host(part, stored) for part in parts])
        found = backend.to_numpy(backend.embedding(backend.from_numpy(ids), weight))
        np.testing.assert_array_equal(found, expected[ids])
        eye = backend.to_numpy(backend.linear(backend.from_numpy(np.eye(7, dtype=np.float32)), weight))
        np.testing.assert_array_equal(eye.T, expected)


def test_weights_may_be_transposed_read_only_and_unaligned() -> None:
    rng = np.random.default_rng(4)
    values = normal(rng, 20, 12)
    raw = b"x" + values.tobytes()
    odd = np.frombuffer(raw, np.uint8)[1:].view(np.float32).reshape(20, 12)
    for backend in pair("float32"):
        read = backend.pack_linear([HostTensor(odd, "float32")])
        np.testing.assert_array_equal(
            backend.to_numpy(backend.embedding(backend.from_numpy(np.arange(20)), read)), values
        )
        turned = backend.pack_linear([HostTensor(odd, "float32").transposed()])
        found = backend.to_numpy(backend.embedding(backend.from_numpy(np.arange(12)), turned))
        np.testing.assert_array_equal(found, values.T)
        np.testing.assert_array_equal(backend.to_numpy(backend.vector(HostTensor(odd[3], "float32"))), values[3])


@pytest.mark.parametrize(("dtype", "dots"), LINEARS[1:])
def test_rounding_is_to_nearest_even_and_keeps_infinity_and_nan(dtype: str, dots: bool) -> None:
    step = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    tricky = [1 + step, 1 + 3 * step, 1 + step * 1.001, -1 - step, 0.0, -0.0, 1e-6, -3e-8, np.inf, -np.inf, np.nan]
    values = np.array(tricky, np.float32)[:, None]
    cpu, reference = pair(dtype, dot_products=dots)
    rows = np.arange(len(tricky))
    got = cpu.embedding(rows, cpu.pack_linear([host(values)]))
    want = reference.embedding(reference.from_numpy(rows), reference.pack_linear([host(values)]))
    np.testing.assert_array_equal(got.view(np.uint32)[:-1], reference.to_numpy(want).view(np.uint32)[:-1])
    assert np.isnan(got[-1])


@pytest.mark.skipif(not HAS_BF16_DOT, reason="the CPU lacks AVX-512 BF16")
def test_inputs_are_rounded_to_nearest_even_and_stay_in_their_row() -> None:
    step = 2.0**-8
    tricky = [1 + step, 1 + 3 * step, 1 + step * 1.001, -1 - step, 0.0, 3.4e38, np.inf, -np.inf, np.nan]
    x = np.array(tricky, np.float32)[:, None]
    for backend in pair("bfloat16"):
        one = backend.pack_linear([host(np.ones((1, 1), np.float32))])
        found = backend.to_numpy(backend.linear(backend.from_numpy(x), one))[:, 0]
        expected = [1, 1 + 4 * step, 1 + 2 * step, -1, 0, np.inf, np.inf, -np.inf, np.nan]
        np.testing.assert_array_equal(found, np.array(expected, np.float32))


@pytest.mark.parametrize(("dtype", "dots"), LINEARS)
def test_no_rows_and_views_are_welcome(dtype: str, dots: bool) -> None:
    rng = np.random.default_rng(5)
    backend = CPUBackend(dtype, dot_products=dots)
    values, x = normal(rng, 6, 8), normal(rng, 5, 24)
    weight = backend.pack_linear([host(values)])
    assert backend.linear(np.empty((0, 8), np.float32), weight).shape == (0, 6)
    np.testing.assert_array_equal(backend.linear(x[:, 8:16], weight), backend.linear(x[:, 8:16].copy(), weight))
    with pytest.raises(ValueError, match="8 inputs"):
        backend.linear(x, weight)


@pytest.mark.usefixtures("always_parallel")
def test_two_engines_may_compute_at_once() -> None:
    rng = np.random.default_rng(6)
    weight, inputs = host(normal(rng, 300, 64)), [normal(rng, 17, 64) for _ in range(4)]
    quiet = CPUBackend(num_threads=1)
    expected = [quiet.linear(x, quiet.pack_linear([weight])) for x in inputs]
    wrong: list[int] = []

    def work(number: int) -> None:
        backend = CPUBackend(num_threads=1 + number % 2)
        packed = backend.pack_linear([weight])
        for _ in range(30):
            if not np.array_equal(backend.linear(inputs[number], packed), expected[number]):
                wrong.append(number)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []
