"""Bad requests to /v1/messages: each is refused by the name of the field, in Anthropic's shape."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from quire.server.anthropic.translate import MessagesRequest
from tests.helpers.live_server import LiveServer
from tests.server.anthropic.wire import HI, LOOK, MESSAGES, ask, check_refused
from tests.server.checks import JSON
from tests.server.test_any_value import VALUES


def user(*blocks: Any) -> list[Any]:
    return [{"role": "user", "content": list(blocks)}]


def assistant(*blocks: Any) -> list[Any]:
    return [*HI, {"role": "assistant", "content": list(blocks)}, *HI]


USE = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model is required"),
    ({"max_tokens": None}, "max_tokens is required"),
    ({"max_tokens": 0}, "max_tokens must be at least 1"),
    ({"max_tokens": "5"}, "max_tokens must be an integer"),
    ({"messages": None}, "messages is required"),
    ({"messages": []}, "messages must not be empty"),
    ({"messages": ["hi"]}, "messages[0] must be an object"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role is required"),
    ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0].role must be one of user, assistant, system"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is required"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content must be a string or a list of blocks"),
    ({"messages": user()}, "messages[0].content must not be empty"),
    ({"messages": user("hi")}, "messages[0].content[0] must be an object"),
    ({"messages": user({"text": "hi"})}, "messages[0].content[0].type is required"),
    ({"messages": user({"type": "text"})}, "messages[0].content[0].text is required"),
    ({"messages": user({"type": "text", "text": "a", "x": 1})}, "unknown parameter messages[0].content[0].x"),
    ({"messages": user({"type": "text", "text": "a", "citations": [1]})}, "content[0].citations is not supported"),
    ({"messages": user({"type": "text", "text": "a", "cache_control": {"type": "x"}})}, "cache_control.type must be"),
    ({"messages": user({"type": "image", "source": {}})}, "messages[0].content[0].type: this model reads text only"),
    ({"messages": user({"type": "document", "source": {}})}, "messages[0].content[0].type: this model reads text only"),
    ({"messages": user({"type": "web_search_tool_result"})}, "messages[0].content[0].type must be one of"),
    ({"messages": user(USE)}, "messages[0].content[0].type must be one of text, tool_result"),
    ({"messages": user({"type": "tool_result", "tool_use_id": "a"})}, "content[0].tool_use_id: no message before"),
    ({"messages": assistant({"type": "redacted_thinking", "data": "x"})}, "content[0].type: redacted_thinking"),
    ({"messages": assistant({"type": "thinking", "thinking": "x"})}, "messages[1].content[0].signature is required"),
    ({"messages": assistant({**USE, "input": "{}"})}, "messages[1].content[0].input must be an object"),
    ({"messages": assistant({**USE, "name": "a b"})}, "messages[1].content[0].name must be"),
    ({"messages": assistant(USE, USE)}, "messages[1].content[1].id: there are two calls"),
    ({"messages": assistant({**USE, "caller": {"type": "code"}})}, "messages[1].content[0].caller"),
    ({"messages": [*HI, {"role": "assistant", "content": [USE]}]}, "messages[1]: the last message has tool_use blocks"),
    ({"system": 5}, "system must be a string or a list of blocks"),
    ({"system": [{"type": "image"}]}, "system[0].type: this model reads text only"),
    ({"messages": [{"role": "user", "content": "a\ud800"}]}, "messages has a lone surrogate"),
    ({"messages": user({"type": "text", "text": "x" * 100_000})}, "messages"),
    ({"stop_sequences": "x"}, "stop_sequences must be a list of strings"),
    ({"stop_sequences": ["a"] * 5}, "stop_sequences may have at most 4 items"),
    ({"stop_sequences": [""]}, "stop_sequences[0] must not be empty"),
    ({"temperature": 3}, "temperature must be at most 2"),
    ({"top_p": 0}, "top_p must be greater than 0"),
    ({"top_k": -1}, "top_k must be at least 0"),
    ({"stream": 1}, "stream must be true or false"),
    ({"service_tier": "fast"}, "service_tier must be one of"),
    ({"metadata": {"user": "x"}}, "unknown parameter metadata.user"),
    ({"tools": {}}, "tools must be a list"),
    ({"tools": [5]}, "tools[0] must be an object"),
    (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools[0].type: only tools of the client's own",
    ),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type: only tools of the client's own"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema is required"),
    ({"tools": [{**LOOK, "name": "a b"}]}, "tools[0].name must be"),
    ({"tools": [LOOK, LOOK]}, "tools[1].name: there are two tools called 'look'"),
    ({"tools": [{**LOOK, "defer_loading": True}]}, "tools[0].defer_loading"),
    (
        {"tools": [{**LOOK, "input_schema": {"type": "string"}}]},
        "tools[0].input_schema must be the schema of an object",
    ),
    (
        {"tools": [{**LOOK, "input_schema": {"properties": {"x": {"type": "nope"}}}}], "tool_choice": {"type": "any"}},
        "tools[0].input_schema",
    ),
    ({"tool_choice": {"type": "auto"}}, "tool_choice needs tools"),
    ({"tools": [LOOK], "tool_choice": "any"}, "tool_choice must be an object"),
    ({"tools": [LOOK], "tool_choice": {"type": "required"}}, "tool_choice.type must be auto, any, tool or none"),
    ({"tools": [LOOK], "tool_choice": {"type": "tool"}}, "tool_choice.name is required"),
    ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "b"}}, "tool_choice.name: no tool is called 'b'"),
    ({"tools": [LOOK], "tool_choice": {"type": "auto", "name": "look"}}, "tool_choice.name needs"),
    ({"thinking": {"type": "on"}}, "thinking.type must be enabled, disabled or adaptive"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is required"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens must be at least 1024"),
    ({"thinking": {"type": "adaptive", "budget_tokens": 2000}}, "thinking.budget_tokens has no place"),
    ({"thinking": {"type": "adaptive", "display": "loud"}}, "thinking.display must be"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort must be one of"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type must be json_schema"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is required"),
    ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config.format.schema must be"),
    ({"container": "x"}, "container is not supported"),
    ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
    ({"context_management": {"edits": []}}, "context_management is not supported"),
    ({"speed": "fast"}, "speed is not supported"),
    ({"max_token": 5}, "unknown parameter max_token; did you mean max_tokens?"),
    ({"cache_control": {"type": "forever"}}, "cache_control.type must be ephemeral"),
]


@pytest.mark.parametrize(("fields", "words"), BAD, ids=[words[:40] for _, words in BAD])
def test_bad_requests(family: LiveServer, fields: dict[str, Any], words: str) -> None:
    check_refused(ask(family, **fields), words)


def test_models_that_do_not_exist(family: LiveServer) -> None:
    check_refused(ask(family, model="nope"), "the model 'nope' does not exist", 404, "not_found_error")


def test_a_context_that_is_too_small(family: LiveServer) -> None:
    check_refused(
        ask(family, messages=user({"type": "text", "text": "a b " * 4000})), "the context length is 4096 tokens"
    )


# Where a value is at odds with another field, that may be the one that is named.
OTHERS = {"tool_choice": {"tools"}, "max_tokens": {"thinking"}}
NAMES = sorted({*MessagesRequest.model_fields, *MessagesRequest.refused} - {"model"})


@pytest.mark.parametrize("name", NAMES)
def test_any_value_is_honoured_or_refused_by_name(family: LiveServer, name: str) -> None:
    for value in VALUES:
        body = {"model": "fake", "max_tokens": 1, "messages": HI, name: value}
        response = family.http.post(MESSAGES, content=json.dumps(body).encode(), headers=JSON)
        if response.status_code != 200:
            message = check_refused(response, "")
            words = re.findall(r"[a-z_]+", message)
            assert {name, *OTHERS.get(name, ())} & set(words), (value, message)
            assert len(message) < 1000
    assert family.do(lambda: family.engine.live) == []


SHAPES = {
    "messages": [
        lambda value: [*HI, {"role": value, "content": "a"}],
        lambda value: [{"role": "user", "content": value}],
        lambda value: user({"type": value, "text": value}),
        lambda value: user({"type": "text", "text": "a", "cache_control": value}),
        lambda value: [*HI, {"role": "assistant", "content": [{**USE, "input": value, "id": value}]}],
        lambda value: [*assistant(USE), *user({"type": "tool_result", "tool_use_id": "a", "content": value})],
        lambda value: [*assistant(USE), *user({"type": "tool_result", "tool_use_id": value, "is_error": value})],
        lambda value: assistant({"type": "thinking", "thinking": value, "signature": value}),
    ],
    "system": [lambda value: [{"type": "text", "text": value}], lambda value: [value]],
    "tools": [
        lambda value: [{**LOOK, "input_schema": value}],
        lambda value: [{**LOOK, "input_schema": {"properties": {"x": value}}}],
        lambda value: [{**LOOK, "name": value, "strict": value, "description": value}],
        lambda value: [{**LOOK, "type": value, "cache_control": value, "input_examples": value}],
    ],
    "tool_choice": [
        lambda value: {"type": value},
        lambda value: {"type": "tool", "name": value},
        lambda value: {"type": "any", "disable_parallel_tool_use": value},
    ],
    "thinking": [
        lambda value: {"type": value},
        lambda value: {"type": "enabled", "budget_tokens": value},
        lambda value: {"type": "adaptive", "display": value},
    ],
    "output_config": [
        lambda value: {"effort": value},
        lambda value: {"format": value},
        lambda value: {"format": {"type": "json_schema", "schema": value}},
    ],
    "metadata": [lambda value: {"user_id": value}],
}


@pytest.mark.parametrize("inner", SHAPES)
def test_any_value_within_a_field(family: LiveServer, inner: str) -> None:
    for shape in SHAPES[inner]:
        for value in VALUES:
            body = {"model": "fake", "max_tokens": 1, "messages": HI, "tools": [LOOK], inner: shape(value)}
            response = family.http.post(MESSAGES, content=json.dumps(body).encode(), headers=JSON)
            if response.status_code != 200:
                assert inner in check_refused(response, ""), (value, response.text)
