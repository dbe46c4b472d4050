"""Sequence breakers are found however a vocabulary spells them."""

from __future__ import annotations

import numpy as np
import pytest

from quire.frontend import sequence_breakers
from quire.frontend.sequence_breakers import SequenceBreakerIndex
from quire.tokenizer.tokenizer import Tokenizer
from tests.frontend.conftest import MAKERS, NAMED
from tests.helpers.errors import refused
from tests.helpers.fake_engine import small_tokenizer


def tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def breaks(spellings: list[tuple[list[int], list[int]]], ids: list[int]) -> bool:
    """Whether any spelling occurs in ids."""
    return any(
        ids[place] in heads and ids[place + 1 : place + 1 + len(tail)] == tail
        for place in range(len(ids))
        for heads, tail in spellings
    )


def test_any_token_that_holds_the_text_spells_it() -> None:
    tokenizer = small_tokenizer()
    index = SequenceBreakerIndex(tokenizer, tokenizer.vocab_size)
    [(heads, tail)] = index.spellings(["l"])
    assert tail == []
    assert {tokenizer.token_text(token) for token in heads} == {"l", "ll", "hell", "hello", "ld"}


def test_a_text_is_found_across_tokens() -> None:
    tokenizer = small_tokenizer()
    spellings = SequenceBreakerIndex(tokenizer, tokenizer.vocab_size).spellings(["o wor"])
    assert breaks(spellings, tokens(tokenizer, "hello world"))
    assert breaks(spellings, tokens(tokenizer, "so world"))
    assert not breaks(spellings, tokens(tokenizer, "hell world"))


@pytest.mark.parametrize("kind", ["byte_level", "llama", "metaspace", "wordpiece"])
def test_the_usual_breakers_are_found_in_any_kind_of_vocabulary(kind: str) -> None:
    tokenizer = Tokenizer(MAKERS[kind](), special_tokens=NAMED[kind])
    index = SequenceBreakerIndex(tokenizer, tokenizer.vocab_size)
    for text in (":", "fox", "\n") if kind != "wordpiece" else ("fox",):
        sentence = f"the quick{text} brown" if text != "fox" else "the quick fox jumps"
        spellings = index.spellings([text])
        assert breaks(spellings, tokens(tokenizer, sentence)), text
        assert not breaks(spellings, tokens(tokenizer, "the quick brown")), text


def test_characters_of_several_bytes() -> None:
    tokenizer = small_tokenizer()  # which has no token for them, only bytes
    spellings = SequenceBreakerIndex(tokenizer, tokenizer.vocab_size).spellings(["。"])
    assert breaks(spellings, tokens(tokenizer, "abc。def"))
    assert not breaks(spellings, tokens(tokenizer, "abc、def"))


def test_what_was_found_is_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = small_tokenizer()
    monkeypatch.setattr(sequence_breakers, "MAX_CACHED", 3)
    index = SequenceBreakerIndex(tokenizer, tokenizer.vocab_size)
    first = index.spellings(["a"])
    for text in "bcdef":
        index.spellings([text])
    assert index._found.cache_info().currsize == 3
    assert index.spellings(["a"]) == first


def test_too_many_spellings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = small_tokenizer()
    monkeypatch.setattr(sequence_breakers, "MAX_IDS", 3)
    with refused("dry_sequence_breakers", match="dry_sequence_breakers can be spelled in 5 ways; at most 3"):
        SequenceBreakerIndex(tokenizer, tokenizer.vocab_size).spellings(["l"])


def test_ids_beyond_the_model_are_left_out() -> None:
    tokenizer = small_tokenizer()
    spellings = SequenceBreakerIndex(tokenizer, 200).spellings(["l", "o wor"])
    assert all(np.max([*heads, *tail]) < 200 for heads, tail in spellings)
