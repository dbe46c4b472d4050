"""POST /v1/messages: what requests become, and what answers and streams look like."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.live_server import LiveServer, MakeServer
from tests.server.anthropic.wire import (
    CALL,
    COUNT,
    HI,
    LOOK,
    MESSAGES,
    THOUGHT,
    ask,
    events_of,
)
from tests.server.checks import check_refused, prompt_of
from tests.server.responses.asking import says


def test_a_message(plain: LiveServer) -> None:
    response = ask(plain)
    assert response.headers["request-id"]
    answer = response.json()
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": "hello world"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 21,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 4,
            "service_tier": "standard",
        },
    }


@pytest.mark.parametrize(
    ("fields", "reason", "sequence", "text"),
    [
        ({}, "end_turn", None, "hello world"),
        ({"max_tokens": 2}, "max_tokens", None, "hello wor"),
        ({"stop_sequences": ["x", "o w"]}, "stop_sequence", "o w", "hell"),
    ],
)
def test_reasons_of_the_end(plain: LiveServer, fields: dict[str, Any], reason: str, sequence: Any, text: str) -> None:
    answer = ask(plain, **fields).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
    assert answer["content"][0]["text"] == text


def test_a_context_that_is_full(make_server: MakeServer) -> None:
    answer = ask(make_server(), max_tokens=1000).json()
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert answer["usage"]["input_tokens"] + answer["usage"]["output_tokens"] == 256


def test_a_stream_adds_up_to_the_message(family: LiveServer) -> None:
    says(family, THOUGHT + "let me\n" + CALL + CALL)
    whole = ask(family, tools=[LOOK], max_tokens=2000).json()
    events = events_of(ask(family, tools=[LOOK], max_tokens=2000, stream=True).text)
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    message = events[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"] | {"partial": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            delta = event["delta"]
            kind = delta.pop("type")
            fields = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
            [value] = delta.values()
            blocks[-1][fields.get(kind, "partial")] += value
    for block in blocks:
        partial = block.pop("partial")
        if block["type"] == "tool_use":
            block["input"] = json.loads(partial)
            assert block.pop("id").startswith("toolu_")
    for block in whole["content"]:
        block.pop("id", None)
    assert blocks == whole["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert blocks[0]["thinking"] == "hmm yes" and blocks[0]["signature"]
    assert blocks[2]["input"] == {"at": "x", "n": 3}
    [ending] = [event for event in events if event["type"] == "message_delta"]
    assert ending["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert {**ending["usage"], "service_tier": "standard"} == whole["usage"]
    assert whole["stop_reason"] == "tool_use"


def test_a_call_that_is_cut_off(family: LiveServer) -> None:
    says(family, CALL)
    answer = ask(family, tools=[LOOK], max_tokens=50).json()
    assert answer["stop_reason"] == "max_tokens"
    [block] = answer["content"]
    assert (block["name"], block["input"]) == ("look", {})


def test_thinking_that_is_not_shown(family: LiveServer) -> None:
    says(family, THOUGHT + "yes")
    fields: dict[str, Any] = {"thinking": {"type": "adaptive", "display": "omitted"}, "max_tokens": 100}
    thinking, text = ask(family, **fields).json()["content"]
    assert thinking["thinking"] == "" and thinking["signature"]
    assert text["text"] == "yes"
    events = events_of(ask(family, stream=True, **fields).text)
    assert "thinking_delta" not in [event.get("delta", {}).get("type") for event in events]


def test_a_long_conversation_of_an_agent(family: LiveServer) -> None:
    """The shape in which command line agents ask: marked system blocks, many tools, results of tools, a reminder."""
    says(family, "done")
    mark = {"cache_control": {"type": "ephemeral"}}
    tools = [{**LOOK, "name": f"tool_{number}"} for number in range(9)]
    tools[-1] |= mark | {"type": "custom", "eager_input_streaming": True}
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "<reminder>be kind</reminder>"}]}]
    messages[0]["content"].append({"type": "text", "text": "fix it", **mark})
    for turn in range(8):
        call = {"type": "tool_use", "id": f"toolu_{turn}", "name": f"tool_{turn}", "input": {"at": f"place {turn}"}}
        thought = {"type": "thinking", "thinking": f"thought {turn}", "signature": "abc"}
        messages.append({"role": "assistant", "content": [thought, {"type": "text", "text": f"step {turn}"}, call]})
        result = {"type": "tool_result", "tool_use_id": f"toolu_{turn}", "content": f"result {turn}", **mark}
        messages.append({"role": "user", "content": [result]})
    messages[-1]["content"][0] |= {"is_error": True, "content": [{"type": "text", "text": "no such place"}]}
    messages[-1]["content"].append({"type": "text", "text": "go on"})
    body = {
        "system": [
            {"type": "text", "text": "You are an agent.", **mark},
            {"type": "text", "text": "Be brief.", **mark},
        ],
        "messages": messages,
        "tools": tools,
        "metadata": {"user_id": json.dumps({"device": "d" * 300})},
        "temperature": 1,
        "stream": True,
        "thinking": {"type": "adaptive"},
        "context_management": None,
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "x-api-key": "any"}
    response = family.http.post(
        f"{MESSAGES}?beta=true", json={"model": "fake", "max_tokens": 32000, **body}, headers=headers
    )
    assert response.status_code == 200, response.text
    assert events_of(response.text)[-1] == {"type": "message_stop"}
    prompt = prompt_of(family)
    assert prompt.count("<|im_start|>system") == 1
    assert "You are an agent.\nBe brief." in prompt
    assert prompt.count("<|im_start|>tool\n") == 8
    assert "Error: no such place" in prompt
    assert prompt.index("step 0") < prompt.index("result 0") < prompt.index("step 1")
    assert prompt.endswith("<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n")


def test_counting_gives_the_tokens_of_the_prompt(family: LiveServer) -> None:
    says(family, "yes")
    body = {"model": "fake", "messages": HI, "system": "be", "tools": [LOOK], "tool_choice": {"type": "auto"}}
    counted = family.http.post(COUNT, json=body)
    assert counted.json() == {"input_tokens": ask(family, **body).json()["usage"]["input_tokens"]}
    assert counted.headers["request-id"]
    check_refused(family.http.post(COUNT, json={**body, "max_tokens": 5}), "unknown parameter max_tokens")


def test_the_last_message_goes_on(plain: LiveServer) -> None:
    ask(plain, messages=[*HI, {"role": "assistant", "content": "the answer is"}])
    assert prompt_of(plain).endswith("<|im_start|>assistant\nthe answer is")


def test_neighbours_of_one_role_are_one_message(plain: LiveServer) -> None:
    ask(plain, messages=[*HI, {"role": "user", "content": "there"}], system="a")
    assert prompt_of(plain).startswith("<|im_start|>system\na<|im_end|>\n<|im_start|>user\nhi\nthere<|im_end|>")


def test_fields_of_sampling(plain: LiveServer) -> None:
    ask(plain, temperature=0.5, top_k=7, top_p=0.9, stop_sequences=["x"], max_tokens=5, service_tier="standard_only")
    params = plain.engine.added[-1].sampling_params
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.5, 7, 0.9, 5)


def test_users_are_tenants_however_long_their_names(plain: LiveServer) -> None:
    for name in ("me", "x" * 1024):
        assert ask(plain, metadata={"user_id": name}).status_code == 200
        tenant = plain.engine.added[-1].tenant
        assert tenant and len(tenant) <= 256
    check_refused(ask(plain, metadata={"user_id": "x" * 1025}), "metadata.user_id")


def test_a_form(make_server: MakeServer) -> None:
    server = make_server()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert ask(server, output_config={"format": {"type": "json_schema", "schema": schema}}).status_code == 200
    assert server.engine.added[-1].grammar is not None
    bad = {"format": {"type": "json_schema", "schema": {"type": "nope"}}}
    check_refused(ask(server, output_config=bad), "output_config.format.schema")


@pytest.mark.parametrize(
    ("choice", "forced"),
    [
        ({"type": "auto"}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "look"}, True),
        ({"type": "none"}, None),
    ],
)
def test_choices_of_tools(family: LiveServer, choice: dict[str, Any], forced: bool | None) -> None:
    says(family, CALL)
    answer = ask(family, tools=[LOOK], tool_choice=choice, max_tokens=200)
    assert answer.status_code == 200, answer.text
    grammar = family.engine.added[-1].grammar
    assert (grammar is None) == (forced is None)
    if forced:
        assert answer.json()["stop_reason"] == "tool_use"
        single = {**choice, "disable_parallel_tool_use": True}
        assert ask(family, tools=[LOOK], tool_choice=single, max_tokens=200).status_code == 200
        if choice["type"] == "any":
            assert family.engine.added[-1].grammar != grammar


def test_reasoning_is_bounded_and_switched(family: LiveServer) -> None:
    says(family, THOUGHT + "yes")
    ask(family, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2000)
    assert family.engine.added[-1].thinking.budget == 1024  # type: ignore[union-attr]
    check_refused(
        ask(family, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=1024), "less than max_tokens"
    )
    check_refused(
        ask(family, thinking={"type": "disabled"}), "thinking.type: this model's reasoning cannot be disabled"
    )
    assert ask(family, output_config={"effort": "high"}).status_code == 200
    warning = ask(family, output_config={"effort": "low"}).headers["x-quire-warning"]
    assert warning.startswith("output_config.effort has no effect")


def test_models_that_do_not_reason(plain: LiveServer) -> None:
    for kind in ("disabled", "adaptive"):
        assert ask(plain, thinking={"type": kind}).status_code == 200
    check_refused(ask(plain, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2000), "does not reason")
