"""Bad requests to /api: each is refused by the name of the field, in Ollama's shape."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from quire.server.ollama.translate import LIMITS, REFUSED_OPTIONS, SAMPLING, ChatRequest, GenerateRequest, ShowRequest
from tests.helpers.live_server import LiveServer
from tests.server.checks import HI, JSON, LEAKS
from tests.server.test_any_value import VALUES

CHAT, GENERATE = "/api/chat", "/api/generate"
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def post(server: LiveServer, path: str, body: dict[str, Any]) -> httpx.Response:
    content = json.dumps({"model": "fake", **body}).encode()
    return server.http.post(path, content=content, headers=JSON)


def check_refused(response: httpx.Response, words: str, status: int = 400) -> str:
    """Check an error, the message of which has these words."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert len(response.content) <= 4096
    assert not LEAKS.search(response.text), response.text
    body = response.json()
    assert set(body) == {"error"}
    assert words in body["error"], body
    return str(body["error"])


def call(**function: Any) -> list[Any]:
    return [*HI, {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}, *HI]


BAD: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"model": None}, "model is required"),
    (CHAT, {"messages": "hi"}, "messages must be a list of objects"),
    (CHAT, {"messages": ["hi"]}, "messages[0] must be an object"),
    (CHAT, {"messages": [{"content": "hi"}]}, "messages[0].role is required"),
    (CHAT, {"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role must be one of"),
    (CHAT, {"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content must be a string"),
    (CHAT, {"messages": [{"role": "user", "content": "a", "images": ["b"]}]}, "messages[0].images is not supported"),
    (CHAT, {"messages": [{"role": "user", "content": "a", "name": "b"}]}, "unknown parameter messages[0].name"),
    (CHAT, {"messages": [{"role": "user", "content": "a", "thinking": "b"}]}, "messages[0].thinking has no place"),
    (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, "messages[0]: a message with role tool must answer"),
    (CHAT, {"messages": [*call(name="a"), {"role": "tool", "content": "", "tool_name": "b"}]}, "messages[3].tool_name"),
    (CHAT, {"messages": call(name="a", arguments="{}")}, "messages[1].tool_calls[0].function.arguments must be"),
    (CHAT, {"messages": call(arguments={})}, "messages[1].tool_calls[0].function.name is required"),
    (CHAT, {"messages": HI, "tools": [{"type": "function"}]}, "tools[0].function is required"),
    (CHAT, {"messages": HI, "tools": {}}, "tools must be a list"),
    (CHAT, {"messages": HI, "format": "yaml"}, 'format must be "json" or a JSON schema'),
    (CHAT, {"messages": HI, "format": {"type": "nope"}}, "format"),
    (CHAT, {"messages": HI, "options": []}, "options must be an object"),
    (CHAT, {"messages": HI, "options": {"temperature": 9}}, "options.temperature must be at most 2"),
    (CHAT, {"messages": HI, "options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
    (CHAT, {"messages": HI, "options": {"stop": ["a"] * 9}}, "options.stop may have at most 4 items"),
    (CHAT, {"messages": HI, "options": {"num_ctx": 10**6}}, "options.num_ctx must be at most 4096"),
    (CHAT, {"messages": HI, "options": {"num_predict": 0}}, "options.num_predict must be at least 1"),
    (CHAT, {"messages": HI, "options": {"repeat_last_n": 64, "repeat_penalty": 1.1}}, "options.repeat_last_n"),
    (CHAT, {"messages": HI, "options": {"num_gpu": 1}}, "options.num_gpu is not supported"),
    (
        CHAT,
        {"messages": HI, "options": {"temprature": 1}},
        "unknown parameter options.temprature; did you mean temperature",
    ),
    (CHAT, {"messages": HI, "think": "hard"}, "think must be true, false or one of"),
    (CHAT, {"messages": HI, "think": False}, "think: this model's reasoning cannot be disabled"),
    (CHAT, {"messages": HI, "keep_alive": "soon"}, "keep_alive must be a number of seconds or a duration"),
    (CHAT, {"messages": HI, "keep_alive": 0}, "keep_alive: clients cannot unload models"),
    (CHAT, {"messages": HI, "keep_alive": "0s"}, "keep_alive: clients cannot unload models"),
    (CHAT, {"messages": HI, "logprobs": True}, "logprobs is not supported"),
    (CHAT, {"messages": HI, "stream": 1}, "stream must be true or false"),
    (CHAT, {"messages": HI, "prompt": "a"}, "unknown parameter prompt"),
    (GENERATE, {"prompt": 5}, "prompt must be a string"),
    (GENERATE, {"prompt": "x" * 200_000}, "prompt"),
    (GENERATE, {"prompt": "a b " * 4000}, "prompt has"),
    (GENERATE, {"prompt": "a", "suffix": "b"}, "suffix is not supported"),
    (GENERATE, {"prompt": "a", "images": ["b"]}, "images is not supported"),
    (GENERATE, {"prompt": "a", "template": "b"}, "template is not supported"),
    (GENERATE, {"prompt": "a", "context": [1]}, "context is not supported"),
    (GENERATE, {"prompt": "a", "raw": True, "system": "b"}, "system has no place"),
    (GENERATE, {"prompt": "a", "raw": True, "think": True}, "think has no place"),
    ("/api/show", {"model": None}, "model is required"),
    ("/api/show", {"name": "other"}, "name is the older name of model"),
]


@pytest.mark.parametrize(("path", "body", "words"), BAD, ids=[words[:40] for *_, words in BAD])
def test_bad_requests(family: LiveServer, path: str, body: dict[str, Any], words: str) -> None:
    check_refused(post(family, path, body), words)


@pytest.mark.parametrize("path", [CHAT, GENERATE, "/api/show"])
def test_models_that_do_not_exist(family: LiveServer, path: str) -> None:
    for name in ("nope", "nope:latest", ":latest"):
        check_refused(post(family, path, {"model": name}), "does not exist", 404)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("DELETE", "/api/delete"),
        *[("POST", f"/api/{name}") for name in ("pull", "push", "create", "copy")],
    ],
)
def test_what_is_not_offered_says_why(family: LiveServer, method: str, path: str) -> None:
    check_refused(family.http.request(method, path, json={"model": "x"}), f"{path} is not offered: ", 404)


def test_models_that_do_not_reason(server: LiveServer) -> None:
    check_refused(post(server, CHAT, {"messages": HI, "think": True}), "think: this model does not reason")
    assert post(server, CHAT, {"messages": HI, "think": False, "options": {"num_predict": 1}}).status_code == 200


ROUTES = [
    (CHAT, ChatRequest, {"messages": HI}),
    (GENERATE, GenerateRequest, {"prompt": "a"}),
    ("/api/show", ShowRequest, {}),
]
CASES = [
    (path, name, base)
    for path, model, base in ROUTES
    for name in sorted({*model.model_fields, *model.refused} - {"model"})
]
SHORT = {"num_predict": 1}


@pytest.mark.parametrize(("path", "name", "base"), CASES, ids=[f"{path}-{name}" for path, name, _ in CASES])
def test_any_value_is_honoured_or_refused_by_name(
    family: LiveServer, path: str, name: str, base: dict[str, Any]
) -> None:
    for value in VALUES:
        limits = {} if path == "/api/show" else {"options": SHORT}
        response = post(family, path, {**limits, **base, name: value})
        if response.status_code != 200:
            message = check_refused(response, "")
            assert name in re.findall(r"[a-z_]+", message), (value, message)
            assert len(message) < 1000
    assert family.do(lambda: family.engine.live) == []


@pytest.mark.parametrize("option", [*SAMPLING, *LIMITS, *REFUSED_OPTIONS])
def test_any_value_of_an_option(family: LiveServer, option: str) -> None:
    for value in VALUES:
        response = post(family, CHAT, {"messages": HI, "options": {**SHORT, option: value}})
        if response.status_code != 200:
            message = check_refused(response, "options")
            assert f"options.{option}" in message or "surrogate" in message, (value, message)


SHAPES = [
    lambda value: [{"role": value, "content": "a"}],
    lambda value: [{"role": "user", "content": value}],
    lambda value: [{"role": "assistant", "content": "a", "thinking": value}, *HI],
    lambda value: [*HI, {"role": "assistant", "tool_calls": value}, *HI],
    lambda value: call(name="a", arguments=value),
    lambda value: call(name=value, index=value),
    lambda value: [*call(name="a"), {"role": "tool", "content": value, "tool_name": value}],
]


@pytest.mark.parametrize("shape", SHAPES)
def test_any_value_within_messages(family: LiveServer, shape: Any) -> None:
    for value in VALUES:
        response = post(family, CHAT, {"messages": shape(value), "options": SHORT, "tools": [TOOL]})
        if response.status_code != 200:
            assert "messages" in check_refused(response, ""), (value, response.text)
