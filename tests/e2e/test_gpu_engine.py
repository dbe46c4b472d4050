"""Whatever a request may ask for and an engine may do with it, a GPU's kernels say what the CPU says, in float32.

Without a GPU they run in Triton's interpreter: models of a layer or two, few tokens, and most of it slow.
`test_gpu_weights.py` has the forms of weights and of caches, and models that write no texts.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.engine_request import ThinkingData
from quire.errors import ModelError
from quire.sampling_params import BeamSearchParams
from quire.tokenizer.tokenizer import Tokenizer
from tests.e2e.test_structured import CHOICE, RECORD
from tests.frontend.conftest import train_byte_level, write_folder
from tests.helpers.adapters import factors, read_tensors, write_adapter
from tests.helpers.checkpoints import safetensors_bytes, write_checkpoint
from tests.helpers.engine_driver import EngineDriver, Request, Result, names_of
from tests.helpers.server import serve
from tests.lora.conftest import World

# Rows of padding may hold anything, and NumPy, in the interpreter, says so.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "num_gpu_blocks_override": 64,
    "swap_space": 0,
    "enforce_eager": True,
}
GREEDY = SamplingParams(temperature=0.0, logprobs=1)
HOT = SamplingParams(temperature=1.0)
COMMON = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]
ask = partial(Request, max_tokens=4, stop_ids=())

DRAWS = [
    GREEDY,
    HOT.clone(logprobs=0),
    HOT.clone(top_k=5),
    HOT.clone(top_p=0.7, temperature=1.5),
    HOT.clone(min_p=0.1),
    HOT.clone(top_k=9, top_p=0.9, min_p=0.01, temperature=0.7, logprobs=2),
    GREEDY.clone(presence_penalty=1.5, frequency_penalty=0.5),
    HOT.clone(repetition_penalty=1.4),
    GREEDY.clone(logit_bias={5: 4.0, 9: -3.0}),
    GREEDY.clone(allowed_token_ids=[5, 6, 7]),
    GREEDY.clone(logprobs=3, prompt_logprobs=2),
    HOT.clone(logprob_token_ids=[3, 4]),
]
EXTRAS = [
    HOT.clone(typical_p=0.4),
    HOT.clone(top_n_sigma=1.0),
    HOT.clone(xtc_probability=1.0, xtc_threshold=0.01),
    HOT.clone(mirostat=1, mirostat_tau=2.0),
    HOT.clone(mirostat=2, mirostat_tau=2.0),
    HOT.clone(dry_multiplier=2.0, dry_base=1.5, dry_allowed_length=1),
    HOT.clone(dynatemp_range=0.5),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of one layer, without a tokenizer."""
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama", **SMALL)


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with a tokenizer, whose vocabulary is larger than the tokenizer's."""
    path = tmp_path_factory.mktemp("writer")
    end = train_byte_level().token_to_id("<|im_end|>")
    write_checkpoint(path, "llama", **{**SMALL, "vocab_size": 437}, eos_token_id=end, bos_token_id=420)
    return write_folder(path, "byte_level")


def said(driver: EngineDriver, turns: list[list[Request]]) -> dict[str, Result]:
    """Run the requests of each turn beside each other, and the turns one after the other."""
    for turn, asks in enumerate(turns):
        for number, item in enumerate(asks):
            driver.add(f"{turn}.{number}", item)
        driver.run()
    driver.check_all_free()
    return driver.results


def check_same(found: dict[str, Result], expected: dict[str, Result], *, cached: bool = True) -> None:
    """Check that the same was said, log-probabilities up to rounding; and as much came from the cache, if `cached`."""
    assert found.keys() == expected.keys()
    for name, told in expected.items():
        mine = found[name]
        assert (mine.tokens, mine.finish_reason) == (told.tokens, told.finish_reason), name
        assert not cached or mine.num_cached == told.num_cached, name
        for ours, theirs in ((mine.logprobs, told.logprobs), (mine.prompt_logprobs, told.prompt_logprobs)):
            assert [(place.token_ids, place.rank) for place in ours] == [
                (place.token_ids, place.rank) for place in theirs
            ], name
            for one, other in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-4, atol=1e-4)


