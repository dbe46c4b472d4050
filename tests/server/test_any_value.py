"""Any JSON value in any field: it is honoured or refused by name, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.server.protocol import ChatCompletionRequest, CompletionRequest, RequestModel
from tests.helpers.live_server import LiveServer
from tests.server.checks import CHAT, COMPLETIONS, HI, check_error, post

VALUES: list[Any] = [
    True,
    0,
    -1,
    1,
    2**70,
    0.5,
    -1e300,
    "",
    "a",
    "\x00\n",
    [],
    [None],
    [[]],
    [{}],
    ["a", 1],
    {},
    {"type": []},
    {"type": "function"},
    {"type": "json_schema", "json_schema": 5},
    {"a": {"b": [1, None]}},
    "\ud800",
    ["\ud800"],
    {"\ud800": "\ud800"},
]
ROUTES: list[tuple[str, type[RequestModel], dict[str, Any]]] = [
    (COMPLETIONS, CompletionRequest, {"prompt": "a"}),
    (CHAT, ChatCompletionRequest, {"messages": HI}),
]
# Where a value is at odds with another field, that may be the one that is named.
OTHERS = {
    "max_tokens": {"min_tokens"},
    "n": {"best_of"},
    "use_beam_search": {"stream"},
    "logprob_token_ids": {"logprobs"},
    "top_logprobs": {"logprobs"},
    "parallel_tool_calls": {"tools"},
}


CASES = [
    (path, name) for path, model, _ in ROUTES for name in sorted({*model.model_fields, *model.refused} - {"model"})
]


@pytest.mark.parametrize(("path", "name"), CASES, ids=[f"{path.rsplit('/')[-1]}-{name}" for path, name in CASES])
def test_any_value_is_honoured_or_refused_by_name(family: LiveServer, path: str, name: str) -> None:
    base = next(body for route, _, body in ROUTES if route == path)
    for value in VALUES:
        body = {"model": "fake", "max_tokens": 1, **base, name: value}
        response = post(family, path, json.dumps(body).encode())
        if response.status_code == 200:
            continue
        error = response.json()["error"]
        check_error(response, 400, error["code"], error["param"])
        named = error["param"] or ""
        assert named.split(".")[0].split("[")[0] in {name, *OTHERS.get(name, ())}, (value, error)
        assert len(error["message"]) < 1000
    assert family.do(lambda: family.engine.live) == []


@pytest.mark.parametrize("inner", ["response_format", "structured_outputs", "tools", "tool_choice", "messages"])
def test_any_value_within_a_field(family: LiveServer, inner: str) -> None:
    """The same for the parts of fields that are objects."""
    shapes: dict[str, list[Any]] = {
        "response_format": [
            lambda value: {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": value}}},
            lambda value: {"type": "json_schema", "json_schema": {"name": "a", "schema": value, "strict": True}},
            lambda value: {"type": "json_schema", "json_schema": {"name": value, "schema": {}}},
            lambda value: {"type": "structural_tag", "format": value},
            lambda value: {"type": "structural_tag", "structures": value, "triggers": [value]},
        ],
        "structured_outputs": [
            lambda value, kind=kind: {kind: value}
            for kind in ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        ],
        "tools": [
            lambda value: [{"type": "function", "function": {"name": "a", "parameters": value}}],
            lambda value: [{"type": "function", "function": {"name": "a", "parameters": {"properties": {"x": value}}}}],
            lambda value: [{"type": "function", "function": {"name": value, "description": value, "strict": value}}],
        ],
        "tool_choice": [
            lambda value: {"type": "function", "function": value},
            lambda value: {"type": "function", "function": {"name": value}},
            lambda value: {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": value}},
        ],
        "messages": [
            lambda value: [*HI, {"role": "assistant", "content": "a", "tool_calls": value}],
            lambda value: [*HI, {"role": "assistant", "tool_calls": [{"id": value, "function": {"name": "a"}}]}],
            lambda value: [*HI, {"role": "tool", "tool_call_id": value, "content": value}],
            lambda value: [*HI, {"role": "assistant", "content": value, "reasoning": value}],
        ],
    }
    tools = [{"type": "function", "function": {"name": "a"}}]
    for shape in shapes[inner]:
        for value in VALUES:
            body = {"model": "fake", "max_tokens": 1, "messages": HI, "tools": tools, inner: shape(value)}
            response = post(family, CHAT, json.dumps(body).encode())
            if response.status_code != 200:
                error = response.json()["error"]
                check_error(response, 400, error["code"], error["param"])
                assert error["param"].startswith(inner), (value, error)
