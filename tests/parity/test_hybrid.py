"""Families with layers that keep a state, against transformers: logits however a prompt is fed, greedy texts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.cases.hybrid import HYBRID, QUICK
from tests.parity.harness import check_greedy, check_logits, runs


@pytest.mark.parametrize(("case", "device"), runs(HYBRID, QUICK))
def test_logits_match_transformers_however_the_prompt_is_fed(case: str, device: str, checkpoint: Any) -> None:
    check_logits(checkpoint(case), device)


@pytest.mark.parametrize(("case", "device"), runs(HYBRID, QUICK, quick_devices=("cpu",)))
def test_greedy_text_is_that_of_transformers(case: str, device: str, checkpoint: Any) -> None:
    check_greedy(checkpoint(case), device)
