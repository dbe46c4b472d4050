"""What is refused, with which code, and where the message points; hostile schemas cost little."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import RequestError
from quire.structured.builder import GrammarBuilder
from quire.structured.json_schema.compiler import SchemaError, add_json_object, add_schema
from tests.structured.json_schema.driver import Acceptor


def _deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"properties": {"a": schema}}
    return schema


INVALID = "invalid_json_schema"
UNSUPPORTED = "unsupported_json_schema"
COMPLEX = "grammar_too_complex"
CASES: list[tuple[Any, str, str]] = [
    ({"type": "strnig"}, INVALID, "#/type"),
    ({"properties": {"a": {"type": 7}}}, INVALID, "#/properties/a/type"),
    ({"properties": {"a/b~": 3}}, INVALID, "#/properties"),
    ({"items": {"minLength": -1}}, INVALID, "#/items/minLength"),
    ({"required": "a"}, INVALID, "#/required"),
    ({"anyOf": []}, INVALID, "#/anyOf"),
    ({"pattern": "(["}, INVALID, "#/pattern"),
    ({"patternProperties": {"a**": True}}, INVALID, "#/patternProperties/a**"),
    ({"$ref": "#/$defs/none"}, INVALID, "#/$ref"),
    ({"$ref": "#anchor"}, INVALID, "#/$ref"),
    ({"minimum": float("nan")}, INVALID, "#"),
    ({1: 2, "a": {3}}, INVALID, "#"),
    ({"allOf": [{"$ref": "http://example.com/x.json"}]}, UNSUPPORTED, "#/allOf/0/$ref"),
    ({"$ref": "#"}, UNSUPPORTED, "#"),
    ({"$schema": "http://example.com/own"}, UNSUPPORTED, "#/$schema"),
    ({"items": {"pattern": r"(a)\1"}}, UNSUPPORTED, "#/items/pattern"),
    ({"items": {"pattern": r"\bword"}}, UNSUPPORTED, "#/items/pattern"),
    ({"type": "array", "uniqueItems": True}, UNSUPPORTED, "#/uniqueItems"),
    ({"type": "object", "minProperties": 2}, UNSUPPORTED, "#/minProperties"),
    ({"multipleOf": 0.01}, UNSUPPORTED, "#/multipleOf"),
    ({"properties": {"a": {"format": "email"}}}, UNSUPPORTED, "#/properties/a/format"),
    ({"not": {"additionalProperties": {"type": "string"}}}, UNSUPPORTED, "#/not/additionalProperties"),
    (False, UNSUPPORTED, "#"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, UNSUPPORTED, "#"),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 10**9}, COMPLEX, "#/maxItems"),
    ({"minLength": 10**9}, COMPLEX, "#/minLength"),
    ({"enum": list(range(100_000))}, COMPLEX, "#"),
    ({"enum": [0] * 1001}, COMPLEX, "#/enum"),
    ({"properties": {f"p{index}": True for index in range(5000)}}, COMPLEX, "#/properties"),
    (_deep(100), COMPLEX, "#" + "/properties/a" * 33),
    (_deep(5000), COMPLEX, "#"),
    ({"pattern": "((((a{1,100}){1,100}){1,100}){1,100})"}, COMPLEX, "#/pattern"),
    ({"pattern": "a" * 5000}, COMPLEX, "#/pattern"),
    ({"minimum": 10**3000}, COMPLEX, "#"),
    (
        {"allOf": [{"anyOf": [{"properties": {f"p{i}": {"minimum": j}}} for j in range(10)]} for i in range(10)]},
        COMPLEX,
        "#",
    ),
]


@pytest.mark.parametrize(("schema", "code", "pointer"), CASES, ids=[f"{c[1]}-{c[2][:40]}" for c in CASES])
def test_refusal_names_the_part(schema: Any, code: str, pointer: str) -> None:
    with pytest.raises(SchemaError) as caught:
        add_schema(GrammarBuilder(), schema)
    assert isinstance(caught.value, RequestError)
    assert caught.value.code == code
    if len(pointer) < 60:
        assert caught.value.pointer == pointer
    assert caught.value.pointer.startswith("#")
    assert caught.value.pointer[:400] in caught.value.message
    assert len(caught.value.message) < 1000


def test_a_schema_that_contains_itself_is_refused() -> None:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    with pytest.raises(SchemaError) as caught:
        add_schema(GrammarBuilder(), schema)
    assert caught.value.code == COMPLEX


def test_many_branches_cost_a_bounded_number_of_steps() -> None:
    branch = [
        {"properties": {"a": {"pattern": f"^{letter}.*x{{3,9}}$"}}, "required": [letter]} for letter in "abcdefgh"
    ]
    schema = {"oneOf": branch, "not": {"anyOf": branch[:4]}, "allOf": [{"oneOf": branch}]}
    try:
        add_schema(GrammarBuilder(), schema)
    except SchemaError as error:
        assert error.code in (COMPLEX, UNSUPPORTED)


def test_schemas_share_one_builder() -> None:
    builder = GrammarBuilder()
    rules = [
        add_schema(builder, {"properties": {"a": {"type": "null"}}, "required": ["a"], "type": "object"}),
        add_schema(builder, {"enum": [1]}),
        add_json_object(builder),
        add_schema(builder, True),
    ]
    read = Acceptor(builder.lark(' ";" '.join(rules)))
    assert read.accepts('{"a":null};1;{"x":[]};[{}]')
    assert not read.accepts('{"a":1};1;{};1') and not read.accepts('{"a":null};1;[];1')
