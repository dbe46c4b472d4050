"""What every test of parity with transformers does: which cases run when, drive a model, compare with the oracle."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.checkpoint.hf_config import load_model_info
from quire.kernels.create import create_backend
from quire.models.loader import load_model
from tests.helpers.checkpoints import load_oracle, logits_of, write_checkpoint
from tests.helpers.model_driver import ModelDriver
from tests.parity.cases.every import EVERY

BACKENDS = ("reference", "cpu")
TOLERANCE = 1e-5

oracle = functools.lru_cache(maxsize=4)(load_oracle)


def runs(cases: Iterable[str], quick: Collection[str], quick_reference: Collection[str] = ()) -> list[Any]:
    """Return ("case", "device") parameters of every case on every backend.

    All are slow but those of `quick` on the CPU backend and of `quick_reference` on the reference backend.
    """
    chosen = {"cpu": quick, "reference": quick_reference}
    return [
        pytest.param(
            case,
            device,
            id=f"{case}-{device}",
            marks=() if case in chosen[device] else (pytest.mark.slow,),
        )
        for case in cases
        for device in BACKENDS
    ]


def write_case(folder: Path, case: str) -> Path:
    """Write the checkpoint of a case of `tests.parity.cases` into `folder` and return it."""
    family, config = EVERY[case]
    return write_checkpoint(folder, family, seed=len(case), **config)


def driver(folder: Path, device: str, dtype: str = "float32", max_model_len: int | None = None) -> ModelDriver:
    """Load a model and return what feeds it."""
    backend = create_backend(device, dtype, "float32", num_threads=1)
    model = load_model(load_model_info(folder), backend, max_model_len=max_model_len)
    return ModelDriver(model, backend)


def tokens(count: int, seed: int = 0, vocab: int = 131) -> list[int]:
    """Return that many random token ids."""
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()


def largest_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference as a share of the largest expected value."""
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float = TOLERANCE) -> None:
    """Compare with the largest of the expected values as the measure."""
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


def check_logits(folder: Path, device: str, tolerance: float = TOLERANCE, count: int = 41) -> None:
    """Check the logits of a prompt of `count` tokens, whole and in chunks that share steps and scattered blocks."""
    prompt, other = tokens(count), tokens(17, seed=1)
    expected = logits_of(oracle(folder), prompt)
    model = driver(folder, device)
    assert_close(model.step({"whole": prompt})["whole"], expected, tolerance)
    chunks = [
        model.step({"a": prompt[:5]})["a"],
        model.step({"b": other[:9], "a": prompt[5:18]})["a"],
        model.step({"a": prompt[18:19], "b": other[9:]})["a"],
        model.step({"a": prompt[19:]})["a"],
    ]
    assert_close(np.concatenate(chunks), expected, tolerance)


def check_greedy(folder: Path, device: str, steps: int = 32) -> None:
    """The most likely tokens, one by one, are those that transformers would choose."""
    prompt = tokens(7, seed=2)
    text = driver(folder, device).greedy(prompt, steps)
    # If the oracle, given our text, would choose each of its tokens next, then its own greedy text is the same.
    choices = logits_of(oracle(folder), prompt + text)[len(prompt) - 1 : -1].argmax(axis=1)
    assert text == choices.tolist()
