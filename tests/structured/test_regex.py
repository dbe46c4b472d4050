"""Regexes of callers: the whole text must match; bad ones are refused with the position."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import RequestError
from quire.structured.builder import GrammarBuilder
from quire.structured.lark import MAX_REGEX_CHARS, add_regex
from tests.helpers.grammars import accepts


def grammar_of(pattern: str) -> str:
    builder = GrammarBuilder()
    return builder.lark(add_regex(builder, pattern))


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("[0-9]{3}-[0-9]{4}", ["555-1234"], ["5551234", "555-12345", ""]),
        ("^a+$", ["a", "aaa"], ["b", "ab"]),
        ("a*", ["", "aa"], ["b"]),
        ("", [""], ["a"]),
        ("a/b", ["a/b"], ["ab"]),
        (r"\d+", ["12"], ["1a", "\u0663"]),
        ("(yes|no)!?", ["yes", "no!"], ["maybe", "yesno"]),
        ('say "hi"\n', ['say "hi"\n'], ["say hi"]),
        ("[äöü]+", ["äö"], ["a"]),
        ("(?i)abc", ["aBc"], ["abd"]),
        ("a+?b", ["aab"], ["aa"]),
    ],
)
def test_the_whole_text_must_match(pattern: str, good: list[str], bad: list[str]) -> None:
    grammar = grammar_of(pattern)
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("pattern", "position"),
    [("[a", 0), ("x(?=a)b", 1), ("(a)\\1", 3), ("a\\Z", 1), ("ab(", 2), ("a\0b", 1)],
)
def test_bad_ones_are_refused_with_the_position(pattern: str, position: int) -> None:
    with pytest.raises(RequestError, match=f"at position {position}") as caught:
        grammar_of(pattern)
    assert caught.value.code == "invalid_grammar" and caught.value.param == "structured_outputs.regex"
    assert "\n" not in caught.value.message


def test_one_without_a_position_is_refused_all_the_same() -> None:
    with pytest.raises(RequestError, match="lookarounds") as caught:
        grammar_of("\\bword\\b")
    assert caught.value.code == "invalid_grammar"


def test_long_ones_are_refused() -> None:
    with pytest.raises(RequestError) as caught:
        grammar_of("a" * (MAX_REGEX_CHARS + 1))
    assert caught.value.code == "grammar_too_complex"


def test_nested_repetition_is_read_as_it_stands() -> None:
    grammar = grammar_of("(((a{1,100}){1,100}){1,100}){1,100}")
    assert accepts(grammar, "a" * 10) and not accepts(grammar, "b")


ATOMS = st.sampled_from(["a", "b", "[ab]", "[^a]", "c?", "(a|bc)", "(b)*", "a{1,3}", "\\.", "."])


@settings(max_examples=60, deadline=None)
@given(st.lists(ATOMS, max_size=5).map("".join), st.text("abc.\n", max_size=6))
def test_it_agrees_with_pythons(pattern: str, text: str) -> None:
    assert accepts(grammar_of(pattern), text) == (re.fullmatch(pattern, text) is not None)
