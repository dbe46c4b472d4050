"""Structural tags: what is tagged has its form, what is not is free, and a trigger always begins a tag."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import RequestError
from quire.structured.builder import GrammarBuilder
from quire.structured.json_schema.compiler import JsonOptions
from quire.structured.structural_tag import add_structural_tag
from tests.helpers.grammars import accepts, begins

NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
WORD = {"type": "regex", "pattern": "[a-z]+"}


def grammar_of(spec: Any, **special: int) -> str:
    builder = GrammarBuilder(special)
    return builder.lark(add_structural_tag(builder, spec, JsonOptions()))


def of(fmt: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": fmt}


def tag(begin: str, content: Any, end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


F, G = tag("<f=", NUMBER, "</f>"), tag("<g>", WORD, "</g>")
TWO_TRIGGERS = {"type": "triggered_tags", "triggers": ["<f", "<g"], "tags": [F, G]}


@pytest.mark.parametrize(
    ("fmt", "good", "bad"),
    [
        ({"type": "const_string", "value": "hi"}, ["hi"], ["", "ho"]),
        (NUMBER, ["12"], ["a"]),
        ({"type": "grammar", "grammar": 'start: "a" "b"'}, ["ab"], ["a"]),
        ({"type": "any_text"}, ["", "what ever\n"], []),
        ({"type": "sequence", "elements": [WORD, {"type": "const_string", "value": ": "}, NUMBER]}, ["a: 1"], ["a: b"]),
        ({"type": "or", "elements": [F, G]}, ["<f=1</f>", "<g>a</g>"], ["<f=a</f>", "x"]),
        (F, ["<f=12</f>"], ["<f=12", "x<f=12</f>"]),
        (tag("<t>", {"type": "any_text"}, "</t>"), ["<t>a < b</t>", "<t></t>"], ["<t>a", "<t>a</t>b"]),
        (tag("", WORD, ""), ["ab"], ["1"]),
        (
            TWO_TRIGGERS,
            ["", "text", "a <f=1</f> b <g>x</g> c", "<g>x</g><g>y</g>", "a < b"],
            ["<f=a</f>", "<h><f=", "<f", "a <g>1</g>"],
        ),
        ({**TWO_TRIGGERS, "at_least_one": True}, ["<g>x</g>", "a<g>x</g>"], ["", "text"]),
        ({**TWO_TRIGGERS, "stop_after_first": True}, ["", "text", "a<g>x</g>"], ["a<g>x</g> b", "<g>x</g><g>x</g>"]),
        (
            {"type": "tags_with_separator", "tags": [F, G], "separator": ", "},
            ["", "<f=1</f>", "<f=1</f>, <g>x</g>"],
            ["<f=1</f><g>x</g>", "<f=1</f>, "],
        ),
        (
            {"type": "tags_with_separator", "tags": [F], "separator": ",", "at_least_one": True},
            ["<f=1</f>", "<f=1</f>,<f=2</f>"],
            [""],
        ),
    ],
)
def test_texts_of_each_kind(fmt: Any, good: list[str], bad: list[str]) -> None:
    grammar = grammar_of(of(fmt))
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


def test_a_trigger_forces_a_tag() -> None:
    grammar = grammar_of(of(TWO_TRIGGERS))
    assert begins(grammar, "say <f=1") and not begins(grammar, "say <fx") and not begins(grammar, "say <g x")


def test_the_older_form_means_the_same() -> None:
    older = {
        "structures": [{"begin": "<f=a>", "schema": {"type": "boolean"}, "end": "</f>"}],
        "triggers": ["<f="],
    }
    for spec in (older, {"type": "structural_tag", **older}):
        grammar = grammar_of(spec)
        assert accepts(grammar, "x <f=a>true</f> y") and not begins(grammar, "x <f=b")
        assert accepts(grammar, "nothing") and not accepts(grammar, "<f=a>1</f>")


def test_markers_that_are_special_tokens_go_by_their_ids() -> None:
    spec = of({"type": "triggered_tags", "triggers": ["<call>"], "tags": [tag("<call>", WORD, "</call>")]})
    grammar = grammar_of(spec, **{"<call>": 300, "</call>": 301})
    assert "<[300]>" in grammar and "<[301]>" in grammar and '"<call>"' not in grammar


@pytest.mark.parametrize(
    ("spec", "pointer"),
    [
        ("{", "not valid JSON"),
        (["x"], "at #:"),
        ({}, "at #/type"),
        (of(None), "at #/format:"),
        (of({"type": "xml"}), "at #/format/type"),
        (of({"type": "const_string"}), "at #/format/value"),
        (of({"type": "regex", "pattern": "[a"}), "at #/format: .*position 0"),
        (of({"type": "grammar", "grammar": "start: x"}), "at #/format: .*unknown name"),
        (of({"type": "json_schema", "json_schema": {"type": "strnig"}}), "#/format/json_schema"),
        (of({"type": "sequence", "elements": []}), "at #/format/elements"),
        (of({"type": "sequence", "elements": [{"type": "any_text"}, WORD]}), "at #/format/elements/0"),
        (of(tag("<t>", {"type": "any_text"}, "")), "at #/format/end"),
        (of({**TWO_TRIGGERS, "triggers": ["<", "<f"]}), "at #/format/triggers/1"),
        (of({**TWO_TRIGGERS, "triggers": ["<f"]}), "at #/format/tags/1/begin"),
        (of({**TWO_TRIGGERS, "triggers": ["<f", "<g", "zz"]}), "at #/format/triggers/2"),
        (of({**TWO_TRIGGERS, "at_least_one": 1}), "at #/format/at_least_one"),
        ({"structures": [], "triggers": ["x"]}, "at #/structures"),
        ({"structures": [{"begin": "x", "schema": {}}], "triggers": ["x"]}, "at #/structures/0/end"),
    ],
)
def test_bad_ones_are_refused_by_pointer(spec: Any, pointer: str) -> None:
    with pytest.raises(RequestError, match=pointer) as caught:
        grammar_of(spec)
    assert caught.value.param == "structured_outputs.structural_tag"
    assert caught.value.code in ("invalid_grammar", "invalid_json_schema")


def test_deep_ones_are_refused() -> None:
    fmt: Any = WORD
    for _ in range(40):
        fmt = {"type": "or", "elements": [fmt]}
    with pytest.raises(RequestError) as caught:
        grammar_of(of(fmt))
    assert caught.value.code == "grammar_too_complex"
