"""Families with layers that keep a state, against transformers: logits however a prompt is fed, greedy texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.checkpoint.hf_config import load_model_info
from quire.checkpoint.safetensors import open_safetensors
from quire.errors import ModelError
from quire.kernels.backend import Backend
from quire.kernels.create import create_backend
from quire.models.loader import load_model
from tests.helpers.checkpoints import safetensors_bytes
from tests.helpers.model_driver import ModelDriver
from tests.helpers.ranks import run_ranks
from tests.parity.cases.hybrid import HYBRID, QUICK
from tests.parity.harness import assert_close, check_greedy, check_logits, driver, runs, tokens


@pytest.mark.parametrize(("case", "device"), runs(HYBRID, QUICK, QUICK))
def test_logits_match_transformers_however_the_prompt_is_fed(case: str, device: str, checkpoint: Any) -> None:
    check_logits(checkpoint(case), device)


@pytest.mark.parametrize(("case", "device"), runs(HYBRID, QUICK))
def test_greedy_text_is_that_of_transformers(case: str, device: str, checkpoint: Any) -> None:
    check_greedy(checkpoint(case), device)


def test_the_text_part_of_a_model_of_images_is_that_of_its_text_model(checkpoint: Any, tmp_path: Path) -> None:
    folder = checkpoint("qwen3.5-wide-heads-tied")
    config = json.loads((folder / "config.json").read_text())
    text = {**config, "model_type": "qwen3_5_text"}
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = {
        name.replace("model.", "model.language_model.", 1): stored.read().to_float32()
        for name, stored in open_safetensors(folder).tensors.items()
    }
    tensors |= {name: np.ones((2, 2), np.float32) for name in ("model.visual.merger.weight", "mtp.fc.weight")}
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    prompt = tokens(9)
    logits = [driver(at, "cpu").step({"a": prompt})["a"] for at in (folder, tmp_path)]
    np.testing.assert_array_equal(*logits)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 4}, "at least one full_attention"),
        ({"layer_types": ["mamba"] * 4}, "names among full_attention, linear_attention"),
        ({"linear_num_value_heads": 3}, "a multiple of linear_num_key_heads, 2"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
    ],
)
def test_sizes_that_do_not_fit_are_named(changes: dict[str, Any], named: str, checkpoint: Any, tmp_path: Path) -> None:
    config = json.loads((checkpoint("qwen3-next") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ModelError, match=named):
        load_model(load_model_info(tmp_path), create_backend("cpu", "float32", "float32", 1), load_format="dummy")


def test_layers_that_attend_are_found_in_older_ways(checkpoint: Any, tmp_path: Path) -> None:
    """Every fourth, or every n-th, layer of Qwen's; those that LFM2's files list."""
    linear, full = "linear_attention", "full_attention"
    for case, changes, types in (
        ("qwen3-next", {}, [linear, linear, linear, full]),
        ("qwen3-next", {"full_attention_interval": 2}, [linear, full] * 2),
        ("lfm2", {"full_attn_idxs": [0, 2]}, [full, "conv", full]),
    ):
        config = {**json.loads((checkpoint(case) / "config.json").read_text()), "layer_types": None, **changes}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert load_model_info(tmp_path).raw["layer_types"] == types


@pytest.mark.parametrize("case", ["qwen3-next", "lfm2", pytest.param("qwen3.5", marks=pytest.mark.slow)])
def test_two_ranks_share_heads_and_channels(case: str, checkpoint: Any) -> None:
    folder, prompt = checkpoint(case), tokens(13)
    backend, info = create_backend("reference", "float32", "float32", num_threads=1), load_model_info(folder)
    expected = driver(folder, "reference").step({"a": prompt})["a"]

    def work(backend: Backend) -> tuple[np.ndarray, int]:
        model = load_model(info, backend)
        return ModelDriver(model, backend).step({"a": prompt})["a"], model.kv_cache_spec().state_bytes

    whole = load_model(info, backend).kv_cache_spec().state_bytes
    for logits, state_bytes in run_ranks(2, backend, work):
        assert_close(logits, expected, 1e-4)
        assert state_bytes == whole // 2
