"""What the tests of Anthropic's API share: how to ask, and what is promised of every error."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.helpers.live_server import LiveServer
from tests.server.checks import JSON, LEAKS

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HI: list[Any] = [{"role": "user", "content": "hi"}]
LOOK: dict[str, Any] = {
    "name": "look",
    "description": "Look at something.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}, "n": {"type": "integer"}}},
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "x", "n": 3}}\n</tool_call>'
THOUGHT = "<think>\nhmm yes\n</think>\n\n"


def ask(server: LiveServer, **fields: Any) -> httpx.Response:
    """Post a message request; it says hi unless told otherwise, and a field that is None is left out."""
    body = {"model": "fake", "max_tokens": 8, "messages": HI, **fields}
    content = json.dumps({name: value for name, value in body.items() if value is not None})
    return server.http.post(MESSAGES, content=content, headers=JSON)


def check_refused(response: httpx.Response, word: str, status: int = 400, kind: str = "invalid_request_error") -> str:
    """Check an error, the message of which begins with, or at least has, a word."""
    assert response.status_code == status, response.text
    assert response.headers["request-id"] == response.headers["x-request-id"]
    assert len(response.content) <= 4096
    assert not LEAKS.search(response.text), response.text
    body = response.json()
    assert (body["type"], body["request_id"]) == ("error", response.headers["request-id"])
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["type"] == kind, body
    message: str = body["error"]["message"]
    assert word in message, message
    return message


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream, comments left out; names and types agree."""
    events = []
    for part in text.split("\n\n"):
        if part and not part.startswith(":"):
            name, data = part.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events


def prompt_of(server: LiveServer) -> str:
    """Return what the model got last."""
    return server.llm.front_model.tokenizer.decode(  # type: ignore[union-attr]
        server.engine.added[-1].prompt_token_ids, skip_special_tokens=False
    )
