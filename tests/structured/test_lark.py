"""Grammars of callers: Lark and GBNF, under names that cannot clash with ours."""

from __future__ import annotations

import pytest

from quire.errors import RequestError
from quire.structured.builder import GrammarBuilder, literal
from quire.structured.lark import MAX_GRAMMAR_CHARS, add_grammar
from tests.helpers.grammars import accepts

ARITHMETIC = """
start: sum
sum: product (("+" | "-") product)*
product: NUMBER | "(" sum ")"
NUMBER: /[0-9]+/
%ignore /[ ]+/
"""
GBNF = """
root ::= item ("," item)*
item ::= [a-z]+ | "\\"" [0-9]{2} "\\""
"""


def grammar_of(text: str) -> str:
    builder = GrammarBuilder()
    return builder.lark(add_grammar(builder, text))


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        (ARITHMETIC, ["1", "1 + 2", "( 1+ 2 )-3"], ["", "1+", "(1", "1 2"]),
        (GBNF, ["ab", 'ab,"12",c'], ["", "ab,", '"1"']),
        ('start: "yes" | "no"', ["yes", "no"], ["maybe"]),
        ('start: "}" | "{ }"', ["}", "{ }"], ["{}"]),
        ('start: start "a" | "b"', ["b", "baa"], ["a"]),
        ('start: rule_1\nrule_1: "mine"', ["mine"], ["ours"]),
        ('start: x\nx: %json {"type": "boolean"}', ["true"], ["1"]),
    ],
)
def test_texts_of_the_grammar(text: str, good: list[str], bad: list[str]) -> None:
    grammar = grammar_of(text)
    assert [item for item in good if not accepts(grammar, item)] == []
    assert [item for item in bad if accepts(grammar, item)] == []


def test_a_grammar_can_stand_among_other_rules() -> None:
    builder = GrammarBuilder()
    ours = builder.rule(literal("ours "), "rule")
    theirs = add_grammar(builder, 'start: rule_1 A\nrule_1: "x"\nA: "y"')
    grammar = builder.lark(f"{ours} {theirs} {literal('!')}")
    assert accepts(grammar, "ours xy!") and not accepts(grammar, "ours x!") and not accepts(grammar, "ours ours !")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", "empty"),
        ("  \n", "empty"),
        ("start: foo", "unknown name"),
        ("start: /[/", "invalid regex"),
        ('start: "a"\nstart: "b"', "duplicate"),
        ("root ::= foo", "not found"),
        ("root ::= [a", "GBNF|end of input"),
        ("item ::= [a]", "root"),
        ('start: "a" }\nbroken: {', "expecting"),
        ('start: "a" } x: %lark { start: "b"', "expecting"),
    ],
)
def test_bad_ones_are_refused(text: str, hint: str) -> None:
    with pytest.raises(RequestError, match=hint) as caught:
        grammar_of(text)
    assert caught.value.code == "invalid_grammar" and caught.value.param == "structured_outputs.grammar"
    assert len(caught.value.message) < 400


def test_long_ones_are_refused() -> None:
    with pytest.raises(RequestError) as caught:
        grammar_of("start: " + '"a" ' * MAX_GRAMMAR_CHARS)
    assert caught.value.code == "grammar_too_complex"