def compare(model: Path, turns: list[list[Request]], *, cached: bool = True, **options: Any) -> EngineDriver:
    """Have both devices say it, compare, and return the GPU's driver, closed."""
    drivers = {}
    for device in ("cpu", "cuda"):
        given = {**OPTIONS, **options}
        if "kv_disk_dir" in given:
            given["kv_disk_dir"] = f"{given['kv_disk_dir']}/{device}"
        drivers[device] = EngineDriver(model, device, **given)
        said(drivers[device], turns)
        drivers[device].final = drivers[device].stats()  # type: ignore[attr-defined]
        drivers[device].close()
    check_same(drivers["cuda"].results, drivers["cpu"].results, cached=cached)
    return drivers["cuda"]


# What requests ask for


def test_a_step_of_many_kinds_of_draws(folder: Path) -> None:
    params = [DRAWS[0], DRAWS[5], DRAWS[6]]
    compare(folder, [[ask([3 + n, 4, 5], item, max_tokens=2, seeds=(n,)) for n, item in enumerate(params)]])


@pytest.mark.slow
@pytest.mark.parametrize("overlapped", [False, True])
def test_every_kind_of_draw(folder: Path, overlapped: bool) -> None:
    asks = [ask([3 + n, 4, 5], params, seeds=(n,)) for n, params in enumerate(DRAWS)]
    asks += [ask(COMMON, HOT.clone(top_p=0.9, logprobs=1), seeds=(1, 2, 3))]
    compare(folder, [asks], async_scheduling=overlapped)


@pytest.mark.slow
def test_samplers_of_the_host(folder: Path) -> None:
    compare(folder, [[ask([3 + n, 4, 5], params, seeds=(n,)) for n, params in enumerate(EXTRAS)]])


@pytest.mark.slow
def test_ends(folder: Path) -> None:
    """By a stop id, not before so many tokens, at once, and by the length of the context."""
    some = tuple(range(0, 64, 3))
    asks = [
        ask([3, 4, 5], GREEDY, max_tokens=9, stop_ids=some),
        ask([4, 4, 5], GREEDY.clone(min_tokens=3), max_tokens=9, stop_ids=some),
        ask([5, 4, 5], HOT.clone(min_tokens=2), max_tokens=9, stop_ids=some),
        ask([6, 4, 5], GREEDY, max_tokens=1),
        ask(list(range(3, 62)), GREEDY, max_tokens=5),
    ]
    driver = compare(folder, [asks])
    assert {told.finish_reason for told in driver.results.values()} == {"stop", "length"}


@pytest.mark.slow
def test_candidates_beams_and_words_that_are_forbidden(writer: Path) -> None:
    """Through `LLM`."""
    found = []
    for device in ("cpu", "cuda"):
        with LLM(str(writer), device=device, **OPTIONS) as llm:
            [letter] = llm.get_tokenizer().encode("a")
            likely = GREEDY.clone(max_tokens=2, logit_bias={letter: 100.0})
            params = [likely, likely.clone(bad_words=["a"]), HOT.clone(max_tokens=2, n=1, best_of=2, seed=5)]
            outputs = llm.generate(["The quick"] * 3, params, use_tqdm=False)
            beams = llm.beam_search(["The quick"], BeamSearchParams(beam_width=2, max_tokens=2, ignore_eos=True))
        texts = [item.token_ids for output in outputs for item in output.outputs]
        assert texts[0] == [letter] * 2 and letter not in texts[1]
        found.append((texts, [beam.tokens for beam in beams[0].sequences]))
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("jump_forward", [True, False])
def test_forms(writer: Path, jump_forward: bool) -> None:
    tokenizer = Tokenizer.from_folder(writer)
    stop = (tokenizer.eos_token_id or 0,)
    prompt = tokenizer.encode("The fox")
    numbers = 'start: /[0-9]{2,3}/ " " /[a-c]{2}/'
    kinds = [(CHOICE, GREEDY), (numbers, HOT.clone(top_k=20)), (CHOICE, HOT), (numbers, GREEDY)]
    asks = [
        ask(prompt, params, max_tokens=30, stop_ids=stop, grammar=grammar, seeds=(n,))
        for n, (grammar, params) in enumerate(kinds)
    ]
    if jump_forward:
        asks.append(ask(prompt, HOT, max_tokens=40, stop_ids=stop, grammar=RECORD, seeds=(7,)))
    # When a grammar is ready decides which of them find the prompt in the cache.
    driver = compare(writer, [asks], cached=False, jump_forward=jump_forward)
    assert tokenizer.decode(driver.results["0.0"].tokens) in ("positive, without doubt", "negative")


