"""Custom tools: the model is shown a function of one text, the client sees calls whose input is that text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.responses.custom_tools import InputReader, arguments_of
from tests.helpers.live_server import LiveServer
from tests.server.checks import prompt_of
from tests.server.responses.asking import LOOK, LOOK_CALL, ask, read_events, says, without_ids
from tests.server.responses.spec import check

NOTE: dict[str, Any] = {"type": "custom", "name": "note", "description": "Write it down."}
TEXT = 'one "two"\n\\three \U0001f600 é </tool>'


def call(text: str) -> str:
    return f'<tool_call>\n{{"name": "note", "arguments": {json.dumps({"input": text})}}}\n</tool_call>'


def test_a_call_of_a_custom_tool(family: LiveServer) -> None:
    says(family, "I note. " + call(TEXT) + "\n" + LOOK_CALL)
    tools = [LOOK, {**NOTE, "format": {"type": "text"}}]
    response = ask(family, tools=tools)
    assert [item["type"] for item in response["output"]] == ["message", "custom_tool_call", "function_call"]
    custom = response["output"][1]
    assert (custom["name"], custom["input"], custom["status"]) == ("note", TEXT, "completed")
    assert custom["id"].startswith("ctc_") and custom["call_id"].startswith("call_")
    check("CustomToolCallResource", custom)
    assert response["tools"] == [{**LOOK, "description": None, "strict": False}, tools[1]]
    shown = {"name": "note", "description": "Write it down."}
    assert json.dumps(shown)[1:-1] in prompt_of(family)


def test_the_stream_of_a_custom_call(family: LiveServer) -> None:
    says(family, call(TEXT))
    whole = ask(family, tools=[NOTE])
    body = {"model": "fake", "input": "hi", "tools": [NOTE], "stream": True}
    events = read_events(family.http.post("/v1/responses", json=body).text)
    own = [event for event in events if event.get("output_index") == 0]
    kinds = [event["type"].removeprefix("response.") for event in own]
    assert kinds[0] == "output_item.added" and kinds[-2:] == ["custom_tool_call_input.done", "output_item.done"]
    assert set(kinds[1:-2]) == {"custom_tool_call_input.delta"} and len(kinds) > 10
    assert "".join([event["delta"] for event in own[1:-2]]) == own[-2]["input"] == own[-1]["item"]["input"] == TEXT
    assert (own[0]["item"]["input"], own[0]["item"]["status"]) == ("", "in_progress")
    assert without_ids(events[-1]["response"]["output"]) == without_ids(whole["output"])


def test_calls_and_outputs_go_back_to_the_model(family: LiveServer) -> None:
    says(family, call(TEXT), "done", "again", "more")
    user = {"role": "user", "content": "note it"}
    first = ask(family, input=[user], tools=[NOTE])
    output = {"type": "custom_tool_call_output", "call_id": first["output"][0]["call_id"], "output": "noted"}
    second = ask(family, input=[user, *first["output"], output], tools=[NOTE], store=False)
    sent = prompt_of(family)
    assert "noted" in sent
    kept = ask(family, input=[output], previous_response_id=first["id"], tools=[NOTE])
    assert prompt_of(family) == sent
    assert (second["output"][0]["type"], kept["output"][0]["type"]) == ("message", "message")
    listed = family.http.get(f"/v1/responses/{kept['id']}/input_items").json()
    check("ResponseItemList", listed)
    assert listed["data"][0]["type"] == "custom_tool_call_output"
    functions = [
        {"type": "function_call", "call_id": "c", "name": "note", "arguments": arguments_of(TEXT)},
        {"type": "function_call_output", "call_id": "c", "output": "noted"},
    ]
    ask(family, input=[user, *functions], tools=[NOTE])
    assert prompt_of(family) == sent


def test_what_is_cut_off_is_incomplete_and_left_out(family: LiveServer) -> None:
    says(family, call("x" * 400))
    response = ask(family, tools=[NOTE], max_output_tokens=90)
    [item] = response["output"]
    assert (item["type"], item["status"]) == ("custom_tool_call", "incomplete")
    assert 0 < len(item["input"]) < 400
    says(family, "well")
    ask(family, previous_response_id=response["id"], tools=[NOTE])
    assert "xxx" not in prompt_of(family)


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "custom", "name": "note"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "note"}]},
    ],
)
def test_choosing_a_custom_tool(family: LiveServer, choice: Any) -> None:
    says(family, call("a"))
    [item] = ask(family, tools=[LOOK, NOTE], tool_choice=choice, parallel_tool_calls=False)["output"]
    assert (item["type"], item["input"]) == ("custom_tool_call", "a")
    assert family.do(lambda: family.engine.added[-1]).grammar is not None  # it cannot but be a text


@settings(max_examples=40, deadline=None)
@given(text=st.text(), ascii_only=st.booleans(), indent=st.sampled_from([None, 2]), sizes=st.lists(st.integers(1, 9)))
def test_any_input_in_any_pieces(text: str, ascii_only: bool, indent: int | None, sizes: list[int]) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only, indent=indent)
    reader, read, place = InputReader(), "", 0
    for size in [*sizes, len(arguments)]:
        read += reader.feed(arguments[place : place + size])
        assert text.startswith(read)
        place += size
    assert read + reader.finish() == text


def test_arguments_of_another_form_are_shown_as_they_are() -> None:
    reader = InputReader()
    assert reader.feed('{"text": "a"}') + reader.finish() == '{"text": "a"}'
    reader = InputReader()
    assert reader.feed(r'{"input": "a\ud83d b"}') + reader.finish() == "a\ufffd b"
