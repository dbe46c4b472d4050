"""One truth: a greedy request gives the same tokens alone, in any batch, in chunks, preempted, and with cache hits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.messages import AbortRequests
from quire.engine_request import EngineRequest
from quire.sampling_params import SamplingParams

VOCAB = 160
NUM_PROMPTS = 12


def make_prompts() -> list[list[int]]:
    """Prompts of many lengths; half of them begin with one of two common prefixes."""
    rng = random.Random(11)
    prefixes = [[rng.randrange(3, VOCAB) for _ in range(37)] for _ in range(2)]
    prompts = []
    for number in range(NUM_PROMPTS):
        tail = [rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 2, 7, 16, 33, 60]))]
        prompts.append((prefixes[number % 4] if number % 4 < 2 else []) + tail)
    prompts.append(list(prompts[0]))  # the same twice: the whole prompt can be cached
    return prompts


PROMPTS = make_prompts()
LENGTHS = [(7 * i) % 29 + 1 for i in range(len(PROMPTS))]


def make_core(folder: Path, device: str, **options: object) -> EngineCore:
    return EngineCore(EngineConfig.from_kwargs(model=str(folder), device=device, **options))


def add(core: EngineCore, request_id: str, index: int, params: SamplingParams) -> None:
    core.add(
        EngineRequest(
            request_id=request_id,
            sequence_ids=[request_id],
            prompt_token_ids=PROMPTS[index],
            sampling_params=params,
            arrival_time=0.0,
            seeds=[1000 + index],
            stop_ids=[2],
            max_tokens=LENGTHS[index],
        )
    )


def params_for(index: int) -> SamplingParams:
    """Two of three are greedy, one is sampled with a seed: both must be reproducible."""
    return SamplingParams(temperature=0.0 if index % 3 else 0.9, top_p=0.95, max_tokens=None, ignore_eos=False)


def drain(core: EngineCore, tokens: dict[str, list[int]]) -> None:
    for output in core.step().outputs:
        tokens.setdefault(output.sequence_id, []).extend(output.new_token_ids)
        assert output.error is None, output.error


@pytest.fixture(scope="module")
def alone(tiny_llama: Path) -> list[list[int]]:
    """What each request gives by itself, computed whole, without a cache, by the reference."""
    core = make_core(tiny_llama, "reference", num_gpu_blocks_override=64, enable_prefix_caching=False)
    results = []
    for index in range(len(PROMPTS)):
        tokens: dict[str, list[int]] = {}
        add(core, "x", index, params_for(index))
        while core.has_unfinished():
            drain(core, tokens)
        results.append(tokens["x"])
    assert len({tuple(result) for result in results}) > 8, "the model should not say the same thing all the time"
    return results


def scenario(seed: int) -> dict[str, object]:
    """Engine options for one run: budgets from one token up, pools that force preemption, caches on and off."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 3, 4, 16])
    longest = max(len(p) + n for p, n in zip(PROMPTS, LENGTHS, strict=True))
    tightest = -(-longest // block_size)
    return {
        "block_size": block_size,
        "num_gpu_blocks_override": rng.choice([tightest, tightest + 3, 2 * tightest, 12 * tightest]),
        "max_num_batched_tokens": rng.choice([1, 2, 5, 16, 33, 64, 2048]),
        "max_num_seqs": rng.choice([1, 2, 5, 16]),
        "enable_prefix_caching": rng.random() < 0.7,
        "long_prefill_token_threshold": rng.choice([0, 0, 4, 21]),
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
    }


@pytest.mark.parametrize(
    ("device", "seed"),
    [
        ("reference", 0),
        *(("cpu", seed) for seed in range(10)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("reference", 6), *(("cpu", s) for s in range(10, 16))]
        ),
    ],
)
def test_tokens_do_not_depend_on_company_chunks_preemption_or_cache(
    tiny_llama: Path, alone: list[list[int]], device: str, seed: int
) -> None:
    options = scenario(seed)
    core = make_core(tiny_llama, device, **options)
    rng = random.Random(seed)
    order = list(range(len(PROMPTS)))
    rng.shuffle(order)
    tokens: dict[str, list[int]] = {}
    victims: set[str] = set()
    while order or core.has_unfinished():
        for _ in range(rng.choice([0, 0, 1, 3])):
            if order:
                index = order.pop()
                add(core, f"{index}", index, params_for(index))
                if rng.random() < 0.2:  # a twin that will be aborted somewhere on its way
                    victims.add(f"twin-{index}")
                    add(core, f"twin-{index}", index, params_for(index))
        if victims and rng.random() < 0.1:
            core.abort(AbortRequests(request_ids=[victims.pop()]))
        drain(core, tokens)
        core.call("check_integrity")
    for index, expected in enumerate(alone):
        assert tokens[f"{index}"] == expected, (index, options)
    stats = core.call("stats")
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)
    assert stats["num_free_blocks"] == stats["num_blocks"]


def test_the_scenarios_do_preempt_and_do_hit_the_cache(tiny_llama: Path) -> None:
    """Guards the test above against becoming empty: starving pools preempt, repeated prompts hit."""
    longest = max(len(p) + n for p, n in zip(PROMPTS, LENGTHS, strict=True))
    core = make_core(tiny_llama, "reference", block_size=4, num_gpu_blocks_override=-(-longest // 4) + 3)
    for index in range(len(PROMPTS)):
        add(core, f"{index}", index, params_for(index))
    while core.has_unfinished():
        core.step()
    stats = core.call("stats")
    assert stats["num_preemptions"] > 0
    assert stats["prefix_cache_hits"] > 0
