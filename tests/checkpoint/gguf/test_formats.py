"""Every format of GGUF's weights, against the package that defines them."""

from __future__ import annotations

import numpy as np
import pytest

from quire.checkpoint.gguf.blocks import FORMATS, TYPE_NAMES
from quire.checkpoint.gguf.tensors import GGUFTensor
from quire.checkpoint.tensor import HostTensor, QuantizedTensor
from tests.helpers.gguf_files import random_blocks

gguf = pytest.importorskip("gguf")
QUANTIZED = [name for name, form in FORMATS.items() if form.decode is not None]
FOURS = ("Q4_0", "Q4_1", "Q4_K")


def made(name: str, shape: tuple[int, int] = (12, 512)) -> tuple[GGUFTensor, np.ndarray]:
    """Return a tensor of random weights, and what the package makes of its bytes."""
    form, kind = FORMATS[name], gguf.GGMLQuantizationType[name]
    if name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"):
        stored = random_blocks(name, shape, seed=3)
    else:
        stored = gguf.quants.quantize(np.random.default_rng(3).standard_normal(shape, np.float32), kind)
    return GGUFTensor(form, stored.reshape(shape[0], -1, form.bytes)), gguf.quants.dequantize(stored, kind)


def test_types_and_sizes_are_those_of_the_package() -> None:
    for number, name in TYPE_NAMES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert kind.name == name
        if name in FORMATS:
            assert (FORMATS[name].size, FORMATS[name].bytes) == gguf.GGML_QUANT_SIZES[kind]


@pytest.mark.parametrize("name", QUANTIZED)
def test_weights_are_equal_to_the_last_bit(name: str) -> None:
    tensor, expected = made(name)
    np.testing.assert_array_equal(tensor.to_float32().view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", QUANTIZED)
def test_integers_with_scales_are_the_same_weights(name: str) -> None:
    tensor, expected = made(name)
    layout, found = tensor.layout, tensor.integers()
    assert layout is not None and found is not None
    assert (found.bits, found.group) == (layout.bits, layout.group) == (4 if name in FOURS else 8, FORMATS[name].group)
    assert (found.zeros is not None) == layout.zeros
    middle = np.float32(8 if found.bits == 4 else 0) if found.zeros is None else found.zeros.repeat(found.group, 1)
    weights = found.scales.repeat(found.group, 1) * (found.values.astype(np.float32) - middle)
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def test_a_group_without_scale_keeps_its_minimum() -> None:
    tensor, _ = made("Q4_1")
    stored = tensor.stored.copy()
    stored[..., :2] = 0
    tensor = GGUFTensor(tensor.form, stored)
    found = tensor.integers()
    assert found is not None and found.zeros is not None
    middle = found.zeros.repeat(32, 1)
    np.testing.assert_array_equal(found.scales.repeat(32, 1) * (found.values - middle), tensor.to_float32())


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "Q6_K"])
def test_cuts(name: str) -> None:
    tensor, expected = made(name)
    np.testing.assert_array_equal(tensor.rows(3, 9).to_float32(), expected[3:9])
    np.testing.assert_array_equal(tensor.rows(3, 90).alternate(1).to_float32(), expected[3:][1::2])
    order = np.random.default_rng(0).permutation(12)
    np.testing.assert_array_equal(tensor.reordered(order).rows(2, 7).to_float32(), expected[order][2:7])
    for start, stop, kind in (
        (0, 512, GGUFTensor),
        (256, 512, GGUFTensor),
        (32, 96, QuantizedTensor),
        (8, 20, HostTensor),
    ):
        cut = tensor.columns(start, stop)
        assert isinstance(cut, kind) and cut.shape == (12, stop - start)
        np.testing.assert_array_equal(cut.to_float32(), expected[:, start:stop])
        found = cut.integers() if isinstance(cut, QuantizedTensor) else None
        if found is not None:
            assert found.values.shape == cut.shape and found.scales.shape[1] == (stop - start) // found.group


def test_bad_scales_are_counted() -> None:
    tensor, _ = made("Q8_0")
    stored = tensor.stored.copy()
    stored[2, 5, :2] = np.array([np.inf], np.float16).view(np.uint8)
    assert GGUFTensor(tensor.form, stored).count_nonfinite() == 1 and tensor.count_nonfinite() == 0
