"""Structured output asked for wrongly: the code, the field as the client wrote it, and a pointer to the part."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.live_server import LiveServer
from tests.server.checks import CHAT, COMPLETIONS, HI, check_error, nested, post


def form(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}


SCHEMA = "response_format.json_schema.schema"
# Table C, and more of the kind: how structured output may be asked for wrongly. Codes and parameters, and a JSON
# pointer that the message must have.
FORM_ROWS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "93 regex": (form(regex="[a"), "invalid_grammar", "structured_outputs.regex", ""),
    "94 regex with NUL": (form(regex="a\0b"), "invalid_grammar", "structured_outputs.regex", ""),
    "96 look-ahead": (form(regex="(?=a)b"), "invalid_grammar", "structured_outputs.regex", ""),
    "97 not JSON": (form(json="{not json"), "invalid_json_schema", "structured_outputs.json", ""),
    "98 strnig": (schema({"type": "strnig"}), "invalid_json_schema", SCHEMA, "#/type"),
    "98 strnig within": (
        schema({"type": "object", "properties": {"a": {"type": "strnig"}}}),
        "invalid_json_schema",
        SCHEMA,
        "#/properties/a/type",
    ),
    "100 $ref to nothing": (schema({"$ref": "#/$defs/a"}), "invalid_json_schema", SCHEMA, "#/$ref"),
    "101 remote $ref": (schema({"$ref": "http://127.0.0.1:9/"}), "unsupported_json_schema", SCHEMA, "#/$ref"),
    "102 nested 100": (schema(nested(100)), "grammar_too_complex", "response_format", ""),
    "103 maxItems": (
        schema({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 10**9}),
        "grammar_too_complex",
        SCHEMA,
        "#/maxItems",
    ),
    "104 enum": (schema({"enum": list(range(100_000))}), "grammar_too_complex", SCHEMA, "#"),
    "105 properties": (
        schema({"type": "object", "properties": {f"p{index}": {} for index in range(5000)}}),
        "grammar_too_complex",
        SCHEMA,
        "",
    ),
    "106 pattern": (schema({"type": "string", "pattern": "(["}), "invalid_json_schema", SCHEMA, "#/pattern"),
    "107 grammar": (form(grammar=""), "invalid_grammar", "structured_outputs.grammar", ""),
    "109 undefined rule": (form(grammar="start: a"), "invalid_grammar", "structured_outputs.grammar", ""),
    "110 choice": (form(choice=[]), "empty_array", "structured_outputs.choice", ""),
    "110 guided_choice": ({"guided_choice": []}, "empty_array", "guided_choice", ""),
    "111 two at once": (form(choice=["a"], regex="b"), "invalid_value", "structured_outputs", ""),
    "111 two fields": (
        {**form(choice=["a"]), "response_format": {"type": "json_object"}},
        "invalid_value",
        "structured_outputs",
        "",
    ),
    "111 two guided": ({"guided_choice": ["a"], "guided_regex": "a"}, "invalid_value", "guided_choice", ""),
    "options of no form": (
        {**form(disable_any_whitespace=True), "response_format": {"type": "text"}},
        "invalid_value",
        "structured_outputs",
        "",
    ),
    "option": (
        {**form(property_order="random"), **schema({})},
        "invalid_value",
        "structured_outputs.property_order",
        "",
    ),
    "unknown option": ({**form(ebnf=True), **schema({})}, "unknown_parameter", "structured_outputs.ebnf", ""),
    "111 none": (form(), "invalid_value", "structured_outputs", ""),
    "112 json_schema": (
        {"response_format": {"type": "json_schema"}},
        "missing_required_parameter",
        "response_format.json_schema",
        "",
    ),
    "113 xml": ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type", ""),
    "140 no schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "missing_required_parameter",
        SCHEMA,
        "",
    ),
    "no name": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "missing_required_parameter",
        "response_format.json_schema.name",
        "",
    ),
    "name": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        "invalid_value",
        "response_format.json_schema.name",
        "",
    ),
    "strict 1": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": 1}}},
        "invalid_type",
        "response_format.json_schema.strict",
        "",
    ),
    "no type": ({"response_format": {}}, "missing_required_parameter", "response_format.type", ""),
    "text": ({"response_format": "json"}, "invalid_type", "response_format", ""),
    "schema text": (schema("{}"), "invalid_type", SCHEMA, ""),
    "unknown": (
        {"response_format": {"type": "json_object", "schema": {}}},
        "unknown_parameter",
        "response_format.schema",
        "",
    ),
    "unknown in structured_outputs": (form(ebnf="a"), "unknown_parameter", "structured_outputs.ebnf", ""),
    "unsupported keyword": (
        schema({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}),
        "unsupported_json_schema",
        SCHEMA,
        "#/uniqueItems",
    ),
    "guided_json": ({"guided_json": {"type": "strnig"}}, "invalid_json_schema", "guided_json", "#/type"),
    "guided_regex": ({"guided_regex": "[a"}, "invalid_grammar", "guided_regex", ""),
    "guided_grammar": ({"guided_grammar": "start: a"}, "invalid_grammar", "guided_grammar", ""),
    "guided backend": ({"guided_decoding_backend": "outlines"}, "unsupported_parameter", "guided_decoding_backend", ""),
    "guided blanks alone": ({"guided_whitespace_pattern": "a"}, "invalid_value", "guided_whitespace_pattern", ""),
    "structural_tag": (
        {"response_format": {"type": "structural_tag", "format": {"type": "nope"}}},
        "invalid_grammar",
        "response_format",
        "#/format",
    ),
}


@pytest.mark.parametrize("name", FORM_ROWS)
def test_bad_forms(server: LiveServer, name: str) -> None:
    changes, code, param, pointer = FORM_ROWS[name]
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HI})):
        response = post(server, path, {"model": "fake", **body, **changes})
        error = check_error(response, 400, code, param)
        assert pointer in error["message"]
    assert server.do(lambda: server.engine.live) == []


@pytest.mark.parametrize(
    "changes",
    [
        form(regex="(((a{1,100}){1,100}){1,100}){1,100}"),
        schema({"$ref": "#"}),
        form(grammar='start: start "a" | "b"'),
        schema({"type": "array", "prefixItems": [{"enum": [1]}] * 500}),
    ],
    ids=["95 repeated repetition", "99 $ref to itself", "108 left recursion", "many items"],
)
def test_forms_that_are_costly_are_answered_all_the_same(server: LiveServer, changes: dict[str, Any]) -> None:
    response = post(server, COMPLETIONS, {"model": "fake", "prompt": "a", "max_tokens": 2, **changes})
    if response.status_code != 200:
        check_error(response, 400, response.json()["error"]["code"], response.json()["error"]["param"])
    assert server.do(lambda: server.engine.live) == []
