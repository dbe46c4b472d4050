"""Input items: what they become in the prompt, and how bad ones are refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from quire.server.responses import running
from tests.helpers.live_server import LiveServer
from tests.server.checks import check_error, prompt_of
from tests.server.responses.asking import LEAVE, LOOK, PATH, ask, refused, says
from tests.server.responses.spec import check

CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
CUSTOM = {"type": "custom_tool_call", "call_id": "c9", "name": "note", "input": "x"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "dark"}


def same_prompt(server: LiveServer, messages: list[dict[str, Any]], **body: Any) -> None:
    """Check that a response is made from the same prompt as a chat of these messages."""
    ask(server, **body)
    ours = prompt_of(server)
    tools = [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in (LOOK, LEAVE)]
    chat = {"model": "fake", "messages": messages, **({"tools": tools} if "tools" in body else {})}
    answer = server.http.post("/v1/chat/completions", json=chat)
    assert answer.status_code == 200, answer.text
    assert prompt_of(server) == ours


def test_items_become_the_messages_of_a_chat(family: LiveServer) -> None:
    says(family, "hello")
    user = {"role": "user", "content": "hi"}
    same_prompt(family, [user], input="hi")
    same_prompt(family, [{"role": "system", "content": "x"}, user], input=[user], instructions="x")
    system = [{"type": "text", "text": text} for text in ("x", "y")]
    body = {"input": [{"role": "developer", "content": "y"}, user], "instructions": "x"}
    same_prompt(family, [{"role": "system", "content": system}, user], **body)
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    same_prompt(
        family, [{"role": "user", "content": texts}], input=[{"type": "message", "role": "user", "content": parts}]
    )
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "yes"}]}
    same_prompt(family, [user, {"role": "assistant", "content": "yes"}, user], input=[user, said, user])


def test_calls_reasoning_and_outputs_become_messages(family: LiveServer) -> None:
    says(family, "hello")
    user = {"role": "user", "content": "hi"}
    items = [
        user,
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": "I look"},
        CALL,
        {**CALL, "call_id": "c2", "name": "leave"},
        OUTPUT,
        {**OUTPUT, "call_id": "c2", "output": [{"type": "input_text", "text": "gone"}]},
    ]
    functions = [{"name": "look", "arguments": "{}"}, {"name": "leave", "arguments": "{}"}]
    calls = [{"id": f"c{index + 1}", "function": function} for index, function in enumerate(functions)]
    messages = [
        user,
        {"role": "assistant", "reasoning": "hm", "content": "I look", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "dark"},
        {"role": "tool", "tool_call_id": "c2", "content": "gone"},
    ]
    same_prompt(family, messages, input=items, tools=[LOOK, LEAVE])


def test_input_items_are_listed_page_by_page(family: LiveServer) -> None:
    says(family, "hello")
    items = [{"role": "user", "content": f"number {index}"} for index in range(5)]
    made = ask(family, input=[*items, CALL, OUTPUT], tools=[LOOK])["id"]

    def page(**query: Any) -> dict[str, Any]:
        answer = family.http.get(f"{PATH}/{made}/input_items", params=query)
        assert answer.status_code == 200, answer.text
        check("ResponseItemList", answer.json())
        found: dict[str, Any] = answer.json()
        return found

    whole = page(order="asc")["data"]
    assert [item["content"][0]["text"] for item in whole[:5]] == [item["content"] for item in items]
    assert [item["type"] for item in whole[5:]] == ["function_call", "function_call_output"]
    assert page()["data"] == whole[::-1]
    assert page()["has_more"] is False
    collected: list[Any] = []
    query: dict[str, Any] = {"order": "asc", "limit": 3}
    while True:
        part = page(**query)
        collected += part["data"]
        assert (part["first_id"], part["last_id"]) == (part["data"][0]["id"], part["data"][-1]["id"])
        if not part["has_more"]:
            break
        query["after"] = part["last_id"]
    assert collected == whole
    check_error(family.http.get(f"{PATH}/{made}/input_items?after=x"), 404, "item_not_found", "after")
    check_error(family.http.get(f"{PATH}/{made}/input_items?limit=0"), 400, "integer_below_min_value", "limit")
    check_error(family.http.get(f"{PATH}/{made}/input_items?limt=1"), 400, "unknown_parameter", "limt")


def test_items_can_be_named_instead_of_sent_again(family: LiveServer) -> None:
    says(family, "hello")
    first = ask(family, input=[{"role": "user", "content": "one", "id": "msg_mine"}])
    answer = first["output"][0]["id"]
    named = [{"type": "item_reference", "id": "msg_mine"}, {"id": answer}]
    second = ask(family, input=[*named, {"role": "user", "content": "two"}])
    assert "one" in prompt_of(family)
    assert "hello" in prompt_of(family)
    family.http.delete(f"{PATH}/{second['id']}")
    ask(family, input=named, store=False)  # the first response still has them
    family.http.delete(f"{PATH}/{first['id']}")
    check_error(refused(family, input=[{"id": answer}]), 400, "item_not_found", "input[0].id")


def test_conversations_that_are_too_long_lose_their_first_turns_if_that_is_asked_for(
    family: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "quire.access")
    says(family, "hello")
    turns = [
        {"role": role, "content": f"{role}{index} " + "x" * 400}
        for index in range(12)
        for role in ("user", "assistant")
    ]
    items = [{"role": "system", "content": "be brief"}, *turns, {"role": "user", "content": "last"}]
    check_error(refused(family, input=items), 400, "context_length_exceeded", "input")
    check_error(refused(family, input=items, truncation="disabled"), 400, "context_length_exceeded", "input")
    response = ask(family, input=items, truncation="auto", max_output_tokens=500)
    prompt = prompt_of(family)
    assert "be brief" in prompt and "last" in prompt and "assistant11" in prompt
    assert "user0 " not in prompt
    first = prompt.split("<|im_start|>")[2]
    assert first.startswith("user\nuser")
    assert response["usage"]["input_tokens"] <= 4096 - 500
    assert response["usage"]["input_tokens"] > 4096 - 500 - 2 * 450
    # What did not fit is not a request of its own.
    assert f"tokens={response['usage']['input_tokens']}+{response['usage']['output_tokens']}" in caplog.messages[-1]
    check_error(refused(family, input="x" * 5000, truncation="auto"), 400, "context_length_exceeded", "input")


def test_cutting_a_conversation_has_an_end(family: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    items = [{"role": "user", "content": "word " * 100} for _ in range(400)]
    body = {"model": "fake", "input": items, "truncation": "auto", "max_output_tokens": 16}
    assert family.http.post(PATH, json=body).status_code == 200
    monkeypatch.setattr(running, "FITTING_SECONDS", -1.0)
    answer = family.http.post(PATH, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
