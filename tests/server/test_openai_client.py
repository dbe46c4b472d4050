"""The official OpenAI client, as users run it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.helpers.live_server import LiveServer

HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def served() -> Iterator[LiveServer]:
    live = LiveServer(api_key="secret", llm={"reply_text": "hello world"})
    yield live
    live.close()


@pytest.fixture
def client(served: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="secret", max_retries=0) as made:
        yield made


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").owned_by == "quire"


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=HI, logprobs=True, top_logprobs=1, n=2)
    assert [choice.message.content for choice in answer.choices] == ["hello world"] * 2
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert answer.choices[0].logprobs.content[0].token == "hello"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer._request_id


def test_a_chat_goes_on_with_its_own_answer(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="fake", messages=HI)
    messages = [*HI, first.choices[0].message, {"role": "user", "content": "more"}]
    assert client.chat.completions.create(model="fake", messages=messages).choices[0].message.content == "hello world"


def test_streamed_chat(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="fake", messages=HI, stream=True, stream_options={"include_usage": True}, max_completion_tokens=9
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "hello world"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 25


def test_the_clients_own_accumulation_of_a_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="fake", messages=HI) as stream:
        assert stream.get_final_completion().choices[0].message.content == "hello world"


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="fake", prompt=["ab", "cd"], logprobs=1, echo=True, extra_body={"top_k": 5, "min_p": 0.1}
    )
    assert [choice.text for choice in answer.choices] == ["abhello world", "cdhello world"]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.tokens[:3] == ["a", "b", "hello"]
    stream = client.completions.create(model="fake", prompt="ab", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "hello world"


def test_errors_are_the_clients_own(client: openai.OpenAI, served: LiveServer) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=HI)
    assert missing.value.code == "model_not_found"
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="fake", messages=HI, temperature=-1)
    assert (bad.value.code, bad.value.param) == ("decimal_below_min_value", "temperature")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="fake", prompt="x" * 500)
    assert long.value.code == "context_length_exceeded"
    with (
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        stranger.models.list()
    assert refused.value.code == "invalid_api_key"


def test_an_error_within_a_stream_is_raised() -> None:
    live = LiveServer(llm={"max_model_len": 100_000})
    try:
        with (
            openai.OpenAI(base_url=f"{live.url}/v1", api_key="x", max_retries=0) as client,
            pytest.raises(openai.APIError) as failed,
        ):
            stream = client.completions.create(
                model="fake", prompt="a", stream=True, max_tokens=90_000, extra_body={"ignore_eos": True}
            )
            next(stream)
            live.do(live.fake_client.die)
            for _ in stream:
                pass
        assert failed.value.code == "engine_unavailable"
    finally:
        live.close()


def test_many_at_once_from_the_async_client(served: LiveServer) -> None:
    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="secret", max_retries=0) as client:

            async def ask(stream: bool) -> str:
                if not stream:
                    answer = await client.chat.completions.create(model="fake", messages=HI)
                    return answer.choices[0].message.content or ""
                text = ""
                async for chunk in await client.chat.completions.create(model="fake", messages=HI, stream=True):
                    text += chunk.choices[0].delta.content or ""
                return text

            return await asyncio.gather(*(ask(bool(index % 2)) for index in range(24)))

    assert asyncio.run(main()) == ["hello world"] * 24
