"""What llguidance is told of a tokenizer, and the store of compiled grammars."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from quire.errors import ErrorData, RequestError
from quire.sampling.grammars import MAX_UNUSED, GrammarStore, GrammarVocabulary
from quire.tokenizer.tokenizer import Tokenizer
from tests.frontend.conftest import MAKERS, NAMED

KINDS = ["byte_level", "llama", "first", "metaspace"]
TEXTS = [
    '{"name": "Hello", "größe": [1, 2.5e-3, null]}',
    " two  spaces and\n\nlines\n",
    "日本語 😀 한국어 👩‍👩‍👧‍👦",
    "<|im_end|></s><s><think>x</think>",
    "",
    " ",
    "\x00\x02\x1f",
]


def tokenizer_of(kind: str) -> Tokenizer:
    return Tokenizer(MAKERS[kind](), special_tokens=NAMED[kind])


@pytest.fixture(scope="module")
def vocabularies() -> dict[str, tuple[Tokenizer, GrammarVocabulary]]:
    """Of models with some rows more than the tokenizer has tokens."""
    found = {}
    for kind in KINDS:
        tokenizer = tokenizer_of(kind)
        assert tokenizer.eos_token_id is not None
        found[kind] = tokenizer, GrammarVocabulary(tokenizer, tokenizer.vocab_size + 7, [tokenizer.eos_token_id])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_has_the_bytes_that_the_tokenizer_decodes_it_to(
    vocabularies: dict[str, tuple[Tokenizer, GrammarVocabulary]], kind: str
) -> None:
    tokenizer, vocabulary = vocabularies[kind]
    compiled = vocabulary.compiled()
    assert compiled.vocab_size == tokenizer.vocab_size + 7 + 1  # and one that stands for an end nobody can choose
    for index in range(tokenizer.vocab_size):
        if index in tokenizer.special_ids:
            assert compiled.is_special_token(index)
        elif tokenizer.token_bytes(index) != b"\xff":  # which no text has
            assert compiled.decode_bytes([index]) == tokenizer.token_bytes(index)
            assert not compiled.is_special_token(index)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50, deadline=None)
@given(before=st.text(max_size=8), text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=30)))
def test_text_is_spelled_as_the_tokenizer_would_in_the_middle_of_a_text(
    vocabularies: dict[str, tuple[Tokenizer, GrammarVocabulary]], kind: str, before: str, text: str
) -> None:
    tokenizer, vocabulary = vocabularies[kind]
    ids = vocabulary(text.encode())
    if kind == "metaspace" and not ids:
        return  # its decoder knows no bytes: many characters it cannot say
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert not tokenizer.special_ids.intersection(ids)
    # What the whole is spelled as, where nothing is joined over the border.
    whole = tokenizer.encode_segments([before + "\x02" + text])
    if kind != "byte_level" or not text.startswith(" "):
        assert whole[len(whole) - len(ids) :] == ids


def test_parts_of_characters_are_spelled_too(vocabularies: dict[str, tuple[Tokenizer, GrammarVocabulary]]) -> None:
    for kind in ("byte_level", "llama"):
        tokenizer, vocabulary = vocabularies[kind]
        for text in (b"\x82\xac", b"a\xe2\x82", b"\xf0\x9f\x98x"):
            assert b"".join(map(tokenizer.token_bytes, vocabulary(text))) == text


def test_a_text_that_a_vocabulary_cannot_spell_forces_nothing(
    vocabularies: dict[str, tuple[Tokenizer, GrammarVocabulary]],
) -> None:
    wordless = Tokenizer(MAKERS["first"](), special_tokens=NAMED["first"])
    vocabulary = GrammarVocabulary(wordless, 40, [2])  # a model with fewer rows than the tokenizer has tokens
    assert vocabulary(b"zzz") == []
    assert vocabulary.compiled().vocab_size == 40 + 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ['{"name": "Hello", "size": [1, 2.5e-3, null]}', *TEXTS[:3]])
def test_any_spelling_of_an_allowed_text_is_allowed(
    vocabularies: dict[str, tuple[Tokenizer, GrammarVocabulary]], kind: str, text: str
) -> None:
    """Token by token, by the masks; and nothing the model has beyond its tokenizer, nor special tokens."""
    tokenizer, vocabulary = vocabularies[kind]
    if kind == "metaspace":
        text = "".join(char for char in text if char in " aehlno")
    store = GrammarStore(lambda: tokenizer, len(vocabulary.tokens))
    grammar = "start: /(?s:.*)/"
    matcher = store.start(grammar)
    rng = np.random.default_rng(len(text))
    by_length = sorted(range(tokenizer.vocab_size), key=lambda index: -len(tokenizer.token_bytes(index)))
    rest = text.encode()
    while rest:
        fitting = [
            index
            for index in by_length
            if index not in tokenizer.special_ids
            and tokenizer.token_bytes(index)
            and rest.startswith(tokenizer.token_bytes(index))
        ]
        index = int(rng.choice(fitting))
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        assert bits[fitting].all()
        assert not bits[tokenizer.vocab_size :].any()
        assert set(np.flatnonzero(bits)).isdisjoint(tokenizer.special_ids - set(store.end_ids()))
        assert matcher.consume_token(index)
        rest = rest[len(tokenizer.token_bytes(index)) :]
    assert matcher.is_accepting()


def test_a_decoder_that_joins_tokens_otherwise_is_refused() -> None:
    store = GrammarStore(lambda: tokenizer_of("wordpiece"), 200)
    store.prepare("start: /a/")
    [(grammar, error)] = store.poll(60.0).items()
    assert grammar == "start: /a/"
    assert error is not None
    assert "tokenizer" in error.message
    with pytest.raises(RequestError, match="tokenizer"):
        store.start("start: /a/")
    store.close()


def test_folders_without_a_tokenizer_say_so(tmp_path: Path) -> None:
    store = GrammarStore(lambda: Tokenizer.from_folder(tmp_path), 100)
    store.prepare("start: /a/")
    [error] = store.poll(60.0).values()
    assert error is not None
    assert "needs a tokenizer" in error.message
    assert str(tmp_path) not in error.message
    with pytest.raises(RequestError, match="needs a tokenizer"):
        store.start("start: /a/")
    store.close()


def test_several_tokens_may_end_a_text() -> None:
    tokenizer = tokenizer_of("byte_level")
    store = GrammarStore(lambda: tokenizer, 425, [422, 420])
    matcher = store.start('start: "a"?')
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    assert set(np.flatnonzero(bits)) == {tokenizer.token_to_id("a"), 420, 422}
    assert store.end_ids() == [422, 420]
    assert matcher.consume_token(420)
    assert matcher.is_stopped()
    assert not matcher.is_error()


def test_without_an_end_token_a_text_ends_where_nothing_may_follow() -> None:
    backend = MAKERS["byte_level"]()
    store = GrammarStore(lambda: Tokenizer(backend), backend.get_vocab_size())
    matcher = store.start('start: "a" "b"?')
    assert store.end_ids() == []
    assert matcher.consume_token(backend.token_to_id("a"))
    assert not matcher.is_stopped()
    assert matcher.consume_token(backend.token_to_id("b"))
    assert matcher.is_stopped()


@pytest.mark.parametrize(
    ("grammar", "error"),
    [
        ("start: nothing", "nothing"),
        ("start: A\nA: /a/ & /b/", "no text satisfies the grammar"),
        ("start: /(/", ""),
        ("rubbish", ""),
        ("start: " + "(" * 5000 + '"a"' + ")" * 5000, "nested"),
        ("start: " + '"a"' * 100_000, "too large"),
    ],
)
def test_bad_grammars_are_told_in_one_line(grammar: str, error: str) -> None:
    store = GrammarStore(lambda: tokenizer_of("byte_level"), 425)
    store.prepare(grammar)
    store.prepare("start: /fine/")
    found: dict[str, ErrorData | None] = {}
    while len(found) < 2:
        found.update(store.poll(60.0))
    failed = found[grammar]
    assert failed is not None
    assert error in failed.message
    assert "\n" not in failed.message
    assert found["start: /fine/"] is None
    store.close()


class Compiled:
    """A store that counts what it compiles, and compiles only when it may."""

    def __init__(self, max_unused_chars: int = 1000) -> None:
        self.number = 0
        self.may = threading.Event()
        self.may.set()
        tokenizer = tokenizer_of("byte_level")
        self.store = GrammarStore(lambda: tokenizer, 425, max_unused_chars=max_unused_chars)
        compiling = self.store._compile

        def compile_counted(grammar: str) -> LLMatcher | str:
            assert self.may.wait(60)
            self.number += 1
            return compiling(grammar)

        self.store._compile = compile_counted  # type: ignore[method-assign]

    def use(self, grammar: str) -> None:
        """Request it and wait."""
        self.store.prepare(grammar)
        while grammar not in self.store.poll(60.0):
            pass


def test_a_grammar_is_compiled_once_and_matchers_are_independent() -> None:
    counted = Compiled()
    store = counted.store
    counted.may.clear()
    for _ in range(3):
        store.prepare("start: /ab/")
    assert store.poll() == {}
    counted.may.set()
    assert store.poll(60.0) == {"start: /ab/": None}
    store.prepare("start: /ab/")
    assert store.poll(60.0) == {"start: /ab/": None}
    first, second = store.start("start: /ab/"), store.start("start: /ab/")
    assert first.consume_token(64)
    assert second.consume_token(64)
    assert first.consume_token(65)
    assert (first.is_stopped(), second.is_stopped()) == (True, False)
    assert counted.number == 1
    store.close()


def test_what_is_in_use_stays_and_the_longest_unused_goes() -> None:
    counted = Compiled(max_unused_chars=40)
    store = counted.store
    grammars = [f"start: /{letter * 8}/" for letter in "abcd"]  # 17 characters each: two are kept
    counted.use(grammars[0])
    for grammar in grammars[1:]:
        counted.use(grammar)
        store.release(grammar)
    assert counted.number == 4
    for grammar in (grammars[0], grammars[2], grammars[3]):
        store.start(grammar)
    assert counted.number == 4
    store.start(grammars[1])  # gone: compiled on the spot
    assert counted.number == 5
    store.release(grammars[0])
    counted.use(grammars[2])
    counted.use(grammars[3])
    assert counted.number == 5
    store.start(grammars[0])
    assert counted.number == 6
    store.close()


def test_few_are_kept_however_short() -> None:
    counted = Compiled(max_unused_chars=100_000)
    store = counted.store
    for number in range(MAX_UNUSED + 5):
        counted.use(f"start: /{number}/")
        store.release(f"start: /{number}/")
    number = counted.number
    store.start("start: /5/")
    assert counted.number == number
    store.start("start: /4/")
    assert counted.number == number + 1
    store.close()


def test_what_nobody_waits_for_any_more_is_not_compiled() -> None:
    counted = Compiled()
    store = counted.store
    counted.may.clear()
    store.prepare("start: /first/")
    store.prepare("start: /given up/")
    store.prepare("start: /last/")
    store.release("start: /given up/")
    counted.may.set()
    found: dict[str, str | None] = {}
    while "start: /last/" not in found:
        found.update(store.poll(60.0))
    assert "start: /given up/" not in found
    assert counted.number == 2
    counted.use("start: /given up/")
    assert counted.number == 3
    store.close()
