"""Several sequences of one prompt over HTTP: best_of and beam search, as the official client asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from quire.engine_request import EngineRequest
from quire.sampling_params import BeamSearchParams
from tests.helpers.fake_engine import fake_front_model, reply_with, small_tokenizer, small_tokenizer_ids
from tests.helpers.live_server import LiveServer, MakeServer

HI: list[Any] = [{"role": "user", "content": "hi"}]
BEAMS = {"use_beam_search": True}


def reply(request: EngineRequest) -> list[int]:
    """Beams: rank + 1 letters "b". Otherwise: so many letters "c" as the sequence's number, from 1. And end-of-text."""
    letters = small_tokenizer_ids()
    eos = small_tokenizer().eos_token_id
    assert eos is not None
    if request.beam is not None:
        return [letters["b"]] * (request.seeds[0] + 1) + [eos]
    number = int(request.sequence_ids[0].rpartition("-")[2]) if request.seeds[0] != 7 else 0
    return [letters["c"]] * (9 - number) + [eos]


@pytest.fixture(scope="module")
def served() -> Iterator[LiveServer]:
    live = LiveServer(llm={"reply": reply, "front_model": fake_front_model(temperature=0.6, top_k=9)}, max_num_seqs=8)
    yield live
    live.close()


@pytest.fixture
def client(served: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as made:
        yield made


def test_the_best_of_several_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=["a", "bc"], n=2, best_of=4, seed=7, max_tokens=30)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["c" * 6, "c" * 7] * 2
    assert all(choice.logprobs is None and choice.finish_reason == "stop" for choice in answer.choices)
    assert answer.usage is not None
    generated = sum(number + 1 for number in (9, 8, 7, 6))
    assert answer.usage.completion_tokens == 2 * generated, "all that were generated are paid for"
    assert answer.usage.prompt_tokens == 3


def test_logprobs_of_the_best(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="a", best_of=3, seed=7, logprobs=1, max_tokens=30)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == [-0.75] * 8


def test_the_best_of_several_chats(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=HI, seed=7, extra_body={"best_of": 3})
    assert [choice.message.content for choice in answer.choices] == ["c" * 7]


def test_best_of_cannot_be_streamed(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="best_of must equal n") as caught:
        client.completions.create(model="fake", prompt="a", best_of=2, stream=True)
    assert caught.value.param == "best_of"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=HI, stream=True, extra_body={"best_of": 2})
    assert caught.value.param == "best_of"


def test_beams_as_choices(client: openai.OpenAI, served: LiveServer) -> None:
    extra = {**BEAMS, "length_penalty": 0.5, "early_stopping": True}
    answer = client.completions.create(model="fake", prompt=["a", "d"], n=3, extra_body=extra, max_tokens=3, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4, 5]
    assert [choice.text for choice in answer.choices] == ["ab", "abb", "abbb", "db", "dbb", "dbbb"]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop", "length"] * 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * (2 + 3 + 3)
    asked = served.do(lambda: served.engine.added[-1])
    assert asked.beam == BeamSearchParams(beam_width=3, max_tokens=3, length_penalty=0.5, early_stopping=True)
    assert asked.sampling_params.temperature == 0.0, "what is recommended for sampling does not apply"


def test_the_n_best_of_more_beams(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="a", n=2, best_of=4, extra_body=BEAMS)
    assert [choice.text for choice in answer.choices] == ["b", "bb"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 + 3 + 4 + 5


def test_beams_of_a_chat(client: openai.OpenAI, served: LiveServer) -> None:
    answer = client.chat.completions.create(model="fake", messages=HI, n=2, temperature=0, extra_body=BEAMS)
    assert [choice.message.content for choice in answer.choices] == ["b", "bb"]
    asked = served.do(lambda: served.engine.added[-1])
    assert asked.max_tokens == 256 - len(asked.prompt_token_ids), "as many as fit"


def test_what_beams_cannot_do(client: openai.OpenAI) -> None:
    for path in ("completion", "chat"):
        for extra, param in (
            ({"stream": True}, "stream"),
            ({"top_p": 0.5}, "top_p"),
            ({"temperature": 0.6}, "temperature"),
            ({"n": 9}, "n"),
            ({"best_of": 9}, "best_of"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                if path == "chat":
                    client.chat.completions.create(model="fake", messages=HI, extra_body={**BEAMS, **extra})
                else:
                    client.completions.create(model="fake", prompt="a", extra_body={**BEAMS, **extra})
            assert caught.value.param == param


def test_more_completions_than_the_engine_runs_at_a_time(make_server: MakeServer) -> None:
    server = make_server(llm={"reply": reply_with(small_tokenizer(), "abc", "d")}, max_num_seqs=2)
    body = {"model": "fake", "prompt": "a", "n": 2, "best_of": 5}
    answer = server.http.post("/v1/completions", json=body).json()
    assert [choice["text"] for choice in answer["choices"]] == ["d", "d"]
    assert answer["usage"]["completion_tokens"] == 4 + 4 * 2
