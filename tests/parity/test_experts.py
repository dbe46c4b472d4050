"""Families with mixtures of experts against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.checkpoint.hf_config import load_model_info
from quire.checkpoint.safetensors import open_safetensors
from quire.kernels.backend import Backend
from quire.kernels.create import create_backend
from quire.models.loader import load_model
from tests.helpers.checkpoints import load_oracle, logits_of
from tests.helpers.model_driver import ModelDriver
from tests.helpers.ranks import run_ranks
from tests.parity.cases.experts import EXPERTS, QUICK
from tests.parity.harness import BACKENDS, check_greedy, check_logits, driver, oracle, runs, tokens


@pytest.mark.parametrize(("case", "device"), runs(EXPERTS, QUICK, QUICK))
def test_logits_match_transformers_however_the_prompt_is_fed(case: str, device: str, checkpoint: Any) -> None:
    check_logits(checkpoint(case), device)


@pytest.mark.parametrize(("case", "device"), runs(EXPERTS, QUICK))
def test_greedy_text_is_that_of_transformers(case: str, device: str, checkpoint: Any) -> None:
    check_greedy(checkpoint(case), device)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_stacked_tensors_of_transformers_5_are_the_same_model(family: str, checkpoint: Any, tmp_path: Path) -> None:
    folder = checkpoint(family)
    load_oracle(folder).save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in open_safetensors(tmp_path).tensors
    prompt = tokens(11)
    one, other = (driver(path, "cpu").step({"a": prompt})["a"] for path in (folder, tmp_path))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("quantization", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ["mixtral-all-experts", pytest.param("gpt_oss-all-experts", marks=pytest.mark.slow)])
def test_quantized_runs_stay_close(case: str, quantization: str, checkpoint: Any) -> None:
    # With every expert chosen: elsewhere a rounding may decide between two experts who agree on nothing.
    folder, prompt, rough = checkpoint(case), tokens(17), {}
    exact = driver(folder, "reference").step({"a": prompt})["a"]
    for device in BACKENDS:
        backend = create_backend(device, "float32", "float32", num_threads=1, quantization=quantization)
        model = load_model(load_model_info(folder), backend)
        rough[device] = ModelDriver(model, backend).step({"a": prompt})["a"]
    size = np.linalg.norm(exact)
    assert np.linalg.norm(rough["reference"] - rough["cpu"]) < 2e-3 * size
    # Four bits of random weights err by some tenths a matrix.
    assert 0 < np.linalg.norm(rough["cpu"] - exact) < {"int8": 0.05, "int4": 0.6}[quantization] * size


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mixtral", "qwen2_moe", "gpt_oss", "glm4_moe-groups", "olmoe"])
def test_ranks_together_compute_what_one_computes(case: str, checkpoint: Any) -> None:
    folder, prompt = checkpoint(case), tokens(19)
    backend, info = create_backend("reference", "float32", "float32", num_threads=1), load_model_info(folder)
    expected = ModelDriver(load_model(info, backend), backend).step({"a": prompt})["a"]

    def work(backend: Backend) -> np.ndarray:
        return ModelDriver(load_model(info, backend), backend).step({"a": prompt})["a"]

    for result in run_ranks(2, backend, work):
        np.testing.assert_allclose(result, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(
    "case", ["gpt_oss", *(pytest.param(case, marks=pytest.mark.slow) for case in QUICK if case != "gpt_oss")]
)
def test_the_engine_writes_the_same_text(case: str, checkpoint: Any) -> None:
    folder, prompts = checkpoint(case), [tokens(count, seed=count) for count in (5, 40, 17)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    with LLM(model=str(folder), dtype="float32", skip_tokenizer_init=True, max_num_batched_tokens=32) as llm:
        found = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]
    for prompt, text in zip(prompts, found, strict=True):
        choices = logits_of(oracle(folder), prompt + text)[len(prompt) - 1 : -1].argmax(axis=1)
        assert text == choices.tolist()
