"""Grammars in the engine: every text satisfies its own, by whatever road it came about, and jumps change no text."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from quire.sampling_params import SamplingParams
from quire.step import ThinkingData
from quire.tokenizer.tokenizer import Tokenizer
from tests.frontend.conftest import train_byte_level, write_folder
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.engine_driver import Ask, EngineDriver, Told, alone, mingle, names_of

RECORD = r'start: "{\"name\": \"" /[a-zäé]{1,12}/ "\", \"age\": " /[1-9][0-9]{0,2}/ ", \"is_member\": " ("true" | "false") "}"'
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
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


def end_id(tokenizer: Tokenizer) -> int:
    index = tokenizer.eos_token_id
    assert index is not None
    return index


def asks(tokenizer: Tokenizer, params: SamplingParams, **options: object) -> list[Ask]:
    """Return a request for each form."""
    prompt = tokenizer.encode("The quick brown fox jumps over the lazy dog.")
    stop = (end_id(tokenizer),)
    return [Ask(prompt, params, 80, stop_ids=stop, grammar=grammar, **options) for grammar, _ in FORMS]  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("params", [GREEDY, HOT, HOT.clone(top_k=5), HOT.clone(top_p=0.9, min_p=0.01)])
@pytest.mark.parametrize("jump_forward", [True, False])
def test_every_text_satisfies_its_grammar(
    folder: Path, tokenizer: Tokenizer, device: str, params: SamplingParams, jump_forward: bool
) -> None:
    driver = EngineDriver(folder, device, jump_forward=jump_forward)
    for seed in range(3):
        for index, ask in enumerate(asks(tokenizer, params, seeds=(seed,))):
            driver.add(f"{seed}-{index}", ask)
    driver.run()
    for name, told in driver.told.items():
        text = tokenizer.decode(told.tokens)
        assert re.fullmatch(FORMS[int(name[2:])][1], text), text
        assert told.finish_reason == "stop"
    driver.check_all_free()
    driver.close()
