"""Weights in PyTorch's files: only by name, only tensors, and nothing in them is ever run."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.checkpoint.hf_config import load_model_info
from quire.checkpoint.open import open_weights
from quire.checkpoint.pickled import open_pickles
from quire.checkpoint.tensor import Tensor
from quire.errors import ModelError
from quire.kernels.create import create_backend
from quire.models.loader import load_model
from tests.helpers.checkpoints import plain_tensors, write_plain
from tests.helpers.model_driver import ModelDriver


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a tiny model that has its weights in safetensors."""
    return write_plain(tmp_path)


def pickled(folder: Path) -> dict[str, torch.Tensor]:
    """Take the safetensors away; return the weights as torch has them."""
    (folder / "model.safetensors").unlink()
    return {name: torch.from_numpy(array) for name, array in plain_tensors().items()}


def logits(folder: Path, load_format: str = "auto") -> np.ndarray:
    backend = create_backend("cpu", "float32", "float32", num_threads=1)
    model = load_model(load_model_info(folder), backend, load_format=load_format)
    return ModelDriver(model, backend).step({"a": [3, 1, 4, 1, 5]})["a"]


@pytest.mark.parametrize("legacy", [False, True])
def test_the_same_weights(folder: Path, legacy: bool) -> None:
    expected = logits(folder)
    tensors: dict[str, Any] = {"state_dict": pickled(folder), "step": 7} if legacy else pickled(folder)
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(ModelError, match="pickle weights are not supported without --load-format pt"):
        logits(folder)
    np.testing.assert_array_equal(logits(folder, "pt"), expected)


def test_shards(folder: Path) -> None:
    expected, tensors = logits(folder), pickled(folder)
    names = sorted(tensors)
    files = {"a.bin": names[:7], "b.bin": names[7:]}
    for file, some in files.items():
        torch.save({name: tensors[name] for name in some}, folder / file)
    weight_map = {name: file for file, some in files.items() for name in some}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    np.testing.assert_array_equal(logits(folder, "pt"), expected)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"x": "../a.bin"}}))
    with pytest.raises(ModelError, match=r"shard path '../a.bin' escapes the model folder"):
        open_pickles(folder)


def test_dtypes(tmp_path: Path) -> None:
    values = torch.tensor([[1.5, -2.0], [0.0, 448.0]])
    kinds = ("float64", "float32", "float16", "bfloat16", "int8", "float8_e4m3fn")
    torch.save({name: values.clamp(-100, 100).to(getattr(torch, name)) for name in kinds}, tmp_path / "x.pt")
    torch.save([1], tmp_path / "optimizer.pt")
    stored = open_pickles(tmp_path).tensors
    for name in kinds:
        expected = values.clamp(-100, 100).to(getattr(torch, name)).float().numpy()
        found: Tensor = stored[name].read()
        np.testing.assert_array_equal(found.to_float32(), expected)
        assert stored[name].shape == (2, 2) and stored[name].path == tmp_path / "x.pt"
    torch.save({"c": torch.zeros(2, dtype=torch.complex64)}, tmp_path / "x.pt")
    assert (
        open_pickles(tmp_path).tensors["c"].dtype == "complex64"
    )  # refused by the check of the headers, if it is needed


class Malicious:
    """What a pickle would run when it is read."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (Path.touch, (self.target,))


@pytest.mark.parametrize("plain", [False, True])
def test_a_malicious_file_runs_nothing(folder: Path, tmp_path: Path, plain: bool) -> None:
    tensors, target = pickled(folder), tmp_path / "PWNED"
    path = folder / "pytorch_model.bin"
    if plain:
        path.write_bytes(pickle.dumps({"a": Malicious(target)}))
    else:
        torch.save({**tensors, "a": Malicious(target)}, path)
    with pytest.raises(ModelError, match=r"pytorch_model.bin: (holds more than tensors|torch cannot read it)"):
        logits(folder, "pt")
    assert not target.exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x02", b"garbage" * 99])
def test_damaged_files(folder: Path, content: bytes) -> None:
    pickled(folder)
    (folder / "model.pt").write_bytes(content)
    with pytest.raises(ModelError, match=r"model.pt: (holds more than tensors|torch cannot read it)"):
        logits(folder, "pt")


def test_other_formats_are_not_mixed_up(folder: Path) -> None:
    info = load_model_info(folder)
    with pytest.raises(ModelError, match=r"no pickle weights \(expected pytorch_model.bin"):
        open_weights(info, "pt")
    with pytest.raises(ModelError, match=r"is no GGUF file; name the file, or FOLDER:Q4_K_M"):
        open_weights(info, "gguf")


def test_without_torch_the_extra_is_named(folder: Path) -> None:
    torch.save(pickled(folder), folder / "pytorch_model.bin")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'torch' else find(name, *a)\n"
        "from pathlib import Path; from quire.checkpoint.pickled import open_pickles\n"
        f"open_pickles(Path({str(folder)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pytorch_model.bin: pickle weights need PyTorch (pip install 'quire[reference]')" in done.stderr
