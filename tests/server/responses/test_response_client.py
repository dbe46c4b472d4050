"""Responses with the official OpenAI client, as users run it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall
from pydantic import BaseModel

from tests.helpers.live_server import LiveServer
from tests.server.responses.asking import LOOK, LOOK_CALL, THOUGHT, family_server, says


class Lamp(BaseModel):
    """Arguments of a function, and an answer."""

    room: Literal["kitchen", "bedroom"]
    brightness: int


LAMP = '{"room": "kitchen", "brightness": 3}'
LAMP_CALL = f'<tool_call>\n{{"name": "Lamp", "arguments": {LAMP}}}\n</tool_call>'


@pytest.fixture(scope="module")
def served() -> Iterator[LiveServer]:
    live = family_server(api_key=["secret"])
    yield live
    live.close()


@pytest.fixture
def client(served: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="secret", max_retries=0) as made:
        yield made


def test_create_and_look_up(client: openai.OpenAI, served: LiveServer) -> None:
    says(served, THOUGHT + "hello world")
    made = client.responses.create(
        model="fake", input="hi", metadata={"a": "b"}, include=["message.output_text.logprobs"], top_logprobs=2
    )
    assert made.output_text.strip() == "hello world"
    assert [item.type for item in made.output] == ["reasoning", "message"]
    assert made.usage is not None and made.usage.output_tokens_details.reasoning_tokens > 0
    found = client.responses.retrieve(made.id)
    assert found.to_dict() == made.to_dict()
    items = list(client.responses.input_items.list(made.id))
    assert [item.type for item in items] == ["message"]
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_streams(client: openai.OpenAI, served: LiveServer) -> None:
    says(served, THOUGHT + "hello world")
    events = list(client.responses.create(model="fake", input="hi", stream=True))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1]
    assert last.type == "response.completed"
    assert text == last.response.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_the_clients_own_accumulation_of_a_stream(client: openai.OpenAI, served: LiveServer) -> None:
    says(served, THOUGHT + "I look. " + LOOK_CALL)
    with client.responses.stream(model="fake", input="hi", tools=[{**LOOK, "strict": True}]) as stream:  # type: ignore[list-item]
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text.strip() == "I look."
    [call] = [item for item in final.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"place": "the hall"}
    assert "response.function_call_arguments.delta" in kinds
    assert "response.reasoning_text.delta" in kinds


def test_a_loop_of_calls(client: openai.OpenAI, served: LiveServer) -> None:
    """As in the client's guide: the output goes into the input of the next turn, with what the functions returned."""
    says(served, THOUGHT + LOOK_CALL, LOOK_CALL, "it is dark")
    items: list[Any] = [{"role": "user", "content": "how is the hall?"}]
    turns = 0
    while True:
        response = client.responses.create(model="fake", input=items, tools=[LOOK], store=False)  # type: ignore[list-item]
        turns += 1
        items += response.output
        calls = [item for item in response.output if isinstance(item, ResponseFunctionToolCall)]
        if not calls:
            break
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "dark"} for call in calls]
    assert (turns, response.output_text) == (3, "it is dark")


def test_a_loop_of_calls_with_stored_responses(client: openai.OpenAI, served: LiveServer) -> None:
    says(served, LOOK_CALL, "it is dark")
    first = client.responses.create(model="fake", input="how is the hall?", tools=[LOOK])  # type: ignore[list-item]
    [call] = first.output
    assert isinstance(call, ResponseFunctionToolCall)
    second = client.responses.create(
        model="fake",
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "dark"}],
        tools=[LOOK],  # type: ignore[list-item]
    )
    assert second.output_text == "it is dark"


def test_objects_of_a_class(client: openai.OpenAI, served: LiveServer) -> None:
    says(served, LAMP)
    parsed = client.responses.parse(model="fake", input="hi", text_format=Lamp)
    assert parsed.output_parsed == Lamp(room="kitchen", brightness=3)
    with client.responses.stream(model="fake", input="hi", text_format=Lamp) as stream:
        stream.until_done()
        assert stream.get_final_response().output_parsed == Lamp(room="kitchen", brightness=3)
    says(served, LAMP_CALL)
    called = client.responses.parse(model="fake", input="hi", tools=[openai.pydantic_function_tool(Lamp)])
    again: list[Any] = [{"role": "user", "content": "hi"}, *called.output]
    [call] = called.output
    assert call.type == "function_call" and call.parsed_arguments == Lamp(room="kitchen", brightness=3)
    again.append({"type": "function_call_output", "call_id": call.call_id, "output": "done"})
    says(served, "done")
    assert client.responses.create(model="fake", input=again).output_text == "done"


def test_in_the_background(client: openai.OpenAI, served: LiveServer) -> None:
    says(served, "hello world")
    served.do(served.fake_client.hold)
    made = client.responses.create(model="fake", input="hi", background=True)
    other = client.responses.create(model="fake", input="hi", background=True)
    assert made.status == "queued"
    assert client.responses.cancel(other.id).status == "cancelled"
    served.do(served.fake_client.resume)
    response: Response = made
    while response.status in ("queued", "in_progress"):
        response = client.responses.retrieve(made.id)
    assert (response.status, response.output_text) == ("completed", "hello world")
    assert client.responses.retrieve(other.id).status == "cancelled"


def test_a_stream_in_the_background_is_taken_up_again(client: openai.OpenAI, served: LiveServer) -> None:
    says(served, "hello world")
    with client.responses.create(model="fake", input="hi", background=True, stream=True) as stream:
        first = next(iter(stream))
    assert first.type == "response.created"
    with client.responses.stream(response_id=first.response.id, starting_after=3) as resumed:
        events = list(resumed)
        assert resumed.get_final_response().output_text == "hello world"
    assert events[0].sequence_number == 4
    plain = client.responses.retrieve(first.response.id, stream=True)
    assert [event.sequence_number for event in plain] == list(range(events[-1].sequence_number + 1))


def test_errors_are_the_clients_own(client: openai.OpenAI, served: LiveServer) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="nope", input="hi")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        client.responses.create(model="fake", input="hi", tools=[{"type": "web_search"}])
    assert (bad.value.code, bad.value.param) == ("unsupported_parameter", "tools[0].type")
    with pytest.raises(openai.BadRequestError) as compact:
        client.responses.compact(model="gpt-5", input="hi")
    assert compact.value.code == "unsupported_operation"


def test_tokens_of_an_input(client: openai.OpenAI, served: LiveServer) -> None:
    says(served, "hello")
    counted = client.responses.input_tokens.count(model="fake", input="hi", instructions="be brief")
    made = client.responses.create(model="fake", input="hi", instructions="be brief")
    assert made.usage is not None
    assert counted.input_tokens == made.usage.input_tokens


def test_many_at_once(served: LiveServer) -> None:
    says(served, "hello world")

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="secret", max_retries=0) as client:

            async def ask(stream: bool) -> str:
                if not stream:
                    return (await client.responses.create(model="fake", input="hi")).output_text
                text = ""
                async for event in await client.responses.create(model="fake", input="hi", stream=True):
                    text += event.delta if event.type == "response.output_text.delta" else ""
                return text

            return await asyncio.gather(*(ask(bool(index % 2)) for index in range(16)))

    assert asyncio.run(main()) == ["hello world"] * 16
