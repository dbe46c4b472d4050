"""What the tests of Anthropic's API share: how to ask, and the events of a stream."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.helpers.live_server import LiveServer
from tests.server.checks import JSON

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


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream, comments left out; names and types agree."""
    events = []
    for part in text.split("\n\n"):
        if part and not part.startswith(":"):
            name, data = part.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}"
    return events
