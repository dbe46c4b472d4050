"""What comes back is what the official specification says, whatever was asked; a stream says the same as the whole."""

from __future__ import annotations

from typing import Any

import pytest

from quire.server.responses.protocol import InputTokensRequest, ResponseRequest
from tests.helpers.live_server import LiveServer
from tests.server.responses.asking import (
    LEAVE,
    LEAVE_CALL,
    LOOK,
    LOOK_CALL,
    PATH,
    THOUGHT,
    ask,
    check_story,
    refused,
    says,
    stream,
    text_of,
    without_ids,
)
from tests.server.responses.spec import check, needs_spec, properties

LOGPROBS = "message.output_text.logprobs"
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "input_text", "text": "where?"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "look", "arguments": '{"place": "x"}'},
    {"type": "function_call_output", "call_id": "call_1", "output": "dark"},
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
# What the model says -> requests that get it.
CASES: dict[str, list[dict[str, Any]]] = {
    "hello world": [
        {},
        {"instructions": "be brief", "temperature": 0.5, "top_p": 0.9, "metadata": {"a": "b"}, "user": "me"},
        {"input": CALLED, "tools": [LOOK], "tool_choice": "none"},
        {"input": [{"role": "developer", "content": "x"}, {"role": "user", "content": "y"}], "store": False},
        {"include": [LOGPROBS], "top_logprobs": 3},
        {"include": [LOGPROBS], "max_output_tokens": 2},
        {"max_output_tokens": 1},
        {"truncation": "auto", "service_tier": "auto", "safety_identifier": "s", "prompt_cache_key": "k"},
        {"reasoning": {"effort": None, "summary": None}, "text": {"format": {"type": "text"}, "verbosity": "medium"}},
        {"tools": [], "max_tool_calls": 3, "top_k": 5, "seed": 7, "stop": ["zzz"], "cache_salt": "salt"},
    ],
    "": [{}],
    '{"a": 1}': [
        {"text": {"format": {"type": "json_object"}}},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "description": "d"}}},
    ],
    THOUGHT + "so it is": [{}, {"include": [LOGPROBS]}, {"max_output_tokens": 3}, {"include_reasoning": False}],
    THOUGHT: [{}],
    THOUGHT + LOOK_CALL: [
        {"tools": [LOOK, LEAVE]},
        {"tools": [LOOK, {**LEAVE, "strict": True, "defer_loading": False}], "tool_choice": "required"},
        {"tools": [LOOK], "tool_choice": {"type": "function", "name": "look"}, "parallel_tool_calls": False},
        {
            "tools": [LOOK, LEAVE],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]},
        },
    ],
    "I look. " + LOOK_CALL + "\n" + LEAVE_CALL: [{"tools": [LOOK, LEAVE]}, {"tools": [LOOK, LEAVE], "store": False}],
    LOOK_CALL: [{"tools": [LOOK], "max_output_tokens": length} for length in (1, 20, 40, 60)],
}
FLAT = [(text, body) for text, bodies in CASES.items() for body in bodies]


@pytest.mark.parametrize(("text", "body"), FLAT)
def test_a_stream_and_a_whole_answer_are_official_and_say_the_same(
    family: LiveServer, text: str, body: dict[str, Any]
) -> None:
    says(family, text)
    whole = ask(family, **body)
    final = check_story(stream(family, **body))
    assert without_ids(final["output"]) == without_ids(whole["output"])
    for name in ("status", "incomplete_details", "usage", "error", "tools", "tool_choice", "text", "model"):
        assert final[name] == whole[name], name


def test_parts_of_an_answer(family: LiveServer) -> None:
    says(family, THOUGHT + "I look. " + LOOK_CALL + "\n" + LEAVE_CALL)
    response = ask(family, tools=[LOOK, LEAVE])
    reasoning, message, *calls = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "let me see"}]
    assert reasoning["summary"] == []
    assert message["content"][0]["text"].strip() == "I look."
    assert [(call["name"], call["arguments"], call["status"]) for call in calls] == [
        ("look", '{"place": "the hall"}', "completed"),
        ("leave", "{}", "completed"),
    ]
    prefixes = [item["id"].split("_")[0] for item in response["output"]]
    assert prefixes == ["rs", "msg", "fc", "fc"]
    assert all(call["call_id"].startswith("call_") for call in calls)
    assert response["id"].startswith("resp_")
    ids = [response["id"], *(item["id"] for item in response["output"]), *(call["call_id"] for call in calls)]
    assert len(set(ids)) == len(ids)
    assert all(len(item) > 24 for item in ids)
    assert response["status"] == "completed"
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


