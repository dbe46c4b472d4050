"""Layerwise blocks: what is partly on the host gives the same tokens and log-probabilities as what is not."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.checkpoint.hf_config import load_model_info
from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.gpu.streams import Streams
from quire.models.loader import load_model
from quire.sampling_params import SamplingParams
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.runner_driver import RunnerDriver
from tests.helpers.streams import Late
from tests.kernels.gpu.common import DEVICE

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
LAYERS, RESIDENT = 4, 1
BLOCKS, LAYERWISE = 24, 18
GREEDY = SamplingParams(temperature=0.0, logprobs=2)
PROMPT = [5, 9, 11, 3, 7, 8, 40, 61, 33, 20, 12]
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


class Streaming(GPUBackend):
    """The GPU's backend with streams of the test."""

    def __init__(self, kv_dtype: str, streams: Callable[[], Streams]) -> None:
        super().__init__("float32", kv_dtype, DEVICE)
        self._streams_of_test = streams

    def new_streams(self) -> Streams:
        """Those of the test."""
        return self._streams_of_test()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama", **SMALL)


def late(seed: int) -> Callable[[], Streams]:
    return lambda: Late(random.Random(seed).randrange)


def make(folder: Path, kv_dtype: str, streams: Callable[[], Streams] | None) -> RunnerDriver:
    """Return a driver of a runner; all its blocks are whole where there are no streams."""
    backend = Streaming(kv_dtype, streams or (lambda: Streams(torch.device(DEVICE))))
    layerwise = {"num_layerwise_blocks": LAYERWISE, "num_resident_layers": RESIDENT} if streams else {}
    return RunnerDriver(load_model(load_model_info(folder), backend), backend, num_blocks=BLOCKS, **layerwise)


def short(folder: Path, streams: Callable[[], Streams] | None) -> list[Any]:
    """Drive one sequence; return what was said."""
    driver = make(folder, "float32", streams)
    driver.add("a", PROMPT[:6], GREEDY)
    outputs = [driver.step({"a": count}) for count in (5, 1, 1)]
    driver.runner.close()
    return [output.logprobs for output in outputs]


def drive(folder: Path, kv_dtype: str, streams: Callable[[], Streams] | None) -> dict[str, Any]:
    """Drive sequences through all that happens to blocks; all are whole where there are no streams."""
    driver = make(folder, kv_dtype, streams)
    found: dict[str, Any] = {}

    def step(*args: Any, **kwargs: Any) -> None:
        output = driver.step(*args, **kwargs)
        for name, logprobs in output.logprobs.items():
            found.setdefault(name, []).extend((place.token_ids, place.logprobs) for place in logprobs)

    driver.add("a", PROMPT, GREEDY)
    driver.add("b", PROMPT[:6], GREEDY)
    step({"a": 6})
    step({"a": 5, "b": 6}, branches={"b": ["b1"]})  # what the branch shares is copied when it is written
    step({"a": 1, "b": 1, "b1": 1})
    driver.end("b")
    forks = [driver.fork("a", "a1", 1)]
    driver.tell("a1", 30)
    step({"a": 1, "b1": 1})
    driver.add("c", PROMPT[6:], GREEDY)  # in blocks that others had
    step({"a1": 1, "c": 5, "a": 1, "b1": 1}, forks)
    step({"a1": 1, "c": 1})
    driver.runner.close()
    return found


def test_what_is_on_the_host_is_there_in_time(llama: Path) -> None:
    """A prompt in two chunks, and tokens after it."""
    assert short(llama, late(0)) == short(llama, None)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "fp8"])
def test_layers_on_the_host_change_no_bit(llama: Path, kv_dtype: str) -> None:
    check(llama, kv_dtype)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["float32", "fp8"])
def test_nor_do_latent_vectors(tmp_path: Path, kv_dtype: str) -> None:
    check(write_checkpoint(tmp_path, "deepseek_v3", vocab_size=64, num_hidden_layers=LAYERS), kv_dtype)


def check(folder: Path, kv_dtype: str) -> None:
    """Compare with blocks that are whole."""
    assert drive(folder, kv_dtype, late(1)) == drive(folder, kv_dtype, None)
