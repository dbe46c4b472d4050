"""Responses of the built-in model, in a server process of its own, with the official OpenAI client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from tests.helpers.server import Server
from tests.server.responses.asking import check_story, read_events, without_ids

MODEL = "quire-demo"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 24}


class Lamp(BaseModel):
    """Arguments of a function, and an answer."""

    room: Literal["kitchen", "bedroom"]
    brightness: int = Field(ge=0, le=100)


@pytest.fixture
def client(demo_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="x", max_retries=0, timeout=120) as made:
        yield made


def test_whole_streamed_and_in_the_background_it_says_the_same(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {**GREEDY, "input": "The king said"}
    whole = client.responses.create(**body)
    assert whole.output_text
    url = f"{client.base_url}responses"
    streamed = httpx.post(url, json={**body, "stream": True}, timeout=120, trust_env=False, verify=False)
    final = check_story(read_events(streamed.text))
    kept = client.responses.create(**body, background=True)
    while kept.status in ("queued", "in_progress"):
        kept = client.responses.retrieve(kept.id)
    assert (
        without_ids(final["output"]) == without_ids(whole.to_dict()["output"]) == without_ids(kept.to_dict()["output"])
    )
    assert kept.status == whole.status == final["status"]


def test_a_conversation_that_is_kept_is_the_one_that_is_sent(client: openai.OpenAI) -> None:
    first = client.responses.create(**GREEDY, input="The king said", instructions="x")
    kept = client.responses.create(**GREEDY, input="And then?", previous_response_id=first.id)
    items: list[Any] = [
        {"role": "user", "content": "The king said"},
        *first.output,
        {"role": "user", "content": "And then?"},
    ]
    sent = client.responses.create(**GREEDY, input=items, store=False)
    assert kept.output_text == sent.output_text
    assert kept.usage is not None and sent.usage is not None
    assert kept.usage.input_tokens == sent.usage.input_tokens
    assert sent.usage.input_tokens_details.cached_tokens > 0


def test_forms_and_calls_are_kept_to(client: openai.OpenAI) -> None:
    for seed in range(3):
        extra = {"seed": seed, "structured_outputs": {"disable_any_whitespace": True}}
        options: dict[str, Any] = {"model": MODEL, "input": "hi", "temperature": 1.5, "max_output_tokens": 128}
        parsed = client.responses.parse(**options, text_format=Lamp, extra_body=extra)
        assert isinstance(parsed.output_parsed, Lamp)
        tool = openai.pydantic_function_tool(Lamp, name="set_lamp")["function"]
        called = client.responses.create(
            **options,
            tools=[{"type": "function", **tool}],  # type: ignore[list-item]
            tool_choice="required",
            parallel_tool_calls=False,
            extra_body={"seed": seed},
        )
        [call] = called.output
        assert call.type == "function_call" and call.name == "set_lamp"
        if called.status == "completed":
            Lamp.model_validate_json(call.arguments)
