"""Loading whole models: formats, limits, name variants, and tensor-parallel ranks that agree with one rank."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quire.checkpoint.hf_config import load_model_info
from quire.errors import ConfigError, ModelError
from quire.kernels.backend import Backend
from quire.kernels.create import create_backend
from quire.models.loader import LoadProgress, load_model, weight_bytes
from quire.step import LayerKVSpec
from tests.helpers.checkpoints import PLAIN_CONFIG, family_parameters, plain_tensors, write_checkpoint, write_plain
from tests.helpers.model_driver import ModelDriver
from tests.helpers.ranks import run_ranks

BACKEND = create_backend("reference", "float32", "float32", num_threads=1)
PROMPT = np.random.default_rng(0).integers(0, 131, 19).tolist()


def logits(folder: Path, backend: Backend = BACKEND, **options: Any) -> np.ndarray:
    model = load_model(load_model_info(folder), backend, **options)
    return ModelDriver(model, backend).step({"a": PROMPT})["a"]


def test_dummy_weights_need_only_a_config_and_follow_the_seed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PLAIN_CONFIG))
    first = logits(tmp_path, load_format="dummy")
    assert first.shape == (19, 160)
    assert np.isfinite(first).all()
    assert np.abs(first).max() > 1e-3
    np.testing.assert_array_equal(first, logits(tmp_path, load_format="dummy", seed=0))
    assert not np.array_equal(first, logits(tmp_path, load_format="dummy", seed=1))
    with pytest.raises(ModelError, match="no safetensors weights"):
        logits(tmp_path)


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_a_loaded_model_no_longer_needs_its_files(device: str, tmp_path: Path) -> None:
    folder = write_plain(tmp_path)
    backend = create_backend(device, "float32", "float32", num_threads=1)
    driver = ModelDriver(load_model(load_model_info(folder), backend), backend)
    before = driver.step({"a": PROMPT})["a"]
    os.truncate(folder / "model.safetensors", 0)
    np.testing.assert_allclose(driver.step({"b": PROMPT})["b"], before, rtol=1e-5)


@pytest.mark.parametrize("family", family_parameters())
def test_dummy_weights_serve_every_family(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, family)
    (folder / "model.safetensors").unlink()
    assert np.isfinite(logits(folder, load_format="dummy")).all()


def test_a_context_that_is_too_long_is_named(tmp_path: Path) -> None:
    write_plain(tmp_path)
    with pytest.raises(ConfigError, match="max_model_len is 257; this model can serve at most 256"):
        logits(tmp_path, max_model_len=257)


def test_layers_for_multi_token_prediction_are_ignored_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = plain_tensors()
    further = {"model.layers.2.eh_proj.weight": np.zeros((32, 64), np.float32)}
    write_plain(tmp_path, {**tensors, **further}, num_nextn_predict_layers=1)
    logits(tmp_path)
    assert not caplog.records
    write_plain(tmp_path, {**tensors, **further})
    logits(tmp_path)
    assert "model.layers.2.eh_proj.weight" in caplog.text


def test_cache_needs_follow_heads_windows_and_dtype(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path, "qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=1, num_key_value_heads=2
    )
    spec = load_model(load_model_info(folder), create_backend("reference", "float32", "bfloat16")).kv_cache_spec()
    assert spec.layers == [LayerKVSpec(2, 8, "bfloat16", None), LayerKVSpec(2, 8, "bfloat16", 9)]


def test_int8_caches_count_their_scales() -> None:
    assert LayerKVSpec(2, 8, "int8").block_bytes(16) == 16 * 2 * 2 * (8 + 4)
    assert LayerKVSpec(2, 8, "bfloat16").block_bytes(16) == 16 * 2 * 2 * 8 * 2


@pytest.mark.parametrize(
    ("quantization", "matrix", "table"),
    [
        (None, 2 * 128, 2 * 128),
        ("int8", 128 + 4, 128 + 4),
        ("int8-weight-only", 128 + 4, 128 + 4),
        ("int4", 64 + 2 * 2 + 4, 128 + 4),
    ],
)
def test_weights_are_counted_as_they_will_be_stored(
    quantization: str | None, matrix: int, table: int, tmp_path: Path
) -> None:
    folder = write_checkpoint(
        tmp_path, "llama", hidden_size=128, intermediate_size=128, num_hidden_layers=1, tie_word_embeddings=True
    )
    rows = 4 * 128 + 3 * 128  # of attention and feed-forward layer, all of them 128 wide
    norms = 3 * 128 * 4
    assert weight_bytes(load_model_info(folder), "bfloat16", quantization) == rows * matrix + 160 * table + norms


@pytest.mark.parametrize("quantization", ["int8", "int8-weight-only", "int4"])
@pytest.mark.parametrize("family", ["qwen3", "gpt2", "starcoder2"])
def test_quantized_models_score_almost_as_before(quantization: str, family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, family)
    exact = logits(folder)
    backend = create_backend("reference", "float32", "int8", num_threads=1, quantization=quantization)
    driver = ModelDriver(load_model(load_model_info(folder), backend), backend)
    got = driver.step({"a": PROMPT})["a"]
    error = np.sqrt(np.mean((got - exact) ** 2) / np.mean(exact**2))
    assert 1e-4 < error < (0.5 if quantization == "int4" else 0.1)


@pytest.mark.parametrize(("family", "prefix"), [("gpt2", "transformer."), ("opt", "model."), ("bloom", "transformer.")])
def test_files_without_the_outermost_prefix_load_too(family: str, prefix: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, family)
    expected = logits(folder)
    tensors = load_file(folder / "model.safetensors")
    assert all(name.startswith(prefix) for name in tensors)
    masks = {"h.0.attn.bias": np.ones((1, 1, 8, 8), np.float32)} if family == "gpt2" else {}
    save_file(
        {name.removeprefix(prefix): array for name, array in tensors.items()} | masks, folder / "model.safetensors"
    )
    np.testing.assert_array_equal(logits(folder), expected)


def test_phi3_refuses_the_scaling_of_its_early_files(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "phi3")
    scaling = {"type": "yarn", "factor": 4.0}
    info = load_model_info(folder, {"rope_scaling": scaling})
    with pytest.raises(ModelError, match=r"rope_scaling is .* \(expected a rope_type of default or longrope"):
        load_model(info, BACKEND)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("gpt_neox", ["gpt_neox.layers.0.attention.bias", "gpt_neox.layers.0.attention.rotary_emb.inv_freq"]),
        ("gptj", ["transformer.h.1.attn.bias", "transformer.h.1.attn.masked_bias"]),
        ("stablelm", ["model.layers.0.self_attn.rotary_emb.inv_freq"]),
    ],
)
def test_masks_and_tables_of_older_files_are_ignored_without_a_warning(
    family: str, names: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_checkpoint(tmp_path, family)
    expected = logits(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: np.ones(4, np.float32) for name in names}, folder / "model.safetensors")
    np.testing.assert_array_equal(logits(folder), expected)
    assert not caplog.records
    save_file(tensors | {"model.strange.weight": np.ones(4, np.float32)}, folder / "model.safetensors")
    logits(folder)
    assert "model.strange.weight" in caplog.text


@pytest.mark.parametrize("layers", [[1], [1, 2], "all", [1, [0]]])
def test_no_rope_layers_that_fit_no_model_are_refused(layers: object, tmp_path: Path) -> None:
    info = load_model_info(write_checkpoint(tmp_path, "smollm3"), {"no_rope_layers": layers})
    with pytest.raises(ModelError, match=r"no_rope_layers is .* \(expected a list of 2 zeros and ones\)"):
        load_model(info, BACKEND)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("mpt", {"no_bias": False}, "no_bias is false (expected true)"),
        ("mpt", {"logit_scale": "inv_sqrt_d_model"}, "logit_scale is 'inv_sqrt_d_model' (expected null)"),
        ("mpt", {"norm_type": "rmsnorm"}, "norm_type is 'rmsnorm' (expected layernorm or"),
        ("mpt", {"attn_config": {"alibi": False}}, "attn_config.alibi is false (expected true)"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "attn_config.qk_ln is true (expected false)"),
        ("mpt", {"attn_config": {"clip_qkv": 6}}, "attn_config.clip_qkv is 6 (expected null)"),
        (
            "mpt",
            {"attn_config": {"attn_type": "multiquery_attention"}},
            "attn_config.attn_type is 'multiquery_attention' (expected multihead_attention)",
        ),
        ("falcon", {"parallel_attn": False}, "parallel_attn is false (expected true, with new_decoder_architecture)"),
        ("falcon", {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn is 3 (expected an integer from 1 to 2)"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm is true (expected false)"),
    ],
)
def test_unsupported_variants_are_refused(family: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    info = load_model_info(write_checkpoint(tmp_path, family), changes)
    with pytest.raises(ModelError) as caught:
        load_model(info, BACKEND)
    assert words in caught.value.message


def test_cross_attention_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "gpt2")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "add_cross_attention": True}))
    with pytest.raises(ModelError, match="add_cross_attention is true \\(expected false"):
        logits(folder)


@pytest.mark.parametrize(
    ("family", "config", "ranks"),
    [
        ("llama", {"num_key_value_heads": 2, "vocab_size": 131, "attention_bias": True, "mlp_bias": True}, 4),
        ("qwen3", {"num_key_value_heads": 1, "tie_word_embeddings": True, "vocab_size": 133}, 4),
        ("phi3", {"vocab_size": 131}, 2),
        ("gpt_neox", {"vocab_size": 131}, 2),
        ("stablelm", {"qk_layernorm": True, "use_qkv_bias": True, "num_key_value_heads": 1, "vocab_size": 131}, 4),
        ("starcoder2", {"vocab_size": 131}, 2),
        ("olmo2", {"num_key_value_heads": 1, "vocab_size": 131}, 4),
        ("olmo2", {"num_key_value_heads": 4, "attention_bias": True}, 2),
        ("granite", {"residual_multiplier": 0.3, "attention_bias": True}, 2),
        ("cohere", {"use_qk_norm": True, "vocab_size": 131}, 2),
        ("gptj", {"vocab_size": 131}, 4),
        ("falcon", {"vocab_size": 131}, 2),
        ("falcon", {"new_decoder_architecture": False, "alibi": True, "bias": True}, 2),
        ("bloom", {"vocab_size": 131}, 2),
        ("mpt", {"vocab_size": 131}, 4),
        ("opt", {"word_embed_proj_dim": 24}, 2),
        ("gpt2", {"vocab_size": 131}, 4),
    ],
)
def test_ranks_together_compute_what_one_computes(
    family: str, config: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path, family, **config)
    expected = logits(folder)

    def work(backend: Backend) -> np.ndarray:
        return logits(folder, backend)

    for result in run_ranks(ranks, BACKEND, work):
        np.testing.assert_allclose(result, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("strategy", ["eager", "prefetch"])
def test_every_load_strategy_gives_the_same_weights(tmp_path: Path, strategy: str) -> None:
    write_plain(tmp_path)
    np.testing.assert_array_equal(logits(tmp_path, strategy=strategy), logits(tmp_path))


def test_long_loads_log_their_progress(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([0.0, 1.0, 6.0, 7.0, 12.5])
    with caplog.at_level(logging.INFO), LoadProgress("m", 4_000_000, clock=lambda: next(times)) as progress:
        for _ in range(4):
            progress.add(1_000_000)
    assert [record.getMessage() for record in caplog.records] == [
        "loading m: 2 of 4 MB (50 %) after 6 s",
        "loading m: 4 of 4 MB (100 %) after 12 s",
    ]


def test_a_terminal_gets_a_bar_after_a_second(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = iter([0.0, 0.5, 2.0, 3.0])
    with LoadProgress("my-model", 3_000_000, clock=lambda: next(times)) as progress:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        for _ in range(3):
            progress.add(1_000_000)
        progress._bar.refresh()
    assert "loading my-model" in capsys.readouterr().err
