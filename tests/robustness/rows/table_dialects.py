"""Tables M and O: bad requests to Anthropic's and Ollama's APIs. Their errors have a message, which names the field."""

from __future__ import annotations

from typing import Any

from tests.robustness.rows.row import Row, table
from tests.server.checks import HI
from tests.server.families import MAX_MODEL_LEN

MESSAGES, CHAT = "/v1/messages", "/api/chat"
LOOK = {"name": "look", "input_schema": {"type": "object"}}
LONG = "x y " * 4 * MAX_MODEL_LEN

_message = table(MESSAGES, {"model": "fake", "max_tokens": 2, "messages": HI})
_chat = table(CHAT, {"model": "fake", "messages": HI, "stream": False, "options": {"num_predict": 2}})


def message(name: str, what: str, changes: dict[str, Any], *words: str, status: int = 400, kind: str = "") -> Row:
    """Return a row of table M; `kind` is the type of the error."""
    return _message(name, what, changes, kind or "invalid_request_error", None, *words, status=status)


def chat(name: str, what: str, changes: dict[str, Any], *words: str, status: int = 400) -> Row:
    """Return a row of table O."""
    return _chat(name, what, changes, "none", None, *words, status=status)


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def strange(field: str) -> dict[str, Any]:
    return {
        field: [{**LOOK, "input_schema": {"properties": {"x": {"type": "strnig"}}}}],
        "tool_choice": {"type": "any"},
    }


MESSAGE_ROWS = [
    message("M1", "no model", {"model": ...}, "model is required"),
    message("M2", "an unknown model", {"model": "nope"}, "'nope' does not exist", status=404, kind="not_found_error"),
    message("M3", "no max_tokens", {"max_tokens": ...}, "max_tokens is required"),
    message("M4", "max_tokens 0", {"max_tokens": 0}, "max_tokens must be at least 1"),
    message("M5", "max_tokens as text", {"max_tokens": "5"}, "max_tokens must be an integer"),
    message("M6", "no messages", {"messages": ...}, "messages is required"),
    message("M7", "an empty conversation", {"messages": []}, "messages must not be empty"),
    message("M8", "an unknown role", {"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role must be"),
    message("M9", "a block without text", user({"type": "text"}), "messages[0].content[0].text is required"),
    message("M10", "an image", user({"type": "image", "source": {}}), "messages[0].content[0].type", "text only"),
    message("M11", "a result of no call", user({"type": "tool_result", "tool_use_id": "a"}), "content[0].tool_use_id"),
    message(
        "M12", "a conversation beyond the context", user({"type": "text", "text": LONG}), f"{MAX_MODEL_LEN} tokens"
    ),
    message("M13", "temperature 3", {"temperature": 3}, "temperature must be at most 2"),
    message("M14", "a schema of an unknown type", strange("tools"), "tools[0].input_schema", "#/properties/x/type"),
    message("M15", "tool_choice alone", {"tool_choice": {"type": "auto"}}, "tool_choice needs tools"),
    message("M16", "a field of others", {"container": "x"}, "container is not supported"),
    message("M17", "a misspelt field", {"max_token": 5}, "unknown parameter max_token; did you mean max_tokens?"),
    message(
        "M18",
        "a stream of an unknown model",
        {"stream": True, "model": "nope"},
        "'nope' does not exist",
        status=404,
        kind="not_found_error",
    ),
]
CHAT_ROWS = [
    chat("O1", "no model", {"model": ...}, "model is required"),
    chat("O2", "an unknown model", {"model": "nope"}, "'nope' does not exist", status=404),
    chat("O3", "a text as messages", {"messages": "hi"}, "messages must be a list"),
    chat("O4", "a message without role", {"messages": [{"content": "a"}]}, "messages[0].role is required"),
    chat("O5", "an unknown role", {"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role must be"),
    chat("O6", "a list as content", user("hi"), "messages[0].content must be a string"),
    chat(
        "O7",
        "an image",
        {"messages": [{"role": "user", "content": "a", "images": ["b"]}]},
        "messages[0].images",
    ),
    chat("O8", "an answer to no call", {"messages": [{"role": "tool", "content": "a"}]}, "messages[0]"),
    chat("O9", "a conversation beyond the context", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    chat("O10", "temperature 9", {"options": {"temperature": 9}}, "options.temperature must be at most 2"),
    chat("O11", "num_predict 0", {"options": {"num_predict": 0}}, "options.num_predict must be at least 1"),
    chat("O12", "an option of how models are run", {"options": {"num_gpu": 1}}, "options.num_gpu is not supported"),
    chat("O13", "a misspelt option", {"options": {"temprature": 1}}, "did you mean temperature"),
    chat("O14", "an unknown format", {"format": "yaml"}, 'format must be "json" or a JSON schema'),
    chat("O15", "a schema of an unknown type", {"format": {"type": "strnig"}}, "format", "#/type"),
    chat("O16", "a tool without function", {"tools": [{"type": "function"}]}, "tools[0].function is required"),
    chat("O17", "an unknown field", {"prompt": "a"}, "unknown parameter prompt"),
    chat("O18", "a stream of an unknown model", {"stream": True, "model": "nope"}, "'nope' does not exist", status=404),
]
