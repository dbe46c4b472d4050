"""Values of quantized weights: bit for bit those of their format, whole and sliced, as integers and as codes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quire.checkpoint.quantization.tensors import StackedTensor
from quire.checkpoint.small_floats import E4M3, E5M2, E8M0, FLOAT8
from quire.checkpoint.tensor import HostTensor, QuantizedTensor
from tests.checkpoint.quantization.conftest import Open
from tests.helpers import quantizers
from tests.helpers.quantizers import FORMATS


def matrix(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def whole(source: Any) -> QuantizedTensor:
    found = source["m.weight"].read()
    assert isinstance(found, QuantizedTensor)
    return found


def again(tensor: QuantizedTensor) -> np.ndarray:
    """Return the weights made of what a backend would be given."""
    codes, integers = tensor.codes(), tensor.integers()
    if codes is not None:
        table = codes.table if codes.table is not None else {"e4m3": E4M3, "e5m2": E5M2}[codes.kind]
        return table[codes.codes] * np.repeat(codes.scales, codes.group, axis=1)
    assert integers is not None
    zeros: Any = 8 if integers.bits == 4 else 0
    if integers.zeros is not None:
        zeros = np.repeat(integers.zeros, integers.group, axis=1)
    found = (integers.values.astype(np.float32) - zeros) * np.repeat(integers.scales, integers.group, axis=1)
    if integers.order is None:
        return found
    straight = np.empty_like(found)
    straight[:, integers.order] = found
    return straight


@pytest.mark.parametrize("kind", FORMATS)
def test_weights_are_what_their_format_says(kind: str, opened: Open) -> None:
    config, pack = FORMATS[kind]
    parts, meant = pack(matrix(96, 128))
    source = opened(parts, config)
    assert list(source) == ["m.weight"]
    tensor, expected = whole(source), meant.numpy()
    np.testing.assert_array_equal(tensor.to_float32(), expected)
    np.testing.assert_array_equal(again(tensor), expected)
    cut = tensor.rows(3, 90).rows(2, 41).columns(64, 128)
    np.testing.assert_array_equal(cut.to_float32(), expected[5:44, 64:])
    np.testing.assert_array_equal(tensor.columns(3, 50).to_float32(), expected[:, 3:50])
    np.testing.assert_array_equal(tensor.alternate(1).to_float32(), expected[1::2])
    assert tensor.count_nonfinite() == 0
    entry = source["m.weight"]
    assert (entry.dtype, entry.shape, entry.layout) == ("F32", (96, 128), tensor.layout)


@pytest.mark.parametrize("kind", ["awq", "gptq", "w4a16", "fp8-block", "nf4"])
def test_columns_that_keep_their_groups_stay_packed(kind: str, opened: Open) -> None:
    config, pack = FORMATS[kind]
    tensor = whole(opened(pack(matrix(32, 256))[0], config))
    kept = tensor.columns(128, 256)
    assert isinstance(kept, QuantizedTensor)
    np.testing.assert_array_equal(again(kept), tensor.to_float32()[:, 128:])
    assert isinstance(tensor.columns(8, 256), HostTensor)


def test_blocks_of_4_bits_may_end_inside_a_row(opened: Open) -> None:
    parts, meant = quantizers.bnb4(matrix(10, 96), block=64)
    tensor = whole(opened(parts, FORMATS["nf4"][0]))
    np.testing.assert_array_equal(tensor.rows(3, 7).to_float32(), meant[3:7].numpy())
    np.testing.assert_array_equal(again(tensor), meant.numpy())
    assert tensor.layout is not None
    assert tensor.layout.group == 32


def test_sizes_that_are_no_multiples(opened: Open) -> None:
    parts, meant = quantizers.fp8(matrix(50, 70), (32, 32), name="weight_scale_inv")
    np.testing.assert_array_equal(whole(opened(parts, FORMATS["fp8-block"][0])).to_float32(), meant.numpy())
    parts, meant = quantizers.packed_tensors(matrix(19, 70), 4, -1, symmetric=False)
    config = quantizers.compressed_config(bits=4, symmetric=False)
    np.testing.assert_array_equal(whole(opened(parts, config)).to_float32(), meant.numpy())


def test_scales_of_8_bit_floats_under_either_name_and_in_powers_of_two(opened: Open) -> None:
    parts, meant = quantizers.fp8(matrix(16, 32), kind=torch.float8_e5m2, name="weight_scale_inv")
    np.testing.assert_array_equal(whole(opened(parts, FORMATS["fp8"][0])).to_float32(), meant.numpy())
    parts["weight_scale_inv"] = torch.tensor([124], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    values = parts["weight"].float() / 8
    np.testing.assert_array_equal(whole(opened(parts, FORMATS["fp8"][0])).to_float32(), values.numpy())


def test_experts_in_mxfp4(opened: Open) -> None:
    blocks, scales, meant = quantizers.mxfp4(matrix(3, 8, 64))
    source = opened({"down_proj_blocks": blocks, "down_proj_scales": scales}, {"quant_method": "mxfp4"})
    tensor = source["m.down_proj"].read()
    assert isinstance(tensor, StackedTensor)
    assert tensor.shape == (3, 64, 8)
    np.testing.assert_array_equal(tensor.to_float32(), meant.transpose(1, 2).numpy())
    straight = tensor.matrix(1).transposed()
    assert isinstance(straight, QuantizedTensor)
    np.testing.assert_array_equal(again(straight), meant[1].numpy())
    np.testing.assert_array_equal(straight.alternate(1).to_float32(), meant[1, 1::2].numpy())


def test_codes_that_are_no_numbers_are_counted(opened: Open) -> None:
    parts, _ = quantizers.fp8(matrix(16, 32))
    parts["weight"].view(torch.uint8)[3, 4:6] = torch.tensor([0x7F, 0xFF], dtype=torch.uint8)
    assert whole(opened(parts, FORMATS["fp8"][0])).count_nonfinite() == 2
    parts, _ = quantizers.awq(matrix(16, 32))
    parts["scales"][0, 2] = torch.inf
    assert whole(opened(parts, FORMATS["awq"][0])).count_nonfinite() == 1


def test_small_floats_are_those_of_torch() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for name, kind in (("e4m3", "e4m3fn"), ("e5m2", "e5m2"), ("e8m0", "e8m0fnu")):
        expected = codes.view(getattr(torch, f"float8_{kind}")).float().numpy()
        np.testing.assert_array_equal(HostTensor(codes.numpy(), f"float8_{name}").to_float32(), expected)
    assert set(FLOAT8) == {"float8_e4m3", "float8_e5m2", "float8_e8m0"}
    assert E8M0[127] == 1
