"""How these tests ask a server for responses, and what they check in every answer."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.helpers.fake_engine import reply_with
from tests.helpers.live_server import LiveServer
from tests.server.families import front_of
from tests.server.responses.spec import check, check_event

PATH = "/v1/responses"
LOOK: dict[str, Any] = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
LEAVE: dict[str, Any] = {"type": "function", "name": "leave", "description": "Go away."}
THOUGHT = "<think>\nlet me see\n</think>\n\n"
LOOK_CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "the hall"}}\n</tool_call>'
LEAVE_CALL = '<tool_call>\n{"name": "leave", "arguments": {}}\n</tool_call>'
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def family_server(**options: Any) -> LiveServer:
    """Return a server of a model with tools and reasoning."""
    return LiveServer(llm={"front_model": front_of("hermes", "qwen3", MARKS), "reply_text": "hello"}, **options)


def says(server: LiveServer, *texts: str) -> None:
    """Make the model answer these texts, one after the other."""
    tokenizer = server.llm.tokenizer
    assert tokenizer is not None
    server.engine.reply = reply_with(tokenizer, *texts)


def ask(server: LiveServer, *, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
    """Return a response, checked."""
    answer = server.http.post(PATH, json={"model": "fake", "input": "hi", **body}, headers=headers)
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    check("Response", response)
    check_usage(response)
    return response


def refused(server: LiveServer, **body: Any) -> httpx.Response:
    """Return the answer to a request that should fail."""
    return server.http.post(PATH, json={"model": "fake", "input": "hi", **body})


def stream(server: LiveServer, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a response, checked."""
    answer = server.http.post(PATH, json={"model": "fake", "input": "hi", "stream": True, **body})
    assert answer.status_code == 200, answer.text
    return read_events(answer.text)


def read_events(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream, each checked by itself."""
    assert "[DONE]" not in text
    *blocks, end = text.split("\n\n")
    assert end == ""
    events = []
    for block in blocks:
        kind, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {events[-1]['type']}"
        check_event(events[-1])
    return events


def check_usage(response: dict[str, Any]) -> None:
    """Check that counts add up."""
    usage = response.get("usage")  # only what has begun has one
    if usage is not None:
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert usage["input_tokens_details"]["cached_tokens"] <= usage["input_tokens"]
        assert usage["output_tokens_details"]["reasoning_tokens"] <= usage["output_tokens"]


def check_story(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Check the order of a whole stream, and that its pieces are those of the final response, which is returned."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] in (["created", "in_progress"], ["created", "queued"])
    assert kinds[-1] in ("completed", "incomplete", "failed")
    assert not {"completed", "incomplete", "failed", "created"} & set(kinds[1:-1])
    final: dict[str, Any] = events[-1]["response"]
    check_usage(final)
    for index, item in enumerate(final["output"]):
        own = [event for event in events if event.get("output_index") == index]
        names = [event["type"].removeprefix("response.") for event in own]
        added, done = own[0]["item"], own[-1]["item"]
        assert done == item
        assert (added["id"], added["type"], added["status"]) == (item["id"], item["type"], "in_progress")
        assert all(event["item_id"] == item["id"] for event in own[1:-1])
        if item["type"] == "function_call":
            deltas = names[1:-2]
            assert names[-2] == "function_call_arguments.done"
            assert set(deltas) <= {"function_call_arguments.delta"}
            assert own[-2]["arguments"] == item["arguments"]
            text = item["arguments"]
        else:
            stem = "output_text" if item["type"] == "message" else "reasoning_text"
            assert names[1] == "content_part.added"
            assert names[-3:-1] == [f"{stem}.done", "content_part.done"]
            deltas = names[2:-3]
            assert set(deltas) <= {f"{stem}.delta"}
            assert own[-3]["text"] == item["content"][0]["text"]
            assert own[-2]["part"] == item["content"][0]
            text = item["content"][0]["text"]
        assert "".join(event["delta"] for event in own if event["type"].endswith(".delta")) == text
    return final


def without_ids(value: Any) -> Any:
    """Return an output without what is drawn at random."""
    if isinstance(value, dict):
        return {key: without_ids(item) for key, item in value.items() if key not in ("id", "call_id")}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


def text_of(response: dict[str, Any]) -> str:
    """Return the text of a response."""
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])
