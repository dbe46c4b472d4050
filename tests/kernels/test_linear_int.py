"""Integer weights: packing them, looking up their rows, multiplying by them, all against the plain specification."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.checkpoint.tensor import HostTensor
from quire.kernels.cpu import activations, linear_int, quantize
from quire.kernels.cpu.linear_int import IntLinear, embed, pack_floats
from quire.kernels.cpu.products import linear
from quire.kernels.cpu.simd import HAS_VNNI
from quire.kernels.reference.quantize import quantize_rows, quantize_weight
from tests.helpers import stored
from tests.helpers.packed import packed_nbytes, unpacked
from tests.helpers.stored import pack_from
from tests.kernels.both_ways import both_ways, new_launcher
from tests.kernels.scenes import DTYPES, host, normal, round_to
from tests.kernels.test_compile import answer, start

ONE, TWO = new_launcher(1), new_launcher(2)
VNNI = [pytest.param(True, marks=pytest.mark.skipif(not HAS_VNNI, reason="the CPU lacks AVX-512 VNNI")), False]
KINDS = [(8, None), (4, 32), (4, 64), (4, 128)]

# Prints results of a lesser CPU, and which kernels it used.
TOUR = """
import sys
import numpy as np
from tests.kernels.test_linear_int import ONE, everything
from quire.kernels.cpu.simd import HAS_VNNI
print(HAS_VNNI)
np.savez(sys.argv[1], *everything())
"""


def pack(weight: np.ndarray, bits: int, group: int | None, bias: np.ndarray | None = None, **options: str) -> IntLinear:
    """Pack one matrix."""
    biases = None if bias is None else [host(bias)]
    tensor = host(weight, **options)
    return pack_floats([tensor], biases, TWO, bits, group)


def specified(
    x: np.ndarray,
    values: np.ndarray,
    bits: int,
    group: int | None,
    bias: np.ndarray | None = None,
    *,
    rounded: bool = True,
) -> np.ndarray:
    """Return x @ values.T (+ bias) with quantized values and, if `rounded`, x; sums in float64."""
    weight, left = quantize_weight(torch.from_numpy(values), bits, group), torch.from_numpy(x).double()
    if rounded:
        integers, scales = quantize_rows(torch.from_numpy(x))
        left = integers.double() * scales.double()[:, None]
    out = left @ (weight.q.double() * weight.scale_of_k().double()).T
    return (out if bias is None else out + torch.from_numpy(bias)).float().numpy()


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Return the size of the difference over that of `want`."""
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))


def close(got: np.ndarray, want: np.ndarray) -> None:
    """Check that no element is off by more than 1e-5 of the largest in its row."""
    assert got.shape == want.shape
    assert (np.abs(got - want) <= 1e-5 * np.abs(want).max(axis=1, keepdims=True)).all()


def everything() -> list[np.ndarray]:
    """Return results of every op on the best kernels of this CPU."""
    rng, results = np.random.default_rng(0), []
    for bits, group in ((8, None), (4, 32)):
        for dtype in DTYPES:
            weight = pack(normal(rng, 40, 75), bits, group, normal(rng, 40), dtype=dtype)
            results.append(unpacked(weight, np.arange(40)))
            results.extend(np.array(linear(ONE, normal(rng, rows, 75), weight)) for rows in (1, 4, 13))
        results.append(embed(ONE, np.array([3, 0, 39]), weight))
    x, weight = normal(rng, 13, 75), pack(normal(rng, 40, 75), 8, None)
    results.append(np.array(linear(ONE, x, weight, round_inputs=False)))
    return results


# Packing


@pytest.mark.parametrize(("bits", "group"), KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("outputs", "inputs"), [(40, 1), (33, 70), (7, 256), (64, 300)])
def test_packed_weights_are_the_specified_ones(
    dtype: str, bits: int, group: int | None, outputs: int, inputs: int
) -> None:
    rng = np.random.default_rng(inputs)
    values = normal(rng, outputs, inputs) * np.float32(10) ** rng.integers(-5, 2, (outputs, 1)).astype(np.float32)
    values[3] = 0
    values[5] = 1e-38 if dtype != "float16" else 0
    values[6, 0] = 0
    stored = round_to(values, dtype)
    expected = quantize_weight(torch.from_numpy(stored), bits, group)
    packed = pack(values, bits, group, dtype=dtype)
    np.testing.assert_array_equal(packed.scales[:outputs], expected.scales.numpy())
    found = unpacked(packed, np.arange(outputs))
    np.testing.assert_array_equal(found, expected.dequantized().numpy())
    scale = expected.scale_of_k().numpy()
    usable = scale != 0
    integers = np.rint(found[usable].astype(np.float64) / scale[usable])
    np.testing.assert_array_equal(integers, expected.q.numpy()[usable])


