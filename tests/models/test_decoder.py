"""The decoder's parts: some rows only, and pipeline stages, give the same bits as the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from quire.checkpoint.hf_config import load_model_info
from quire.checkpoint.open import open_weights
from quire.checkpoint.weights import DryRunWeights
from quire.kernels.backend import Array, AttentionMetadata, Backend
from quire.kernels.create import create_backend
from quire.layers.builder import Builder
from quire.models.decoder import Decoder
from quire.models.loader import load_model
from quire.models.registry import build_model
from quire.step import KVCacheSpec
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.model_driver import ModelDriver

PROMPTS = {"a": [5, 9, 11, 3, 7], "b": [8, 2, 6]}


def logits_of(driver: ModelDriver, backend: Backend, rows: list[int] | None) -> np.ndarray:
    """Compute the prompts in one step; return logits of the indices `rows`, or of all."""
    indices = None if rows is None else backend.from_numpy(np.array(rows, np.int64))
    make = driver._metadata

    def with_rows(*args: object) -> object:
        metadata = make(*args)
        metadata.logits_indices = indices
        return metadata

    driver._metadata = with_rows  # type: ignore[method-assign]
    found = driver.step(PROMPTS)
    driver._metadata = make  # type: ignore[method-assign]
    return np.concatenate(list(found.values()))


# Each way to add to the residual stream, and each mixer; one of them on the other backend as well.
ROW_FAMILIES = ("llama", "gemma2", "olmo2", "falcon", "gptj", "qwen2_moe", "qwen3_next", "lfm2", "deepseek_v3")
ROW_CASES = [(family, "cpu") for family in ROW_FAMILIES] + [("gemma2", "reference")]


@pytest.mark.parametrize(("family", "device"), ROW_CASES)
def test_selected_rows_are_those_of_the_whole(family: str, device: str, tmp_path: Path) -> None:
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


class Stages:
    """Two pipeline stages of a model, one after the other."""

    def __init__(self, first: Decoder, second: Decoder) -> None:
        self.first, self.second = first, second
        self.compute_logits = second.compute_logits

    def kv_cache_spec(self) -> KVCacheSpec:
        first, second = self.first.kv_cache_spec(), self.second.kv_cache_spec()
        return KVCacheSpec(first.layers + second.layers, first.states + second.states)

    def forward(self, input_ids: Array, positions: Array, caches: list[Any], metadata: AttentionMetadata) -> Array:
        first, second = self.first.kv_cache_spec(), self.second.kv_cache_spec()
        mid, end = len(first.layers), len(first.layers) + len(second.layers)
        attention, states = caches[:end], caches[end:]
        own = attention[:mid] + states[: len(first.states)]
        hidden = self.first.run_layers(self.first.embed(input_ids, positions, metadata), positions, own, metadata)
        own = attention[mid:] + states[len(first.states) :]
        return self.second.norm(self.second.run_layers(hidden, positions, own, metadata))


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("llama", False),
        ("gemma2", True),
        ("olmo2", True),
        ("gpt_neox", False),
        ("opt", True),
        ("qwen3_next", False),
        ("deepseek_v3", True),
    ],
)
def test_two_stages_give_the_bits_of_the_whole_and_read_their_own_tensors_only(
    family: str, tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    info = load_model_info(write_checkpoint(tmp_path, family, tie_word_embeddings=tied))
    backend = create_backend("cpu", "float32", "float32", num_threads=1)
    checkpoint, half = open_weights(info), 1
    ranges = (range(half), range(half, info.num_hidden_layers))
    names = []
    for layers in (*ranges, None):
        dry_run = DryRunWeights(checkpoint)
        build_model(info, Builder(dry_run, backend, layers=layers), 1)
        names.append(set(dry_run.names))
    first, second, whole = names
    assert first | second == whole
    assert all("embed" in name or "wte" in name for name in first & second)
    assert bool(first & second) == info.tie_word_embeddings
    parts = [cast(Decoder, load_model(info, backend, max_model_len=64, layers=layers)) for layers in ranges]
    assert caplog.text == "", "tensors of the other stage are no surprise"
    one = ModelDriver(load_model(info, backend, max_model_len=64), backend)
    two = ModelDriver(cast(Any, Stages(*parts)), backend)
    for work in (PROMPTS, {"a": [1], "b": [4]}):
        expected = one.step(dict(work))
        for name, logits in two.step(dict(work)).items():
            np.testing.assert_array_equal(logits, expected[name])
