"""Grammars in the engine: every text satisfies its own, by whatever road it came about, and jumps change no text."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from quire.sampling_params import SamplingParams
from quire.tokenizer.tokenizer import Tokenizer
from tests.frontend.conftest import train_byte_level, write_folder
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.engine_driver import EngineDriver, Request, Result, alone, mingle, names_of

RECORD = r"""start: "{\"name\": \"" /[a-zäé]{1,12}/ "\", \"age\": " /[1-9][0-9]{0,2}/ ", \"is_member\": " flag "}"
flag: "true" | "false"
"""
RECORD_REGEX = r'\{"name": "[a-zäé]{1,12}", "age": [1-9][0-9]{0,2}, "is_member": (true|false)\}'
WORDS = "start: /( [a-z]{1,6}){2,4}/"
WORDS_REGEX = "( [a-z]{1,6}){2,4}"
CHOICE = 'start: "positive, without doubt" | "negative"'
CHOICE_REGEX = "positive, without doubt|negative"
FORMS = [(RECORD, RECORD_REGEX), (WORDS, WORDS_REGEX), (CHOICE, CHOICE_REGEX)]
GREEDY = SamplingParams(temperature=0.0)
HOT = SamplingParams(temperature=2.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose vocabulary is larger than its tokenizer's, and no multiple of 32."""
    path = tmp_path_factory.mktemp("model")
    end = train_byte_level().token_to_id("<|im_end|>")
    write_checkpoint(path, "llama", num_key_value_heads=2, vocab_size=437, eos_token_id=end, bos_token_id=420)
    return write_folder(path, "byte_level")


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose queries look back nine tokens."""
    path = tmp_path_factory.mktemp("windowed")
    end = train_byte_level().token_to_id("<|im_end|>")
    write_checkpoint(path, "mistral", sliding_window=9, vocab_size=448, eos_token_id=end, bos_token_id=420)
    return write_folder(path, "byte_level")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


def end_id(tokenizer: Tokenizer) -> int:
    index = tokenizer.eos_token_id
    assert index is not None
    return index


def asks(tokenizer: Tokenizer, params: SamplingParams, seed: int) -> list[Request]:
    """Return a request for each form."""
    prompt = tokenizer.encode("The quick brown fox jumps over the lazy dog.")
    stop = (end_id(tokenizer),)
    return [Request(prompt, params, 80, seeds=(seed,), stop_ids=stop, grammar=grammar) for grammar, _ in FORMS]


@pytest.mark.parametrize(("device", "jump_forward"), [("cpu", True), ("cpu", False), ("reference", True)])
def test_every_text_satisfies_its_grammar(folder: Path, tokenizer: Tokenizer, device: str, jump_forward: bool) -> None:
    driver = EngineDriver(folder, device, jump_forward=jump_forward)
    for number, params in enumerate([GREEDY, HOT, HOT, HOT.clone(top_k=5), HOT.clone(top_p=0.9, min_p=0.01)]):
        for index, ask in enumerate(asks(tokenizer, params, number)):
            driver.add(f"{number}-{index}", ask)
    driver.run()
    assert len(driver.results) == 5 * len(FORMS)
    for name, told in driver.results.items():
        text = tokenizer.decode(told.tokens)
        assert re.fullmatch(FORMS[int(name[2:])][1], text), text
        assert told.finish_reason == "stop"
    driver.check_all_free()
    driver.close()


def variety(tokenizer: Tokenizer) -> list[Request]:
    """Return requests of many kinds, with prompts that share beginnings."""
    rng = random.Random(7)
    text = "The quick brown fox jumps over the lazy dog. Hello, hello world! " * 2
    params = [
        GREEDY,
        HOT,
        HOT.clone(top_k=20),
        HOT.clone(repetition_penalty=1.3, min_tokens=5),
        GREEDY.clone(logprobs=2, prompt_logprobs=1),
        HOT.clone(logit_bias={5: 30.0}, frequency_penalty=1.0),
    ]
    found = []
    for number in range(16):
        prompt = tokenizer.encode(text[: rng.choice([5, 40, 70, 110])] + "abc"[: rng.randrange(3)])
        grammar, _ = FORMS[number % len(FORMS)]
        found.append(
            Request(
                prompt,
                params[number % len(params)],
                rng.choice([3, 25, 80]),
                seeds=tuple(range(number, number + rng.choice([1, 1, 2, 3]))),
                stop_ids=(end_id(tokenizer),),
                grammar=None if number % 8 == 7 else grammar,
            )
        )
    return found


def check_texts(tokenizer: Tokenizer, asked: list[Request], told: dict[str, Result]) -> None:
    """Assert that what ended by itself satisfies its grammar, and what was cut begins a text that does."""
    by_grammar = dict(FORMS)
    num_whole = 0
    for number, ask in enumerate(asked):
        for name in names_of(f"{number}", ask):
            if ask.grammar is not None and told[name].finish_reason == "stop":
                num_whole += 1
                text = tokenizer.decode(told[name].tokens)
                assert re.fullmatch(by_grammar[ask.grammar], text), text
            elif ask.grammar is not None:
                assert len(told[name].tokens) == ask.max_tokens
    assert num_whole > 10


ROADS: dict[str, dict[str, object]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 8, "long_prefill_token_threshold": 5, "max_num_seqs": 6},
    "ahead": {"async_scheduling": True, "max_num_batched_tokens": 40},
    "recompute": {"num_gpu_blocks_override": 56, "preemption_mode": "recompute", "max_num_seqs": 12},
    "swap": {"num_gpu_blocks_override": 56, "preemption_mode": "swap", "swap_space": 2**20, "max_num_seqs": 12},
    "prefill_first": {"scheduler": "prefill-first", "max_num_batched_tokens": 128},
    "prefill_first_recompute": {
        "scheduler": "prefill-first",
        "max_num_batched_tokens": 128,
        "num_gpu_blocks_override": 56,
        "preemption_mode": "recompute",
        "max_num_seqs": 8,
    },
    "no_cache": {"enable_prefix_caching": False},
}


@pytest.fixture(scope="module")
def singly(folder: Path, tokenizer: Tokenizer) -> dict[bool, dict[str, Result]]:
    """What each sequence says alone, with jumps and without."""
    return {jumps: alone(folder, variety(tokenizer), jump_forward=jumps) for jumps in (True, False)}


WITHOUT_JUMPS = ("ahead", "swap")  # others are for slow runs


@pytest.mark.parametrize(
    ("road", "jump_forward"),
    [
        *((road, True) for road in ROADS),
        *(pytest.param(road, False, marks=() if road in WITHOUT_JUMPS else pytest.mark.slow) for road in ROADS),
    ],
)
def test_every_road_gives_what_the_request_alone_gives(
    folder: Path, tokenizer: Tokenizer, singly: dict[bool, dict[str, Result]], road: str, jump_forward: bool
) -> None:
    asked = variety(tokenizer)
    driver = EngineDriver(folder, jump_forward=jump_forward, **ROADS[road])
    mingle(driver, asked, random.Random(1), twins=True)
    told = {name: told for name, told in driver.results.items() if not name.startswith("twin")}
    assert told == singly[jump_forward]
    check_texts(tokenizer, asked, told)
    stats = driver.stats()
    if "recompute" in road or "swap" in road:
        assert stats.num_preemptions > 0
    assert (stats.num_swapped_out > 0) == (road == "swap")
    driver.check_all_free()
    driver.close()


def test_sliding_windows_change_nothing(windowed: Path, tokenizer: Tokenizer) -> None:
    asked = variety(tokenizer)
    singly = alone(windowed, asked)
    for road in ("chunks", "recompute", "prefill_first"):
        driver = EngineDriver(windowed, **ROADS[road])
        mingle(driver, asked, random.Random(2))
        assert driver.results == singly
        driver.check_all_free()
        driver.close()
    check_texts(tokenizer, asked, singly)