@pytest.mark.parametrize(("bits", "group"), KINDS)
def test_parts_are_stacked_wherever_they_lie(bits: int, group: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_int, "STAGED_ELEMENTS", 7 * 48)
    rng = np.random.default_rng(1)
    wide = normal(rng, 9, 100)
    wide.flags.writeable = False
    odd = np.frombuffer(b"x" + normal(rng, 20, 48).tobytes(), np.uint8)[1:].view(np.float32).reshape(20, 48)
    half = host(normal(rng, 5, 96), "bfloat16")
    parts = [
        HostTensor(odd, "float32"),
        HostTensor(wide, "float32").columns(10, 58),
        host(normal(rng, 48, 21)).transposed(),
        half.columns(0, 48),
        HostTensor(normal(rng, 3, 48).astype(np.float64), "float64"),
    ]
    bias = [host(normal(rng, part.shape[0])) for part in parts]
    stacked = np.concatenate([part.to_float32() for part in parts])
    weight = pack_floats(parts, bias, TWO, bits, group)
    assert (weight.outputs, weight.inputs, weight.padded) == (58, 48, 64)
    expected = quantize_weight(torch.from_numpy(stacked), bits, group).dequantized().numpy()
    np.testing.assert_array_equal(unpacked(weight, np.arange(58)), expected)
    found = linear(ONE, np.zeros((1, 48), np.float32), weight)[0]
    np.testing.assert_array_equal(found, np.concatenate([b.array for b in bias]))


def test_ties_round_to_even() -> None:
    ties = np.array([[127, 0.5, 1.5, -0.5, -2.5, 126.5]], np.float32)
    expected = [127, 0, 2, 0, -2, 126]
    np.testing.assert_array_equal(unpacked(pack(ties, 8, None), np.array([0]))[0], expected)
    eye = pack(np.eye(6, dtype=np.float32), 8, None)
    np.testing.assert_allclose(linear(ONE, ties, eye)[0], expected, rtol=1e-6)
    quarter = np.array([[8, 0.5, 1.5, -0.5, -2.5, -7]], np.float32)
    np.testing.assert_array_equal(unpacked(pack(quarter, 4, 32), np.array([0]))[0], [8, 0, 2, 0, -2, -7])


def test_weights_shrink_as_promised() -> None:
    values = normal(np.random.default_rng(2), 64, 1024)
    assert packed_nbytes(pack(values, 8, None)) == 64 * 1024 + 64 * 4
    assert packed_nbytes(pack(values, 4, 64)) == 64 * 512 + 64 * 16 * 2 + 64 * 4


# Products


@pytest.mark.parametrize("vnni", VNNI)
@pytest.mark.parametrize(("bits", "group"), KINDS)
@pytest.mark.parametrize("rows", [2, 5, 8, 65, 130])
def test_products_are_the_specified_ones(rows: int, bits: int, group: int | None, vnni: bool) -> None:
    rng = np.random.default_rng(rows)
    outputs, inputs = int(rng.integers(1, 120)), int(rng.integers(1, 300))
    values, bias = normal(rng, outputs, inputs), normal(rng, outputs)
    plain, biased = pack(values, bits, group), pack(values, bits, group, bias)
    wide = normal(rng, rows, inputs + 9)
    x = wide[:, 4 : 4 + inputs]
    close(linear(TWO, x, plain, vnni=vnni), specified(x, values, bits, group))
    close(linear(ONE, x, biased, vnni=vnni), specified(x, values, bits, group, bias=bias))


@pytest.mark.parametrize("vnni", VNNI)
@pytest.mark.parametrize(("bits", "group"), KINDS)
@pytest.mark.usefixtures("always_parallel")
def test_products_are_the_same_recorded_and_on_any_thread(bits: int, group: int | None, vnni: bool) -> None:
    rng = np.random.default_rng(3)
    values = normal(rng, 200, 130)
    weight = pack(values, bits, group)
    for rows in (1, 9, 70):
        both_ways(
            [ONE, TWO],
            lambda launcher, x: (linear(launcher, x[:, :130], weight, vnni=vnni),),
            lambda seed, rows=rows: (normal(np.random.default_rng(seed), rows, 140),),
            lambda x: (specified(x[:, :130], values, bits, group),),
            close,
        )


