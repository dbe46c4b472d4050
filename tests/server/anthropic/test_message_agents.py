"""Messages as a coding agent sends them: long systems with marks, many tools, several turns, counted before each."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.helpers.live_server import LiveServer
from tests.helpers.server import Server
from tests.server.anthropic.wire import CALL, COUNT, LOOK, MESSAGES, THOUGHT, events_of
from tests.server.families import front_of
from tests.server.responses.asking import MARKS, says

CACHED = {"type": "ephemeral"}
HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "interleaved-thinking-2025-05-14,fine-grained-tool-streaming-2025-05-14",
    "x-api-key": "none",
    "user-agent": "agent/1.0 (external, cli)",
    "x-app": "cli",
    "x-stainless-lang": "js",
    "x-stainless-retry-count": "0",
    "x-stainless-timeout": "600",
}
SYSTEM = [
    {"type": "text", "text": "You are an agent.", "cache_control": CACHED},
    {"type": "text", "text": "# Rules\n- be brief\n" * 40, "cache_control": CACHED},
]
STRING = {"type": "string", "description": "x"}
FRAME = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "additionalProperties": False}
SCHEMAS: list[dict[str, Any]] = [
    {**FRAME, "properties": {}},
    {**FRAME, "properties": {"a": STRING}, "required": ["a"]},
    {
        **FRAME,
        "properties": {"a": {"type": "number", "exclusiveMinimum": 0}, "b": {"type": "boolean", "default": False}},
    },
    {**FRAME, "properties": {"a": {"type": "array", "items": {"type": "object", "properties": {"b": STRING}}}}},
    {**FRAME, "properties": {"a": {"type": "string", "enum": ["x", "y"]}}},
    {**FRAME, "properties": {"a": {"type": "string", "format": "uri"}}},
    {"type": "object", "properties": {"a": {"anyOf": [STRING, {"type": "null"}]}}},
]
TOOLS = [
    LOOK,
    *[
        {"name": f"tool_{index}", "description": "Does it.\n" * 5, "input_schema": SCHEMAS[index % len(SCHEMAS)]}
        for index in range(14)
    ],
]
TOOLS[-1] = {**TOOLS[-1], "cache_control": CACHED}
THINKING = {"type": "enabled", "budget_tokens": 31999}


def body_of(messages: list[Any], **others: Any) -> dict[str, Any]:
    return {
        "model": "fake",
        "max_tokens": 32000,
        "messages": messages,
        "system": SYSTEM,
        "tools": TOOLS,
        "thinking": THINKING,
        "metadata": {"user_id": "user_" + "a" * 64 + "_account__session_" + "b" * 36},
        "temperature": 1,
        "stream": True,
        **others,
    }


def counted(url: str, body: dict[str, Any]) -> int:
    """Return the number of tokens a request's prompt has."""
    names = ("model", "messages", "system", "tools", "thinking")
    asked = {name: body[name] for name in names if name in body}
    headers = {**HEADERS, "anthropic-beta": "token-counting-2024-11-01"}
    answer = httpx.post(
        f"{url}{COUNT}?beta=true", json=asked, headers=headers, timeout=60, trust_env=False, verify=False
    )
    assert answer.status_code == 200, answer.text
    number: int = answer.json()["input_tokens"]
    return number


