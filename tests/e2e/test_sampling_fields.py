"""Every field of `SamplingParams` has its effect in a whole engine, or is refused by name, and no road changes it.

The table has one check for each field: adding a field without one fails.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM
from quire.errors import ConfigError, GenerationError, RequestError, UnsupportedError
from quire.outputs import FlatLogprobs, RequestOutput
from quire.sampling_params import BeamSearchParams, SamplingParams
from tests.helpers.engine_driver import EngineDriver, Request, alone, mingle

PROMPT = "KING RICHARD:\nGood morrow to my lord. Good morrow to my"
MAX_TOKENS = 12
PLUGIN = "only=tests.helpers.logits_processors:only"


class Rig:
    """The demo model, and what it says without any options."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.vocab_size = llm.vocab_size
        eos = llm.get_tokenizer().eos_token_id
        assert eos is not None
        self.eos = eos
        self.plain = self.run()
        self.prompt_ids = self.plain.prompt_token_ids
        self.greedy = self.run(temperature=0.0)

    def run(self, **fields: Any) -> RequestOutput:
        """Generate with these fields; seed 3 and 12 tokens unless they say otherwise."""
        params = SamplingParams(**{"seed": 3, "max_tokens": MAX_TOKENS, **fields})
        [output] = self.llm.generate([PROMPT], params, use_tqdm=False)
        return output


def tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def text(output: RequestOutput) -> str:
    return output.outputs[0].text


def reason(output: RequestOutput) -> str | None:
    return output.outputs[0].finish_reason


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with LLM(
        max_model_len=256, max_num_seqs=8, num_gpu_blocks_override=96, max_logprobs=-1, logits_processors=[PLUGIN]
    ) as llm:
        yield Rig(llm)


def changes(**fields: Any) -> Callable[[Rig], None]:
    """Other tokens than without, the same each time."""

    def check(rig: Rig) -> None:
        first = rig.run(**fields)
        assert tokens(first) != tokens(rig.plain)
        assert tokens(rig.run(**fields)) == tokens(first)

    return check


def as_greedy(**fields: Any) -> Callable[[Rig], None]:
    """So strict that only the likeliest token is left."""

    def check(rig: Rig) -> None:
        assert tokens(rig.run(**fields)) == tokens(rig.greedy) != tokens(rig.plain)

    return check


def changes_greedy(**fields: Any) -> Callable[[Rig], None]:
    def check(rig: Rig) -> None:
        assert tokens(rig.run(temperature=0.0, **fields)) != tokens(rig.run(temperature=0.0))

    return check


def matters(base: dict[str, Any], **fields: Any) -> Callable[[Rig], None]:
    """Other tokens than with `base` alone."""

    def check(rig: Rig) -> None:
        assert tokens(rig.run(**base, **fields)) != tokens(rig.run(**base))

    return check


def refused(kind: type[RequestError] = UnsupportedError, **fields: Any) -> Callable[[Rig], None]:
    def check(rig: Rig) -> None:
        with pytest.raises(kind) as caught:
            rig.run(**fields)
        assert caught.value.param in fields and caught.value.param in caught.value.message

    return check


def check_n(rig: Rig) -> None:
    outputs = rig.run(n=3).outputs
    assert len({tuple(item.token_ids) for item in outputs}) == 3 and outputs[0].token_ids == tokens(rig.plain)


def check_best_of(rig: Rig) -> None:
    everyone = rig.run(n=4, logprobs=0).outputs
    best = max(everyone, key=lambda item: item.cumulative_logprob or -math.inf)
    assert tokens(rig.run(best_of=4)) == best.token_ids


def check_stop(rig: Rig) -> None:
    word = text(rig.greedy).split()[1]
    output = rig.run(temperature=0.0, stop=[word])
    assert reason(output) == "stop" and text(output) == text(rig.greedy).split(word)[0]


def check_include_stop(rig: Rig) -> None:
    word = text(rig.greedy).split()[1]
    assert text(rig.run(temperature=0.0, stop=[word], include_stop_str_in_output=True)).endswith(word)


def check_stop_token_ids(rig: Rig) -> None:
    last = tokens(rig.greedy)[3]
    output = rig.run(temperature=0.0, stop_token_ids=[last])
    assert reason(output) == "stop" and tokens(output) == tokens(rig.greedy)[: tokens(rig.greedy).index(last) + 1]


