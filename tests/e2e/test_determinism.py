"""The same request gives the same tokens and log-probabilities, bit by bit, whatever else the engine does.

Alone; in random company; in chunks; preempted and computed again; swapped; forked; with its beginning from the cache,
ending inside a block too; from the host, from disk. Blocks and threads are those of the run compared with: what shape
the cache has, and how wide the machine's instructions are, may show in the last bits.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.checkpoint.tensor import HostTensor
from quire.frontend.input_processor import child_seed
from quire.kernels.cpu import threads
from quire.kernels.create import create_backend
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.engine_driver import EngineDriver, Request, Result, alone, mingle, names_of

VOCAB = 160
BLOCK_SIZE = 8
GREEDY = SamplingParams(temperature=0.0, logprobs=3)
SEEDED = SamplingParams(temperature=1.0, top_p=0.95, logprobs=0)
FANCY = SamplingParams(
    temperature=1.3, top_k=40, repetition_penalty=1.2, frequency_penalty=0.3, min_tokens=3, logprobs=5
)
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, int8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4", "kv_cache_dtype": "int8"},
    "int8-weight-only": {"dtype": "bfloat16", "quantization": "int8-weight-only"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose sizes are no multiples of the tiles of any kernel."""
    return write_checkpoint(
        tmp_path_factory.mktemp("llama"),
        "llama",
        hidden_size=96,
        intermediate_size=200,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )


@pytest.fixture
def both_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the threads share even the work of a tiny model."""
    monkeypatch.setattr(threads, "SMALL_WORK", 0)


def make_requests(seed: int, count: int = 7, longest: int = 160) -> list[Request]:
    """Requests of all kinds, many of which begin alike; some prompts are longer than a segment of attention."""
    rng = random.Random(seed)
    common = [rng.randrange(3, VOCAB) for _ in range(longest)]
    asks = []
    for number in range(count):
        shared = rng.choice([0, rng.randrange(40), rng.randrange(40), rng.randrange(longest)])
        prompt = common[:shared] + [rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 2, 7, 16, 30]))]
        params = (GREEDY, SEEDED, FANCY)[number % 3]
        if number % 5 == 1:
            params = params.clone(prompt_logprobs=number % 3)
        seeds = tuple(rng.randrange(2**40) for _ in range(3 if number % 4 == 2 else 1))
        asks.append(Request(prompt, params, rng.randrange(4, 30), seeds))
    return asks


def roads(disk: Path, num_blocks: int) -> dict[str, dict[str, Any]]:
    """Return engine options under which requests are computed in other ways than alone.

    The tiers are small: every block of theirs is looked at after each step.
    """
    tight = {"num_gpu_blocks_override": num_blocks, "swap_space": 0}
    return {
        "chunks": {"max_num_batched_tokens": 13, "swap_space": 0},
        "recompute": {**tight, "preemption_mode": "recompute", "max_num_batched_tokens": 40},
        "swap": {**tight, "preemption_mode": "swap", "swap_space": "4MiB", "enable_prefix_caching": False},
        "host": {**tight, "swap_space": "4MiB", "max_num_batched_tokens": 64},
        "prompts first": {**tight, "swap_space": "4MiB", "scheduler": "prefill-first", "max_num_batched_tokens": 512},
        "disk": {**tight, "kv_disk_space": "64MiB", "kv_disk_dir": str(disk), "max_num_batched_tokens": 99},
    }


def go(driver: EngineDriver, asks: list[Request], expected: dict[str, Result], seed: int, turns: int) -> int:
    """Run `asks` some times, beside each other at random; return how many began inside a block of the cache."""
    num_inside = 0
    for turn in range(turns):
        driver.results.clear()
        mingle(driver, asks, random.Random(seed + turn), twins=True)
        for number, ask in enumerate(asks):
            for name in names_of(f"{number}", ask):
                assert driver.results[name] == expected[name], name
        num_inside += sum((told.num_cached or 0) % BLOCK_SIZE > 0 for told in driver.results.values())
    driver.check_all_free()
    return num_inside


def check_all_roads(
    model: Path, asks: list[Request], disk: Path, device: str, options: dict[str, Any], num_blocks: int
) -> dict[str, int]:
    """Compare every road with the requests alone; return how often what makes each of them special happened."""
    happened = {}
    common = {"block_size": BLOCK_SIZE, "num_threads": 2, **options}
    expected = alone(model, asks, device, max_num_batched_tokens=512, **{**common, "num_threads": 1})
    for road, settings in roads(disk, num_blocks).items():
        driver = EngineDriver(model, device, **{**common, **settings})
        num_inside = go(driver, asks, expected, len(asks), turns=2 if road in ("chunks", "host", "disk") else 1)
        stats = driver.stats()
        driver.close()
        counts = {
            "chunks": num_inside,
            "recompute": stats.num_preemptions - stats.num_swapped_out,
            "swap": stats.num_swapped_out,
            "host": stats.host_cache_hits,
            "prompts first": stats.num_preemptions,
            "disk": stats.disk_cache_hits,
        }
        happened[road] = counts[road]
    return happened


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "bfloat16, int8 cache" else (pytest.mark.slow,))
        for name in FORMATS
        if name != "int8-weight-only"
    ],
)
def test_no_road_changes_a_bit(both_threads: None, folder: Path, tmp_path: Path, name: str) -> None:
    happened = check_all_roads(folder, make_requests(1), tmp_path, "cpu", FORMATS[name], 36)
    assert all(happened.values()), happened


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 5))
@pytest.mark.parametrize("name", FORMATS)
def test_no_road_changes_a_bit_of_many(both_threads: None, folder: Path, tmp_path: Path, name: str, seed: int) -> None:
    happened = check_all_roads(folder, make_requests(seed, 30), tmp_path, "cpu", FORMATS[name], 60)
    assert any(happened.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float32", "int4"])
def test_no_road_changes_a_bit_of_the_reference_if_it_is_asked(tmp_path: Path, name: str) -> None:
    """A GPT-2 with 203 inner features: without the option, torch's vectorized `tanh` betrays where a row stands."""
    folder = write_checkpoint(tmp_path / "gpt2", "gpt2", n_inner=203)
    options = {**FORMATS[name], "batch_invariant": True, "num_threads": 1}
    happened = check_all_roads(folder, make_requests(2, 7, 30), tmp_path / "disk", "reference", options, 16)
    assert all(happened.values()), happened


