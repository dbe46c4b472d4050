"""Table C: structured output that is asked for wrongly, or that would cost too much."""

from __future__ import annotations

from typing import Any

from tests.robustness.rows.row import table
from tests.server.checks import COMPLETIONS, nested

bad = table(COMPLETIONS, {"model": "fake", "prompt": "a", "max_tokens": 2})
SCHEMA = "response_format.json_schema.schema"
REGEX, GRAMMAR, JSON = "structured_outputs.regex", "structured_outputs.grammar", "structured_outputs.json"


def form(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}


ITEMS = {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 10**9}
MANY = {"type": "object", "properties": {f"p{index}": {} for index in range(5000)}}

ROWS = [
    bad("C1", "an open bracket", form(regex="[a"), "invalid_grammar", REGEX, "position 0"),
    bad("C2", "NUL in a regex", form(regex="a\0b"), "invalid_grammar", REGEX, "position 1"),
    bad(
        "C3",
        "repeated repetition",
        form(regex="(((a{1,100}){1,100}){1,100}){1,100}"),
        "grammar_too_complex",
        "structured_outputs",
    ),
    bad("C4", "look-ahead", form(regex="(?=a)b"), "invalid_grammar", REGEX),
    bad("C5", "no JSON", form(json="{not json"), "invalid_json_schema", JSON),
    bad(
        "C6",
        "an unknown type",
        schema({"properties": {"a": {"type": "strnig"}}}),
        "invalid_json_schema",
        SCHEMA,
        "#/properties/a/type",
        "strnig",
    ),
    bad(
        "C7", "a reference to itself", schema({"$ref": "#"}), "unsupported_json_schema", SCHEMA, "refers to itself", "#"
    ),
    bad("C8", "a reference to nothing", schema({"$ref": "#/$defs/a"}), "invalid_json_schema", SCHEMA, "#/$ref"),
    bad(
        "C9",
        "a reference to another machine",
        schema({"$ref": "http://169.254.169.254/"}),
        "unsupported_json_schema",
        SCHEMA,
        "#/$ref",
    ),
    bad("C10", "100 levels", schema(nested(100)), "grammar_too_complex", "response_format", "64"),
    bad("C11", "a thousand million items", schema(ITEMS), "grammar_too_complex", SCHEMA, "#/maxItems"),
    bad("C12", "100000 values", schema({"enum": list(range(100_000))}), "grammar_too_complex", SCHEMA, "#"),
    bad("C13", "5000 properties", schema(MANY), "grammar_too_complex", SCHEMA),
    bad(
        "C14",
        "a pattern that is none",
        schema({"type": "string", "pattern": "(["}),
        "invalid_json_schema",
        SCHEMA,
        "#/pattern",
    ),
    bad("C15", "no grammar", form(grammar=""), "invalid_grammar", GRAMMAR),
    bad("C16", "a rule that begins with itself", form(grammar='start: start "a" | "b"'), None, None),
    bad("C17", "a rule that is not there", form(grammar="start: a"), "invalid_grammar", GRAMMAR),
    bad("C18", "no choice", form(choice=[]), "empty_array", "structured_outputs.choice"),
    bad("C19", "two forms", form(choice=["a"], regex="b"), "invalid_value", "structured_outputs"),
    bad(
        "C20",
        "no schema at all",
        {"response_format": {"type": "json_schema"}},
        "missing_required_parameter",
        "response_format.json_schema",
    ),
    bad("C21", "an unknown form", {"response_format": {"type": "xml"}}, "invalid_value", "response_format.type", "xml"),
]
