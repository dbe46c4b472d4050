"""Requests that are swapped to the host and back on a GPU say what they say undisturbed."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.sampling_params import SamplingParams
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.engine_driver import EngineDriver, Request
from tests.parity.harness import tokens

PARAMS = SamplingParams(temperature=0.0, ignore_eos=True)


def texts(folder: Path, **options: object) -> tuple[list[list[int]], int]:
    """Return what three requests say side by side, and how many were swapped out."""
    driver = EngineDriver(
        folder, "cuda", dtype="float32", block_size=4, max_model_len=32, enforce_eager=True, **options
    )
    for number in range(3):
        ask = Request(tokens(6, seed=number), PARAMS, max_tokens=9, stop_ids=())
        driver.add(f"request-{number}", ask)
    driver.run()
    swapped = driver.core.call("stats")["num_swapped_out"]
    return [driver.results[f"request-{number}"].tokens for number in range(3)], swapped


@pytest.mark.slow
def test_swapped_requests_go_on_where_they_were(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama")
    undisturbed, none = texts(folder, num_gpu_blocks_override=64)
    assert none == 0
    cramped, some = texts(
        folder, num_gpu_blocks_override=9, swap_space="1MiB", preemption_mode="swap", enable_prefix_caching=False
    )
    assert some > 0
    assert cramped == undisturbed