def check_bad_words(rig: Rig) -> None:
    word = text(rig.greedy).split()[0]
    assert word not in text(rig.run(temperature=0.0, bad_words=[word]))


def check_ignore_eos(rig: Rig) -> None:
    bias = {rig.eos: 100.0}
    assert reason(rig.run(logit_bias=bias)) == "stop"
    output = rig.run(logit_bias=bias, ignore_eos=True)
    assert reason(output) == "length" and len(tokens(output)) == MAX_TOKENS


def check_max_tokens(rig: Rig) -> None:
    assert tokens(rig.run(max_tokens=5)) == tokens(rig.plain)[:5]


def check_min_tokens(rig: Rig) -> None:
    assert len(tokens(rig.run(logit_bias={rig.eos: 100.0}, min_tokens=5))) == 6


def check_logprobs(rig: Rig) -> None:
    for asked, count in ((0, 1), (3, 3), (True, 1), (-1, rig.vocab_size)):
        entries = rig.run(logprobs=asked).outputs[0].logprobs
        assert entries is not None and len(entries) == MAX_TOKENS
        for token, entry in zip(tokens(rig.plain), entries, strict=True):
            assert token in entry and count <= len(entry) <= count + 1
        if asked == -1:
            assert sum(math.exp(item.logprob) for item in entries[0].values()) == pytest.approx(1.0, abs=1e-5)


def check_prompt_logprobs(rig: Rig) -> None:
    for asked, count in ((0, 1), (2, 2), (-1, rig.vocab_size)):
        entries = rig.run(prompt_logprobs=asked).prompt_logprobs
        assert entries is not None and len(entries) == len(rig.prompt_ids)
        for token, entry in list(zip(rig.prompt_ids, entries, strict=True))[1:]:
            assert token in entry and count <= len(entry) <= count + 1


def check_prompt_logprob_start(rig: Rig) -> None:
    whole = rig.run(prompt_logprobs=1).prompt_logprobs
    for start in (0, 1, 2, 7, len(rig.prompt_ids) - 1):
        entries = rig.run(prompt_logprobs=1, prompt_logprob_start=start).prompt_logprobs
        assert entries[max(start, 1) :] == whole[max(start, 1) :]
        assert entries[: max(start, 1)] == [None] * max(start, 1)


def check_logprob_token_ids(rig: Rig) -> None:
    whole = rig.run(logprobs=-1).outputs[0].logprobs
    entries = rig.run(logprob_token_ids=[9, 700]).outputs[0].logprobs
    for token, entry, reference in zip(tokens(rig.plain), entries, whole, strict=True):
        assert entry.keys() == {token, 9, 700}
        assert entry[token].rank == reference[token].rank and entry[9].rank in (None, reference[9].rank)
        for name in entry:
            assert entry[name].logprob == pytest.approx(reference[name].logprob, abs=1e-4)


def check_flat_logprobs(rig: Rig) -> None:
    flat = rig.run(logprobs=2, prompt_logprobs=1, flat_logprobs=True)
    full = rig.run(logprobs=2, prompt_logprobs=1)
    assert isinstance(flat.outputs[0].logprobs, FlatLogprobs) and isinstance(flat.prompt_logprobs, FlatLogprobs)
    assert list(flat.outputs[0].logprobs) == full.outputs[0].logprobs
    assert list(flat.prompt_logprobs)[1:] == full.prompt_logprobs[1:]


def check_logit_bias(rig: Rig) -> None:
    assert tokens(rig.run(logit_bias={77: 100.0})) == [77] * MAX_TOKENS


def check_allowed_token_ids(rig: Rig) -> None:
    assert set(tokens(rig.run(allowed_token_ids=[77, 78]))) <= {77, 78}


def check_truncate_prompt_tokens(rig: Rig) -> None:
    assert rig.run(truncate_prompt_tokens=4).prompt_token_ids == rig.prompt_ids[-4:]


def check_form(name: str) -> Callable[[Rig], None]:
    def check(rig: Rig) -> None:
        assert text(rig.run(**{name: {"choice": ["yes", "no"]}})) in ("yes", "no")

    return check


