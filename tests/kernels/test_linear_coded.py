"""Products with codes of small floats: against plain products with what the codes stand for, on every path."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.checkpoint.quantization.tensors import CodeTensor
from quire.checkpoint.small_floats import E2M1
from quire.kernels.cpu import activations, formats, linear_coded, products
from quire.kernels.cpu.levels import available_levels, level_of
from quire.kernels.cpu.simd import HAS_BF16_DOT
from quire.kernels.cpu.threads import Launcher
from tests.helpers import stored
from tests.helpers.packed import unpacked
from tests.helpers.quantizers import NF4
from tests.kernels.both_ways import T_SIZES, both_ways, new_launcher
from tests.kernels.scenes import host, normal, round_to
from tests.kernels.test_compile import answer, start

ONE, TWO = new_launcher(1), new_launcher(2)
PAIRED = pytest.param(True, marks=pytest.mark.skipif(not HAS_BF16_DOT, reason="the CPU lacks AVX-512 BF16"))
KINDS = ["table", "e4m3", "e5m2"]
NF4_TABLE = np.array(NF4, np.float32)
# Results of a lesser CPU.
TOUR = """
import sys
import numpy as np
from tests.kernels.test_linear_coded import everything
np.savez(sys.argv[1], *everything())
"""


def weight_of(kind: str, shape: tuple[int, int], group: int, *, short: bool = False) -> CodeTensor:
    """Return random codes, subnormal ones among them, with scales, of bfloat16 if `short`."""
    rng, (outputs, inputs) = np.random.default_rng(3), shape
    finite = {"table": 16, "e4m3": 0x7F, "e5m2": 0x7C}[kind]
    q = rng.integers(0, finite, shape).astype(np.uint8)
    if kind != "table":
        q |= rng.integers(0, 2, shape).astype(np.uint8) << 7
    scales = rng.uniform(0.5, 2, (outputs, -(-inputs // group))).astype(np.float32)
    table = NF4_TABLE if kind == "table" else None
    made = stored.codes(q, round_to(scales, "bfloat16") if short else scales, group, kind, table)
    assert made.whole_layout is not None
    return dataclasses.replace(made, whole_layout=made.whole_layout._replace(scale_bytes=2)) if short else made


def power_weight(shape: tuple[int, int], largest: float = 8.0) -> CodeTensor:
    """Return random MXFP4 numbers, a group of zeros with the least scale there is among them."""
    rng, (outputs, inputs) = np.random.default_rng(4), shape
    q = rng.integers(0, 16, shape).astype(np.uint8)
    scales = (2.0 ** rng.integers(-20, 3, (outputs, -(-inputs // 32)))).astype(np.float32)
    q[3, :32], scales[3, 0], q[4, :32], scales[4, 0] = 0, 2.0**-127, 2, largest
    made = stored.codes(q, scales, 32, "table", np.array(E2M1, np.float32))
    assert made.whole_layout is not None
    return dataclasses.replace(made, whole_layout=made.whole_layout._replace(scale_bytes=2))


def packed(
    tensors: list[CodeTensor], paired: bool, launcher: Launcher = TWO, **options: Any
) -> linear_coded.CodedLinear:
    made = linear_coded.pack_codes(tensors, options.pop("biases", None), launcher, paired, **options)
    assert made is not None
    return made


def product(x: np.ndarray, weight: np.ndarray, paired: bool, bias: np.ndarray | None = None) -> np.ndarray:
    """Return x @ weight.T in float64, x rounded to bfloat16 if `paired`."""
    rounded = round_to(x, "bfloat16") if paired else x
    out = rounded.astype(np.float64) @ weight.T.astype(np.float64)
    return out if bias is None else out + bias


def close(got: np.ndarray, want: np.ndarray) -> None:
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= 2e-6 * np.abs(want).max()


def everything() -> list[np.ndarray]:
    """Return products of every kind in float32."""
    x = normal(np.random.default_rng(5), 11, 200)
    weights = [weight_of(kind, (40, 200), 200) for kind in KINDS]
    return [np.array(products.linear(ONE, x, packed([weight], False, ONE))) for weight in weights]


@pytest.mark.parametrize("paired", [PAIRED, False])
@pytest.mark.parametrize(("kind", "group", "short"), [("table", 32, True), ("e4m3", 128, False), ("e5m2", 608, False)])
def test_products(kind: str, group: int, short: bool, paired: bool) -> None:
    tensor = weight_of(kind, (48, 600), group, short=short)
    weight = packed([tensor], paired)
    values = unpacked(weight, np.arange(48))
    if paired and kind == "table":
        table = round_to(NF4_TABLE, "bfloat16")
        tensor = dataclasses.replace(tensor, table=table)
    np.testing.assert_array_equal(values, tensor.to_float32())
    rng = np.random.default_rng(6)
    alone = np.array(products.linear(ONE, normal(rng, 1, 600), weight))
    for rows in T_SIZES:
        x = normal(np.random.default_rng(6), rows, 600)
        got = products.linear(TWO, x, weight)
        close(got, product(x, values, paired))
        np.testing.assert_array_equal(got[:1], alone)


@pytest.mark.skipif(not HAS_BF16_DOT, reason="the CPU lacks AVX-512 BF16")
@pytest.mark.parametrize(("kind", "group"), [("table", 48), ("e4m3", 2096), ("e5m2", 80), ("powers", 32)])
def test_depth_of_more_than_a_panel_and_rows_of_any_number(kind: str, group: int) -> None:
    inputs = linear_coded.PANEL + 1049
    tensor = power_weight((32, inputs)) if kind == "powers" else weight_of(kind, (32, inputs), group)
    weight = packed([tensor], True)
    assert weight.powers == (kind == "powers")
    values, x = unpacked(weight, np.arange(32)), normal(np.random.default_rng(9), 77, inputs)
    if kind == "powers":
        np.testing.assert_array_equal(values, tensor.to_float32())
    whole = np.array(products.linear(TWO, x, weight))
    close(whole, product(x, values, True))
    for rows in (1, 3, 8, 13):
        np.testing.assert_array_equal(products.linear(ONE, x[:rows], weight), whole[:rows])


@pytest.mark.skipif(not HAS_BF16_DOT, reason="the CPU lacks AVX-512 BF16")
def test_scales_out_of_range_are_not_added_to_exponents() -> None:
    tensor = power_weight((32, 64), largest=2.0**126)
    weight = packed([tensor], True)
    assert not weight.powers
    np.testing.assert_array_equal(unpacked(weight, np.arange(32)), tensor.to_float32())


@pytest.mark.parametrize("kind", KINDS)
def test_float32_products_are_those_of_the_widened_weight_to_the_bit(kind: str) -> None:
    tensor = weight_of(kind, (32, 528), 48)
    plain = formats.pack([host(tensor.to_float32())], None, "float32", ONE)
    for rows in (1, 13):
        x = normal(np.random.default_rng(7), rows, 528)
        got = products.linear(TWO, x, packed([tensor], False))
        np.testing.assert_array_equal(got, products.linear(ONE, x, plain))


@pytest.mark.parametrize("paired", [PAIRED, False])
def test_gated_with_bias_recorded_or_not(paired: bool) -> None:
    rng = np.random.default_rng(8)
    gate, up = weight_of("table", (32, 96), 32), weight_of("table", (48, 96), 32).rows(16, 48)
    bias = normal(rng, 64)
    weight = packed([gate, up], paired, gated=True, biases=[host(bias[:32]), host(bias[32:])])
    values = unpacked(weight, np.arange(64))

    def expect(wide: np.ndarray) -> tuple[np.ndarray]:
        both = product(wide[:, 3:99], values, paired, bias)
        return (both[:, :32] / (1 + np.exp(-both[:, :32])) * both[:, 32:],)

    both_ways(
        [ONE, TWO],
        lambda launcher, wide: (products.linear(launcher, wide[:, 3:99], weight, activations.SILU),),
        lambda seed: (normal(np.random.default_rng(seed), 9, 100),),
        expect,
        close,
    )


def test_parts_with_tables_of_their_own_are_not_packed_together() -> None:
    tensor = weight_of("table", (16, 32), 32)
    other = dataclasses.replace(tensor, table=E2M1)
    assert linear_coded.pack_codes([tensor, other], None, ONE) is None


@pytest.mark.parametrize("paired", [PAIRED, False])
def test_a_code_that_is_no_number_spoils_its_output_only(paired: bool) -> None:
    tensor = weight_of("e4m3", (32, 64), 32)
    q = tensor.unpack(slice(0, 32), slice(0, 64))
    q[5, 40] = 0xFF
    got = products.linear(ONE, np.ones((3, 64), np.float32), packed([tensor], paired))
    assert np.isnan(got[:, 5]).all()
    assert np.isfinite(np.delete(got, 5, axis=1)).all()


PAIRED_TOUR = """
import sys
import numpy as np
from tests.kernels.test_linear_coded import paired_octets
np.savez(sys.argv[1], *paired_octets())
"""


def paired_octets() -> list[np.ndarray]:
    """Return products of 8-bit floats in pairs of bfloat16."""
    x = normal(np.random.default_rng(5), 11, 200)
    weights = [weight_of(kind, (40, 200), 200) for kind in ("e4m3", "e5m2")]
    return [np.array(products.linear(ONE, x, packed([weight], True, ONE))) for weight in weights]


@pytest.mark.slow
@pytest.mark.skipif("avx512-bf16-vnni" not in available_levels(), reason="the CPU lacks AVX-512 BF16")
def test_bytes_are_unpacked_alike_without_the_instruction_that_looks_them_up(tmp_path: Path) -> None:
    path, level = tmp_path / "found.npz", level_of("avx512-bf16-vnni")
    found = {"NUMBA_CPU_NAME": level.cpu, "NUMBA_CPU_FEATURES": level.flags}
    answer(start(PAIRED_TOUR, tmp_path / "cache", str(path), **found))
    with np.load(path) as results:
        for got, want in zip(results.values(), paired_octets(), strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_lesser_cpus_give_the_same_numbers(tmp_path: Path) -> None:
    path = tmp_path / "found.npz"
    answer(start(TOUR, tmp_path / "cache", str(path), NUMBA_CPU_NAME="nehalem"))
    with np.load(path) as found:
        for got, want in zip(found.values(), everything(), strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)
