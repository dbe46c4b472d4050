"""Requests as coding agents and agent frameworks send them: nothing is kept, everything is sent again at every turn."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import httpx
import pytest

from quire.server.responses.items import seal, unseal
from tests.helpers.live_server import LiveServer
from tests.helpers.server import Server
from tests.server.checks import prompt_of
from tests.server.families import front_of
from tests.server.responses.asking import (
    LOOK,
    LOOK_CALL,
    MARKS,
    PATH,
    THOUGHT,
    ask,
    check_story,
    read_events,
    says,
    stream,
    text_of,
)
from tests.server.responses.spec import check

SEALED = "reasoning.encrypted_content"
INSTRUCTIONS = "You are an agent that works in a terminal.\n\n# Rules\n- `apply_patch` edits files\n" * 20
# Schemas as programs make them: unions with null, references, nothing at all, keywords that only describe.
SCHEMAS: list[Any] = [
    {"type": "object", "properties": {}, "additionalProperties": False, "required": []},
    {"type": "object", "properties": {}},
    None,
    {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "title": "A", "properties": {"a": True}},
    {"type": "object", "properties": {"a": {"type": ["string", "null"], "default": None, "description": "x"}}},
    {"type": "object", "properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "null"}], "title": "A"}}},
    {"type": "object", "properties": {"a": {"type": "object", "additionalProperties": {"type": "string"}}}},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/T"}}, "$defs": {"T": {"enum": ["b", "c"]}}},
    {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string"}, "minItems": 1}}},
    {"type": "object", "properties": {"a": {"type": "string", "format": "uri", "examples": ["x"]}}, "required": ["a"]},
    {
        "type": "object",
        "properties": {"a": {"type": "number", "minimum": 0}},
        "x-order": 1,
        "additionalProperties": True,
    },
    {"type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}, "workdir": {}}},
]


def function(name: str, schema: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "description": f"Does {name}.", "strict": False, "parameters": schema}


TOOLS = [{**LOOK, "strict": False}, *[function(f"tool_{index}", schema) for index, schema in enumerate(SCHEMAS)]]
ENVIRONMENT = {
    "type": "message",
    "role": "user",
    "content": [{"type": "input_text", "text": "<environment_context>\n  <cwd>/home/me</cwd>\n</environment_context>"}],
}


def asked(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def terminal_agent(items: list[Any], **others: Any) -> dict[str, Any]:
    """Return a request as a coding agent in a terminal sends it."""
    return {
        "model": "fake",
        "instructions": INSTRUCTIONS,
        "input": items,
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": [SEALED],
        "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
        "text": {"verbosity": "medium"},
        "service_tier": "auto",
        **others,
    }


def framework(items: list[Any], **others: Any) -> dict[str, Any]:
    """Return a request as an agent framework sends it: what is not given is often there as null or empty."""
    return {
        "model": "fake",
        "instructions": "You are helpful.",
        "input": items,
        "tools": TOOLS,
        "include": [SEALED],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_retention": "in_memory",
        "truncation": "auto",
        "metadata": {"workflow": "agent"},
        "store": False,
        "temperature": 0.1,
        "top_p": 1,
        "max_output_tokens": 3000,
        "reasoning": {"effort": "medium", "summary": "auto"},
        **others,
    }


def handed_back(item: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return an item as a client sends it in again: as it is, or as one keeps it that was told to store nothing."""
    if kind == "whole":
        return item
    kept = {key: value for key, value in item.items() if key not in ("id", "status")}
    return {**kept, "content": None} if item["type"] == "reasoning" else kept


@pytest.mark.parametrize("kind", ["whole", "kept"])
@pytest.mark.parametrize("make", [terminal_agent, framework])
def test_an_agent_at_work(make: Any, kind: str) -> None:
    """Three turns of the user's, each with a call, and everything is sent each time."""
    live = LiveServer(llm=_large())
    try:
        says(live, *[THOUGHT + "I look. " + LOOK_CALL, THOUGHT + "It is dark."] * 3)
        items: list[Any] = [ENVIRONMENT]
        for turn in range(3):
            items.append(asked(f"question {turn}"))
            for expected in (["reasoning", "message", "function_call"], ["reasoning", "message"]):
                answer = live.http.post(PATH, json=make(items))
                assert answer.status_code == 200, answer.text
                final = check_story(read_events(answer.text)) if make is terminal_agent else answer.json()
                check("Response", final)
                assert [item["type"] for item in final["output"]] == expected
                assert final["reasoning"] == {"effort": "medium", "summary": "auto"}
                prompt = prompt_of(live)
                assert prompt.count("It is dark.") == turn and f"question {turn}" in prompt
                items += [handed_back(item, kind) for item in final["output"]]
                if expected[-1] == "function_call":
                    call_id = final["output"][-1]["call_id"]
                    items.append({"type": "function_call_output", "call_id": call_id, "output": "it is dark in there"})
        assert live.call(live.context.responses.totals) == (0, 0)
    finally:
        live.close()


