"""Any JSON value in any field of a request for a response: it is honoured, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from quire.server.responses.protocol import InputTokensRequest, ResponseRequest
from tests.helpers.live_server import LiveServer
from tests.server.checks import check_error, post
from tests.server.responses.asking import LOOK, PATH
from tests.server.test_any_value import VALUES

VALUES = [*VALUES, {"type": "json_schema"}, {"type": "json_schema", "name": "a", "schema": 5}, {"format": {"type": 1}}]
CREATE, COUNT = PATH, f"{PATH}/input_tokens"
# Where a value is at odds with another field, that may be the one that is named.
OTHERS = {
    "previous_response_id": {"response_id"},
    "xtc_threshold": {"xtc_probability"},
    "guided_json": {"text"},
    "store": {"background"},
}
CASES = [
    (path, name)
    for path, model in ((CREATE, ResponseRequest), (COUNT, InputTokensRequest))
    for name in sorted({*model.model_fields, *model.refused} - {"model"})
]


def send(live: LiveServer, path: str, body: dict[str, Any], names: set[str]) -> None:
    """Send a request; an error must name one of these fields."""
    response = post(live, path, json.dumps(body).encode())
    if response.status_code == 200:
        return
    error = response.json()["error"]
    check_error(response, 404 if error["code"].endswith("_not_found") else 400, error["code"], error["param"])
    assert (error["param"] or "").split(".")[0].split("[")[0] in names, (body, error)


@pytest.mark.parametrize(("path", "name"), CASES, ids=[f"{path.rsplit('/')[-1]}-{name}" for path, name in CASES])
def test_any_value_is_honoured_or_refused_by_name(family: LiveServer, path: str, name: str) -> None:
    limit = {"max_output_tokens": 1} if path == CREATE else {}
    for value in VALUES:
        send(family, path, {"model": "fake", "input": "a", **limit, name: value}, {name, *OTHERS.get(name, ())})
    family.wait_until(lambda: not family.engine.live)


Shape = Callable[[Any], Any]
SHAPES: dict[str, list[Shape]] = {
    "input": [
        *(
            lambda value, field=field: [{"role": "user", "content": "a", field: value}]
            for field in ("role", "content", "type", "id", "status", "phase", "what")
        ),
        lambda value: [{"role": "assistant", "content": [{"type": "output_text", "text": value, "logprobs": value}]}],
        lambda value: [{"role": "assistant", "content": [{"type": "output_text", "text": "", "annotations": value}]}],
        lambda value: [{"role": "assistant", "content": [{"type": "refusal", "refusal": value}]}],
        lambda value: [{"role": "user", "content": [{"type": value, "text": "a"}]}],
        lambda value: [{"role": "user", "content": [value]}],
        *(
            lambda value, field=field: [
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", field: value}
            ]
            for field in ("call_id", "name", "arguments", "id", "status", "caller", "namespace")
        ),
        *(
            lambda value, field=field: [
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "x", field: value},
            ]
            for field in ("call_id", "output", "id", "status", "name", "caller")
        ),
        *(
            lambda value, field=field: [{"type": "reasoning", "summary": [], field: value}]
            for field in ("summary", "content", "id", "encrypted_content")
        ),
        lambda value: [{"type": "item_reference", "id": value}],
        lambda value: [value],
    ],
    "tools": [
        lambda value: [value],
        *(
            lambda value, field=field: [{**LOOK, field: value}]
            for field in (
                "type",
                "name",
                "description",
                "parameters",
                "strict",
                "output_schema",
                "allowed_callers",
                "x",
            )
        ),
    ],
    "tool_choice": [
        lambda value: {"type": "function", "name": value},
        lambda value: {"type": "allowed_tools", "mode": value, "tools": [{"type": "function", "name": "look"}]},
        lambda value: {"type": "allowed_tools", "mode": "auto", "tools": value},
        lambda value: {"type": "allowed_tools", "mode": "auto", "tools": [value]},
        lambda value: {"type": value},
    ],
    "text": [
        lambda value: {"format": value},
        lambda value: {"verbosity": value},
        lambda value: {"format": {"type": "json_schema", "name": "a", "schema": {"type": value}}},
        lambda value: {"format": {"type": "json_schema", "name": value, "schema": {}}},
        lambda value: {"format": {"type": "json_schema", "name": "a", "schema": {}, "strict": value}},
        lambda value: {"format": {"type": "text", "what": value}},
    ],
    "reasoning": [
        lambda value, field=field: {field: value}
        for field in ("effort", "summary", "generate_summary", "context", "mode", "what")
    ],
    "stream_options": [lambda value: {"include_obfuscation": value}, lambda value: {"include_usage": value}],
    "metadata": [lambda value: {"a": value}],
    "include": [lambda value: [value]],
}


@pytest.mark.parametrize("name", SHAPES)
def test_any_value_within_a_field(family: LiveServer, name: str) -> None:
    base = {"model": "fake", "input": "a", "tools": [LOOK], "max_output_tokens": 1}
    for shape in SHAPES[name]:
        for value in VALUES:
            send(family, CREATE, {**base, name: shape(value)}, {name})
    family.wait_until(lambda: not family.engine.live)


@pytest.mark.parametrize(
    "name", ["stream", "include", "starting_after", "include_obfuscation", "limit", "order", "after"]
)
def test_any_value_in_a_query(family: LiveServer, name: str) -> None:
    stored = family.http.post(PATH, json={"model": "fake", "input": "a", "max_output_tokens": 1}).json()["id"]
    for path in (f"{PATH}/{stored}", f"{PATH}/{stored}/input_items", f"{PATH}/nobody"):
        for value in ("", "a", "-1", "0", "1", "101", "1" * 50, "1.5", "true", "\x00", "é", "²"):
            response = family.http.get(path, params={name: value})
            if response.status_code != 200:
                error = response.json()["error"]
                check_error(
                    response, 404 if error["code"].endswith("_not_found") else 400, error["code"], error["param"]
                )
                assert error["param"].split("[")[0] in (name, "response_id", "stream")
