"""What chat completions answer, streamed or not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.live_server import LiveServer
from tests.server import streams
from tests.server.checks import CHAT, HI, prompt_of


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    live = LiveServer(llm={"reply_text": "hello wörld"})
    yield live
    live.close()


def chat(server: LiveServer, **body: Any) -> dict[str, Any]:
    response = server.http.post(CHAT, json={"model": "fake", "messages": HI, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream(server: LiveServer, **body: Any) -> list[dict[str, Any]]:
    return streams.stream(server, CHAT, {"model": "fake", "messages": HI, **body})


def test_an_answer(server: LiveServer) -> None:
    answer = chat(server)
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello wörld", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert answer["usage"]["prompt_tokens"] == 21
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert prompt_of(server) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_conversations_become_prompts(server: LiveServer) -> None:
    chat(server, messages=[{"role": "developer", "content": "be brief"}, *HI])
    assert prompt_of(server).startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user")
    chat(server, messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}])
    assert prompt_of(server).startswith("<|im_start|>user\na\nb<|im_end|>")
    chat(server, add_generation_prompt=False)
    assert prompt_of(server) == "<|im_start|>user\nhi<|im_end|>\n"
    chat(server, messages=[*HI, {"role": "assistant", "content": "hel"}], continue_final_message=True)
    assert prompt_of(server).endswith("<|im_start|>assistant\nhel")


def test_text_goes_on_to_the_end_of_the_context_unless_told_otherwise(server: LiveServer) -> None:
    assert chat(server, ignore_eos=True)["usage"]["total_tokens"] == 256
    assert chat(server, ignore_eos=True, max_tokens=9)["usage"]["completion_tokens"] == 9
    assert chat(server, ignore_eos=True, max_tokens=9, max_completion_tokens=5)["usage"]["completion_tokens"] == 5


def test_logprobs(server: LiveServer) -> None:
    content = chat(server, logprobs=True, top_logprobs=2, max_tokens=1)["choices"][0]["logprobs"]["content"]
    assert content == [
        {
            "token": "hello",
            "logprob": -0.75,
            "bytes": list(b"hello"),
            "top_logprobs": [
                {"token": "hell", "logprob": -0.5, "bytes": list(b"hell")},
                {"token": "hello", "logprob": -0.75, "bytes": list(b"hello")},
            ],
        }
    ]
    plain = chat(server, logprobs=True, max_tokens=1)["choices"][0]["logprobs"]["content"]
    assert plain[0]["top_logprobs"] == []


def test_bytes_of_tokens_that_are_half_a_character(server: LiveServer) -> None:
    content = chat(server, logprobs=True)["choices"][0]["logprobs"]["content"]
    text = b"".join(bytes(item["bytes"]) for item in content[:-1])
    assert text.decode() == "hello wörld"


def test_prompt_logprobs_and_token_ids(server: LiveServer) -> None:
    answer = chat(server, prompt_logprobs=0, return_token_ids=True, max_tokens=1)
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"]) == 21
    assert answer["choices"][0]["token_ids"] == [263]


def test_the_bytes_of_a_stream(server: LiveServer) -> None:
    response = server.http.post(CHAT, json={"model": "fake", "messages": HI, "stream": True, "request_id": "x"})
    created = json.loads(response.text.split("\n")[0][6:])["created"]
    head = f'data: {{"id":"chatcmpl-x","object":"chat.completion.chunk","created":{created},"model":"fake","choices":['

    def line(delta: str, end: str) -> str:
        return f'{head}{{"index":0,"delta":{{{delta}}},"logprobs":null,"finish_reason":{end}}}]}}'

    assert response.text.split("\n\n") == [
        line('"role":"assistant","content":""', "null"),
        *[line(f'"content":"{text}"', "null") for text in ("hello", " w", "ö", "r", "ld")],
        line("", '"stop","stop_reason":null'),
        "data: [DONE]",
        "",
    ]


def test_each_choice_of_a_stream_begins_with_its_role_and_ends_with_a_reason(server: LiveServer) -> None:
    chunks = stream(server, n=3, logprobs=True, stream_options={"include_usage": True})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 21
    for index in range(3):
        parts = [part for chunk in chunks[:-1] for part in chunk["choices"] if part["index"] == index]
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(part["delta"].get("content", "") for part in parts) == "hello wörld"
        assert parts[-1]["finish_reason"] == "stop"
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        tokens = [item for part in parts if part["logprobs"] for item in part["logprobs"]["content"]]
        assert len(tokens) == 7


def test_text_and_end_in_one_step_are_two_chunks() -> None:
    live = LiveServer(llm={"reply_text": "hello world", "tokens_per_step": 8})
    try:
        parts = [chunk["choices"][0] for chunk in stream(live)]
        assert [(part["delta"].get("content"), part["finish_reason"]) for part in parts] == [
            ("", None),
            ("hello world", None),
            (None, "stop"),
        ]
    finally:
        live.close()


def test_conversations_can_be_tokenized(server: LiveServer) -> None:
    answer = server.http.post("/tokenize", json={"messages": HI, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) == 21
    assert answer["max_model_len"] == 256
    assert answer["token_strs"][0] == "<|im_start|>"
    text = server.http.post("/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"]
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_conversation_beyond_the_context_fits_once_truncated(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "abc " * 100}]
    refused = server.http.post(CHAT, json={"model": "fake", "messages": messages})
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    answer = chat(server, messages=messages, truncate_prompt_tokens=24)
    assert answer["usage"]["prompt_tokens"] == 24
    assert prompt_of(server).endswith("<|im_end|>\n<|im_start|>assistant\n")
    answer = chat(server, messages=messages, truncate_prompt_tokens=-1, max_tokens=6)
    assert answer["usage"]["prompt_tokens"] == 250


def test_an_answer_that_is_long() -> None:
    live = LiveServer(llm={"reply_text": "x" * 70_000, "max_model_len": 100_000, "tokens_per_step": 10_000})
    try:
        assert chat(live)["choices"][0]["message"]["content"] == "x" * 70_000
    finally:
        live.close()