def turn(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the message that the events of an answer add up to."""
    answer = httpx.post(
        f"{url}{MESSAGES}?beta=true", json=body, headers=HEADERS, timeout=120, trust_env=False, verify=False
    )
    assert answer.status_code == 200, answer.text
    if not body["stream"]:
        whole: dict[str, Any] = answer.json()
        return whole
    message: dict[str, Any] = {}
    pieces: list[str] = []
    for event in events_of(answer.text):
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(dict(event["content_block"]))
                pieces = []
            case "content_block_delta":
                _add(message["content"][event["index"]], event["delta"], pieces)
            case "content_block_stop":
                if pieces:
                    message["content"][event["index"]]["input"] = json.loads("".join(pieces))
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    return message


def _add(block: dict[str, Any], delta: dict[str, Any], pieces: list[str]) -> None:
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "signature_delta":
            block["signature"] = delta["signature"]
        case "input_json_delta":
            pieces.append(delta["partial_json"])
        case kind:
            raise AssertionError(kind)


@pytest.fixture
def server() -> Iterator[LiveServer]:
    """A server of a model with tools and reasoning, that reads as much as agents send."""
    front = front_of("hermes", "qwen3", MARKS)
    front = dataclasses.replace(front, info=dataclasses.replace(front.info, max_model_len=32768))
    live = LiveServer(llm={"front_model": front, "reply_text": "x"})
    yield live
    live.close()


@pytest.mark.parametrize("streamed", [True, False])
def test_an_agent_at_work(server: LiveServer, streamed: bool) -> None:
    says(server, *[THOUGHT + "I look." + CALL, THOUGHT + "It is dark."] * 3)
    messages: list[Any] = []
    for number in range(3):
        reminder = {"type": "text", "text": "<system-reminder>\nremember\n</system-reminder>"}
        question = {"type": "text", "text": f"question {number}", "cache_control": CACHED}
        messages.append({"role": "user", "content": [reminder, question]})
        for kinds, reason in ((["thinking", "text", "tool_use"], "tool_use"), (["thinking", "text"], "end_turn")):
            body = body_of(messages, stream=streamed)
            size = counted(server.url, body)
            message = turn(server.url, body)
            assert [block["type"] for block in message["content"]] == kinds
            assert message["stop_reason"] == reason
            usage = message["usage"]
            assert size == usage["input_tokens"] + usage["cache_read_input_tokens"]
            assert server.do(lambda: server.engine.added[-1]).max_tokens < 32000  # no more than there is room for
            messages.append({"role": "assistant", "content": message["content"]})
            if reason == "tool_use":
                call = message["content"][-1]
                assert (call["name"], call["input"]) == ("look", {"at": "x", "n": 3})
                texts = [{"type": "text", "text": f"part {part}"} for part in range(3)]
                result = {"type": "tool_result", "tool_use_id": call["id"], "content": texts, "cache_control": CACHED}
                messages.append({"role": "user", "content": [result, {"type": "text", "text": "go on"}]})
    prompt = server.do(lambda: server.engine.added[-1]).prompt_token_ids
    assert server.llm.tokenizer is not None
    text = server.llm.tokenizer.decode(prompt, skip_special_tokens=False)
    assert [text.count(f"question {number}") for number in range(3)] == [1, 1, 1]
    assert text.count("part 2") == 3


def test_small_requests_beside_the_work(server: LiveServer) -> None:
    """Titles of conversations, whether there is quota left: short, without tools, not streamed."""
    says(server, "hello")
    user = [{"role": "user", "content": "quota"}]
    message = turn(server.url, {"model": "fake", "max_tokens": 1, "messages": user, "stream": False})
    assert message["stop_reason"] == "max_tokens"
    title = body_of([*user, {"role": "assistant", "content": "{"}], thinking={"type": "disabled"}, max_tokens=512)
    del title["tools"], title["thinking"]
    assert turn(server.url, title)["content"][0]["text"] == "hello"


def test_an_agent_with_the_built_in_model(demo_server: Server) -> None:
    """It does not reason and reads a thousand tokens: every turn is an answer all the same."""
    messages: list[Any] = []
    for number in range(3):
        messages.append({"role": "user", "content": [{"type": "text", "text": f"The king {number}"}]})
        body = body_of(messages, model="quire-demo", system=SYSTEM[:1], tools=TOOLS[:2], temperature=0)
        del body["thinking"]
        size = counted(demo_server.url, body)
        message = turn(demo_server.url, {**body, "stop_sequences": ["\n"]})
        usage = message["usage"]
        assert size == usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert message["stop_reason"] in ("end_turn", "stop_sequence", "max_tokens", "tool_use")
        texts = [block for block in message["content"] if block["type"] == "text" and block["text"].strip()]
        messages.append({"role": "assistant", "content": texts or "well"})