def check_beams(**fields: Any) -> Callable[[Rig], None]:
    """The best of the beams that a search of its own finds; all of them count."""

    def check(rig: Rig) -> None:
        output = rig.run(n=2, best_of=4, use_beam_search=True, **fields)
        search = BeamSearchParams(beam_width=4, max_tokens=MAX_TOKENS, **fields)
        [found] = rig.llm.beam_search([PROMPT], search)
        assert [PROMPT + item.text for item in output.outputs] == [beam.text for beam in found.sequences[:2]]
        assert output.num_generated_tokens > sum(len(item.token_ids) for item in output.outputs)

    return check


def check_detokenize(rig: Rig) -> None:
    output = rig.run(detokenize=False)
    assert (text(output), tokens(output)) == ("", tokens(rig.plain))


def check_special_tokens(**fields: bool) -> Callable[[Rig], None]:
    def check(rig: Rig) -> None:
        tokenizer = rig.llm.get_tokenizer()
        special = next(index for index in sorted(tokenizer.special_ids) if index != rig.eos)
        bias = {"logit_bias": {special: 100.0}, "ignore_eos": True}
        assert text(rig.run(**bias)) == ""
        name = tokenizer.id_to_token(special)
        assert text(rig.run(**bias, skip_special_tokens=False, **fields)) == name * MAX_TOKENS

    return check


def check_skip_reading_prefix_cache(rig: Rig) -> None:
    assert rig.run().num_cached_tokens > 0
    output = rig.run(skip_reading_prefix_cache=True)
    assert output.num_cached_tokens == 0 and tokens(output) == tokens(rig.plain)


def check_skip_clone(rig: Rig) -> None:
    assert tokens(rig.run(skip_clone=True)) == tokens(rig.plain)


def check_repetition_detection(rig: Rig) -> None:
    base = {"logit_bias": {77: 100.0}}
    output = rig.run(**base, repetition_detection={"max_pattern_size": 4, "min_count": 3})
    assert reason(output) == "repetition" and tokens(output) == [77] * 3


def check_logits_processors(rig: Rig) -> None:
    output = rig.run(logits_processors=[{"name": "only", "args": {"ids": [77, 78, 79]}}])
    assert set(tokens(output)) <= {77, 78, 79}
    [failed] = rig.run(logits_processors=[{"name": "only", "args": {"fail": 1}}]).outputs
    assert failed.finish_reason == "error" and isinstance(failed.error, GenerationError)
    assert "logits processor only failed: RuntimeError: asked to fail" in failed.error.message
    refused(RequestError, logits_processors=["other"])(rig)
    assert tokens(rig.run()) == tokens(rig.plain)


def check_extra_args(rig: Rig) -> None:
    assert set(tokens(rig.run(logits_processors=["only"], extra_args={"ids": [80, 81]}))) <= {80, 81}


def check_dry(rig: Rig) -> None:
    base = {"allowed_token_ids": [77, 78, 79], "temperature": 0.0, "max_tokens": 40}
    plain, dry = tokens(rig.run(**base)), tokens(rig.run(**base, dry_multiplier=10.0))
    assert len(set(zip(dry, dry[1:], dry[2:], strict=False))) > len(set(zip(plain, plain[1:], plain[2:], strict=False)))