def _large() -> dict[str, Any]:
    """Return a model that reads as much as agents send."""
    front = front_of("hermes", "qwen3", MARKS)
    return {"front_model": dataclasses.replace(front, info=dataclasses.replace(front.info, max_model_len=65536))}


def test_reasoning_comes_back_from_what_is_sealed(family: LiveServer) -> None:
    says(family, THOUGHT + "so it is")
    events = stream(family, include=[SEALED])
    final = check_story(events)
    reasoning = final["output"][0]
    assert unseal(reasoning["encrypted_content"], "x") == reasoning["content"][0]["text"] == "let me see"
    assert reasoning["summary"] == []
    added = next(event["item"] for event in events if event["type"] == "response.output_item.added")
    assert "encrypted_content" not in added
    assert "encrypted_content" not in ask(family)["output"][0]
    user = {"role": "user", "content": "hi"}
    prompts = []
    for sent in (
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "let me see"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": reasoning["encrypted_content"]},
        {"type": "reasoning", "summary": [], "content": [], "encrypted_content": reasoning["encrypted_content"]},
        reasoning,
    ):
        ask(family, input=[user, sent, final["output"][1], user])
        prompts.append(prompt_of(family))
    assert len(set(prompts)) == 1


def test_reasoning_that_was_cut_off_is_sealed_as_far_as_it_is(family: LiveServer) -> None:
    says(family, THOUGHT + "so it is")
    [reasoning] = ask(family, include=[SEALED], max_output_tokens=4)["output"]
    assert reasoning["status"] == "incomplete"
    assert unseal(reasoning["encrypted_content"], "x") == reasoning["content"][0]["text"]


def test_a_conversation_goes_on_from_what_is_stored_as_well(family: LiveServer) -> None:
    says(family, THOUGHT + "yes")
    sealed = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": seal("a thought ö")}
    first = ask(family, input=[{"role": "user", "content": "a"}, sealed, {"role": "assistant", "content": "b"}])
    listed = family.http.get(f"{PATH}/{first['id']}/input_items", params={"order": "asc", "include": SEALED}).json()
    check("ResponseItemList", listed)
    assert listed["data"][1]["content"] == [{"type": "reasoning_text", "text": "a thought ö"}]
    assert ask(family, previous_response_id=first["id"])["status"] == "completed"


def test_labels_of_phases_change_nothing_and_are_kept(family: LiveServer) -> None:
    says(family, "hello")
    user = {"role": "user", "content": "hi"}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "wait"}]}
    ask(family, input=[user, said, user])
    plain = prompt_of(family)
    made = ask(family, input=[user, {**said, "phase": "commentary"}, user])
    assert prompt_of(family) == plain
    listed = family.http.get(f"{PATH}/{made['id']}/input_items").json()
    check("ResponseItemList", listed)
    assert listed["data"][1]["phase"] == "commentary"


def test_the_usual_effort_is_no_wish(family: LiveServer) -> None:
    says(family, "hello")
    assert ask(family, reasoning={"effort": "medium"})["reasoning"]["effort"] == "medium"
    counted = family.http.post(f"{PATH}/input_tokens", json={"input": "hi", "reasoning": {"effort": "medium"}})
    assert counted.status_code == 200
    for background in (False, True):
        body = {"model": "fake", "input": "hi", "reasoning": {"effort": "high"}, "background": background}
        warning = family.http.post(PATH, json=body).headers["x-quire-warning"]
        assert warning == "reasoning.effort has no effect: this model's chat template does not read it"


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_tools_are_repeated_as_they_were_given(family: LiveServer, schema: Any) -> None:
    says(family, "hello")
    tool = function("tool", schema)
    assert ask(family, tools=[tool])["tools"] == [tool]


def test_an_agent_with_the_built_in_model(demo_server: Server) -> None:
    """It knows no tools well and reads a thousand tokens: whatever it says, every turn is an answer."""
    items: list[Any] = []
    for turn in range(3):
        items.append(asked(f"The king said {turn}"))
        body = terminal_agent(items, model="quire-demo", instructions="Be brief.", tools=TOOLS[:2])
        body |= {"max_output_tokens": 24, "temperature": 0}
        answer = httpx.post(demo_server.url + PATH, json=body, timeout=120, trust_env=False, verify=False)
        assert answer.status_code == 200, answer.text
        final = check_story(read_events(answer.text))
        assert text_of(final) or json.dumps(final["output"])
        items += [handed_back(item, "kept") for item in final["output"]]
