"""Whole models in every quantized format, against transformers with the weights that the formats stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.checkpoint.hf_config import load_model_info
from quire.config import EngineConfig
from quire.engine.resolve import resolve_config
from quire.errors import ModelError
from quire.kernels.backend import Backend
from quire.kernels.cpu.backend import CPUBackend
from quire.models.loader import load_model, weight_bytes
from quire.worker.footprint import Footprint
from tests.helpers.checkpoints import logits_of, write_checkpoint
from tests.helpers.model_driver import ModelDriver
from tests.helpers.packed import packed_nbytes
from tests.helpers.quantizers import FORMATS, mxfp4, quantize_folder
from tests.helpers.ranks import run_ranks
from tests.parity.harness import BACKENDS, TOLERANCE, assert_close, driver, oracle, tokens

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 2}
MOE_SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64}
QUICK = ("awq", "gptq-order", "w4a16-asym", "w8a8-static", "fp8-block", "nf4-double", "bnb8")
CODES = ("ct-fp8", "fp8", "fp8-block", "nf4", "nf4-double", "fp4", "nvfp4", "mxfp4")
PROMPT = tokens(23)
# Largest error of a logit, over the largest logit, with weights held as they are stored. These random models, whose
# matrices have 64 inputs, feel the rounding of inputs to 8 bits far more than trained ones do.
BOUND = {"integers": 0.2, "codes": 0.05}
SAME = {"integers": 0.02, "codes": 1e-4}  # between the backends, with inputs that are not rounded to bfloat16


def some(kinds: Any, quick: tuple[str, ...] = QUICK) -> list[Any]:
    return [pytest.param(kind, marks=() if kind in quick else (pytest.mark.slow,)) for kind in kinds]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from family and format to a quantized folder and one with what it stands for."""
    plain: dict[str, Path] = {}
    made: dict[tuple[str, str], tuple[Path, Path]] = {}

    def get(family: str, kind: str) -> tuple[Path, Path]:
        if family not in plain:
            sizes = SIZES if family == "llama" else MOE_SIZES
            plain[family] = write_checkpoint(tmp_path_factory.mktemp(family), family, **sizes)
        if (family, kind) not in made:
            folder = tmp_path_factory.mktemp(f"{family}-{kind}")
            made[family, kind] = folder, quantize_folder(plain[family], folder, kind)
        return made[family, kind]

    return get


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize("kind", some(FORMATS))
def test_float32_is_what_the_format_says(kind: str, device: str, folders: Any) -> None:
    folder, meant = folders("llama", kind)
    expected = logits_of(oracle(meant), PROMPT)
    model = driver(folder, device)
    assert_close(model.step({"whole": PROMPT})["whole"], expected, TOLERANCE)
    chunks = [model.step({"a": PROMPT[:9]})["a"], model.step({"a": PROMPT[9:]})["a"]]
    assert_close(np.concatenate(chunks), expected, TOLERANCE)


@pytest.mark.parametrize("kind", some(FORMATS))
def test_packed_runs_stay_close(kind: str, folders: Any) -> None:
    folder, meant = folders("llama", kind)
    expected = logits_of(oracle(meant), PROMPT)
    info = load_model_info(folder)
    form = "codes" if kind in CODES else "integers"
    rough = driver(folder, "cpu", "bfloat16").step({"a": PROMPT})["a"]
    assert_close(rough, expected, BOUND[form])
    one, other = (driver(folder, device, "float16").step({"a": PROMPT})["a"] for device in BACKENDS)
    assert_close(one, other, SAME[form])
    plain = weight_bytes(load_model_info(meant), "bfloat16", None)
    assert weight_bytes(info, "bfloat16", None) < 0.7 * plain  # embeddings and output are as large as the layers here


