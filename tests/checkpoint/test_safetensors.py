"""Reading good weight files: every dtype, odd layouts, several files; and what comes out equals what was written."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from quire.checkpoint.safetensors import SafetensorsFile, open_safetensors
from quire.checkpoint.tensor import HostTensor, count_nonfinite
from quire.checkpoint.weights import DummyWeights
from quire.errors import ModelError
from tests.helpers.checkpoints import safetensors_bytes
from tests.helpers.mapped import resident


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int64", "int32", "int8", "uint8", "bool"])
def test_values_come_back_as_they_were_written(dtype: str, tmp_path: Path) -> None:
    array = np.arange(-6, 6).reshape(3, 4).astype(dtype)
    save_file({"a": array, "empty": np.zeros((0, 3), dtype), "scalar": np.array(1, dtype)}, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    tensor = file.read("a")
    assert tensor.dtype == dtype
    np.testing.assert_array_equal(tensor.array, array)
    assert not tensor.array.flags.writeable
    assert file.read("empty").shape == (0, 3)
    assert file.read("scalar").shape == ()


def test_bfloat16_is_raw_bits(tmp_path: Path) -> None:
    values = np.array([1.0, -2.5, 3.0e38, 1e-40], np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    header = json.dumps({"a": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bits.tobytes())
    tensor = SafetensorsFile(tmp_path / "x.safetensors").read("a")
    assert tensor.dtype == "bfloat16"
    np.testing.assert_array_equal(tensor.to_float32(), (bits.astype(np.uint32) << 16).view(np.float32).reshape(2, 2))
    np.testing.assert_array_equal(tensor.rows(1, 2).to_float32(), tensor.to_float32()[1:2])
    np.testing.assert_array_equal(tensor.columns(0, 1).to_float32(), tensor.to_float32()[:, :1])
    np.testing.assert_array_equal(tensor.transposed().to_float32(), tensor.to_float32().T)


@pytest.mark.parametrize("padding", range(8))
def test_data_may_lie_at_any_address(padding: int, tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float32)
    raw = safetensors_bytes({"a": array})
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length] + b" " * padding
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
    tensor = SafetensorsFile(tmp_path / "x.safetensors").read("a")
    np.testing.assert_array_equal(tensor.array, array)
    assert tensor.array.flags.aligned


def test_a_dtype_we_cannot_compute_with_is_refused_only_when_read(tmp_path: Path) -> None:
    save_file({"a": np.ones(3, np.uint16), "b": np.ones(3, np.float32)}, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    np.testing.assert_array_equal(file.read("b").array, 1)
    with pytest.raises(ModelError, match="tensor 'a' has dtype U16, which is not supported"):
        file.read("a")


def test_metadata_is_no_tensor(tmp_path: Path) -> None:
    save_file({"a": np.ones(1, np.float32)}, tmp_path / "x.safetensors", metadata={"format": "pt"})
    assert list(SafetensorsFile(tmp_path / "x.safetensors").entries) == ["a"]


def test_the_single_file_is_preferred_to_an_index_and_to_other_files(tmp_path: Path) -> None:
    one = np.ones(1, np.float32)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    save_file({"a": one}, tmp_path / "model.safetensors")
    save_file({"a": 2 * one}, tmp_path / "consolidated.safetensors")
    checkpoint = open_safetensors(tmp_path)
    assert list(checkpoint.tensors) == ["a"]
    np.testing.assert_array_equal(checkpoint.tensors["a"].read().array, one)


def test_files_of_any_name_are_read_together_but_not_consolidated_copies(tmp_path: Path) -> None:
    save_file({"a": np.ones(1, np.float32)}, tmp_path / "part1.safetensors")
    save_file({"b": np.ones(1, np.float32)}, tmp_path / "part2.safetensors")
    save_file({"a": np.ones(1, np.float32)}, tmp_path / "consolidated.safetensors")
    assert list(open_safetensors(tmp_path).tensors) == ["a", "b"]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_gives_tensors_inside_itself(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    raw = bytearray(safetensors_bytes({"a": np.ones((2, 3), np.float32), "b": np.zeros(5, np.float32)}))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw)
    try:
        file = SafetensorsFile(path)
        for name, entry in file.entries.items():
            assert file.read(name).array.size * file.read(name).array.itemsize == entry.end - entry.begin
    except ModelError as error:
        assert "\n" not in error.message


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_counting_values_that_are_not_finite(dtype: str) -> None:
    array = np.random.default_rng(0).standard_normal((300, 1001)).astype(dtype)
    array[0, 0] = np.finfo(dtype).max
    assert count_nonfinite(HostTensor(array, dtype)) == 0
    array[0, 1], array[150, 7], array[-1, -1] = np.nan, np.inf, -np.inf
    assert count_nonfinite(HostTensor(array, dtype)) == 3
    assert count_nonfinite(HostTensor(array.T, dtype)) == 3


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 65_536, 99_999])
def test_a_single_bad_value_is_found_wherever_it_is(dtype: str, value: float, place: int) -> None:
    array = np.full(100_000, -np.finfo(dtype).max, dtype)
    array[::2] *= -1
    array[place] = value
    assert count_nonfinite(HostTensor(array, dtype)) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_tensors_read_earlier_leave_memory_but_keep_their_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 1 << 20
    arrays = {name: np.random.default_rng(ord(name)).integers(0, 255, size, np.uint8) for name in "abcdefgh"}
    save_file(arrays, tmp_path / "model.safetensors")
    monkeypatch.setattr("quire.checkpoint.mapped.RESIDENT_BYTES", 2 * size)
    checkpoint = open_safetensors(tmp_path)
    read = {}
    for name in arrays:
        read[name] = checkpoint.tensors[name].read().array
        np.testing.assert_array_equal(read[name], arrays[name])
    assert size < resident(tmp_path / "model.safetensors") < 4 * size
    for name, array in arrays.items():
        np.testing.assert_array_equal(read[name], array)


def test_counting_in_bfloat16_and_integers() -> None:
    bits = np.array([0x7F80, 0xFF80, 0x7FC0, 0x7F7F, 0xFF7F, 0x0000, 0x3F80], np.uint16)
    assert count_nonfinite(HostTensor(bits, "bfloat16")) == 3
    assert count_nonfinite(HostTensor(np.full(4, -1, np.int32), "int32")) == 0
    assert count_nonfinite(HostTensor(np.zeros((0, 4), np.float32), "float32")) == 0


def test_dummy_weights_depend_on_name_and_seed_only() -> None:
    first = DummyWeights(seed=1).read("a.weight", (30, 40)).array
    np.testing.assert_array_equal(first, DummyWeights(seed=1).read("a.weight", (30, 40)).array)
    assert not np.array_equal(first, DummyWeights(seed=2).read("a.weight", (30, 40)).array)
    assert not np.array_equal(first, DummyWeights(seed=1).read("b.weight", (30, 40)).array)
    assert 0.01 < DummyWeights(seed=1).read("a.weight", (30, 40)).to_float32().std() < 0.03
    np.testing.assert_array_equal(DummyWeights().read("norm.weight", (5,)).array, 1)
    assert DummyWeights().read("big.weight", (2000, 1000)).shape == (2000, 1000)
