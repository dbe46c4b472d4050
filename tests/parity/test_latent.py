"""Families with latent attention against transformers, whose caches hold what ours do, and which make keys of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.cases.latent import LATENT, QUICK
from tests.parity.harness import check_greedy, check_logits, runs


@pytest.mark.parametrize(("case", "device"), runs(LATENT, QUICK))
def test_logits_match_transformers_however_the_prompt_is_fed(case: str, device: str, checkpoint: Any) -> None:
    check_logits(checkpoint(case), device)


@pytest.mark.parametrize(("case", "device"), runs(LATENT, QUICK, quick_devices=("cpu",)))
def test_greedy_text_is_that_of_transformers(case: str, device: str, checkpoint: Any) -> None:
    check_greedy(checkpoint(case), device)