def test_what_is_cut_off_is_incomplete(family: LiveServer) -> None:
    says(family, THOUGHT + "so it is")
    response = ask(family, max_output_tokens=3)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [(item["type"], item["status"]) for item in response["output"]] == [("reasoning", "incomplete")]
    says(family, LOOK_CALL)
    [call] = ask(family, tools=[LOOK], max_output_tokens=40)["output"]
    assert (call["type"], call["status"]) == ("function_call", "incomplete")
    says(family, "hello world")
    [message] = ask(family, max_output_tokens=1)["output"]
    assert (message["content"][0]["text"], message["status"]) == ("hello", "incomplete")


def test_an_answer_of_nothing_is_an_empty_message(family: LiveServer) -> None:
    for text, kinds in (("", ["message"]), (THOUGHT, ["reasoning", "message"])):
        says(family, text)
        response = ask(family)
        assert [item["type"] for item in response["output"]] == kinds
        assert text_of(response) == ""
        assert response["status"] == "completed"


def test_logprobs_are_those_of_the_text(family: LiveServer) -> None:
    says(family, THOUGHT + "hello world")
    [_, message] = ask(family, include=[LOGPROBS], top_logprobs=2)["output"]
    logprobs = message["content"][0]["logprobs"]
    assert "".join(item["token"] for item in logprobs).strip() == "hello world"
    assert [len(item["top_logprobs"]) for item in logprobs] == [2] * len(logprobs)
    for text in ("<b> and </b", "ö < <too", "\n x"):  # held back until it is no mark
        says(family, THOUGHT + text)
        [_, message] = ask(family, include=[LOGPROBS])["output"]
        part = message["content"][0]
        made = b"".join(bytes(item["bytes"]) for item in part["logprobs"]).decode()
        assert made.strip() == part["text"].strip() == text.strip()
    [_, message] = ask(family)["output"]
    assert message["content"][0]["logprobs"] == []


def test_deltas_are_padded_where_that_is_asked_for(family: LiveServer) -> None:
    says(family, "hello world")
    events = stream(family, stream_options={"include_obfuscation": True})
    deltas = [event for event in events if "delta" in event]
    assert len(deltas) == 3
    assert {(len(event["delta"]) + len(event["obfuscation"])) % 32 for event in deltas} == {0}
    assert not [event for event in stream(family) if "obfuscation" in event]


def test_tokens_of_a_request_are_counted_as_in_its_answer(family: LiveServer) -> None:
    says(family, "hello")
    for body in ({"input": "hi"}, {"input": CALLED, "tools": [LOOK], "instructions": "x"}, {"input": "é" * 50}):
        counted = family.http.post(f"{PATH}/input_tokens", json={"model": "fake", **body})
        assert counted.status_code == 200, counted.text
        check("TokenCountsResource", counted.json())
        assert counted.json()["input_tokens"] == ask(family, **body)["usage"]["input_tokens"]
    previous = ask(family)["id"]
    body = {"previous_response_id": previous, "input": "more"}
    counted = family.http.post(f"{PATH}/input_tokens", json=body)
    assert counted.json()["input_tokens"] == ask(family, **body)["usage"]["input_tokens"]


@needs_spec
def test_every_official_field_is_known() -> None:
    """Each is a field that is read, or one that is refused by name: none can be ignored."""
    for name, model in (("CreateResponse", ResponseRequest), ("TokenCountsBody", InputTokensRequest)):
        official = set(properties(name))
        assert len(official) > 10
        assert official - {*model.model_fields, *model.refused} == set()


@needs_spec
def test_values_that_are_not_honoured_are_refused_by_name(family: LiveServer) -> None:
    """For each official field that is not read: a value that asks for something is an error with its name."""
    values: dict[str, Any] = {
        "context_management": [{"type": "compaction"}],
        "moderation": {"model": "m"},
        "prompt": {"id": "p"},
        "prompt_cache_options": {"mode": "explicit"},
        "prompt_cache_retention": "24h",
        "service_tier": "priority",
    }
    assert set(properties("CreateResponse")) - set(ResponseRequest.model_fields) == set(values)
    for name, value in values.items():
        error = refused(family, **{name: value}).json()["error"]
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert refused(family, **{name: None}).status_code == 200
