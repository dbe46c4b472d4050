"""A model asked for some rows' hidden states gives those, bit for bit, and still caches every token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quire.checkpoint.hf_config import load_model_info
from quire.kernels.backend import Backend
from quire.kernels.create import create_backend
from quire.models.loader import load_model
from tests.helpers.checkpoints import family_parameters, write_checkpoint
from tests.helpers.model_driver import ModelDriver

PROMPTS = {"a": [5, 9, 11, 3, 7], "b": [8, 2, 6]}


def logits_of(driver: ModelDriver, backend: Backend, wanted: list[int] | None) -> np.ndarray:
    """Compute the prompts in one step; return logits of the rows `wanted`, or of all."""
    asked = None if wanted is None else backend.from_numpy(np.array(wanted, np.int64))
    make = driver._metadata

    def with_wanted(*args: object) -> object:
        metadata = make(*args)
        metadata.wanted = asked
        return metadata

    driver._metadata = with_wanted  # type: ignore[method-assign]
    found = driver.step(PROMPTS)
    driver._metadata = make  # type: ignore[method-assign]
    return np.concatenate(list(found.values()))


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("family", family_parameters())
def test_rows_that_are_asked_for_are_those_of_the_whole(family: str, device: str, tmp_path: Path) -> None:
    info = load_model_info(write_checkpoint(tmp_path, family))
    backend = create_backend(device, "float32", "float32", batch_invariant=True)
    model = load_model(info, backend)
    whole, some, none = (ModelDriver(model, backend) for _ in range(3))
    expected = logits_of(whole, backend, None)
    np.testing.assert_array_equal(logits_of(some, backend, [4, 7]), expected[[4, 7]])
    assert logits_of(none, backend, []).shape == (0, model.vocab_size)
    follow = whole.step({"a": [1], "b": [4]})
    for driver in (some, none):
        for name, logits in driver.step({"a": [1], "b": [4]}).items():
            np.testing.assert_array_equal(logits, follow[name])
