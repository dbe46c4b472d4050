"""Anthropic's own client, as people run it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.live_server import LiveServer, MakeServer
from tests.server.anthropic.wire import CALL, HI, LOOK, THOUGHT
from tests.server.families import front_of

if TYPE_CHECKING:
    import anthropic

MakeClient = Callable[..., "anthropic.Anthropic"]


@pytest.fixture(scope="module")
def sdk() -> ModuleType:
    """The package `anthropic`: its import takes as long as that of PyTorch, and only this file needs it."""
    return importlib.import_module("anthropic")


@pytest.fixture(scope="module")
def served() -> Iterator[LiveServer]:
    live = LiveServer(api_key=["secret"], llm={"reply_text": "hello world"})
    yield live
    live.close()


@pytest.fixture
def connect(sdk: ModuleType) -> Iterator[MakeClient]:
    """Makes clients; they are closed at the end."""
    made: list[anthropic.Anthropic] = []

    def make(server: LiveServer, api_key: str = "secret", **options: Any) -> anthropic.Anthropic:
        made.append(sdk.Anthropic(base_url=server.url, api_key=api_key, max_retries=0, **options))
        return made[-1]

    yield make
    for client in made:
        client.close()


def test_create(served: LiveServer, connect: MakeClient) -> None:
    message = connect(served).messages.create(model="fake", max_tokens=20, messages=HI)
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "hello world"}]
    assert (message.stop_reason, message.role, message.usage.output_tokens) == ("end_turn", "assistant", 4)
    assert message._request_id


def test_stream(served: LiveServer, connect: MakeClient) -> None:
    with connect(served).messages.stream(model="fake", max_tokens=20, messages=HI) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "hello world"
    assert (final.stop_reason, final.usage.input_tokens, final.usage.output_tokens) == ("end_turn", 21, 4)


def test_raw_events(served: LiveServer, connect: MakeClient) -> None:
    events = list(connect(served).messages.create(model="fake", max_tokens=2, messages=HI, stream=True))
    assert [event.type for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_count_tokens(served: LiveServer, connect: MakeClient) -> None:
    assert connect(served).messages.count_tokens(model="fake", messages=HI, system="be").input_tokens == 33


def test_a_bearer_token(served: LiveServer, sdk: ModuleType) -> None:
    with sdk.Anthropic(base_url=served.url, auth_token="secret", api_key=None, max_retries=0) as client:
        assert client.messages.create(model="fake", max_tokens=2, messages=HI).content


def test_classes_of_errors(served: LiveServer, connect: MakeClient, sdk: ModuleType) -> None:
    client = connect(served)
    good: dict[str, Any] = {"model": "fake", "max_tokens": 2, "messages": HI}
    for kind, fields in (
        (sdk.BadRequestError, {"max_tokens": 0}),
        (sdk.BadRequestError, {"messages": []}),
        (sdk.NotFoundError, {"model": "nope"}),
    ):
        with pytest.raises(kind) as caught:
            client.messages.create(**{**good, **fields})
        assert caught.value.request_id
    with pytest.raises(sdk.AuthenticationError):
        connect(served, "wrong").messages.create(**good)


def test_a_server_that_goes_away(make_server: MakeServer, connect: MakeClient, sdk: ModuleType) -> None:
    server = make_server()
    server.context.draining = True
    with pytest.raises(sdk.InternalServerError) as caught:
        connect(server).messages.create(model="fake", max_tokens=2, messages=HI)
    assert caught.value.status_code == 503


def test_an_error_within_a_stream(make_server: MakeServer, connect: MakeClient, sdk: ModuleType) -> None:
    server = make_server(llm={"max_model_len": 100_000})
    with (
        connect(server).messages.create(model="fake", max_tokens=90_000, messages=HI, stream=True) as stream,
        pytest.raises(sdk.APIStatusError, match="logits are not finite"),
    ):
        for number, _ in enumerate(stream):
            if number == 3:
                server.do(lambda: server.engine.fail_on.update(server.engine.live))


def test_a_loop_of_tools(make_server: MakeServer, connect: MakeClient) -> None:
    """Calls are run and answered until the model calls nothing more; content goes back as it came."""
    replies = iter([THOUGHT + "let me\n" + CALL, CALL, "it is 42"])
    front = front_of("hermes", "qwen3")
    assert front.tokenizer is not None
    tokenizer = front.tokenizer
    server = make_server(
        llm={
            "front_model": front,
            "reply": lambda _: [*tokenizer.encode(next(replies), add_special_tokens=False), tokenizer.eos_token_id],
        }
    )
    client = connect(server)
    messages: list[Any] = list(HI)
    rounds = 0
    while True:
        with client.messages.stream(
            model="fake", max_tokens=2000, messages=messages, tools=[LOOK], system="be"
        ) as stream:  # type: ignore[call-overload]
            message = stream.get_final_message()
        messages.append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            break
        rounds += 1
        calls = [block for block in message.content if block.type == "tool_use"]
        assert [call.input for call in calls] == [{"at": "x", "n": 3}]
        messages.append(
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "42"} for call in calls],
            }
        )
    assert rounds == 2
    assert message.content[0].text == "it is 42"