@pytest.mark.skipif(not HAS_VNNI, reason="the CPU lacks AVX-512 VNNI")
@pytest.mark.parametrize(("bits", "group"), KINDS)
def test_products_with_and_without_vnni_agree_to_the_last_bit(bits: int, group: int | None) -> None:
    rng = np.random.default_rng(4)
    weight = pack(normal(rng, 70, 290), bits, group)
    extremes = np.full((16, 290), 100.0, np.float32)
    extremes[:, ::2] *= -1
    for x in (normal(rng, 29, 290), extremes, np.abs(extremes), -np.abs(extremes)):
        found = [linear(ONE, x, weight, vnni=vnni) for vnni in (True, False)]
        np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("vnni", VNNI)
def test_the_largest_integers_do_not_overflow(vnni: bool) -> None:
    signs = np.where(np.arange(64)[:, None] % 3 == 0, -1, 1).astype(np.float32) * np.ones((1, 4096), np.float32)
    x = np.ones((8, 4096), np.float32)
    for weight in (pack(signs, 8, None), pack(signs, 4, 128)):
        np.testing.assert_allclose(linear(ONE, x, weight, vnni=vnni), np.tile(4096 * signs[:, 0], (8, 1)), rtol=1e-6)


@pytest.mark.parametrize("vnni", VNNI)
@pytest.mark.parametrize(("bits", "group"), KINDS)
def test_a_row_is_the_same_alone_and_in_any_batch(bits: int, group: int | None, vnni: bool) -> None:
    rng = np.random.default_rng(5)
    weight, x = pack(normal(rng, 40, 129), bits, group, normal(rng, 40)), normal(rng, 85, 129)
    alone = np.concatenate([linear(ONE, row[None], weight, vnni=vnni) for row in x])
    for rows in (2, 3, 4, 5, 7, 8, 9, 12, 15, 63, 64, 65, 85):
        np.testing.assert_array_equal(linear(TWO, x[:rows], weight, vnni=vnni), alone[:rows])
        np.testing.assert_array_equal(linear(TWO, x[-rows:], weight, vnni=vnni), alone[-rows:])


def test_results_are_near_the_unrounded_ones() -> None:
    rng = np.random.default_rng(6)
    values, x = normal(rng, 256, 1024), normal(rng, 16, 1024)
    exact = x.astype(np.float64) @ values.T
    assert relative_error(linear(ONE, x, pack(values, 8, None)), exact) < 0.015
    assert relative_error(linear(ONE, x, pack(values, 8, None), round_inputs=False), exact) < 0.01
    for group, limit in ((32, 0.12), (64, 0.15), (128, 0.17)):
        assert relative_error(linear(ONE, x, pack(values, 4, group)), exact) < limit


@pytest.mark.parametrize("rows", [1, 5, 8, 65, 130])
def test_inputs_may_stay_as_they_are(rows: int) -> None:
    rng = np.random.default_rng(rows)
    values, bias, wide = normal(rng, 70, 101), normal(rng, 70), normal(rng, rows, 120)
    x, weight = wide[:, 7:108], pack(values, 8, None, bias)
    found = linear(TWO, x, weight, round_inputs=False)
    close(found, specified(x, values, 8, None, bias, rounded=False))
    np.testing.assert_array_equal(linear(ONE, x[-1:], weight, round_inputs=False)[0], found[-1])


def test_inputs_stay_as_they_are_for_plain_8_bits_only() -> None:
    x = np.ones((1, 32), np.float32)
    with pytest.raises(ValueError, match="8-bit weights without groups"):
        linear(ONE, x, pack(np.ones((3, 32), np.float32), 4, 32), round_inputs=False)


@pytest.mark.parametrize(("bits", "group", "round_inputs"), [(8, None, True), (8, None, False), (4, 64, True)])
def test_a_row_that_is_not_finite_gives_nan_and_leaves_the_others_alone(
    bits: int, group: int | None, round_inputs: bool
) -> None:
    rng = np.random.default_rng(7)
    weight, x = pack(normal(rng, 40, 100), bits, group, normal(rng, 40)), normal(rng, 11, 100)
    clean = np.array(linear(ONE, x, weight, round_inputs=round_inputs))
    for value in (np.nan, np.inf, -np.inf):
        x[4, 98] = value
        found = linear(ONE, x, weight, round_inputs=round_inputs)
        assert not np.isfinite(found[4]).any()
        assert np.isnan(found[4]).all() or not round_inputs
        keep = np.arange(11) != 4
        np.testing.assert_array_equal(found[keep], clean[keep])


