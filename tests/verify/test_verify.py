"""`quire verify`: agreement with transformers, and the layer and part that it names where there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.checkpoint.hf_config import load_model_info
from quire.cli.main import main
from quire.config import EngineConfig
from quire.engine.resolve import load_info, resolve_config
from quire.verify.check import LayerErrors, Report, first_difference, relative_error, verify
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.pooling_checkpoints import DECODER, MODERN, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", num_hidden_layers=3)


def check(folder: Path, overrides: dict[str, Any] | None = None, **options: Any) -> Report:
    """Verify a model whose config.json one side sees with `overrides`, as a wrong reading of it would."""
    config = EngineConfig.from_kwargs(model=str(folder), dtype="float32", device="reference", **options)
    info = load_model_info(folder)
    if overrides:
        info = load_model_info(folder, overrides)
    return verify(resolve_config(config, info), info, None, length=12, num_tokens=6)


def test_a_model_agrees(folder: Path) -> None:
    report = check(folder)
    assert report.agrees and report.logits < 1e-5 and report.chunked < 1e-5
    assert report.greedy_matches == report.greedy_tokens == 6
    assert report.layers == [] and report.first is None


def test_a_wrong_rope_theta_is_found_in_the_first_layer(folder: Path) -> None:
    report = check(folder, {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}})
    assert not report.agrees
    assert report.first is not None and report.first.startswith("layer 0: scores differ from the second token on")
    assert "rope_theta" in report.first


def test_a_wrong_window_is_found_in_its_layer(folder: Path) -> None:
    windows = {
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    }
    report = check(folder, windows)
    assert not report.agrees
    assert report.first is not None and report.first.startswith("layer 1: scores and values agree")
    assert [at.worst() < 1e-5 for at in report.layers] == [True, False, False]


def test_a_wrong_activation_is_found_behind_the_layer_that_has_it(folder: Path) -> None:
    report = check(folder, {"hidden_act": "relu"})
    assert report.first is not None and report.first.startswith(
        "layer 1: queries, keys and values differ: what layer 0"
    )


def test_words_for_every_kind_of_difference() -> None:
    def said(values: float, scores: float, first: float, output: float) -> str:
        return first_difference([LayerErrors(3, values, scores, first, output)], 0.5) or ""

    assert said(0, 0, 0, 0) == ""
    assert "value projection" in said(1, 0, 0, 1)
    assert "norms, or the scale" in said(0, 1, 1, 1)
    assert relative_error(np.zeros(2), np.zeros(3)) == float("inf")
    assert relative_error(np.array([np.nan]), np.zeros(1)) == float("inf")


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--skip-tokenizer-init", "--device", "reference", "--prompt-len", "8", "--num-tokens", "4")
    assert main(["verify", str(folder), *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["agrees"] and found["logits_error"] < 1e-5 and found["layers"] == []

    assert main(["verify", str(folder), "--max-num-seqs", "3"]) == 2  # nothing of a model by itself
    assert "--max-num-seqs" in capsys.readouterr().err
    assert main(["verify", str(folder), *options, "--all-layers", "--tolerance", "0"]) == 1
    printed = capsys.readouterr().out
    assert "they differ (tolerance 0)" in printed and "  layer      values      scores" in printed


def test_quantized_weights_are_measured_too(folder: Path) -> None:
    report = check(folder, quantization="int8")
    assert report.agrees and report.tolerance == 0.25 and report.logits > 1e-4


@pytest.mark.parametrize(
    ("architecture", "shape"),
    [
        ("ModernBertForSequenceClassification", {**MODERN, "num_labels": 3}),
        ("Qwen3Model", {**DECODER, "head_dim": 16}),
    ],
)
def test_models_that_make_vectors_and_scores(architecture: str, shape: dict[str, Any], tmp_path: Path) -> None:
    folder = write_model(tmp_path, architecture, **shape)
    config = EngineConfig.from_kwargs(model=str(folder), dtype="float32", device="reference")
    info = load_info(config)
    report = verify(resolve_config(config, info), info, None, length=12, all_layers=True)
    assert report.agrees and report.compares_hidden and report.logits < 1e-5 and report.scores < 1e-5
    assert len(report.layers) == info.num_hidden_layers and report.first is None