def test_blocks_of_the_reference_with_and_without_the_option_are_kept_apart() -> None:
    """They may differ in their last bits: the disk tier goes by `arithmetic`."""
    names = {create_backend("reference", "float32", "float32", batch_invariant=on).arithmetic for on in (True, False)}
    assert len(names) == 2


# Where a hit ends


def warm(folder: Path, **options: Any) -> EngineDriver:
    return EngineDriver(folder, **{"block_size": 16, "num_gpu_blocks_override": 100, **options})


@pytest.mark.parametrize(
    ("unit", "cached"), [(1, {20: 20, 24: 24, 31: 31, 17: 16, 40: 32}), (4, {20: 20, 27: 24}), (16, {24: 16, 40: 32})]
)
def test_a_hit_ends_where_two_prompts_part(folder: Path, unit: int, cached: dict[int, int]) -> None:
    """`cached`: tokens in common with a cached prompt of 32 -> tokens that are not computed again.

    Less than an eighth of a block is not worth a copy.
    """
    prompt = list(range(5, 37))
    driver = warm(folder, prefix_match_unit=unit)
    driver.generate("first", Request(prompt, GREEDY, 1))
    for common, expected in cached.items():
        other = Request([*prompt[:common], *range(50 + common, 60 + common)], GREEDY)
        told = driver.generate(f"{common}", other)
        assert told.num_cached == expected
        assert told == alone(folder, [other], block_size=16)["0"]
    driver.check_all_free()


@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_a_second_turn_goes_on_inside_a_block_of_the_first_ones_output(folder: Path, params: SamplingParams) -> None:
    driver = warm(folder)
    prompt = list(range(5, 26))
    first = driver.generate("first", Request(prompt, params, 10, stop_ids=()))
    # The last token was sampled and never computed: 30 of 31 are cached, one whole block and 14 tokens.
    second = Request([*prompt, *first.tokens, 7, 8, 9, 10, 11], params, 12, stop_ids=())
    told = driver.generate("second", second)
    assert told.num_cached == len(prompt) + len(first.tokens) - 1 == 30
    assert told == alone(folder, [second], block_size=16)["0"]
    third = Request([*second.prompt, *told.tokens, 12], params, 12, stop_ids=())
    again = driver.generate("third", third)
    assert again.num_cached == len(third.prompt) - 2
    assert again == alone(folder, [third], block_size=16)["0"]
    driver.check_all_free()


def test_the_first_turn_is_not_spoiled_by_who_goes_on_from_it(folder: Path) -> None:
    """Copies, not blocks, are written: both continuations of a half-full block, and itself again, are as alone."""
    prompt = list(range(5, 28))
    asks = [Request([*prompt, *tail], GREEDY) for tail in ([40], [50, 51], [60, 61, 62], [70])]
    expected = alone(folder, asks, block_size=16)
    driver = warm(folder)
    driver.generate("first", Request([*prompt, 30], GREEDY, 2))
    for number, ask in enumerate(asks):
        driver.add(f"{number}", ask)
    driver.run()
    for name, told in expected.items():
        assert driver.results[name] == told
        assert driver.results[name].num_cached == len(prompt)


