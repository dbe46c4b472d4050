"""Families with latent attention against transformers, whose caches hold what ours do, and which make keys of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checkpoints import logits_of, write_checkpoint
from tests.helpers.quantizers import quantize_folder
from tests.parity.cases.latent import LATENT, QUICK
from tests.parity.harness import BACKENDS, assert_close, check_greedy, check_logits, driver, oracle, runs, tokens

MULTIPLES = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}


@pytest.mark.parametrize(("case", "device"), runs(LATENT, QUICK, QUICK))
def test_logits_match_transformers_however_the_prompt_is_fed(case: str, device: str, checkpoint: Any) -> None:
    check_logits(checkpoint(case), device)


@pytest.mark.parametrize(("case", "device"), runs(LATENT, QUICK))
def test_greedy_text_is_that_of_transformers(case: str, device: str, checkpoint: Any) -> None:
    check_greedy(checkpoint(case), device)


@pytest.mark.parametrize("kind", ["fp8-block", pytest.param("awq", marks=pytest.mark.slow)])
def test_projections_may_be_stored_in_fewer_bits(kind: str, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    plain = write_checkpoint(tmp_path / "plain", "deepseek_v2", hidden_size=64, intermediate_size=64, **MULTIPLES)
    meant = quantize_folder(plain, tmp_path / "stored", kind, keep=("embed", "lm_head", "norm", "experts"))
    prompt = tokens(23)
    for device in BACKENDS:
        assert_close(driver(tmp_path / "stored", device).step({"a": prompt})["a"], logits_of(oracle(meant), prompt))
