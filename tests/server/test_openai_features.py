"""Tools, structured output and their streams with the official OpenAI client, on the built-in model; and the examples.

What a small model says is not worth much, but what it must follow it follows.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.helpers.server import Server
from tests.meta.source import ENVIRONMENT, ROOT

MODEL = "quire-demo"
HI: list[Any] = [{"role": "user", "content": "The king said"}]


class Lamp(BaseModel):
    """Arguments of a function, and an answer."""

    room: Literal["kitchen", "bedroom"]
    brightness: int = Field(ge=0, le=100)


@pytest.fixture
def client(demo_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="x", max_retries=0, timeout=120) as made:
        yield made


def test_an_object_of_a_class(client: openai.OpenAI) -> None:
    for seed in range(4):
        answer = client.chat.completions.parse(
            model=MODEL,
            messages=HI,
            response_format=Lamp,
            max_completion_tokens=128,
            seed=seed,
            temperature=1.5,
            extra_body={"structured_outputs": {"disable_any_whitespace": True}},
        )
        lamp = answer.choices[0].message.parsed
        assert isinstance(lamp, Lamp)
        assert list(json.loads(answer.choices[0].message.content or "")) == ["room", "brightness"]


def test_tool_calls_with_parsed_arguments(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=HI,
        tools=[openai.pydantic_function_tool(Lamp, name="set_lamp")],
        tool_choice="required",
        parallel_tool_calls=False,
        max_completion_tokens=100,
        seed=1,
    )
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls or []
    assert call.function.name == "set_lamp"
    assert isinstance(call.function.parsed_arguments, Lamp)


def test_a_stream_of_tool_calls_is_accumulated_by_the_client(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": HI,
        "tools": [openai.pydantic_function_tool(Lamp, name="set_lamp")],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_completion_tokens": 150,
        "seed": 5,
        "temperature": 1.2,
    }
    with client.chat.completions.stream(**options) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion()
    whole = client.chat.completions.parse(**options)
    assert "tool_calls.function.arguments.delta" in kinds
    ours, theirs = streamed.choices[0], whole.choices[0]
    assert ours.finish_reason == theirs.finish_reason
    assert ours.message.content == theirs.message.content
    calls = [
        [(call.function.name, call.function.arguments) for call in item.message.tool_calls or []]
        for item in (ours, theirs)
    ]
    assert calls[0] == calls[1] != []


def test_a_conversation_goes_on_behind_tool_calls(client: openai.OpenAI, demo_server: Server) -> None:
    tools: Any = [openai.pydantic_function_tool(Lamp, name="set_lamp")]
    first = client.chat.completions.create(
        model=MODEL,
        messages=HI,
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        max_completion_tokens=150,
        seed=2,
    )
    message = first.choices[0].message
    calls = message.tool_calls or []
    answers = [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in calls]
    messages = [*HI, message, *answers]
    last = client.chat.completions.create(
        model=MODEL, messages=messages, tools=tools, tool_choice="none", max_completion_tokens=8
    )
    assert last.choices[0].message.content
    assert last.choices[0].message.tool_calls is None
    status, rendered = demo_server.post(
        "/tokenize", {"messages": json.loads(json.dumps([*HI, message.to_dict(), *answers])), "tools": tools}
    )
    assert status == 200
    text = demo_server.post("/detokenize", {"tokens": rendered["tokens"]})[1]["prompt"]
    assert '"name": "set_lamp", "arguments": {"' in text
    assert "<tool_response>\ndone\n</tool_response>" in text


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[a-c]{3}-[0-9]+"}, "[a-c]{3}-[0-9]+"),
        ({"choice": ["north", "south"]}, "north|south"),
        ({"grammar": 'start: "(" start ")" | "x"'}, r"\(*x\)*"),
        ({"json": {"enum": [1, None, "a"]}}, '1|null|"a"'),
    ],
)
def test_forms_of_texts(client: openai.OpenAI, form: dict[str, Any], pattern: str) -> None:
    for temperature in (0.0, 2.0):
        body: dict[str, Any] = {"model": MODEL, "max_tokens": 64, "temperature": temperature, "seed": 3}
        extra = {"structured_outputs": form}
        texts = [
            client.chat.completions.create(messages=HI, extra_body=extra, **body).choices[0],
            client.completions.create(prompt="The king", extra_body=extra, **body).choices[0],
        ]
        for choice, text in zip(texts, (texts[0].message.content, texts[1].text), strict=True):  # type: ignore[union-attr]
            if choice.finish_reason == "stop":
                assert re.fullmatch(pattern, text or "")


def test_errors_are_in_the_clients_words(client: openai.OpenAI) -> None:
    bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strnig"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=HI, response_format=bad)
    assert (caught.value.code, caught.value.param) == ("invalid_json_schema", "response_format.json_schema.schema")
    assert "#/type" in caught.value.message


@pytest.mark.parametrize(
    ("script", "pattern"),
    [
        pytest.param(
            "openai_tools.py",
            r"finish_reason: tool_calls\nget_temperature\((.|\n)*\) = .* degrees (.|\n)*answer: ",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "openai_json_schema.py",
            r"(.*: a (hall|kitchen|cellar|chapel) with \d\d? chairs; exits: \w.*\n){3}",
            marks=pytest.mark.slow,
        ),
        ("openai_streaming_tools.py", r"(call \d: \+ .*\n)+finish_reason: "),
    ],
)
def test_the_examples_run(demo_server: Server, script: str, pattern: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), f"{demo_server.url}/v1"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(pattern, done.stdout), done.stdout