@pytest.mark.parametrize("family", ["llama", pytest.param("mixtral", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", some(FORMATS, ("gptq-order", "w4a16-asym", "w8a8-static", "nf4")))
def test_memory_is_known_before_loading(kind: str, family: str, folders: Any) -> None:
    folder, _ = folders(family, kind)
    info = load_model_info(folder)
    packed: list[int] = []

    class Counting(CPUBackend):
        def pack_linear(self, *args: Any, **options: Any) -> Any:
            made = super().pack_linear(*args, **options)
            packed.append(packed_nbytes(made))
            return made

    load_model(info, Counting("bfloat16", "bfloat16", 1))
    config = resolve_config(EngineConfig.from_kwargs(model=str(folder), dtype="bfloat16", max_model_len=64), info)
    found = Footprint(config, info)
    linears = sum(found.in_memory.values()) - found.in_memory["norms"]
    assert abs(linears - sum(packed)) <= 64 * len(packed) + 4 * 64 * 256  # alignment; rotary angles
    assert found.on_disk is not None
    assert found.on_disk["unused"] == 0


@pytest.mark.parametrize("kind", some(FORMATS, ("gptq-order", "fp8-block")))
def test_experts(kind: str, folders: Any) -> None:
    folder, meant = folders("mixtral", kind)
    expected = logits_of(oracle(meant), PROMPT)
    for device in BACKENDS:
        assert_close(driver(folder, device).step({"a": PROMPT})["a"], expected, TOLERANCE)
    form = "codes" if kind in CODES else "integers"
    one, other = (driver(folder, device, "float16").step({"a": PROMPT})["a"] for device in BACKENDS)
    # A rounding may choose another expert in a row.
    rows = np.abs(one - other).max(axis=1) <= SAME[form] * np.abs(other).max()
    assert rows.mean() > 0.8


FAMILIES = ("deepseek_v3", "qwen3_moe", "phi3", "falcon", "gemma2", "qwen3_next", "glm4_moe")


@pytest.mark.parametrize("family", some(FAMILIES, ("deepseek_v3",)))
@pytest.mark.parametrize("kind", some(("fp8-block", "nf4", "w8a8"), ("fp8-block",)))
def test_families_know_nothing_of_formats(kind: str, family: str, tmp_path: Path) -> None:
    """Weights that are taken apart, fused, or of experts; sizes that no block divides."""
    plain = write_checkpoint(tmp_path / "plain", family)
    meant = quantize_folder(plain, tmp_path / "quantized", kind, keep=("embed", "lm_head", "norm", "conv"))
    expected = logits_of(oracle(meant), PROMPT)
    for device in BACKENDS:
        assert_close(driver(tmp_path / "quantized", device).step({"a": PROMPT})["a"], expected, TOLERANCE)
    assert np.isfinite(driver(tmp_path / "quantized", "cpu", "bfloat16").step({"a": PROMPT})["a"]).all()


def write_gpt_oss(folder: Path) -> Path:
    """Write GPT-OSS with experts in MXFP4, and return a folder with what they stand for."""
    meant = folder / "meant"
    write_checkpoint(meant, "gpt_oss", **MOE_SIZES)
    stored: dict[str, torch.Tensor] = {}
    values = load_file(meant / "model.safetensors")
    for name, value in values.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            stored[f"{name}_blocks"], stored[f"{name}_scales"], exact = mxfp4(value.transpose(1, 2))
            values[name] = exact.transpose(1, 2).contiguous()
        else:
            stored[name] = value
    save_file(values, meant / "model.safetensors", {"format": "pt"})
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((meant / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return meant


@pytest.mark.slow
def test_experts_in_mxfp4(tmp_path: Path) -> None:
    meant = write_gpt_oss(tmp_path)
    expected = logits_of(oracle(meant), PROMPT)
    for device in BACKENDS:
        assert_close(driver(tmp_path, device).step({"a": PROMPT})["a"], expected, TOLERANCE)
    one, other = (driver(tmp_path, device, "float16").step({"a": PROMPT})["a"] for device in BACKENDS)
    assert (np.abs(one - other).max(axis=1) <= 1e-3 * np.abs(other).max()).mean() > 0.8
    rough = driver(tmp_path, "cpu", "bfloat16").step({"a": PROMPT})["a"]
    assert (np.abs(rough - expected).max(axis=1) <= BOUND["codes"] * np.abs(expected).max()).mean() > 0.5
    plain = weight_bytes(load_model_info(meant), "bfloat16", None)
    assert weight_bytes(load_model_info(tmp_path), "bfloat16", None) < 0.6 * plain


@pytest.mark.parametrize("quantization", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_quantizing_again_starts_from_what_the_format_stands_for(quantization: str, folders: Any) -> None:
    folder, meant = folders("llama", "fp8-block")
    found = []
    for path in (folder, meant):
        backend = CPUBackend("float32", "float32", 1, quantization=quantization)
        model = load_model(load_model_info(path), backend)
        found.append(ModelDriver(model, backend).step({"a": PROMPT})["a"])
    np.testing.assert_array_equal(*found)


def test_a_weight_without_scales_is_refused_before_anything_is_loaded(folders: Any, tmp_path: Path) -> None:
    folder, _ = folders("llama", "awq")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.scales"
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ModelError, match=f"1 part of quantized weights is missing: '{name}'"):
        driver(tmp_path, "cpu")


@pytest.mark.parametrize("kind", ["awq", "gptq-asym"])
def test_ranks_cut_groups_or_widen_them(kind: str, folders: Any) -> None:
    """Two ranks split the 64 inputs of o_proj: between two groups of AWQ, inside the one of GPTQ."""
    folder, meant = folders("llama", kind)
    backend = CPUBackend("float32", "float32", 1)

    def work(backend: Backend) -> np.ndarray:
        model = load_model(load_model_info(folder), backend)
        return ModelDriver(model, backend).step({"a": PROMPT})["a"]

    expected = logits_of(oracle(meant), PROMPT)
    for logits in run_ranks(2, backend, work):
        assert_close(logits, expected, TOLERANCE)
