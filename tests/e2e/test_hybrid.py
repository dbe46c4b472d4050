"""Models with layers that keep a state, through the whole engine: a text does not depend on what happens around it."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest

from quire.checkpoint.hf_config import load_model_info
from quire.config import EngineConfig
from quire.engine.plan import make_plan
from quire.engine.resolve import resolve_config
from quire.engine_request import EngineRequest
from quire.errors import ConfigError
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.scheduler.beam import BeamSearch
from quire.step import BeamOutput
from quire.worker.footprint import Footprint
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.engine_driver import EngineDriver, Request, Result, alone, mingle, names_of

VOCAB = 160
GREEDY = SamplingParams(temperature=0.0, logprobs=1)
SEEDED = SamplingParams(temperature=1.0, top_p=0.95)


def make_requests() -> list[Request]:
    """Requests of one to three sequences, every other one sampled; some prompts begin alike."""
    rng = random.Random(3)
    common = [rng.randrange(3, VOCAB) for _ in range(20)]
    asks = []
    for number in range(8):
        prompt = common[: rng.randrange(20)] + [rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 6, 15]))]
        seeds = tuple(range(number, number + (3 if number % 4 == 3 else 1)))
        asks.append(Request(prompt, SEEDED if number % 2 else GREEDY, rng.randrange(10, 20), seeds))
    return asks


ASKS = make_requests()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    layers = ["linear_attention", "full_attention", "linear_attention"]
    return write_checkpoint(
        tmp_path_factory.mktemp("hybrid"), "qwen3_5_text", layer_types=layers, num_hidden_layers=len(layers)
    )


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Result]:
    """What each sequence of ASKS says alone, with its prompt in one piece."""
    return alone(folder, ASKS)


@pytest.mark.parametrize(
    ("scheduler", "max_num_batched_tokens", "max_num_seqs"),
    [("unified", 10, 8), ("unified", 64, 5), ("prefill-first", 100, 8)],
)
def test_starved_and_chunked_requests_say_what_they_say_alone(
    folder: Path, expected: dict[str, Result], scheduler: str, max_num_batched_tokens: int, max_num_seqs: int
) -> None:
    """Twins that are aborted leave rows with states that others get next."""
    driver = EngineDriver(
        folder,
        num_gpu_blocks_override=26,
        scheduler=scheduler,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
    )
    mingle(driver, ASKS, random.Random(1), twins=True)
    assert {name: told for name, told in driver.results.items() if not name.startswith("twin")} == expected
    stats = driver.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_swapped_out, stats.prefix_cache_hits) == (0, 0)
    driver.check_all_free()


def test_the_reference_backend_says_the_same(folder: Path, expected: dict[str, Result]) -> None:
    driver = EngineDriver(folder, "reference", num_gpu_blocks_override=26, max_num_batched_tokens=24)
    mingle(driver, ASKS, random.Random(2))
    greedy = [name for number, ask in enumerate(ASKS) if ask.params is GREEDY for name in names_of(f"{number}", ask)]
    assert [driver.results[name].tokens for name in greedy] == [expected[name].tokens for name in greedy]


def test_a_new_engine_goes_on_where_one_has_died(folder: Path, expected: dict[str, Result]) -> None:
    first, second = EngineDriver(folder), EngineDriver(folder, max_num_batched_tokens=16)
    for number, ask in enumerate(ASKS):
        first.add(f"{number}", ask)
    for _ in range(6):
        first.step()
    for number, ask in enumerate(ASKS):
        second.take_over(first, f"{number}", ask)
    second.run()
    assert second.results == expected


def test_nothing_is_left_of_states_after_sleep(folder: Path, expected: dict[str, Result]) -> None:
    driver = EngineDriver(folder)
    driver.generate("before", ASKS[0])
    for level in (1, 2):
        driver.core.call("sleep", {"level": level})
        driver.core.call("wake_up")
        assert driver.generate(f"{level}", ASKS[0]) == expected["0"]


# Beams


def beams_of(driver: EngineDriver, prompts: list[list[int]], params: BeamSearchParams) -> dict[str, list[BeamOutput]]:
    for number, prompt in enumerate(prompts):
        driver.core.add(
            EngineRequest(
                request_id=f"{number}",
                sequence_ids=[f"{number}"],
                prompt_token_ids=prompt,
                sampling_params=SamplingParams(temperature=0.0),
                arrival_time=0.0,
                seeds=[0],
                stop_ids=[2],
                max_tokens=params.max_tokens,
                beam=params,
            )
        )
    found = {}
    while driver.core.has_unfinished():
        found |= {news.sequence_id: news.beams for news in driver.core.step().outputs if news.beams is not None}
    return found


def by_hand(driver: EngineDriver, prompt: list[int], params: BeamSearchParams) -> list[list[int]]:
    """Search with a request of its own for each beam and token."""
    search = BeamSearch(params, stop_ids=[2], max_tokens=params.max_tokens)
    running: list[list[int]] = [[]]
    one = SamplingParams(temperature=0.0, logprobs=search.num_candidates)
    asked = 0
    while not search.over:
        candidates = []
        for tokens in running:
            asked += 1
            (top,) = driver.generate(f"hand-{len(prompt)}-{asked}", Request(prompt + tokens, one, 1)).logprobs
            candidates.append((top.token_ids[1:], top.logprobs[1:]))
        running = [running[parent] + [token] for parent, token in search.advance(candidates).running]
    return [beam.token_ids for beam in search.beams()]


@pytest.mark.parametrize("num_blocks", [400, 22])
def test_beams_take_the_states_of_their_parents(folder: Path, num_blocks: int) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=10)
    prompts = [ask.prompt for ask in ASKS[:4]]
    driver = EngineDriver(folder, num_gpu_blocks_override=num_blocks, max_num_batched_tokens=32)
    found = beams_of(driver, prompts, params)
    assert (driver.stats().num_preemptions > 0) == (num_blocks < 400)
    apart = EngineDriver(folder)
    for number, prompt in enumerate(prompts):
        assert [beam.token_ids for beam in found[f"{number}"]] == by_hand(apart, prompt, params)
    driver.check_all_free()


# Options and memory


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("enable_prefix_caching", True),
        ("swap_space", "1MiB"),
        ("kv_disk_space", "1GiB"),
        ("preemption_mode", "swap"),
        ("scheduling_policy", "lpm"),
    ],
)
def test_options_that_need_older_states_are_refused(folder: Path, option: str, value: Any) -> None:
    config = EngineConfig.from_kwargs(model=str(folder), **{option: value})
    with pytest.raises(ConfigError, match=f"{option}: .* is not possible; .* keep a state") as caught:
        resolve_config(config, load_model_info(folder))
    assert caught.value.param == option


def test_prefix_caching_goes_off_with_a_line_in_the_log(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        config = resolve_config(EngineConfig.from_kwargs(model=str(folder)), load_model_info(folder))
    assert sum("prefix caching is off" in record.message for record in caplog.records) == 1
    assert (config.cache.enable_prefix_caching, config.cache.swap_space) == (False, 0)
    assert config.scheduler.preemption_mode == "recompute"
    caplog.clear()
    resolve_config(config, load_model_info(folder))
    assert not caplog.records


def test_states_are_part_of_the_plan(folder: Path) -> None:
    """Two delta nets of 4 heads of 16 x 12 and of convolutions of 4 inputs of 2 x 32 + 48 channels."""
    info = load_model_info(folder)
    few, many = (
        make_plan(EngineConfig.from_kwargs(model=str(folder), max_num_seqs=number), info, 2**31) for number in (4, 64)
    )
    assert few.state_bytes == 2 * 4 * (4 * 16 * 12 + 3 * 112)
    assert (few.step.states, many.step.states) == (4 * few.state_bytes, 64 * few.state_bytes)
    assert few.budget - many.budget > 60 * few.state_bytes


def test_the_simulator_counts_the_blocks_that_the_model_has(folder: Path) -> None:
    info = load_model_info(folder)
    config = resolve_config(EngineConfig.from_kwargs(model=str(folder)), info)
    spec, caching = Footprint(config, info).spec, info.raw["layer_types"].count("full_attention")
    assert 0 < len(spec.layers) == caching < info.num_hidden_layers == caching + len(spec.states)