@pytest.mark.slow
def test_reasoning_that_must_end(writer: Path) -> None:
    tokenizer = Tokenizer.from_folder(writer)
    start, end = tokenizer.encode("<think>"), tokenizer.encode("\n</think>")
    thinking = ThinkingData(start, end, 2, open=True)
    asks = [ask([5, 6], params, max_tokens=len(end) + 4, thinking=thinking) for params in (GREEDY, HOT)]
    driver = compare(writer, [asks])
    assert driver.results["0.0"].tokens[2 : 2 + len(end)] == end


# What an engine does with them


def many() -> list[Request]:
    """Requests that need more blocks together than the tight engines below have."""
    asks = [ask([*COMMON, 20 + n], params, max_tokens=7) for n, params in enumerate((GREEDY, HOT, GREEDY))]
    return [*asks, ask([3, 4, 5], HOT, seeds=(1, 2), max_tokens=7)]


TIGHT = {"num_gpu_blocks_override": 12, "max_model_len": 32}
ROADS: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 5, "max_num_seqs": 5},
    "recompute": {**TIGHT, "preemption_mode": "recompute"},
    "swap": {**TIGHT, "preemption_mode": "swap", "swap_space": "1MiB"},
    "prompts first": {**TIGHT, "scheduler": "prefill-first", "max_num_batched_tokens": 64},
    "one by one": {"async_scheduling": False},
    "by priority, without names": {"scheduling_policy": "priority", "enable_prefix_caching": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("road", ROADS)
def test_roads(folder: Path, road: str) -> None:
    stats = compare(folder, [many()], **ROADS[road]).final  # type: ignore[attr-defined]
    assert road not in ("recompute", "prompts first") or stats.num_preemptions
    assert road != "swap" or stats.num_swapped_out


def test_prefixes_are_found_inside_blocks(folder: Path) -> None:
    asks = [[ask([*COMMON, 20], GREEDY, max_tokens=1)], [ask([*COMMON[:10], 30], GREEDY, max_tokens=1)]]
    driver = compare(folder, asks)
    assert driver.results["1.0"].num_cached == 10


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_prefixes_come_back_from_other_tiers(folder: Path, tmp_path: Path, tier: str) -> None:
    more = {"swap_space": "1MiB"} if tier == "host" else {"kv_disk_space": "1MiB", "kv_disk_dir": str(tmp_path)}
    others = [ask([30 + n, *range(3, 30)], GREEDY, max_tokens=1) for n in range(2)]
    turns = [[ask([*COMMON, 20], GREEDY, max_tokens=2)], others[:1], others[1:], [ask([*COMMON, 20], GREEDY)]]
    driver = compare(folder, turns, num_gpu_blocks_override=9, max_model_len=32, **more)
    stats = driver.final  # type: ignore[attr-defined]
    assert (stats.host_cache_hits if tier == "host" else stats.disk_cache_hits) > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_groups_of_windows(tmp_path: Path, family: str) -> None:
    path = write_checkpoint(tmp_path, family, vocab_size=64)
    asks = [ask(list(range(3, 25)), GREEDY), ask([*range(3, 16), 40], HOT), ask([9, 9], GREEDY)]
    again = [ask([*range(3, 25), 30], GREEDY)]
    driver = compare(path, [asks, again], max_num_batched_tokens=16)
    assert driver.results["1.0"].num_cached


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3", "lfm2", "qwen3_5_text"])
def test_company_changes_no_bit_if_it_is_asked(tmp_path: Path, family: str) -> None:
    """In chunks, beside others, with a prefix from the cache (none so short with states): the very same
    log-probabilities.
    """
    path = write_checkpoint(tmp_path, family, vocab_size=64)
    options = {**OPTIONS, "batch_invariant": True}
    asks = [replace(item, params=item.params.clone(logprobs=2)) for item in many()]
    expected: dict[str, Result] = {}
    single = EngineDriver(path, "cuda", enable_prefix_caching=False, **options)
    for number, item in enumerate(asks):
        for index, name in enumerate(names_of(f"{number}", item)):
            expected[name] = single.generate(name, item.single(index))
    single.close()
    driver = EngineDriver(path, "cuda", **{**options, "max_num_batched_tokens": 13})
    for _ in range(2):
        driver.results.clear()
        for number, item in enumerate(asks):
            driver.add(f"{number}", item)
            driver.step()
        driver.run()
        assert driver.results == expected
    assert bool(driver.results["0"].num_cached) == (family not in ("lfm2", "qwen3_5_text"))
    driver.close()


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
def test_what_was_said_before_a_sleep_is_said_after_it(folder: Path, level: int) -> None:
    item = ask(COMMON, GREEDY)
    driver = EngineDriver(folder, "cuda", **OPTIONS)
    before = driver.generate("before", item)
    assert driver.core.call("sleep", {"level": level})["level"] == level
    driver.core.call("wake_up")
    after = driver.generate("after", item)
    assert after == before and after.num_cached == 0
    driver.check_all_free()
    driver.close()


@pytest.mark.slow
def test_numbers_that_are_none_end_their_own_request_only(folder: Path, tmp_path: Path) -> None:
    """A token whose vector is NaN, in a batch with others; weights that hold such are refused unless asked for."""
    tensors = read_tensors(folder)
    tensors["model.embed_tokens.weight"][33] = np.nan
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    with pytest.raises(ModelError, match="embed_tokens"):
        EngineDriver(tmp_path, "cuda", **OPTIONS)
    driver = EngineDriver(tmp_path, "cuda", allow_nonfinite=True, **OPTIONS)
    fine = ask([3, 4, 5], GREEDY.clone(logit_bias={33: -100.0}))  # it must not choose that token itself
    expected = driver.generate("alone", fine)
    driver.add("fine", fine)
    driver.add("bad", ask([3, 33, 5], GREEDY))
    errors = {}
    while driver.core.has_unfinished():
        for news in driver.core.step().outputs:
            driver.results.setdefault(news.sequence_id, Result()).tokens += news.new_token_ids
            if news.error is not None:
                errors[news.sequence_id] = news.error.message
    assert list(errors) == ["bad"] and "finite" in errors["bad"]
    assert driver.results["fine"].tokens == expected.tokens
    driver.check_all_free()
    driver.close()


@pytest.mark.slow
def test_adapters_come_and_go(folder: Path, tmp_path: Path) -> None:
    """Three of them take turns in two places, beside the model itself."""
    world = World.__new__(World)
    weights = read_tensors(folder)
    world.adapters = {
        name: write_adapter(tmp_path / name, factors(weights, suffixes, rank=rank, seed=rank), r=rank)
        for name, suffixes, rank in (
            ("few", ("q_proj", "v_proj"), 2),
            ("all", ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), 3),
            ("tables", ("down_proj", "embed_tokens", "lm_head"), 4),
        )
    }
    names = ["few", None, "all", "tables", "few"]
    prompts = [{"prompt_token_ids": [3 + n, 4, 5, 6]} for n in range(len(names))]
    found = []
    for device in ("cpu", "cuda"):
        options = {**OPTIONS, "skip_tokenizer_init": True, "enable_lora": True, "max_loras": 2}
        with LLM(str(folder), device=device, **options) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
            loras = [world.request(name) for name in names]
            outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=loras)
            llm.sleep(2)
            llm.wake_up()
            outputs += llm.generate(prompts[:1], params, use_tqdm=False, lora_request=loras[:1])
        assert [output.outputs[0].error for output in outputs] == [None] * len(outputs)
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
    assert found[1][0] == found[1][-1]