REPEATING: dict[str, Any] = {"allowed_token_ids": [77, 78, 79], "max_tokens": 40, "dry_multiplier": 1.0, "seed": 5}
MIRO: dict[str, Any] = {"mirostat": 2, "mirostat_tau": 2.0, "max_tokens": 40}
DYNAMIC: dict[str, Any] = {"dynatemp_range": 0.9, "max_tokens": 40}
CHECKS: dict[str, Callable[[Rig], None]] = {
    "n": check_n,
    "best_of": check_best_of,
    "presence_penalty": changes_greedy(presence_penalty=2.0, max_tokens=60),
    "frequency_penalty": changes_greedy(frequency_penalty=2.0, max_tokens=60),
    "repetition_penalty": changes_greedy(repetition_penalty=1.5),
    "temperature": changes(temperature=1.9),
    "top_p": as_greedy(top_p=1e-6),
    "top_k": as_greedy(top_k=1),
    "min_p": as_greedy(min_p=1.0),
    "seed": changes(seed=4),
    "stop": check_stop,
    "stop_token_ids": check_stop_token_ids,
    "bad_words": check_bad_words,
    "ignore_eos": check_ignore_eos,
    "max_tokens": check_max_tokens,
    "min_tokens": check_min_tokens,
    "logprobs": check_logprobs,
    "prompt_logprobs": check_prompt_logprobs,
    "logit_bias": check_logit_bias,
    "allowed_token_ids": check_allowed_token_ids,
    "truncate_prompt_tokens": check_truncate_prompt_tokens,
    "structured_outputs": check_form("structured_outputs"),
    "guided_decoding": check_form("guided_decoding"),
    "use_beam_search": check_beams(),
    "length_penalty": check_beams(length_penalty=3.0),
    "early_stopping": check_beams(early_stopping=True),
    "detokenize": check_detokenize,
    "skip_special_tokens": check_special_tokens(),
    "include_stop_str_in_output": check_include_stop,
    "spaces_between_special_tokens": check_special_tokens(spaces_between_special_tokens=False),
    "stream_interval": refused(RequestError, stream_interval=2),  # nothing streams here
    "logprob_token_ids": check_logprob_token_ids,
    "prompt_logprob_token_ids": refused(prompt_logprob_token_ids=[[1]]),
    "prompt_logprob_start": check_prompt_logprob_start,
    "flat_logprobs": check_flat_logprobs,
    "skip_reading_prefix_cache": check_skip_reading_prefix_cache,
    "skip_clone": check_skip_clone,
    "repetition_detection": check_repetition_detection,
    "logits_processors": check_logits_processors,
    "extra_args": check_extra_args,
    "typical_p": changes(typical_p=0.1),
    "top_n_sigma": as_greedy(top_n_sigma=0.01),
    "xtc_probability": changes_greedy(xtc_probability=1.0),
    "xtc_threshold": matters({"xtc_probability": 1.0, "temperature": 0.0}, xtc_threshold=0.01),
    "dry_multiplier": check_dry,
    "dry_base": matters({**REPEATING}, dry_base=4.0),
    "dry_allowed_length": matters({**REPEATING}, dry_allowed_length=6),
    "dry_penalty_last_n": matters({**REPEATING}, dry_penalty_last_n=4),
    "dry_sequence_breakers": lambda rig: matters(
        {**REPEATING}, dry_sequence_breakers=[rig.llm.get_tokenizer().token_text(index) for index in (77, 78, 79)]
    )(rig),
    "dynatemp_range": changes(dynatemp_range=1.0),
    "dynatemp_exponent": matters({**DYNAMIC}, dynatemp_exponent=5.0),
    "mirostat": changes(mirostat=2, mirostat_tau=1.0),
    "mirostat_tau": matters({"mirostat": 1}, mirostat_tau=0.5),
    "mirostat_eta": matters({**MIRO}, mirostat_eta=1.0),
    "thinking_token_budget": refused(RequestError, thinking_token_budget=3),  # this model's reasoning is not marked
    "watermarking": refused(watermarking={"key": 3}),
    "routed_experts_prompt_start": refused(routed_experts_prompt_start=2),
    "trace_decode_token_ids": refused(trace_decode_token_ids=[3]),
}
# Streams have tests of their own; offline every request has one output.
ELSEWHERE = {"output_kind"}


def test_every_field_has_a_check() -> None:
    assert set(SamplingParams.__struct_fields__) == CHECKS.keys() | ELSEWHERE


@pytest.mark.parametrize("name", CHECKS)
def test_the_field_has_its_effect_or_is_refused(rig: Rig, name: str) -> None:
    CHECKS[name](rig)


FORM = {"regex": "(alpha|beta) [0-9]{2,4} (yes|no)"}


