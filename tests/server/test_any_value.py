"""Any JSON value in any field, at any depth: it is honoured or refused by name, and the server goes on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from quire.server.anthropic.translate import MessagesRequest
from quire.server.ollama.translate import LIMITS, REFUSED_OPTIONS, SAMPLING, ChatRequest, GenerateRequest, ShowRequest
from quire.server.pooling import ClassifyRequest, EmbeddingRequest, PoolRequest, RerankRequest, ScoreRequest
from quire.server.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest, RequestModel
from quire.server.responses.protocol import CreateConversationRequest, InputTokensRequest, ResponseRequest
from tests.helpers.live_server import LiveServer
from tests.server.checks import CHAT, COMPLETIONS, HI, check_refused, post

VALUES: list[Any] = [
    *(True, 0, -1, 2**70, 0.5, "", "a\x00\n", [], [None], [{}], ["a", 1], {}, {"type": []}, "\ud800", {"\ud800": 1}),
    *({"type": "function"}, {"type": "json_schema", "json_schema": 5}, {"format": {"type": 1}}),
]
# With 2 one field gets the values with even numbers, the next one the others; so do the places within a field.
strides = pytest.mark.parametrize("stride", [2, pytest.param(1, marks=pytest.mark.slow)])
MESSAGES, OLLAMA, RESPONSES = "/v1/messages", "/api/chat", "/v1/responses"


class Route(NamedTuple):
    """A route, a good and short request to it, and the fields that are tried.

    `like`: a request whose fields are the same here, and are tried there. `others`: where a value is at odds with
    another field, that may be the one that is named.
    """

    path: str
    model: type[RequestModel]
    base: dict[str, Any]
    like: type[RequestModel] = RequestModel
    others: dict[str, set[str]] = {}
    server: str = "family"


ROUTES = [
    Route(
        COMPLETIONS,
        CompletionRequest,
        {"prompt": "a", "max_tokens": 1},
        others={
            "max_tokens": {"min_tokens"},
            "n": {"best_of"},
            "use_beam_search": {"stream"},
            "logprob_token_ids": {"logprobs"},
        },
    ),
    Route(
        CHAT,
        ChatCompletionRequest,
        {"messages": HI, "max_tokens": 1},
        GenerationRequest,
        {"top_logprobs": {"logprobs"}, "parallel_tool_calls": {"tools"}},
    ),
    Route(
        RESPONSES,
        ResponseRequest,
        {"input": "a", "max_output_tokens": 1},
        GenerationRequest,
        {"previous_response_id": {"response_id"}, "store": {"background"}},
    ),
    Route(f"{RESPONSES}/input_tokens", InputTokensRequest, {"input": "a"}, ResponseRequest),
    Route("/v1/conversations", CreateConversationRequest, {"model": None}),
    Route(
        MESSAGES,
        MessagesRequest,
        {"messages": HI, "max_tokens": 1},
        others={"tool_choice": {"tools"}, "max_tokens": {"thinking"}},
    ),
    Route(OLLAMA, ChatRequest, {"messages": HI, "options": {"num_predict": 1}}),
    Route("/api/generate", GenerateRequest, {"prompt": "a", "options": {"num_predict": 1}}),
    Route("/api/show", ShowRequest, {}),
    Route("/v1/embeddings", EmbeddingRequest, {"input": "a"}, server="server"),
    Route("/pooling", PoolRequest, {"input": "a"}, EmbeddingRequest, server="server"),
    Route("/classify", ClassifyRequest, {"input": "a"}, EmbeddingRequest, server="server"),
    Route("/rerank", RerankRequest, {"query": "a", "documents": ["b", "c"]}, EmbeddingRequest, server="server"),
    Route(
        "/score",
        ScoreRequest,
        {"text_1": "a", "text_2": "b"},
        EmbeddingRequest,
        {"queries": {"text_1", "text_2"}, "documents": {"text_1", "text_2"}},
        "server",
    ),
]
CASES = [
    (route, name)
    for route in ROUTES
    for name in sorted({*route.model.model_fields, *route.model.refused} - {"model", *route.like.model_fields})
]


def check_named(live: LiveServer, path: str, body: dict[str, Any], names: set[str]) -> None:
    """Send a request; it succeeds, or one of these fields is named as the one at fault."""
    response = post(live, path, json.dumps({"model": "fake", **body}).encode())
    if response.status_code == 200:
        return
    message = check_refused(response, status=404 if response.status_code == 404 else 400)
    assert len(message) < 1000
    error = response.json()["error"]
    if isinstance(error, dict) and "param" in error:
        if error["code"] == "unsupported_endpoint":  # checked to the end
            return
        found = {re.split(r"[.\[]", error["param"] or "")[0]}
    else:
        found = set(re.findall(r"[a-z_]+", message))
    assert found & names, (body, message)


@strides
@pytest.mark.parametrize(("route", "name"), CASES, ids=[f"{route.path}-{name}" for route, name in CASES])
def test_any_value_is_honoured_or_refused_by_name(
    request: pytest.FixtureRequest, route: Route, name: str, stride: int
) -> None:
    live: LiveServer = request.getfixturevalue(route.server)
    if stride > 1 and name in route.model.refused:  # these differ in nothing but the values that are accepted
        stride *= 3
    for value in VALUES[CASES.index((route, name)) % stride :: stride]:
        check_named(live, route.path, {**route.base, name: value}, {name, *route.others.get(name, ())})
    live.wait_until(lambda: not live.engine.live)


Shape = Callable[[Any], Any]


def in_each(value: dict[str, Any], *fields: str, before: tuple[Any, ...] = ()) -> list[Shape]:
    """Return, for each of these fields of an object, what puts a value into it; a list, behind what comes before."""
    return [lambda found, field=field: [*before, {**value, field: found}] for field in fields]


def nested_in(*places: str | int) -> Shape:
    """Return what puts a value at the end of a path of keys, a number being a list of one item."""

    def put(value: Any) -> Any:
        for place in reversed(places):
            value = [value] if isinstance(place, int) else {place: value}
        return value

    return put


TOOL = {"type": "function", "function": {"name": "a"}}
FLAT_TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}
LOOK = {"name": "look", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
USED = (*HI, {"role": "assistant", "content": [USE]})
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}


def assistant(**fields: Any) -> list[Any]:
    return [*HI, {"role": "assistant", **fields}]


def ollama_call(**function: Any) -> list[Any]:
    return [*assistant(content="", tool_calls=[{"function": function}]), *HI]


SHAPES: dict[tuple[str, str], list[Shape]] = {
    (CHAT, "response_format"): [
        lambda value: {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": value}}},
        lambda value: {"type": "json_schema", "json_schema": {"name": "a", "schema": value, "strict": True}},
        lambda value: {"type": "json_schema", "json_schema": {"name": value, "schema": {}}},
        lambda value: {"type": "structural_tag", "format": value},
        lambda value: {"type": "structural_tag", "structures": value, "triggers": [value]},
    ],
    (CHAT, "structured_outputs"): [
        nested_in(kind) for kind in ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
    ],
    (CHAT, "tools"): [
        lambda value: [{"type": "function", "function": {"name": "a", "parameters": value}}],
        lambda value: [{"type": "function", "function": {"name": "a", "parameters": {"properties": {"x": value}}}}],
        lambda value: [{"type": "function", "function": {"name": value, "description": value, "strict": value}}],
    ],
    (CHAT, "tool_choice"): [
        lambda value: {"type": "function", "function": value},
        lambda value: {"type": "function", "function": {"name": value}},
        lambda value: {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": value}},
    ],
    (CHAT, "messages"): [
        lambda value: assistant(content="a", tool_calls=value),
        lambda value: assistant(tool_calls=[{"id": value, "function": {"name": "a"}}]),
        lambda value: [*HI, {"role": "tool", "tool_call_id": value, "content": value}],
        lambda value: assistant(content=value, reasoning=value),
    ],
    (RESPONSES, "input"): [
        *in_each({"role": "user", "content": "a"}, "role", "content", "type", "id", "status", "phase", "what"),
        lambda value: [{"role": "assistant", "content": [{"type": "output_text", "text": value, "logprobs": value}]}],
        lambda value: [{"role": "assistant", "content": [{"type": "output_text", "text": "", "annotations": value}]}],
        lambda value: [{"role": "assistant", "content": [{"type": "refusal", "refusal": value}]}],
        lambda value: [{"role": "user", "content": [{"type": value, "text": "a"}]}],
        lambda value: [{"role": "user", "content": [value]}],
        *in_each(CALL, "call_id", "name", "arguments", "id", "status", "caller", "namespace"),
        *in_each(OUTPUT, "call_id", "output", "id", "status", "name", "caller", before=(CALL,)),
        *in_each({"type": "reasoning", "summary": []}, "summary", "content", "id", "encrypted_content"),
        lambda value: [{"type": "item_reference", "id": value}],
        nested_in(0),
    ],
    (RESPONSES, "tools"): [
        nested_in(0),
        *in_each(FLAT_TOOL, "type", "name", "description", "parameters", "strict", "output_schema", "allowed_callers"),
        *in_each({"type": "custom", "name": "n"}, "format", "name", "x"),
    ],
    (RESPONSES, "tool_choice"): [
        lambda value: {"type": "function", "name": value},
        lambda value: {"type": "allowed_tools", "mode": value, "tools": [{"type": "function", "name": "look"}]},
        lambda value: {"type": "allowed_tools", "mode": "auto", "tools": value},
        lambda value: {"type": "allowed_tools", "mode": "auto", "tools": [value]},
        nested_in("type"),
    ],
    (RESPONSES, "text"): [
        nested_in("format"),
        nested_in("verbosity"),
        lambda value: {"format": {"type": "json_schema", "name": "a", "schema": {"type": value}}},
        lambda value: {"format": {"type": "json_schema", "name": value, "schema": {}}},
        lambda value: {"format": {"type": "json_schema", "name": "a", "schema": {}, "strict": value}},
        lambda value: {"format": {"type": "text", "what": value}},
    ],
    (RESPONSES, "reasoning"): [
        nested_in(field) for field in ("effort", "summary", "generate_summary", "context", "mode", "what")
    ],
    (RESPONSES, "stream_options"): [nested_in("include_obfuscation"), nested_in("include_usage")],
    (RESPONSES, "metadata"): [nested_in("a")],
    (RESPONSES, "include"): [nested_in(0)],
    (MESSAGES, "messages"): [
        lambda value: [*HI, {"role": value, "content": "a"}],
        lambda value: [{"role": "user", "content": value}],
        lambda value: [{"role": "user", "content": [{"type": value, "text": value}]}],
        lambda value: [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": value}]}],
        lambda value: assistant(content=[{**USE, "input": value, "id": value}]),
        lambda value: [
            *USED,
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": value}]},
        ],
        lambda value: [
            *USED,
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": value, "is_error": value}]},
        ],
        lambda value: assistant(content=[{"type": "thinking", "thinking": value, "signature": value}]) + HI,
    ],
    (MESSAGES, "system"): [lambda value: [{"type": "text", "text": value}], nested_in(0)],
    (MESSAGES, "tools"): [
        *in_each(LOOK, "input_schema", "name", "strict", "type", "cache_control", "input_examples"),
        lambda value: [{**LOOK, "input_schema": {"properties": {"x": value}}}],
    ],
    (MESSAGES, "tool_choice"): [
        nested_in("type"),
        lambda value: {"type": "tool", "name": value},
        lambda value: {"type": "any", "disable_parallel_tool_use": value},
    ],
    (MESSAGES, "thinking"): [
        nested_in("type"),
        lambda value: {"type": "enabled", "budget_tokens": value},
        lambda value: {"type": "adaptive", "display": value},
    ],
    (MESSAGES, "output_config"): [
        nested_in("effort"),
        nested_in("format"),
        lambda value: {"format": {"type": "json_schema", "schema": value}},
    ],
    (MESSAGES, "metadata"): [nested_in("user_id")],
    (OLLAMA, "messages"): [
        lambda value: [{"role": value, "content": "a"}],
        lambda value: [{"role": "user", "content": value}],
        lambda value: [{"role": "assistant", "content": "a", "thinking": value}, *HI],
        lambda value: [*assistant(tool_calls=value), *HI],
        lambda value: ollama_call(name="a", arguments=value),
        lambda value: ollama_call(name=value, index=value),
        lambda value: [*ollama_call(name="a"), {"role": "tool", "content": value, "tool_name": value}],
    ],
    (OLLAMA, "options"): [
        lambda value, option=option: {"num_predict": 1, option: value}  # type: ignore[misc]
        for option in (*SAMPLING, *LIMITS, *REFUSED_OPTIONS)
    ],
}
WITH_TOOLS = {CHAT: [TOOL], RESPONSES: [FLAT_TOOL], MESSAGES: [LOOK], OLLAMA: [TOOL]}


@strides
@pytest.mark.parametrize(("path", "name"), SHAPES)
def test_any_value_within_a_field(family: LiveServer, path: str, name: str, stride: int) -> None:
    base = next(route.base for route in ROUTES if route.path == path)
    for number, shape in enumerate(SHAPES[path, name]):
        for value in VALUES[number % stride :: stride]:
            check_named(family, path, {**base, "tools": WITH_TOOLS[path], name: shape(value)}, {name})
    family.wait_until(lambda: not family.engine.live)


@pytest.mark.parametrize(
    "name", ["stream", "include", "starting_after", "include_obfuscation", "limit", "order", "after"]
)
def test_any_value_in_a_query(family: LiveServer, name: str) -> None:
    body = {"model": "fake", "input": "a", "max_output_tokens": 1}
    stored = family.http.post(RESPONSES, json=body).json()["id"]
    for path in (f"{RESPONSES}/{stored}", f"{RESPONSES}/{stored}/input_items", f"{RESPONSES}/nobody"):
        for value in ("", "a", "-1", "0", "1", "101", "1" * 50, "1.5", "true", "\x00", "é", "²"):
            response = family.http.get(path, params={name: value})
            if response.status_code != 200:
                check_refused(response, status=404 if response.status_code == 404 else 400)
                assert response.json()["error"]["param"].split("[")[0] in (name, "response_id", "stream")