def test_salts_part_what_is_cached(folder: Path) -> None:
    driver = warm(folder)
    asks = [Request(list(range(5, 45)), GREEDY, 4, salt=salt) for salt in (None, "a", "b", "a", None)]
    told = [driver.generate(f"{number}", ask) for number, ask in enumerate(asks)]
    assert [item.num_cached for item in told] == [0, 0, 0, 39, 39]
    assert all(item == told[0] for item in told)


# Forks and seeds


def test_each_of_n_is_a_request_with_a_seed_derived_from_theirs(folder: Path) -> None:
    prompts = [{"prompt_token_ids": list(range(first, first + 19))} for first in (10, 60)]
    params = SamplingParams(temperature=1.0, seed=77, max_tokens=20, logprobs=2, ignore_eos=True)
    common = {"skip_tokenizer_init": True, "block_size": 8, "num_gpu_blocks_override": 200}
    with LLM(str(folder), **common) as llm:
        singles = [
            llm.generate(prompt, params.clone(seed=child_seed(77, index)), use_tqdm=False)[0].outputs[0]
            for prompt in prompts
            for index in range(4)
        ]
    assert len({tuple(item.token_ids) for item in singles}) == 8
    variants: list[dict[str, Any]] = [
        {},
        {"num_gpu_blocks_override": 20, "preemption_mode": "recompute", "enable_prefix_caching": False},
        {"num_gpu_blocks_override": 18, "preemption_mode": "swap", "swap_space": "16MiB"},
        {"max_num_batched_tokens": 9},
    ]
    for options in variants:
        with LLM(str(folder), **{**common, **options}) as llm:
            together = llm.generate(prompts, params.clone(n=4), use_tqdm=False)
            preempted = [output.metrics.num_preemptions for output in together]
        assert any(preempted) == ("preemption_mode" in options), options
        found = [(item.token_ids, item.logprobs) for output in together for item in output.outputs]
        assert found == [(item.token_ids, item.logprobs) for item in singles], options


def test_draws_depend_on_seed_and_position_and_on_nothing_else(folder: Path) -> None:
    """The same seed twice in one batch, at different times, in other company, says the same; another seed does not."""
    ask = Request(list(range(9, 30)), SEEDED, 16, (5,), stop_ids=())
    driver = EngineDriver(folder, max_num_batched_tokens=20)
    driver.add("a", ask)
    driver.step()
    driver.add("b", replace(ask, seeds=(6,)))
    driver.add("c", ask)
    driver.add("d", Request(list(range(60, 90)), FANCY, 30, (5, 6)))
    for _ in range(7):
        driver.step()
    driver.abort("d")
    driver.add("e", replace(ask, seeds=(6, 5)))
    driver.run()
    told = driver.results
    assert told["a"] == told["c"] == told["e-1"]
    assert told["b"] == told["e-0"]
    assert told["a"].tokens != told["b"].tokens
    # A text that goes on from its own first half draws at the same positions, and so goes on in the same way.
    half = replace(ask, prompt=[*ask.prompt, *told["a"].tokens[:8]], max_tokens=8)
    assert driver.generate("f", half).tokens == told["a"].tokens[8:]


# Ops


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_the_rows_of_a_batch_are_computed_as_if_alone(both_threads: None, device: str) -> None:
    """With the option; torch's own `silu` gives other bits where a row's elements stand elsewhere in a vector."""
    backend = create_backend(device, "float32", "float32", 2, batch_invariant=True)
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((37, 53)).astype(np.float32) * 3

    def tensor(*shape: int) -> HostTensor:
        return HostTensor(rng.standard_normal(shape).astype(np.float32), "float32")

    weight = backend.pack_linear([tensor(41, 53)], [tensor(41)])
    gated = backend.pack_linear([tensor(31, 53), tensor(31, 53)], gated=True)
    scale, shift = backend.vector(tensor(53)), backend.vector(tensor(53))
    ops: dict[str, Callable[[Any], Any]] = {
        "linear": lambda x: backend.linear(x, weight),
        "gated_linear": lambda x: backend.gated_linear(x, gated, "silu"),
        "rms_norm": lambda x: backend.rms_norm(x, scale, 1e-5),
        "layer_norm": lambda x: backend.layer_norm(x, scale, shift, 1e-5),
        **{name: partial(backend.activation, activation=name) for name in ("silu", "gelu", "gelu_tanh", "quick_gelu")},
    }
    for name, op in ops.items():
        together = backend.to_numpy(op(backend.from_numpy(rows.copy()))).copy()
        for first, last in ((0, 1), (7, 8), (36, 37), (5, 20)):
            apart = backend.to_numpy(op(backend.from_numpy(rows[first:last].copy())))
            assert np.array_equal(apart, together[first:last]), name
    found = backend.top_logprobs(backend.from_numpy(rows), backend.from_numpy(np.arange(37)), 5)
    for row in range(37):
        one = backend.top_logprobs(backend.from_numpy(rows[row : row + 1]), backend.from_numpy(np.array([row])), 5)
        assert np.array_equal(one.logprobs[0], found.logprobs[row])
