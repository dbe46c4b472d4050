"""What every keyword admits and what not; which spellings of a value are read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.structured.json_schema.driver import acceptor, spellings

DRAFT7 = "http://json-schema.org/draft-07/schema#"
NAMED = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a"]}
CASES: list[tuple[Any, list[Any], list[Any]]] = [
    (True, [None, 1, "x", [], {"a": [1.5]}], []),
    ({}, [None, {"": {}}], []),
    ({"type": "integer"}, [0, -7, 10**60], [1.5, 1.0, 1e300, "1", True, None]),
    ({"type": ["integer", "null"]}, [1, None], [1.5, False]),
    ({"type": "number"}, [1, -2.5, 1e-9, 5e-324, 1.7976931348623157e308], ["1", True]),
    ({"type": "boolean"}, [True, False], [0, 1, "true"]),
    ({"minLength": 3}, ["abc", 1, None, []], ["ab", ""]),
    (
        {"minLength": 1, "maxLength": 2},
        ["\U0001f600\U0001f600", "é\n", '"\\'],
        ["", "abc", "\U0001f600\U0001f600\U0001f600"],
    ),
    ({"type": "string", "maxLength": 65536}, ["a" * 65536], ["a" * 65537]),
    ({"enum": [1, "a", None, [1, {"b": 2}], True]}, [1, "a", None, [1, {"b": 2}], True], [1.0, 2, "b", [1], False]),
    (
        {"const": {"x": 1, "y": [None]}},
        [{"y": [None], "x": 1}],
        [{"x": 1.0, "y": [None]}, {"x": 1}, {"x": 1, "y": [None], "z": 0}],
    ),
    ({"const": "é\"\\\n\u2028\U0001f600"}, ["é\"\\\n\u2028\U0001f600"], ["é"]),
    (NAMED, [{"a": ""}, {"b": 1, "a": "x", "c": [1]}], [{}, {"b": 1}, {"a": 1}, {"a": "", "b": "1"}]),
    ({**NAMED, "additionalProperties": False}, [{"a": "x"}, {"b": 2, "a": "x"}], [{"a": "x", "c": 1}]),
    ({"additionalProperties": {"type": "null"}}, [{}, {"k": None}, 3], [{"k": 1}]),
    ({"patternProperties": {"^x": {"type": "null"}, "y$": False}}, [{"x": None}, {"z": 1}], [{"x": 1}, {"xy": None}]),
    ({"propertyNames": {"maxLength": 1}}, [{"a": 1}, {}], [{"ab": 1}]),
    ({"minProperties": 1}, [{"a": 1}, []], [{}]),
    (
        {"properties": {"a": {}, "b": {}}, "additionalProperties": False, "minProperties": 2},
        [{"a": 1, "b": 2}],
        [{"a": 1}],
    ),
    ({"maxProperties": 2}, [{}, {"a": 1, "b": 2}], [{"a": 1, "b": 2, "c": 3}]),
    ({"dependentRequired": {"a": ["b"]}}, [{}, {"b": 1}, {"a": 1, "b": 2}], [{"a": 1}]),
    ({"dependentSchemas": {"a": {"required": ["b"]}}}, [{"b": 1}, {"b": 1, "a": 1}], [{"a": 1}]),
    ({"items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, [[1], [1, 2], "x"], [[], [1, 2, 3], ["a"]]),
    ({"prefixItems": [{"const": 1}, {"const": 2}], "items": False}, [[], [1], [1, 2]], [[2], [1, 2, 3]]),
    ({"prefixItems": [{"const": 1}], "minItems": 2}, [[1, "x"], [1, 2, 3]], [[1], [2, 2]]),
    ({"contains": {"const": 1}}, [[1], [2, 1, 3]], [[], [2]]),
    ({"contains": True, "minItems": 2}, [[1, 2], [None, None, None]], [[], [1]]),
    ({"contains": {"const": 1}, "minContains": 2, "maxContains": 3}, [[1, 0, 1], [1, 1, 1]], [[1], [1, 1, 1, 1]]),
    ({"items": {"enum": ["a", "b", 1]}, "uniqueItems": True}, [[], ["a"], [1, "b", "a"]], [["a", "a"], [1, 1.0]]),
    ({"anyOf": [{"type": "string"}, {"minimum": 3}]}, ["x", 3, None], [2]),
    ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, [1, 3.5, "x"], [4]),
    (
        {"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"},
        [{"a": 1}, {"b": 1, "c": 2}],
        [{}, {"a": 1, "b": 2}],
    ),
    (
        {
            "oneOf": [
                {"properties": {"kind": {"const": "x"}, "v": {"type": "string"}}, "required": ["kind"]},
                {"properties": {"kind": {"const": "y"}, "v": {"type": "number"}}, "required": ["kind"]},
            ],
            "type": "object",
        },
        [{"kind": "x", "v": "s"}, {"v": 1.5, "kind": "y"}],
        [{"kind": "x", "v": 1.5}, {"v": "s"}, {"kind": "z"}],
    ),
    ({"allOf": [{"minimum": 2}, {"maximum": 4}]}, [2, 4.0, "x"], [1, 5]),
    ({"not": {"type": ["string", "integer"]}}, [None, 1.5, {}], ["", 1, 2.0]),
    ({"not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}, 1]),
    ({"not": {"enum": [1, "a"]}}, [2, "b", "A"], [1, 1.0, "a"]),
    # So large a number has one text, which is also that of a string.
    ({"enum": [str(2**53 + 1), 2**53 + 1]}, [str(2**53 + 1), 2**53 + 1], [1]),
    (
        {"properties": {str(2**53 + 1): {"const": 2**53 + 1}}},
        [{str(2**53 + 1): 2**53 + 1}],
        [{str(2**53 + 1): str(2**53 + 1)}],
    ),
    ({"type": "string", "not": {"pattern": "^a"}}, ["b", ""], ["a", "ab"]),
    (
        {
            "if": {"properties": {"a": {"const": 1}}, "required": ["a"]},
            "then": {"required": ["b"]},
            "else": {"maxProperties": 1},
        },
        [{"a": 1, "b": 1}, {"a": 2}, {}, 7],
        [{"a": 1}, {"a": 2, "b": 1}],
    ),
    (
        {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}},
        [[], [[[]], []]],
        [[1]],
    ),
    ({"properties": {"a": True}, "unevaluatedProperties": False, "allOf": [{"properties": {"b": True}}]},
     [{"a": 1, "b": 2}], [{"c": 1}]),
    ({"minimum": 0, "exclusiveMaximum": 1}, [0, 0.0, 0.9999999999999999, 5e-324], [1, 1.0, -1e-300, 1e16]),
    ({"minimum": 1e-7, "maximum": 2e22}, [1e-7, 1.5e-7, 1e22, 7], [9e-8, 3e22]),
    ({"multipleOf": 7}, [0, 14, -21, 7.0, 10**30 * 7], [1, 7.5, 10**30]),
    ({"multipleOf": 0.5}, [0, -1, 2.5, -0.5, 7.0, 1e16], [0.25, -1.75]),
    ({"allOf": [{"multipleOf": 0.25}, {"not": {"multipleOf": 1}}]}, [0.5, -2.75], [0, 1.0, 2.125, 1e16]),
    ({"multipleOf": 2.5}, [0, 2.5, -5, 10.0], [1, 2.4]),
    ({"type": "integer", "not": {"multipleOf": 3}}, [1, 2, -4], [2.0, 0, 3, 6.0]),
    ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "2024-2-1"]),
    ({"type": "string", "format": "ipv6"}, ["::1", "1:2:3:4:5:6:7:8"], [":::", "1::2::3"]),
    ({"type": "string", "format": "uri"}, ["https://example.com/a?b#c"], ["no uri", "/a"]),
    ({"type": "string", "format": "made-up"}, ["anything"], [1]),
    ({"$schema": DRAFT7, "items": [{"const": 1}], "additionalItems": False}, [[1]], [[1, 1]]),
    ({"$schema": DRAFT7, "dependencies": {"a": ["b"]}}, [{"a": 1, "b": 1}], [{"a": 1}]),
    ({"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 1, "exclusiveMinimum": True}, [1.5], [1]),
    ({"pattern": "a.c", "title": "found anywhere", "x-own": {"type": 3}}, ["xabcx", "a\u00e9c", 5], ["ac", "a\nc"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "valid", "invalid"), CASES, ids=[json.dumps(case[0])[:60] for case in CASES])
def test_keyword(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    read = acceptor(schema)
    for value in valid:
        for text in spellings(value):
            assert read.accepts(text), text
    for value in invalid:
        for text in spellings(value):
            assert not read.accepts(text), text


@pytest.mark.parametrize("schema", [True, NAMED, {"const": {"a": [1]}}])
def test_whitespace_belongs_between_the_parts_only(schema: Any) -> None:
    value = {"a": [1]} if schema != NAMED else {"a": "x"}
    flexible, tight = acceptor(schema), acceptor(schema, whitespace="none")
    indented, compact = json.dumps(value, indent=2), json.dumps(value, separators=(",", ":"))
    assert flexible.accepts(indented) and flexible.accepts(compact)
    assert tight.accepts(compact) and not tight.accepts(indented)
    assert not flexible.accepts(" " + compact) and not flexible.accepts(compact + "\n")


def test_whitespace_of_the_callers_own() -> None:
    read = acceptor(True, whitespace=" {2}")
    assert read.accepts("[  1  ,  2  ]") and not read.accepts("[1, 2]")
    assert not acceptor(True, whitespace="x?").accepts("[x1]")


def test_order_of_the_schema() -> None:
    schema = {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "required": ["b"]}
    read = acceptor(schema, ordered=True)
    for text in ('{"b":1}', '{"a":1,"b":1}', '{"b":1,"c":2,"d":3,"e":4}'):
        assert read.accepts(text), text
    for text in ('{"b":1,"a":1}', '{"d":1,"b":1}', '{"a":1}', '{"b":1,"b":1}', '{"b":1,}'):
        assert not read.accepts(text), text
    limited = acceptor({**schema, "maxProperties": 3, "minProperties": 2}, ordered=True)
    assert limited.accepts('{"a":1,"b":1,"x":1}') and limited.accepts('{"b":1,"c":1}')
    assert not limited.accepts('{"b":1}') and not limited.accepts('{"a":1,"b":1,"c":1,"d":1}')


def test_unnamed_properties_can_be_closed_out() -> None:
    schema = {"type": "object", "properties": {"a": {}, "o": {"type": "object"}}}
    read = acceptor(schema, additional_properties=False)
    assert read.accepts('{"o":{"x":1}}') and not read.accepts('{"x":1}')
    asked = acceptor({**schema, "additionalProperties": {"type": "null"}}, additional_properties=False)
    assert asked.accepts('{"x":null}')


def test_names_appear_once_and_cannot_hide_behind_escapes() -> None:
    read = acceptor({"properties": {"é": {"type": "null"}, "a/b": {"type": "null"}}})
    for text in ('{"é":null}', '{"\\u00e9":null}', '{"\\u00E9":null}', '{"a\\/b":null}', '{"c":1,"c":2}'):
        assert read.accepts(text), text
    for text in ('{"é":1}', '{"\\u00e9":1}', '{"a\\/b":1}', '{"\\u0061/b":1}', '{"é":null,"\\u00e9":null}'):
        assert not read.accepts(text), text


@pytest.mark.parametrize(
    "text", ['"\\ud800"', '"\\ud800\\u0041"', '"\n"', '"\\x"', '"\\u12"', "01", "+1", ".5", "1.", "nul"]
)
def test_what_is_no_json_is_not_written(text: str) -> None:
    assert not acceptor(True).accepts(text)


def test_many_properties_in_any_order() -> None:
    names = [f"p{index}" for index in range(150)]
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": names[100:140]}
    read = acceptor({**schema, "additionalProperties": False})
    assert read.accepts(json.dumps(dict.fromkeys(reversed(names), 1)))
    assert not read.accepts(json.dumps(dict.fromkeys(names[:139], 1)))
    assert not read.accepts(json.dumps({**dict.fromkeys(names, 1), "x": 1}))
    each_has_its_bit = {name: {"type": "integer"} for name in names[:63]}
    read = acceptor({"type": "object", "properties": each_has_its_bit, "additionalProperties": False})
    assert read.accepts(json.dumps(dict.fromkeys(names[:63], 1)))
    assert not read.accepts(json.dumps(dict.fromkeys(names[:63], 1))[:-1] + ', "p62": 1}')


def test_deep_nesting_of_instances() -> None:
    value: Any = 1
    for _ in range(200):
        value = [{"a": value}]
    assert acceptor(True).accepts(json.dumps(value))
