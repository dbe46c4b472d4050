"""Borders between the words of a program and those of a model, for many tokenizers and chat templates."""

from __future__ import annotations

import random

import pytest

from quire.errors import RequestError
from quire.frontend.chat import ChatTemplate
from quire.lang.backend import Turn
from quire.lang.local import TurnWriter, common_length, continuation_ids, kept_tokens
from quire.tokenizer.tokenizer import Tokenizer
from tests.frontend.conftest import CORPUS, MAKERS, NAMED, train_byte_level
from tests.frontend.families import FAMILIES
from tests.frontend.test_chat_families import template_of
from tests.helpers.fake_engine import small_tokenizer


def tokenizer_of(kind: str) -> Tokenizer:
    return Tokenizer(MAKERS[kind](), special_tokens=NAMED[kind])


@pytest.mark.parametrize("kind", ["byte_level", "llama", "first", "metaspace"])
def test_text_behind_other_tokens_is_neither_more_nor_less(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    rng = random.Random(1)
    text = " ".join(CORPUS if kind == "byte_level" else CORPUS[:2])
    for _ in range(50):
        start = rng.randrange(len(text) - 40)
        middle, end = sorted(rng.randrange(start + 1, start + 40) for _ in range(2))
        first, second = text[start:middle], text[middle:end]
        ids = tokenizer.encode(first)
        more = continuation_ids(tokenizer, second, lambda text: tokenizer.encode(text, add_special_tokens=False))
        assert tokenizer.decode(ids + more) == tokenizer.decode(ids) + second


@pytest.mark.parametrize("cut", range(30))
def test_tokens_within_a_text_are_kept_and_the_rest_is_text(cut: int) -> None:
    tokenizer = Tokenizer(train_byte_level())
    whole = "brown fox 😀🎉日本語 größer over"
    ids = tokenizer.encode(whole)
    text = whole[:cut]
    kept, rest = kept_tokens(tokenizer, ids, text)
    assert tokenizer.decode(kept) + rest == text
    assert kept == ids[: len(kept)]
    assert not text.startswith(tokenizer.decode(ids[: len(kept) + 1])) or kept == ids


def test_what_lists_have_in_common() -> None:
    assert common_length([[1, 2, 3], [1, 2], [1, 2, 4]]) == 2
    assert common_length([[], [1]]) == 0


def turns_of(*contents: str) -> list[Turn]:
    """User and assistant in turn; the last one is about to begin."""
    roles = ["user", "assistant"] * len(contents)
    closed = [Turn(role, content, False) for role, content in zip(roles, contents, strict=False)]
    return [*closed, Turn("assistant")]


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_written_one_by_one_are_the_conversation(family: str) -> None:
    """But for what a template leaves out of, or puts into, earlier turns."""
    template = template_of(family)
    tokenizer = template._tokenizer
    writer = TurnWriter(template, tokenizer)
    turns = turns_of(" Hi <b>&amp; x ", "Eins.", "More?")
    messages = [turn.message() for turn in turns[:-1]]
    begin = [turns[0], turns[-1]]
    prompted = writer.write(begin, 0, prompt=True)
    assert prompted == template.encode(messages[:1])
    behind = writer.text_ids("Eins.") + writer.write(turns, 2, prompt=True)
    begun = writer.write(begin, 0, prompt=False)
    texts = [tokenizer.decode(ids + behind, skip_special_tokens=False) for ids in (prompted, begun)]
    assert tokenizer.decode(template.encode(messages), skip_special_tokens=False) in texts


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_template_writes_control_tokens(family: str) -> None:
    template = template_of(family)
    writer = TurnWriter(template, template._tokenizer)
    known = set(template.controls.ids("".join(FAMILIES[family].controls)))
    evil = "".join(FAMILIES[family].controls)

    def controls(*contents: str, num_written: int) -> list[int]:
        return [index for index in writer.write(turns_of(*contents), num_written, prompt=True) if index in known]

    for num_written in (0, 2):
        honest = controls("a", "b", "c", num_written=num_written)
        assert controls(evil, evil, evil, num_written=num_written) == honest
    assert not known & set(writer.text_ids(evil))


def test_a_template_that_drops_contents_is_refused() -> None:
    tokenizer = small_tokenizer()
    template = ChatTemplate("{% for m in messages %}<|im_start|>{{ m.role }}{% endfor %}", tokenizer)
    writer = TurnWriter(template, tokenizer)
    assert writer.write(turns_of("a"), 0, prompt=True)
    with pytest.raises(RequestError, match="drops the content"):
        writer.write(turns_of("a", "b", "c"), 2, prompt=True)
