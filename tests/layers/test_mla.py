"""Latent attention as a layer: the same with absorbed projections as with keys and values of all heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.checkpoint.hf_config import load_model_info
from quire.checkpoint.rope import RopeParameters
from quire.errors import ConfigError
from quire.kernels.backend import Backend
from quire.kernels.create import create_backend
from quire.models.deepseek import attention_scale
from quire.models.loader import load_model
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.model_driver import ModelDriver
from tests.helpers.ranks import run_ranks

PROMPT = np.random.default_rng(0).integers(3, 131, 41).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("mla"), "deepseek_v2", n_shared_experts=1)


def make(kind: str, kv_dtype: str = "float32") -> Backend:
    return create_backend(kind, "float32", kv_dtype, num_threads=1)


def logits(folder: Path, backend: Backend, **options: Any) -> np.ndarray:
    """Of the prompt, in two chunks and then token by token."""
    driver = ModelDriver(load_model(load_model_info(folder), backend, **options), backend)
    pieces = [PROMPT[:17], PROMPT[17:30], *([token] for token in PROMPT[30:])]
    return np.concatenate([driver.step({"a": piece})["a"] for piece in pieces])


@pytest.mark.parametrize("kind", ["reference", "cpu"])
def test_absorbed_projections_give_what_keys_and_values_of_all_heads_give(folder: Path, kind: str) -> None:
    absorbed, plain = logits(folder, make(kind)), logits(folder, make(kind), latent_cache=False)
    assert np.abs(absorbed - plain).max() <= 1e-5 * np.abs(plain).max()


@pytest.mark.parametrize("latent_cache", [True, False])
def test_ranks_split_the_heads_and_all_hold_the_latent_vectors(folder: Path, latent_cache: bool) -> None:
    info, backend, options = load_model_info(folder), make("reference"), {"latent_cache": latent_cache}
    whole = logits(folder, backend, **options)

    def work(backend: Backend) -> tuple[np.ndarray, int]:
        model = load_model(info, backend, **options)
        return logits(folder, backend, **options), model.kv_cache_spec().block_bytes(16, 256)

    whole_bytes = load_model(info, backend, **options).kv_cache_spec().block_bytes(16, 256)
    for result, block_bytes in run_ranks(2, backend, work):
        assert np.abs(result - whole).max() <= 1e-5 * np.abs(whole).max()
        assert block_bytes == (whole_bytes if latent_cache else whole_bytes / 2)


def test_latent_vectors_are_not_cached_in_int8(folder: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype is int8; latent vectors are cached in float32") as error:
        load_model(load_model_info(folder), make("cpu", "int8"))
    assert error.value.param == "kv_cache_dtype"


@pytest.mark.parametrize("kind", ["reference", pytest.param("cpu", marks=pytest.mark.slow)])
def test_keys_and_values_cached_in_int8_stay_close(folder: Path, kind: str) -> None:
    exact, rounded = (logits(folder, make(kind, dtype), latent_cache=False) for dtype in ("float32", "int8"))
    assert 1e-5 < np.abs(exact - rounded).max() / np.abs(exact).max() < 0.1


def test_values_larger_than_keys_need_the_latent_cache(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "deepseek_v2", v_head_dim=32)
    backend = make("reference")
    assert np.isfinite(logits(tmp_path, backend)).all()
    with pytest.raises(ConfigError, match="latent_cache is off; it must be on"):
        load_model(load_model_info(tmp_path), backend, latent_cache=False)


@pytest.mark.parametrize(
    ("kind", "kv_dtype"),
    [
        ("reference", "bfloat16"),
        *(pytest.param("cpu", dtype, marks=pytest.mark.slow) for dtype in ("bfloat16", "float16")),
    ],
)
def test_half_precision_caches_stay_close(folder: Path, kind: str, kv_dtype: str) -> None:
    exact, close = logits(folder, make(kind)), logits(folder, make(kind, kv_dtype))
    errors = np.sort(np.abs(exact - close).max(axis=1)) / np.abs(exact).max()
    assert 0 < errors[-2] < 0.05, "one token, whose second and third expert nearly tie, may be sent to the other"


def test_yarn_corrects_the_scale_by_the_square_of_its_logarithm() -> None:
    plain = {"theta": 1e4, "rotary_dim": 64, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
    assert attention_scale(RopeParameters(rope_type="default", **plain), 192) == 192**-0.5
    yarn = RopeParameters(rope_type="yarn", factor=40.0, mscale=1.0, mscale_all_dim=1.0, **plain)
    assert attention_scale(yarn, 192) == pytest.approx(192**-0.5 * 1.3688879454**2)
    assert attention_scale(RopeParameters(rope_type="yarn", factor=40.0, **plain), 192) == 192**-0.5