@pytest.mark.parametrize(
    "fields",
    [
        {"typical_p": 0.3},
        {"top_n_sigma": 0.5},
        {"xtc_probability": 1.0, "xtc_threshold": 0.01},
        {"dry_multiplier": 5.0, "repetition_penalty": 2.0},
        {"dynatemp_range": 1.0},
        {"mirostat": 1},
        {"mirostat": 2, "n": 3},
        {"logprob_token_ids": [5, 6], "flat_logprobs": True},
        {"temperature": 2.0, "best_of": 3},
    ],
)
def test_samplers_choose_within_the_form(rig: Rig, fields: dict[str, Any]) -> None:
    for item in rig.run(structured_outputs=FORM, max_tokens=60, **fields).outputs:
        assert re.fullmatch(FORM["regex"], item.text) and item.finish_reason == "stop"


def test_a_plugin_cannot_break_out_of_a_form(rig: Rig) -> None:
    fields = {"logits_processors": ["only"], "extra_args": {"ids": [77, 78]}}
    [item] = rig.run(structured_outputs=FORM, **fields).outputs
    assert item.finish_reason == "error" and "leave no token" in str(item.error)


def test_a_plugin_that_cannot_be_imported_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="logits processor mine cannot be imported from no_such_module:f"):
        LLM(logits_processors=["mine=no_such_module:f"]).close()


@pytest.mark.slow  # starts a process
def test_a_plugin_that_an_engine_process_cannot_import_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="logits processor mine cannot be imported from no_such_module:f"):
        asyncio.run(generate_in_a_process("mine=no_such_module:f", SamplingParams()))


@pytest.mark.slow  # starts a process
def test_an_engine_process_has_plugins_too() -> None:
    params = SamplingParams(
        logits_processors=["only"], extra_args={"ids": [80, 81]}, mirostat=2, dry_multiplier=1.0, max_tokens=8
    )
    output = asyncio.run(generate_in_a_process(PLUGIN, params))
    assert set(output.outputs[0].token_ids) <= {80, 81}


async def generate_in_a_process(plugin: str, params: SamplingParams) -> RequestOutput:
    options = {"max_model_len": 128, "num_gpu_blocks_override": 16}
    async with AsyncLLM(engine="process", logits_processors=[plugin], **options) as llm:
        return [output async for output in llm.generate(PROMPT, params)][-1]


STATEFUL = [
    {"mirostat": 1, "mirostat_tau": 2.0},
    {"mirostat": 2, "mirostat_tau": 3.0},
    {"dry_multiplier": 2.0, "dry_base": 1.2, "allowed_token_ids": [9, 10, 11]},
    {"xtc_probability": 0.5, "xtc_threshold": 0.001, "typical_p": 0.9, "top_n_sigma": 3.0},
    {"dynatemp_range": 0.5, "repetition_penalty": 1.2, "logprob_token_ids": [5, 6]},
    {"logits_processors": ["only"], "extra_args": {"ids": [20, 21, 22, 23], "every": 4}},
    {"logprobs": -1, "prompt_logprobs": 2, "prompt_logprob_start": 5},
]


@pytest.mark.parametrize(
    ("scheduler", "seed"), [("unified", 0), ("prefill-first", 0), ("unified", 1), ("prefill-first", 2)]
)
def test_preemption_batches_and_forks_change_nothing(tiny_llama: Path, seed: int, scheduler: str) -> None:
    rng = random.Random(seed)
    asks = [
        Request(
            [rng.randrange(3, 160) for _ in range(rng.choice([3, 9, 20]))],
            SamplingParams(**fields, temperature=1.0),
            max_tokens=20,
            seeds=tuple(range(10 * number, 10 * number + rng.choice([1, 1, 3]))),
        )
        for number, fields in enumerate(STATEFUL * 2)
    ]
    for place, ask in enumerate(asks):  # positions to score must exist
        if ask.params.prompt_logprob_start and len(ask.prompt) < 9:
            asks[place] = Request([*ask.prompt] * 3, ask.params, ask.max_tokens, ask.seeds)
    hoped = alone(tiny_llama, asks, logits_processors=[PLUGIN])
    driver = EngineDriver(
        tiny_llama,
        num_gpu_blocks_override=34,
        scheduler=scheduler,
        logits_processors=[PLUGIN],
        preemption_mode=rng.choice(["recompute", "swap"]),
        max_num_batched_tokens=rng.choice([8, 32, 256]),
    )
    mingle(driver, asks, rng)
    assert driver.stats().num_preemptions > 0
    driver.check_all_free()
    driver.close()
    assert driver.results == hoped
