"""Draft tokens, right or wrong, change no output: compared with requests alone, one by one, without drafts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire import SamplingParams
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.engine_driver import EngineDriver, Request, alone, names_of

VOCAB = 160
KINDS = {
    "greedy": SamplingParams(temperature=0.0, logprobs=1),
    "sampled": SamplingParams(temperature=0.8, top_p=0.95, logit_bias={7: 1.0}),
    "penalized": SamplingParams(temperature=1.2, presence_penalty=0.5, repetition_penalty=1.2, min_tokens=3),
    "mirostat": SamplingParams(temperature=1.0, mirostat=2),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlapped": {"async_scheduling": True},
    "chunks": {"max_num_batched_tokens": 13},
    "preemption": {"num_gpu_blocks_override": 30, "swap_space": "1MiB", "async_scheduling": True},
    "prefill first": {"num_gpu_blocks_override": 30, "scheduler": "prefill-first", "max_num_batched_tokens": 512},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_key_value_heads=2)


@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_change_no_output(folder: Path, variant: str) -> None:
    rng = random.Random(variant)
    common = [rng.randrange(3, VOCAB) for _ in range(20)]
    asks = []
    for number in range(8):
        prompt = common[: rng.choice([0, 20])] + [rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 3, 9]))]
        seeds = tuple(rng.randrange(2**40) for _ in range(2 if number % 4 == 3 else 1))
        stop_ids = tuple(range(2, 2 + rng.choice([1, 12])))
        asks.append(Request(prompt, list(KINDS.values())[number % 4], rng.randrange(5, 30), seeds, stop_ids=stop_ids))
    expected = alone(folder, asks)
    driver = EngineDriver(folder, **VARIANTS[variant])
    names = [name for number, ask in enumerate(asks) for name in names_of(f"{number}", ask)]
    for number, ask in enumerate(asks):
        driver.add(f"{number}", ask)
    num_drafts = num_steps = 0
    while driver.core.has_unfinished():
        for name in names:
            sequence = driver.core.scheduler.requests.get_sequence(name)
            if sequence is not None and rng.random() < 0.7:
                done = sequence.num_tokens - sequence.num_prompt_tokens - len(sequence.draft_token_ids)
                drafts = list(expected[name].tokens[done : done + rng.randint(1, 5)])
                if drafts and rng.random() < 0.4:
                    drafts[rng.randrange(len(drafts))] = rng.randrange(VOCAB)
                num_drafts += driver.core.scheduler.propose(name, drafts)
        driver.step()
        num_steps += 1
        driver.core.call("check_integrity")
    assert {name: driver.results[name] for name in names} == expected
    assert num_drafts > 30
    if variant == "plain":
        assert num_steps < max(len(told.tokens) for told in expected.values()) + 20
    driver.check_all_free()
    driver.close()