def test_rows_of_any_size_keep_their_precision() -> None:
    rng = np.random.default_rng(8)
    values, x = normal(rng, 40, 64), normal(rng, 6, 64)
    weight = pack(values, 8, None)
    x *= np.array([[0], [1e-30], [1e-12], [1], [1e12], [1e30]], np.float32)
    found = linear(ONE, x, weight)
    np.testing.assert_array_equal(found[0], 0)
    for row in range(1, 6):
        assert relative_error(found[row].astype(np.float64), x[row].astype(np.float64) @ values.T) < 0.02
    q, scales = quantize_rows(torch.from_numpy(x))
    packed, starts, factors = np.empty(128, np.uint32), np.empty(8, np.int32), np.empty(8, np.float32)
    args = x, 64, 6, 64, 64, 64, 128, packed, starts, factors, None
    ONE.emit(quantize.quantize_tiles, *args, items=1, work=1)
    np.testing.assert_array_equal(factors[:6], scales.numpy())
    stored = packed.view(np.int8).reshape(16, 8, 4)[:, :6].transpose(1, 0, 2).reshape(6, 64)
    np.testing.assert_array_equal(stored, q.numpy())


def test_no_rows_are_no_obstacle() -> None:
    weight = pack(np.ones((5, 8), np.float32), 8, None)
    assert linear(ONE, np.empty((0, 8), np.float32), weight).shape == (0, 5)
    assert embed(ONE, np.empty(0, np.int64), weight).shape == (0, 8)


# Activations in the same step


@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 32)])
@pytest.mark.parametrize("kind", range(5))
@pytest.mark.parametrize("half", [16, 37])
def test_gate_and_up_alternate(bits: int, group: int | None, kind: int, half: int) -> None:
    rng = np.random.default_rng(half)
    parts = [host(normal(rng, half, 65), "bfloat16") for _ in range(2)]
    biases = [host(normal(rng, half)) for _ in range(2)]
    plain, gated = (pack_floats(parts, biases, ONE, bits, group, gated) for gated in (False, True))
    np.testing.assert_array_equal(unpacked(gated, np.arange(2 * half)), unpacked(plain, np.arange(2 * half)))
    functions = [
        torch.relu,
        torch.nn.functional.silu,
        torch.nn.functional.gelu,
        lambda v: torch.nn.functional.gelu(v, approximate="tanh"),
        lambda v: v * torch.sigmoid(1.702 * v),
    ]
    for rows in (1, 10, 66):
        x = normal(rng, rows, 65)
        both = torch.from_numpy(np.array(linear(ONE, x, plain)))
        expected = functions[kind](both[:, :half]) * both[:, half:]
        np.testing.assert_allclose(linear(TWO, x, gated, kind), expected, rtol=1e-5, atol=1e-5)


# Looking up rows


@pytest.mark.usefixtures("always_parallel")
@pytest.mark.parametrize(("bits", "group"), KINDS)
def test_rows_are_found_by_ids_read_when_the_program_runs(bits: int, group: int | None) -> None:
    weight = pack(normal(np.random.default_rng(9), 50, 75), bits, group)
    both_ways(
        [ONE, TWO],
        lambda launcher, ids: (embed(launcher, ids, weight),),
        lambda seed: (np.random.default_rng(seed).integers(0, 50, 13),),
        lambda ids: (unpacked(weight, ids),),
    )


# Integers of quantized checkpoints


