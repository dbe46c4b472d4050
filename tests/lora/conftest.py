"""A small model, three adapters for it, and the three models that it is with one of them merged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.engine_request import LoRARequest
from quire.outputs import RequestOutput
from tests.helpers.adapters import factors, merge, read_tensors, write_adapter
from tests.helpers.checkpoints import write_plain

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPTS = [{"prompt_token_ids": [(7 * i + j) % 160 for j in range(12 + i)]} for i in range(8)]


class World:
    """Folders of the base model, its adapters and merged models, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "base").mkdir()
        self.base = write_plain(folder / "base")
        weights = read_tensors(self.base)
        self.adapters: dict[str, Path] = {}
        self.add("few", factors(weights, ("q_proj", "v_proj"), rank=4, seed=1))
        self.add("all", factors(weights, ALL_LINEAR, rank=8, seed=2), r=8, use_rslora=True, target_modules="all-linear")
        ranks = {"down_proj": 6, "o_proj": 3, "embed_tokens": 3, "lm_head": 3}
        self.add(
            "tables",
            factors(weights, ranks, rank=ranks, seed=3),
            r=3,
            lora_alpha=5,
            rank_pattern={"down_proj": 6},
            alpha_pattern={"layers.1.mlp.down_proj": 9},
        )

    def add(self, name: str, tensors: dict[str, np.ndarray], **config: Any) -> None:
        """Write one more adapter."""
        self.adapters[name] = write_adapter(self.folder / name, tensors, **config)

    def merged(self, name: str) -> Path:
        """Return the folder of the model with an adapter merged."""
        folder = self.folder / f"merged-{name}"
        return folder if folder.exists() else merge(self.base, self.adapters[name], folder)

    def request(self, name: str | None, number: int | None = None) -> LoRARequest | None:
        """Return the `LoRARequest` for an adapter; None for None."""
        return lora_request(self.adapters, name, number)


def lora_request(adapters: dict[str, Path], name: str | None, number: int | None = None) -> LoRARequest | None:
    """Return the `LoRARequest` for one of these adapters; None for None."""
    if name is None:
        return None
    return LoRARequest(name, number or 1 + list(adapters).index(name), str(adapters[name]))


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("lora"))


def open_llm(folder: Path, device: str = "cpu", **options: Any) -> LLM:
    """Return an engine of a small model."""
    defaults = {"dtype": "float32", "num_gpu_blocks_override": 96, "max_logprobs": -1, "block_size": 4}
    return LLM(str(folder), skip_tokenizer_init=True, device=device, **{**defaults, "num_threads": 2, **options})


def answers(
    llm: LLM, loras: Sequence[LoRARequest | None], prompts: Sequence[Any] = PROMPTS, **params: Any
) -> list[RequestOutput]:
    """Generate greedily, with all log-probabilities."""
    options = {"temperature": 0.0, "max_tokens": 10, "ignore_eos": True, "logprobs": -1, **params}
    return llm.generate(prompts[: len(loras)], SamplingParams(**options), use_tqdm=False, lora_request=list(loras))


def scores(output: RequestOutput) -> np.ndarray:
    """Return log-probabilities of all tokens at each generated position, [T, V]."""
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None, output
    rows = [[position[token].logprob for token in sorted(position)] for position in logprobs if position is not None]
    return np.array(rows)


def check_same(got: RequestOutput, reference: RequestOutput) -> None:
    """Check that tokens are the same, and log-probabilities up to rounding."""
    assert got.outputs[0].error is None, got.outputs[0].error
    assert list(got.outputs[0].token_ids) == list(reference.outputs[0].token_ids)
    a, b = scores(got), scores(reference)
    np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b[np.isfinite(b)]).max())
