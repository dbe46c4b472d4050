"""Few blocks, many requests: greedy and seeded text is that of a request alone, and in the end everything is free."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire.sampling_params import SamplingParams
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.engine_driver import EngineDriver, Request, Result, alone, mingle

VOCAB = 160
GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=1.0, top_p=0.95)
# Layers of two kinds in three groups, the last of which has fewer layers; the window is no multiple of a block.
KINDS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
TWO_KINDS: dict[str, Any] = {
    "num_hidden_layers": len(KINDS),
    "num_key_value_heads": 2,
    "use_sliding_window": True,
    "sliding_window": 7,
    "max_window_layers": 0,
    "layer_types": KINDS,
}
WINDOW = 21


def make_requests() -> list[Request]:
    """Requests whose prompts share beginnings; every other one is sampled, some have several sequences."""
    rng = random.Random(3)
    common = [rng.randrange(3, VOCAB) for _ in range(22)]
    asks = []
    for number in range(12):
        prompt = common[: rng.randrange(23)] + [rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 6, 15]))]
        seeds = tuple(range(number, number + (3 if number % 4 == 3 else 1)))
        asks.append(Request(prompt, SEEDED if number % 2 else GREEDY, rng.randrange(12, 26), seeds))
    return asks


ASKS = make_requests()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    make = tmp_path_factory.mktemp
    return {
        "full": write_checkpoint(make("full"), "llama", num_key_value_heads=2),
        "two kinds": write_checkpoint(make("two-kinds"), "qwen2", **TWO_KINDS),
        "window": write_checkpoint(make("window"), "mistral", sliding_window=WINDOW),
    }


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, dict[str, Result]]:
    """What each sequence of ASKS says alone, by folder."""
    return {name: alone(folder, ASKS) for name, folder in folders.items()}


NUM_BLOCKS = {"full": 36, "two kinds": 76, "window": 32}


@pytest.mark.parametrize(
    ("folder", "scheduler", "mode", "caching"),
    [
        ("full", "unified", "recompute", True),
        ("two kinds", "unified", "recompute", False),
        ("window", "unified", "recompute", True),
        ("two kinds", "unified", "swap", True),
        ("full", "prefill-first", "recompute", False),
        ("two kinds", "prefill-first", "recompute", False),
        ("two kinds", "prefill-first", "swap", True),
        ("window", "prefill-first", "swap", True),
        ("full", "prefill-first", "swap", False),
    ],
)
def test_starved_requests_say_what_they_say_alone(
    folders: dict[str, Path],
    expected: dict[str, dict[str, Result]],
    folder: str,
    scheduler: str,
    mode: str,
    caching: bool,
) -> None:
    driver = EngineDriver(
        folders[folder],
        num_gpu_blocks_override=NUM_BLOCKS[folder],
        preemption_mode=mode,
        swap_space="1MiB",
        scheduler=scheduler,
        max_num_batched_tokens=24 if scheduler == "unified" else 100,
        enable_prefix_caching=caching,
    )
    mingle(driver, ASKS, random.Random(1))
    assert driver.results == expected[folder]
    stats = driver.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_swapped_out > 0) == (mode == "swap")
    assert (stats.prefix_cache_hits > 0) == caching
    driver.check_all_free()


def test_only_requests_of_several_sequences_are_swapped_by_default(folders: dict[str, Path]) -> None:
    for seeds, swaps in (((5,), False), ((5, 6, 7), True)):
        asks = [Request(ask.prompt, ask.params, 24, seeds) for ask in ASKS]
        driver = EngineDriver(folders["full"], num_gpu_blocks_override=40, swap_space="1MiB")
        mingle(driver, asks, random.Random(2))
        stats = driver.stats()
        assert stats.num_preemptions > 0
        assert (stats.num_swapped_out > 0) == swaps


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_sequences_that_fill_the_pool_to_its_last_block_run(folders: dict[str, Path], mode: str) -> None:
    """No block to spare: each of three sequences ends with 8 blocks of its own, and the pool has 24."""
    ask = Request(list(range(10, 27)), SEEDED, 16, (1, 2, 3))
    others = [Request(list(range(40, 56)), GREEDY, 10, (number,)) for number in range(3)]
    asks = [*others, ask]
    expected = alone(folders["full"], asks)
    driver = EngineDriver(
        folders["full"],
        num_gpu_blocks_override=24,
        preemption_mode=mode,
        swap_space="1MiB",
        enable_prefix_caching=False,
        max_num_batched_tokens=16,
    )
    for number, item in enumerate(asks):
        driver.add(f"{number}", item)
    driver.run()
    assert driver.results == expected
    driver.check_all_free()


def test_evicted_prefixes_come_back_from_the_host(folders: dict[str, Path]) -> None:
    prompts = [[number, *range(20, 50)] for number in range(3, 9)]
    asks = [Request(prompt, GREEDY, 2) for prompt in prompts]
    expected = alone(folders["full"], asks)
    driver = EngineDriver(folders["full"], num_gpu_blocks_override=20, swap_space="1MiB")
    for turn in range(2):
        for number, ask in enumerate(asks):
            told = driver.generate(f"{turn}-{number}", ask)
            assert told == expected[f"{number}"]
            assert told.num_cached == (28 if turn else 0)
    assert driver.stats().host_cache_hits > 0
    driver.check_all_free()


@pytest.mark.parametrize(("folder", "num_windowed"), [("window", 1), ("two kinds", 2)])
def test_windows_bound_the_blocks_of_a_long_text(folders: dict[str, Path], folder: str, num_windowed: int) -> None:
    """The tokens are those of transformers; a windowed group holds what its window and a step take, and no more."""
    prompt = [7 * i % (VOCAB - 3) + 3 for i in range(60)]
    length, step = 160, 24
    driver = EngineDriver(folders[folder], max_num_batched_tokens=step)
    told = driver.generate("a", Request(prompt, GREEDY, length, stop_ids=()))
    assert told.tokens == transformers_greedy(folders[folder], prompt, length)
    whole = -(-(len(prompt) + length - 1) // 4)
    window = WINDOW if folder == "window" else TWO_KINDS["sliding_window"]
    bounded = (window + step - 2) // 4 + 2
    num_full = 3 - num_windowed if folder == "two kinds" else 0
    assert bounded < whole / 3
    assert driver.most_used <= num_full * whole + num_windowed * bounded
    driver.check_all_free()


def transformers_greedy(folder: Path, prompt: list[int], length: int) -> list[int]:
    """Return the tokens that transformers goes on with; none of them ends it."""
    import torch
    import transformers

    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        output = model.eval().generate(torch.tensor([prompt]), max_new_tokens=length, do_sample=False, pad_token_id=0)
    tokens = output[0, len(prompt) :].tolist()
    assert len(tokens) == length
    return tokens


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("folder", ["full", "two kinds"])
def test_nothing_is_held_after_random_load_with_aborts(folders: dict[str, Path], folder: str, mode: str) -> None:
    driver = EngineDriver(
        folders[folder],
        num_gpu_blocks_override=60 if folder == "two kinds" else 36,
        preemption_mode=mode,
        swap_space="1MiB",
        max_num_batched_tokens=20,
        max_num_seqs=7,
    )
    rng = random.Random(9)
    for turn in range(3):
        live = []
        for number, ask in enumerate(ASKS):
            name = f"{turn}-{number}"
            driver.add(name, ask)
            live += [name] if rng.random() < 0.5 or len(ask.seeds) == 1 else [f"{name}-{i}" for i in range(3)]
            driver.step()
            if rng.random() < 0.6:
                driver.abort(live.pop(rng.randrange(len(live))))
            driver.core.call("check_integrity")
        if turn:  # the first time whoever is left runs to the end
            driver.abort(*live)
        driver.run()
        driver.check_all_free()
    stats = driver.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_swapped_out > 0) == (mode == "swap")