@pytest.mark.slow
def test_an_engine_in_a_process_of_its_own(folder: Path) -> None:
    async def run(device: str) -> list[int]:
        options = {**OPTIONS, "skip_tokenizer_init": True, "engine": "process"}
        async with AsyncLLM(model=str(folder), device=device, **options) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
            outputs = [output async for output in llm.generate({"prompt_token_ids": [3, 4, 5]}, params)]
        return outputs[-1].outputs[0].token_ids

    assert asyncio.run(run("cuda")) == asyncio.run(run("cpu"))


@pytest.mark.slow
def test_over_http(writer: Path, tmp_path: Path) -> None:
    body = {"model": "it", "prompt": "The quick", "max_tokens": 3, "temperature": 0, "logprobs": 1}
    form = {"structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 8, "temperature": 0}
    limits = ["--max-model-len", "64", "--num-gpu-blocks-override", "32", "--max-num-batched-tokens", "32"]
    found = []
    for device in ("cpu", "cuda"):
        words = [str(writer), "--served-model-name", "it", "--dtype", "float32", "--device", device]
        with serve(tmp_path / device, *words, *limits, "--swap-space", "0", "--max-num-seqs", "4") as server:
            texts = []
            for asked in (body, {**body, **form}):
                status, answer = server.post("/v1/completions", asked)
                assert status == 200, answer
                texts.append((answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]))
            found.append(texts)
            if device == "cuda":
                assert server.metric("quire:step_host_gap_seconds_total") >= 0
    assert found[0] == found[1]
    assert found[1][1][0] in ("yes", "no")
