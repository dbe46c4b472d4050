"""Every kind of form, as a grammar; what cannot be compiled is refused by its own name."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import RequestError
from quire.structured.compile import compile_structured_output
from quire.structured_outputs import StructuredOutputParams
from tests.helpers.grammars import accepts

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
NAME_FIRST, AGE_FIRST = '{"name": "A", "age": 3}', '{"age": 3, "name": "A"}'


def compiled(**form: Any) -> str:
    return compile_structured_output(StructuredOutputParams(**form))


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ({"json": PERSON}, [NAME_FIRST, AGE_FIRST], ['{"name": "A"}', "{}", "[]"]),
        ({"json": '{"type": "boolean"}'}, ["true"], ["1"]),
        ({"json": True}, ["1", "[{}]", '"a"'], ["a", "[1,]"]),
        ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", "{"]),
        ({"regex": "a|b"}, ["a"], ["ab"]),
        ({"choice": ["tea", "teapot"]}, ["tea", "teapot"], ["te", "coffee"]),
        ({"grammar": 'start: "x"+'}, ["xx"], [""]),
        ({"grammar": 'root ::= "x" "y"?'}, ["x", "xy"], ["y"]),
        ({"structural_tag": {"type": "structural_tag", "format": {"type": "any_text"}}}, ["", "z"], []),
        ({"json": PERSON, "property_order": "schema"}, [NAME_FIRST], [AGE_FIRST]),
        ({"json": PERSON, "disable_any_whitespace": True}, ['{"name":"A","age":3}'], [NAME_FIRST]),
        ({"json": PERSON, "whitespace_pattern": "\\t?"}, ['{\t"name"\t:"A",\t"age":3}'], [NAME_FIRST]),
        ({"json": {"properties": {"a": {}}}}, ["{}", '{"a": 1}', "3"], ['{"b": 1}']),
        ({"json": {"properties": {"a": {}}, "additionalProperties": True}}, ['{"b": 1}'], []),
        ({"json": {"properties": {"a": {}}}, "disable_additional_properties": False}, ['{"b": 1}'], []),
        ({"json": {"type": "object"}}, ['{"b": 1}'], ["3"]),
    ],
)
def test_texts_of_a_form(form: dict[str, Any], good: list[str], bad: list[str]) -> None:
    grammar = compiled(**form)
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("form", "code", "param"),
    [
        ({"json": "{not json"}, "invalid_json_schema", "json"),
        ({"json": "5"}, "invalid_json_schema", "json"),
        ({"json": {"type": "strnig"}}, "invalid_json_schema", "json"),
        ({"json": {"$ref": "#/$defs/none"}}, "invalid_json_schema", "json"),
        ({"json": {"type": "array", "maxItems": 10**9, "minItems": 10**8}}, "grammar_too_complex", "json"),
        ({"json": {"enum": list(range(100_000))}}, "grammar_too_complex", "json"),
        ({"json": {"properties": {f"p{i}": {} for i in range(5000)}}}, "grammar_too_complex", "json"),
        ({"json": {"pattern": "(["}}, "invalid_json_schema", "json"),
        ({"regex": "[a"}, "invalid_grammar", "regex"),
        ({"grammar": "start: nothing"}, "invalid_grammar", "grammar"),
        ({"choice": ["x" * 70000]}, "grammar_too_complex", "choice"),
        ({"structural_tag": "{}"}, "invalid_grammar", "structural_tag"),
    ],
)
def test_bad_forms_are_refused_by_name(form: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        compiled(**form)
    assert (caught.value.code, caught.value.param) == (code, f"structured_outputs.{param}")
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize(
    ("form", "code", "says"),
    [
        ({"regex": r"[^\s\S]"}, "invalid_grammar", "no text satisfies"),
        ({"regex": "a{1,200}[a&&b]"}, "invalid_grammar", "no text satisfies"),
        ({"grammar": "start: a\na[temperature=0.5]: /x/"}, "invalid_grammar", "temperature"),
        ({"grammar": 'start: a\n  a[lazy, capture="y"]: /x/'}, "invalid_grammar", "capture"),
        ({"grammar": "start: start"}, "invalid_grammar", "no text satisfies"),
        ({"grammar": '{"grammars": [{"json_schema": {}}]}'}, "invalid_grammar", "expecting rule"),
        ({"grammar": "start: " + "(" * 3000 + '"a"' + ")" * 3000}, "grammar_too_complex", "too deeply"),
        ({"grammar": "start: limit\nlimit: nothing"}, "invalid_grammar", "nothing"),
        ({"json": {}, "whitespace_pattern": "("}, "invalid_grammar", "whitespace_pattern"),
        ({"json": {}, "whitespace_pattern": "\\/? | x"}, "invalid_grammar", "slash"),
    ],
)
def test_why_a_form_is_refused(form: dict[str, Any], code: str, says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        compiled(**form)
    assert caught.value.code == code


def test_words_that_name_attributes_elsewhere_are_text() -> None:
    grammar = compiled(grammar='start: "a[temperature=1]" b\nb[lazy]: /[capture]+!/')
    assert accepts(grammar, "a[temperature=1]cap!")


@pytest.mark.parametrize("pattern", [r"\s*", ".*", "x*", "\n?", " {0,3}"])
def test_blanks_are_those_of_json_whatever_the_pattern(pattern: str) -> None:
    grammar = compiled(json={"type": "array", "items": {"type": "null"}}, whitespace_pattern=pattern)
    assert accepts(grammar, "[null,null]")
    for text in ("[\x0bnull]", "[x]", "[xnull]", "[\u00a0null]"):
        assert not accepts(grammar, text)


@pytest.mark.parametrize("pattern", ["(((a{1,100}){1,100}){1,100}){1,100}"])
def test_what_cannot_be_followed_is_refused(pattern: str) -> None:
    with pytest.raises(RequestError) as caught:
        compiled(regex=pattern)
    assert caught.value.code == "grammar_too_complex"
