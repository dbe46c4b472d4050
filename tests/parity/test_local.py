"""Families that mix full attention with attention through a window, against transformers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.cases.local import LOCAL, QUICK
from tests.parity.harness import check_greedy, check_logits, runs


@pytest.mark.parametrize(("case", "device"), runs(LOCAL, QUICK, ("gemma2", "cohere2")))
def test_logits_match_transformers_however_the_prompt_is_fed(case: str, device: str, checkpoint: Any) -> None:
    check_logits(checkpoint(case), device)


@pytest.mark.parametrize(("case", "device"), runs(LOCAL, ("gemma2", "gemma3-stretched-capped", "ministral")))
def test_greedy_text_is_that_of_transformers(case: str, device: str, checkpoint: Any) -> None:
    check_greedy(checkpoint(case), device)
