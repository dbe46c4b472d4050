"""Streaming text equals decoding at once, never shows half a character, and ends exactly at a stop string."""

from __future__ import annotations

import functools
import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.frontend.detokenizer import IncrementalDetokenizer, StopChecker
from quire.tokenizer.tokenizer import Tokenizer
from tests.frontend.conftest import CORPUS, MAKERS, NAMED

KINDS = ["byte_level", "llama", "first", "metaspace"]
TEXT = st.text(
    alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from("aäб字😀👩‍👧🇩🇪 \n▁Ġ<|>/s")), max_size=30
)


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    return Tokenizer(MAKERS[kind](), special_tokens=NAMED[kind])


def stream(tokenizer: Tokenizer, ids: list[int], **options: object) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)  # type: ignore[arg-type]
    return [*(detokenizer.add(index) for index in ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=60, deadline=None)
def test_streaming_random_ids_equals_decoding_at_once(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = tokenizer_of(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    pieces = stream(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["byte_level", "llama", "first"])
def test_a_text_that_goes_on_keeps_its_first_blank(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode("a  b", add_special_tokens=False)
    ids = ids[next(index for index in range(len(ids)) if tokenizer.token_bytes(ids[index])[:1] == b" " and index) :]
    whole = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert whole.startswith(" ")
    assert "".join(stream(tokenizer, ids, continues=True)) == whole


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXT)
@settings(max_examples=60, deadline=None)
def test_streaming_text_never_shows_half_a_character(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    text = text.replace("\ufffd", "?")
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer, ids, skip_special_tokens=False)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)


def test_decoders_that_look_at_neighbours_stream_too() -> None:
    tokenizer = tokenizer_of("wordpiece")
    assert tokenizer.pieces is None
    for text in CORPUS:
        ids = tokenizer.encode(text)
        pieces = stream(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids)
        assert len([piece for piece in pieces if piece]) > len(ids) // 3


def test_a_character_comes_out_with_its_last_byte() -> None:
    tokenizer = tokenizer_of("llama")
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "😀é".encode()]
    assert stream(tokenizer, ids) == ["", "", "", "😀", "", "é", ""]  # type: ignore[arg-type]


def test_half_a_character_at_the_end_becomes_the_replacement_character() -> None:
    tokenizer = tokenizer_of("llama")
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "字".encode()[:2]]
    assert stream(tokenizer, ids) == ["", "", "\ufffd"]  # type: ignore[arg-type]


def first_end(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the first match is complete, by brute force; the longer of two that end together."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return end, max(hits, key=len)
    return None


@given(
    text=st.text(alphabet="abc", max_size=24),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
    cuts=st.lists(st.integers(0, 24), max_size=8),
)
@settings(max_examples=250, deadline=None)
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(
    text: str, stops: list[str], include: bool, cuts: list[int]
) -> None:
    bounds = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    checker = StopChecker(stops, include)
    out = ""
    for start, end in itertools.pairwise(bounds):
        out += checker.add(text[start:end])
        if checker.matched is not None:
            break
        if not include:
            assert end - len(out) <= max(map(len, stops)) - 1, "held back more than could be a stop string"
        else:
            assert end == len(out), "held back for nothing"
    expected = first_end(text, stops)
    if expected is None:
        assert checker.matched is None
        assert out + checker.flush() == text
    else:
        end, stop = expected
        assert checker.matched == stop
        assert out == (text[:end] if include else text[: end - len(stop)])


def test_many_long_stop_strings_cost_little() -> None:
    stops = ["a" * 99 + "b" * 925 + str(number) for number in range(127)] + ["a" * 900 + "c"]
    checker = StopChecker(stops, include=False)
    assert checker.add("x" + "a" * 800) == "x"
    before = time.thread_time()
    for _ in range(99):
        assert checker.add("a") == ""
    assert checker.add("b") == "a" * 800
    assert checker.add("c") == "a" * 99 + "bc"
    assert time.thread_time() - before < 2.0


def test_text_that_cannot_begin_a_stop_string_is_not_held_back() -> None:
    checker = StopChecker(["\n\nUser:"], include=False)
    assert checker.add("Hello.") == "Hello."
    assert checker.add("\n") == ""
    assert checker.add("Next") == "\nNext"
    assert checker.add("\n\nUs") == ""
    assert checker.add("e") == ""
    assert checker.add("d") == "\n\nUsed"


@pytest.mark.parametrize("kind", ["byte_level", "llama"])
@pytest.mark.parametrize("stop", ["brown f", "字", "😀😁", "dog.", "é"])
def test_stop_strings_across_tokens_and_characters(kind: str, stop: str) -> None:
    tokenizer = tokenizer_of(kind)
    text = f"The quick {stop} and what follows {stop}"
    detokenizer = IncrementalDetokenizer(tokenizer, stop=[stop])
    out = ""
    used = 0
    for index in tokenizer.encode(text, add_special_tokens=False):
        out += detokenizer.add(index)
        used += 1
        if detokenizer.matched:
            break
    assert detokenizer.matched == stop
    assert out + detokenizer.flush() == "The quick "
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert stop in tokenizer.decode(ids[:used])
    assert stop not in tokenizer.decode(ids[: used - 1])


def test_stop_strings_count_only_after_min_tokens() -> None:
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.encode("a,b,c,d")
    for min_tokens, expected in ((0, "a"), (1, "a"), (2, "a,b"), (4, "a,b,c")):
        detokenizer = IncrementalDetokenizer(tokenizer, stop=[","], min_tokens=min_tokens)
        out = ""
        for index in ids:
            out += detokenizer.add(index)
            if detokenizer.matched:
                break
        assert out == expected


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_streams_with_stop_strings_lose_nothing(data: st.DataObject) -> None:
    tokenizer = tokenizer_of("byte_level")
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    stops = data.draw(st.lists(st.text(alphabet="the o\ufffd", min_size=1, max_size=3), min_size=1, max_size=3))
    detokenizer = IncrementalDetokenizer(tokenizer, stop=stops)
    out = ""
    for index in ids:
        out += detokenizer.add(index)
        if detokenizer.matched:
            break
    out += detokenizer.flush()
    whole = tokenizer.decode(ids)
    expected = first_end(whole, stops)
    assert out == (whole if expected is None else whole[: expected[0] - len(expected[1])])
