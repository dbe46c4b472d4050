"""Dense families against transformers: logits however a prompt is fed, greedy texts, stretched contexts, dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.checkpoint.hf_config import load_model_info
from tests.helpers.checkpoints import oracle_logits, write_checkpoint
from tests.parity.cases.dense import DENSE, QUICK, REFERENCE_QUICK
from tests.parity.harness import BACKENDS, assert_close, check_greedy, check_logits, driver, runs, tokens


@pytest.mark.parametrize(("case", "device"), runs(DENSE, QUICK, REFERENCE_QUICK))
def test_logits_match_transformers_however_the_prompt_is_fed(case: str, device: str, checkpoint: Any) -> None:
    check_logits(checkpoint(case), device)


# Logits of chunks, one of them a single token, are compared for every family. Texts add the growth of the cache.
GREEDY_QUICK = (
    "llama-gqa-tied",
    "mistral-window",
    "phi3-longrope-partial",
    "falcon-rw",
    "opt-post-norm-projected",
    "phi",
)


@pytest.mark.parametrize(("case", "device"), runs(DENSE, GREEDY_QUICK))
def test_greedy_text_is_that_of_transformers(case: str, device: str, checkpoint: Any) -> None:
    check_greedy(checkpoint(case), device)


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize(
    ("case", "max_model_len", "length"),
    [("llama-dynamic", 300, 300), ("llama-longrope", 160, 140), ("phi3-longrope-partial", 160, 140)],
)
def test_stretched_contexts_match_transformers_where_one_table_can(
    case: str, max_model_len: int, length: int, device: str, checkpoint: Any
) -> None:
    folder, prompt = checkpoint(case), tokens(length, seed=3)
    model = driver(folder, device, max_model_len=max_model_len)
    assert_close(model.step({"a": prompt})["a"], oracle_logits(folder, prompt))


@pytest.mark.parametrize("device", BACKENDS)
def test_a_sharded_bfloat16_checkpoint_gives_the_logits_of_its_own_values(device: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "qwen2", dtype="bfloat16", max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert load_model_info(folder).dtype == "bfloat16"
    prompt = tokens(23)
    expected = oracle_logits(folder, prompt)
    assert_close(driver(folder, device).step({"a": prompt})["a"], expected)
    assert_close(driver(folder, device, dtype="bfloat16").step({"a": prompt})["a"], expected, tolerance=0.03)


@pytest.mark.parametrize("device", BACKENDS)
def test_a_float16_checkpoint_gives_the_logits_of_its_own_values(device: str, tmp_path: Path) -> None:
    folder, prompt = write_checkpoint(tmp_path, "opt", dtype="float16"), tokens(23)
    assert_close(driver(folder, device).step({"a": prompt})["a"], oracle_logits(folder, prompt))