@pytest.mark.parametrize("fractions", [False, True])
@pytest.mark.parametrize("inputs", [128, 200])
def test_integers_with_zero_points_keep_their_values(inputs: int, fractions: bool) -> None:
    rng = np.random.default_rng(10)
    groups = -(-inputs // 64)
    q = rng.integers(0, 16, (45, inputs), dtype=np.uint8)
    scales = (rng.random((45, groups)) * 0.01 + 0.001).astype(np.float16)
    zeros = rng.integers(0, 16, (45, groups)).astype(np.float16)
    if fractions:
        zeros += np.float16(0.25)
    weight = pack_from(q, scales, zeros, 64, [host(normal(rng, 45))])
    by_k = (np.repeat(values.astype(np.float64), 64, axis=1)[:, :inputs] for values in (zeros, scales))
    values = (q - next(by_k)) * next(by_k)
    np.testing.assert_allclose(unpacked(weight, np.arange(45)), values, rtol=1e-6)
    np.testing.assert_array_equal(embed(ONE, np.arange(45), weight), unpacked(weight, np.arange(45)))
    assert weight.bias is not None
    for vnni in {HAS_VNNI, False}:
        for rows in (1, 7, 9):
            x = normal(rng, rows, inputs)
            integers, sizes = quantize_rows(torch.from_numpy(x))
            rounded = integers.double().numpy() * sizes.double().numpy()[:, None]
            close(linear(TWO, x, weight, vnni=vnni), rounded @ values.T + weight.bias[:45])


@pytest.mark.parametrize("gated", [False, True])
def test_integers_without_zero_points(gated: bool) -> None:
    rng = np.random.default_rng(11)
    q = rng.integers(0, 16, (46, 100), dtype=np.uint8)
    signed = rng.integers(-128, 128, (46, 100)).astype(np.int8)
    scales = (rng.random((46, 4)) * 0.01).astype(np.float16)
    scales[7] = 0
    by_k = np.repeat(scales.astype(np.float32), 32, axis=1)[:, :100]
    four, eight = (
        pack_from(q, scales, None, 32, gated=gated),
        pack_from(signed, scales, None, 32, gated=gated),
    )
    np.testing.assert_array_equal(unpacked(four, np.arange(46)), (q.astype(np.float32) - 8) * by_k)
    np.testing.assert_array_equal(unpacked(eight, np.arange(46)), signed * by_k)
    whole = pack_from(signed, scales[:, 0].astype(np.float32), gated=gated)
    np.testing.assert_array_equal(unpacked(whole, np.arange(46)), signed * by_k[:, :1])
    x = normal(rng, 5, 100)
    integers, sizes = quantize_rows(torch.from_numpy(x))
    rounded = integers.double().numpy() * sizes.double().numpy()[:, None]
    for weight in (four, eight, whole):
        both = rounded @ unpacked(weight, np.arange(46)).astype(np.float64).T
        expected = np.maximum(both[:, :23], 0) * both[:, 23:] if gated else both
        close(linear(ONE, x, weight, activations.RELU if gated else activations.NO_ACTIVATION), expected)


# Other CPUs


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names x86 features")
@pytest.mark.parametrize(
    ("name", "features"), [("x86-64", ""), ("haswell", "+avx,+avx2,+fma,+f16c,+sse4.2,+bmi,+bmi2")]
)
def test_lesser_cpus_give_the_same_results(name: str, features: str, tmp_path: Path) -> None:
    cpu = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    assert answer(start(TOUR, tmp_path / "cache", str(tmp_path / "results.npz"), **cpu)) == "False"
    with np.load(tmp_path / "results.npz") as arrays:
        for expected, got in zip(everything(), (arrays[key] for key in arrays.files), strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("bits", "group", "with_zeros"), [(8, 16, True), (8, 48, False), (4, 64, True), (8, 200, True)]
)
@pytest.mark.parametrize("ordered", [False, True])
def test_integers_in_any_group_and_order(bits: int, group: int, with_zeros: bool, ordered: bool) -> None:
    rng = np.random.default_rng(12)
    inputs, groups = 200 if group == 200 else 192, -(-192 // group)
    low, high, kind = (0, 16, np.uint8) if bits == 4 else (-128, 128, np.int8)
    q = rng.integers(low, high, (64, inputs)).astype(kind)
    scales = (rng.random((64, groups)) * 0.01 + 0.001).astype(np.float16)
    zeros = rng.integers(low, high, (64, groups)) if with_zeros else None
    tensor = stored.integers(q, scales, zeros, group)
    if ordered and group < inputs:
        layout = tensor.whole_layout._replace(ordered=True)
        tensor = dataclasses.replace(tensor, group_of=rng.permutation(inputs) // group, whole_layout=layout)
    parts = [tensor.rows(0, 32), tensor.rows(32, 64)]
    weight = linear_int.pack_integers(parts, None, ONE, True)
    assert weight is not None
    values = tensor.to_float32()
    np.testing.assert_array_equal(unpacked(weight, np.arange(64)), values)
    whole = linear_int.pack_integers([tensor], None, ONE)
    assert whole is not None
    np.testing.assert_array_equal(embed(ONE, np.arange(64), whole), values)
    for vnni in {HAS_VNNI, False}:
        for rows in (1, 9):
            x = normal(rng, rows, inputs)
            found, sizes = quantize_rows(torch.from_numpy(x))
            rounded = found.double().numpy() * sizes.double().numpy()[:, None]
            close(linear(TWO, x, whole, vnni=vnni), rounded @ values.T.astype(np.float64))


def test_parts_with_orders_of_their_own_are_not_packed_as_they_are() -> None:
    rng = np.random.default_rng(13)
    tensor = stored.integers(rng.integers(0, 16, (32, 64), dtype=np.uint8), np.ones((32, 2)), None, 32)
    parts = [
        dataclasses.replace(
            tensor, group_of=rng.permutation(64) // 32, whole_layout=tensor.whole_layout._replace(ordered=True)
        )
        for _ in range(2)
    ]
    assert linear_int.pack_integers(parts, None, ONE) is None
