"""Table R: bad requests to /v1/responses."""

from __future__ import annotations

from typing import Any

from tests.robustness.rows.row import Row, table
from tests.server.families import MAX_MODEL_LEN

bad = table("/v1/responses", {"model": "fake", "input": "hi", "max_output_tokens": 2})


def items(*found: Any) -> dict[str, Any]:
    return {"input": list(found)}


def part(**fields: Any) -> dict[str, Any]:
    return items({"role": "user", "content": [fields]})


def schema(value: Any) -> dict[str, Any]:
    return {"text": {"format": {"type": "json_schema", "name": "x", "schema": value}}}


ROWS = [
    bad("R1", "no model", {"model": ...}, "missing_required_parameter", "model"),
    bad("R2", "no input", {"input": ...}, "missing_required_parameter", "input"),
    bad("R3", "no items", items(), "empty_array", "input"),
    bad("R4", "a number as input", {"input": 5}, "invalid_type", "input"),
    bad("R5", "an item without type", items({}), "missing_required_parameter", "input[0].type"),
    bad("R6", "an unknown item", items({"type": "what"}), "invalid_value", "input[0].type", "message"),
    bad("R7", "an image", part(type="input_image"), "unsupported_content_type", "input[0].content[0].type"),
    bad(
        "R8",
        "an output of no call",
        items({"type": "function_call_output", "call_id": "c", "output": "x"}),
        "invalid_value",
        "input[0].call_id",
    ),
    bad(
        "R9",
        "a conversation beyond the context",
        {"input": "x y " * 4 * MAX_MODEL_LEN},
        "context_length_exceeded",
        "input",
        f"{MAX_MODEL_LEN}",
    ),
    bad("R10", "max_output_tokens 0", {"max_output_tokens": 0}, "integer_below_min_value", "max_output_tokens"),
    bad("R11", "temperature 3", {"temperature": 3}, "decimal_above_max_value", "temperature", "2"),
    bad(
        "R12",
        "a schema of an unknown type",
        schema({"properties": {"a": {"type": "strnig"}}}),
        "invalid_json_schema",
        "text.format.schema",
        "#/properties/a/type",
    ),
    bad("R13", "a tool of the server", {"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools[0].type"),
    bad("R14", "a name of chats", {"max_tokens": 5}, "unsupported_parameter", "max_tokens"),
    bad("R15", "an unknown field", {"inputs": 1}, "unknown_parameter", "inputs", "did you mean input?"),
    bad(
        "R16",
        "a response that is not kept",
        {"previous_response_id": "resp_nope"},
        "previous_response_not_found",
        "previous_response_id",
        "resp_nope",
        status=404,
    ),
    Row(
        name="R17",
        what="GET of one that is not kept",
        method="GET",
        path="/v1/responses/resp_nope",
        status=404,
        code="response_not_found",
        param="response_id",
    ),
    bad(
        "R18", "a stream of an unknown model", {"stream": True, "model": "nope"}, "model_not_found", "model", status=404
    ),
]
