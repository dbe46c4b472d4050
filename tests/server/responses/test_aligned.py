"""Log-probabilities are those of the tokens that a text was made of, however many tokens a step brings."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.server.responses.events import TokenQueue
from tests.helpers.live_server import LiveServer, MakeServer
from tests.server.families import front_of
from tests.server.responses.asking import (
    LEAVE,
    LOOK,
    LOOK_CALL,
    MARKS,
    THOUGHT,
    ask,
    check_story,
    says,
    stream,
    without_ids,
)

LOGPROBS = "message.output_text.logprobs"
SHAPES = [
    "hello world",
    THOUGHT + "so it is",
    THOUGHT + "a <b> and </b",
    THOUGHT + "ö < <too \U0001f600 end",
    THOUGHT + "I look. " + LOOK_CALL,
    "I look. " + LOOK_CALL + LOOK_CALL,
    THOUGHT + "see me " + LOOK_CALL,
]


def family(make_server: MakeServer, tokens_per_step: int, special: tuple[str, ...]) -> LiveServer:
    front = front_of("hermes", "qwen3", special)
    return make_server(llm={"front_model": front, "reply_text": "x", "tokens_per_step": tokens_per_step})


def spelled(logprobs: list[dict[str, Any]]) -> str:
    return b"".join([bytes(item["bytes"]) for item in logprobs]).decode()


@pytest.mark.parametrize("special", [MARKS, ()])
@pytest.mark.parametrize("tokens_per_step", [1, 3, 8, 400])
def test_logprobs_match_the_text_whatever_a_step_brings(
    make_server: MakeServer, tokens_per_step: int, special: tuple[str, ...]
) -> None:
    server = family(make_server, tokens_per_step, special)
    for text in SHAPES:
        says(server, text)
        body: dict[str, Any] = {"include": [LOGPROBS], "tools": [LOOK, LEAVE], "top_logprobs": 2}
        events = stream(server, **body)
        final = check_story(events)
        assert without_ids(ask(server, **body)["output"]) == without_ids(final["output"])
        for index, item in enumerate(final["output"]):
            if item["type"] != "message":
                continue
            [part] = item["content"]
            assert spelled(part["logprobs"]).strip() == part["text"].strip(), text
            deltas = [event for event in events if event.get("output_index") == index and "delta" in event]
            assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]
            assert {entry["logprob"] for entry in part["logprobs"]} == {-0.75}


@pytest.mark.parametrize("tokens_per_step", [1, 3, 7, 400])
def test_chats_show_each_token_once(make_server: MakeServer, tokens_per_step: int) -> None:
    """Chats show all tokens, those of marks and calls, too: in a stream the same ones as in a whole answer."""
    server = family(make_server, tokens_per_step, MARKS)
    for text in SHAPES:
        says(server, text)
        tools = [{"type": "function", "function": {k: v for k, v in LOOK.items() if k != "type"}}]
        body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "tools": tools}
        whole = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
        answer = server.http.post("/v1/chat/completions", json={**body, "stream": True}).text
        chunks = [line.removeprefix("data: ") for line in answer.split("\n") if line.startswith("data: {")]
        choices = [choice for chunk in chunks for choice in _choices(chunk)]
        assert [item for choice in choices if choice["logprobs"] for item in choice["logprobs"]["content"]] == whole
        assert spelled(whole).removesuffix("<|im_end|>") == text


def _choices(chunk: str) -> list[dict[str, Any]]:
    choices: list[dict[str, Any]] = json.loads(chunk)["choices"]
    return choices


def entries(*texts: bytes) -> list[dict[str, Any]]:
    return [{"bytes": list(text)} for text in texts]


def test_tokens_that_come_out_in_parts() -> None:
    queue = TokenQueue()
    whole = entries(b"hel", b"lo <", b"b> x")
    queue.add(whole)
    assert queue.take("hello ", begun=True, last=True) == whole[:2]
    assert queue.take("<b", begun=False, last=True) == whole[2:]
    assert queue.take("> x", begun=False, last=True) == []
    more = entries(b"y")
    queue.add(more)
    assert queue.take("y", begun=False, last=True) == more


def test_parts_of_characters() -> None:
    queue = TokenQueue()
    broken = entries(b"a", b"\xff", b"b")
    queue.add(broken)
    assert queue.take("a\ufffdb", begun=True, last=True) == broken
    queue.add(entries(b"thought \xff"))
    queue.skip("thought \ufffd")
    after = entries(b"c")
    queue.add(after)
    assert queue.take("c", begun=True, last=True) == after
