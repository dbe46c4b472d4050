"""What completions answer: choices, text, usage, echo, log-probabilities, and the bytes of a stream."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.live_server import LiveServer
from tests.server import streams
from tests.server.checks import COMPLETIONS, check_error
from tests.server.families import front_of


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    live = LiveServer(llm={"reply_text": "hello world"})
    yield live
    live.close()


def complete(server: LiveServer, **body: Any) -> dict[str, Any]:
    response = server.http.post(COMPLETIONS, json={"model": "fake", "prompt": "ab", **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream(server: LiveServer, **body: Any) -> list[dict[str, Any]]:
    return streams.stream(server, COMPLETIONS, {"model": "fake", "prompt": "ab", **body})


def test_a_suffix_is_what_the_text_ends_in() -> None:
    special = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    front = front_of(None, None, special=special)
    with contextlib.closing(LiveServer(llm={"front_model": front})) as live:
        answer = complete(live, prompt=["def f(", "x"], suffix="return 1", echo=True, max_tokens=2)
        assert answer["choices"][0]["text"].startswith("def f(")
        [first, second] = live.do(lambda: [item.prompt_token_ids for item in live.engine.added[-2:]])
        before, behind, middle = [front.tokenizer.token_to_id(text) for text in special]
        assert (first[0], first.count(behind), first[-1]) == (before, 1, middle)
        assert front.tokenizer.decode(first) == "def f(return 1"
        assert front.tokenizer.decode(second[: second.index(behind)]) == "x"
        whole = {"model": "fake", "prompt": "def f(", "suffix": "return 1", "stream": False}
        assert live.http.post("/api/generate", json=whole).status_code == 200
        assert live.do(lambda: live.engine.added[-1].prompt_token_ids) == first
        for body in ({"prompt": [1, 2]}, {"truncate_prompt_tokens": 4}):
            response = live.http.post(COMPLETIONS, json={"model": "fake", "prompt": "a", "suffix": "b", **body})
            check_error(response, 400, "invalid_value", "suffix")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_field_that_changes_nothing_here_is_named_in_a_header(server: LiveServer, streamed: bool) -> None:
    body = {"model": "fake", "prompt": "ab", "stream": streamed}
    response = server.http.post(COMPLETIONS, json={**body, "priority": 3})
    assert response.status_code == 200
    warning = "priority has no effect: this server runs with --scheduling-policy fcfs"
    assert response.headers["x-quire-warning"] == warning
    assert "x-quire-warning" not in server.http.post(COMPLETIONS, json=body).headers


def test_an_answer(server: LiveServer) -> None:
    answer = complete(server)
    assert answer["id"].startswith("cmpl-")
    assert isinstance(answer["created"], int)
    del answer["id"], answer["created"]
    assert answer == {
        "object": "text_completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "text": "hello world",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 4,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_sixteen_tokens_unless_told_otherwise(server: LiveServer) -> None:
    def finished(**body: Any) -> tuple[str, int]:
        answer = complete(server, ignore_eos=True, **body)
        return answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]

    assert finished() == ("length", 16)
    assert finished(max_tokens=None) == ("length", 16)
    assert finished(max_tokens=3) == ("length", 3)


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(server: LiveServer) -> None:
    answer = complete(server, prompt=[[68, 69], [5, 6, 7]], n=2, max_tokens=1, echo=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts[0] == texts[1] == "abhello"
    assert texts[2] == texts[3] == '"#$hello'
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 4


def test_sampling_fields_reach_the_engine(server: LiveServer) -> None:
    asked = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "seed": 42,
        "stop": ["x", "yz"],
        "stop_token_ids": [9],
        "bad_words": ["foo"],
        "ignore_eos": True,
        "min_tokens": 2,
        "max_tokens": 3,
        "logit_bias": {"5": 1.5},
        "allowed_token_ids": [5, 6, 263],
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }
    complete(server, **asked)
    params = server.do(lambda: server.engine.added[-1]).sampling_params
    for name, value in {**asked, "logit_bias": {5: 1.5}}.items():
        assert getattr(params, name) == value, name


def test_stop_strings_and_their_reason(server: LiveServer) -> None:
    choice = complete(server, stop=["wor"])["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hello ", "stop", "wor")
    choice = complete(server, stop="wor", include_stop_str_in_output=True)["choices"][0]
    assert choice["text"] == "hello wor"
    choice = complete(server, stop_token_ids=[266])["choices"][0]
    assert (choice["text"], choice["stop_reason"]) == ("hello", 266)


def test_special_tokens_of_a_prompt_are_up_to_the_caller(server: LiveServer) -> None:
    usage = complete(server, prompt="hello world", add_special_tokens=False)["usage"]
    assert usage["prompt_tokens"] == 3


def test_the_end_of_a_prompt_can_be_kept(server: LiveServer) -> None:
    answer = complete(server, prompt="abcdef", truncate_prompt_tokens=2, echo=True, max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["choices"][0]["text"] == "efhello"


def test_logprobs(server: LiveServer) -> None:
    logprobs = complete(server, logprobs=2, max_tokens=2)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["hello", " wor"]
    assert logprobs["token_logprobs"] == [-0.75, -0.75]
    assert logprobs["text_offset"] == [0, 5]
    assert [len(top) for top in logprobs["top_logprobs"]] == [2, 2]
    assert logprobs["top_logprobs"][0]["hello"] == -0.75
    only_chosen = complete(server, logprobs=0, max_tokens=1)["choices"][0]["logprobs"]
    assert only_chosen["top_logprobs"] == [{"hello": -0.75}]


def test_tokens_can_be_named_by_id(server: LiveServer) -> None:
    logprobs = complete(server, logprobs=0, max_tokens=1, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:263"]


def test_scoring_a_prompt(server: LiveServer) -> None:
    """echo with logprobs and no new token, as evaluation tools ask for it."""
    answer = complete(server, prompt="abc", echo=True, max_tokens=0, logprobs=1)
    choice = answer["choices"][0]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.75, -0.75]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0


def test_prompt_logprobs(server: LiveServer) -> None:
    choice = complete(server, prompt="abc", prompt_logprobs=1, max_tokens=1)["choices"][0]
    first, second, third = choice["prompt_logprobs"]
    assert first is None
    assert second["69"] == {"logprob": -0.75, "rank": 2, "decoded_token": "b"}
    assert set(third) == {"70", "69"}


def test_token_ids_on_request(server: LiveServer) -> None:
    choice = complete(server, max_tokens=2, return_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == [68, 69]
    assert choice["token_ids"] == [263, 266]


def test_ids_of_the_caller(server: LiveServer) -> None:
    assert complete(server, request_id="mine")["id"] == "cmpl-mine"
    plain = [complete(server)["id"] for _ in range(2)]
    assert plain[0] != plain[1]


def test_the_bytes_of_a_stream(server: LiveServer) -> None:
    response = server.http.post(
        COMPLETIONS,
        json={
            "model": "fake",
            "prompt": "ab",
            "stream": True,
            "request_id": "x",
            "stream_options": {"include_usage": True},
        },
    )
    created = json.loads(response.text.split("\n")[0][6:])["created"]
    head = f'data: {{"id":"cmpl-x","object":"text_completion","created":{created},"model":"fake","choices":['
    texts = [("hello", "null"), (" wor", "null"), ("ld", "null"), ("", '"stop"')]
    expected = [
        f'{head}{{"index":0,"text":"{text}","logprobs":null,"finish_reason":{reason},"stop_reason":null}}],"usage":null}}'
        for text, reason in texts
    ]
    usage = '{"prompt_tokens":2,"completion_tokens":4,"total_tokens":6,"prompt_tokens_details":{"cached_tokens":0}}'
    expected += [f'{head}],"usage":{usage}}}', "data: [DONE]", ""]
    assert response.text.split("\n\n") == expected


@pytest.mark.parametrize("body", [{}, {"n": 2}, {"prompt": ["ab", "cd", "e"]}, {"prompt": ["a", "b"], "n": 3}])
@pytest.mark.parametrize("extra", [{}, {"echo": True, "logprobs": 1}, {"echo": True, "max_tokens": 0, "logprobs": 1}])
def test_streams_add_up_to_the_answer(server: LiveServer, body: dict[str, Any], extra: dict[str, Any]) -> None:
    whole = complete(server, **body, **extra)
    chunks = stream(server, stream_options={"include_usage": True}, **body, **extra)
    assert chunks[-1]["usage"] == whole["usage"]
    assert chunks[-1]["choices"] == []
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts][-1] == choice["finish_reason"]
        assert all(part["finish_reason"] is None for part in parts[:-1])
        if choice["logprobs"] is not None:
            joined: dict[str, list[Any]] = {name: [] for name in choice["logprobs"]}
            for part in parts:
                for name, values in (part["logprobs"] or {}).items():
                    joined[name] += values
            assert joined == choice["logprobs"]


def test_usage_in_every_chunk(server: LiveServer) -> None:
    chunks = stream(server, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 4]
    assert all("usage" not in chunk for chunk in stream(server))


def test_streams_with_token_ids(server: LiveServer) -> None:
    parts = [chunk["choices"][0] for chunk in stream(server, return_token_ids=True)]
    assert parts[0]["prompt_token_ids"] == [68, 69]
    assert [token for part in parts for token in part["token_ids"]] == [263, 266, 267, 2]


def test_recommended_sampling_values_apply_where_the_request_is_silent() -> None:
    from tests.helpers.fake_engine import fake_front_model

    front = fake_front_model(temperature=0.25, top_k=3, max_tokens=7)
    live = LiveServer(llm={"front_model": front})
    try:
        complete(live, top_k=5)
        params = live.do(lambda: live.engine.added[-1]).sampling_params
        assert (params.temperature, params.top_k, params.max_tokens) == (0.25, 5, 16)
        live.http.post("/v1/chat/completions", json={"model": "fake", "messages": [{"role": "user", "content": "a"}]})
        assert live.do(lambda: live.engine.added[-1]).max_tokens == 7
    finally:
        live.close()
