"""The whole engine on a GPU's kernels says what the CPU says, with graphs and without, in float32, greedily.

Without a GPU, Triton's interpreter and a tape (graph_tape.py) stand in, which takes minutes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.kernels.gpu.graphs import GraphOps
from quire.sampling_params import SamplingParams
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.engine_driver import EngineDriver, Request
from tests.helpers.graph_tape import TapeCapture

# Rows of padding may hold anything, and NumPy, in the interpreter, says so.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
GPU = torch.cuda.is_available()
FAMILIES = ("llama", "gemma3_text", "mixtral", "lfm2", "qwen3_5_text", "deepseek_v3", "gpt_oss")
GREEDY = SamplingParams(temperature=0.0)
SHARED = [7, 8, 9, 10, 11, 12, 13, 14, 15]
PROMPTS = ([3, 4], [*SHARED, 20], [*SHARED, 21, 22, 23], [5, 6] * 15)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "num_gpu_blocks_override": 96,
}


def said(driver: EngineDriver) -> dict[str, list[int]]:
    """Run prompts in chunks, some with a common prefix, of lengths that make the batch grow and shrink."""
    for number, prompt in enumerate(PROMPTS):
        driver.add(f"{number}", Request(prompt, GREEDY, max_tokens=3 + 2 * number, stop_ids=()))
    driver.run()
    for number, prompt in enumerate(([*SHARED, 20, 30], [3]), start=len(PROMPTS)):
        driver.add(f"{number}", Request(prompt, GREEDY, max_tokens=4, stop_ids=()))
    driver.run()
    driver.check_all_free()
    return {name: told.tokens for name, told in driver.results.items()}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["eager", "captured"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_on_a_gpu_says_what_the_cpu_says(
    tmp_path: Path, family: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path / family, family)
    cpu = EngineDriver(folder, "cpu", **OPTIONS)
    expected = said(cpu)
    cpu.close()
    if not GPU:
        monkeypatch.setattr(GraphOps, "new_capture", lambda self: TapeCapture())
    driver = EngineDriver(folder, "cuda", enforce_eager=how == "eager", **OPTIONS)
    assert said(driver) == expected
    stats = driver.core.executor.worker.backend.graph_stats()  # type: ignore[attr-defined]
    assert stats.failed == 0
    if how == "eager":
        assert stats.captured == 0
    else:
        assert stats.graphs > stats.captured > 2, "whole ones and pieces"
    driver.close()


@pytest.mark.gpu
def test_an_engine_that_idles_has_captured_what_comes(tmp_path: Path) -> None:
    driver = EngineDriver(write_checkpoint(tmp_path / "llama", "llama"), "cuda", **OPTIONS)
    driver.generate("first", Request([3, 4, 5], GREEDY, max_tokens=3, stop_ids=()))
    while driver.core.idle():
        pass
    backend = driver.core.executor.worker.backend  # type: ignore[attr-defined]
    before = backend.graph_stats()
    assert before.captured >= 2
    for name in ("a", "b"):
        driver.add(name, Request([3, 4, 5], GREEDY, max_tokens=5, stop_ids=()))
    driver.run()
    assert driver.results["a"].tokens == driver.results["b"].tokens
    assert driver.results["a"].tokens[:3] == driver.results["first"].tokens
