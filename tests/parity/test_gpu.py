"""Every family on a GPU: its logits are transformers', and the engine's greedy text is that of the reference backend,
eager or from CUDA graphs. Without a GPU the kernels run in Triton's interpreter, which records no graphs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.sampling_params import SamplingParams
from tests.helpers.engine_driver import EngineDriver, Request
from tests.parity.cases.every import EVERY
from tests.parity.harness import check_logits, tokens

QUICK = ("qwen3-tied-bias",)
# Exponentials are approximations on a GPU. Some rows of random weights magnify any rounding: of gemma3-stretched-capped
# one is off by 0.8e-5 in the reference as well.
TOLERANCE = 3e-5
PARAMS = SamplingParams(temperature=0.0, ignore_eos=True)


def parameters(quick: tuple[str, ...] = ()) -> list[Any]:
    """Return all cases; those that are not quick are slow."""
    return [pytest.param(case, marks=() if case in quick else (pytest.mark.slow,)) for case in EVERY]


def texts(folder: Any, device: str, **options: object) -> list[list[int]]:
    """Return what four requests of different lengths say side by side, in an engine that computes prompts in parts."""
    driver = EngineDriver(folder, device, dtype="float32", max_num_batched_tokens=24, **options)
    for number, length in enumerate((5, 19, 33, 2)):
        driver.add(f"request-{number}", Request(tokens(length, seed=number), PARAMS, max_tokens=9, stop_ids=()))
    driver.run()
    return [driver.results[f"request-{number}"].tokens for number in range(4)]


@pytest.mark.parametrize("case", parameters(QUICK))
def test_logits_match_transformers_however_the_prompt_is_fed(case: str, checkpoint: Any) -> None:
    check_logits(checkpoint(case), "cuda", TOLERANCE, count=41 if torch.cuda.is_available() else 23)


@pytest.mark.slow
@pytest.mark.parametrize("case", parameters())
def test_greedy_texts_are_those_of_the_reference(case: str, checkpoint: Any) -> None:
    folder = checkpoint(case)
    assert texts(folder, "cuda", enforce_eager=True) == texts(folder, "reference")


@pytest.mark.gpu
@pytest.mark.parametrize("case", parameters())
def test_greedy_texts_are_the_same_from_graphs(case: str, checkpoint: Any) -> None:
    folder = checkpoint(case)
    assert texts(folder, "cuda") == texts(folder, "cuda", enforce_eager=True)
