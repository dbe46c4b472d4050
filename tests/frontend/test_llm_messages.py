"""`LLM.chat` with tools and forms: calls are what was asked for, and `read_message` finds them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import jsonschema
import pytest

from quire import LLM, SamplingParams
from quire.errors import RequestError, UnsupportedError
from tests.helpers.errors import refused

USER = [{"role": "user", "content": "What time is it?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"zone": {"enum": ["UTC", "CET"]}, "hours": {"type": "integer", "minimum": 0, "maximum": 23}},
    "required": ["zone"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "now", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop"}},
]
SAMPLING = SamplingParams(temperature=1.0, seed=3, max_tokens=600, n=3)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(model="quire-demo", max_model_len=1024, num_gpu_blocks_override=300) as llm:
        yield llm


def test_a_required_call_is_one(llm: LLM) -> None:
    [output] = llm.chat(USER, SAMPLING, use_tqdm=False, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    for index, completion in enumerate(output.outputs):
        message = llm.read_message(output, index, tools=TOOLS)
        assert completion.finish_reason == "stop" and message.content is None
        [call] = message.tool_calls
        assert call.complete and call.name in ("now", "stop")
        arguments = json.loads(call.arguments)
        jsonschema.validate(arguments, PARAMETERS if call.name == "now" else {"maxProperties": 0})


def test_a_named_call_is_that_one(llm: LLM) -> None:
    choice = {"type": "function", "function": {"name": "now"}}
    [output] = llm.chat(USER, SAMPLING, use_tqdm=False, tools=TOOLS, tool_choice=choice)
    assert [llm.read_message(output, index, tools=TOOLS).tool_calls[0].name for index in range(3)] == ["now"] * 3


def test_without_a_choice_there_may_be_content(llm: LLM) -> None:
    [output] = llm.chat(USER, SAMPLING, use_tqdm=False, tools=TOOLS)
    for index in range(3):
        message = llm.read_message(output, index, tools=TOOLS)
        assert message.content or message.tool_calls


def test_without_tools_it_is_content(llm: LLM) -> None:
    [output] = llm.chat(USER, SamplingParams(temperature=0.0, max_tokens=30), use_tqdm=False)
    message = llm.read_message(output)
    assert message.content == output.outputs[0].text and not message.tool_calls and message.reasoning is None


def test_a_form_is_that_of_the_content(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=200, structured_outputs={"json": PARAMETERS})
    [output] = llm.chat(USER, params, use_tqdm=False)
    jsonschema.validate(json.loads(llm.read_message(output).content or ""), PARAMETERS)


def test_a_stop_string_is_no_content(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, stop="i")
    [output] = llm.chat(USER, params, use_tqdm=False)
    assert output.outputs[0].stop_reason == "i"
    assert llm.read_message(output).content == output.outputs[0].text


def test_bad_tools_are_refused_by_name(llm: LLM) -> None:
    with refused("tools[0].function.name"):
        llm.chat(USER, tools=[{"type": "function", "function": {}}])
    with pytest.raises(RequestError, match="no tool is called"):
        llm.chat(USER, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "never"}})
    bad = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "minProperties": "x"}}}]
    with pytest.raises(RequestError, match="#/minProperties"):
        llm.chat(USER, tools=bad, tool_choice="required")


def test_a_choice_without_a_way_to_call_is_refused() -> None:
    with LLM(model="quire-demo", max_model_len=64, num_gpu_blocks_override=20) as llm:
        object.__setattr__(llm._front.message_format, "calls", None)
        with pytest.raises(UnsupportedError, match="tool_choice"):
            llm.chat(USER, tools=TOOLS, tool_choice="required")
