"""The whole thing as a user meets it: a server process with the built-in model, and the official client."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.helpers.server import Server, serve

PROMPT = "KING RICHARD III:\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server shared by the tests of this file, of which the last one ends it."""
    with serve(tmp_path_factory.mktemp("server") / "log.txt") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def settled(server: Server, seconds: float = 30.0) -> bool:
    """Whether nothing runs, nothing waits, and no block is in use, within so many seconds."""
    deadline = time.monotonic() + seconds
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    while time.monotonic() < deadline:
        if all(server.metric(name) == 0 for name in names):
            return True
        time.sleep(0.05)
    return False


def test_chat_answers_about_quire(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "What is Quire?"}]
    answer = client.chat.completions.create(model="quire-demo", messages=messages, temperature=0, max_tokens=60)
    assert "engine" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streamed_equals_not_streamed_and_repeats_are_cached(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="quire-demo", prompt=PROMPT * 4, temperature=0, max_tokens=40)
    stream = client.completions.create(
        model="quire-demo",
        prompt=PROMPT * 4,
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    usage = chunks[-1].usage
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == 40
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens is not None
    assert usage.prompt_tokens_details.cached_tokens >= 16


def test_seeded_sampling_is_reproducible_and_completions_differ(client: openai.OpenAI) -> None:
    def ask() -> list[str]:
        answer = client.completions.create(model="quire-demo", prompt=PROMPT, n=4, seed=7, max_tokens=24)
        return [choice.text for choice in answer.choices]

    first = ask()
    assert first == ask()
    assert len(set(first)) == 4


def test_logprobs_are_consistent(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="quire-demo",
        messages=[{"role": "user", "content": "What is 12 + 30?"}],
        temperature=0,
        max_tokens=30,
        logprobs=True,
        top_logprobs=3,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    text = b"".join(bytes(item.bytes or []) for item in logprobs.content).decode()
    assert text.startswith(answer.choices[0].message.content or "?")
    for item in logprobs.content:
        assert len(item.top_logprobs) == 3
        assert item.logprob == pytest.approx(max(top.logprob for top in item.top_logprobs))


def test_stop_strings_end_the_text_before_them(client: openai.OpenAI) -> None:
    free = client.completions.create(model="quire-demo", prompt=PROMPT, temperature=0, max_tokens=60).choices[0].text
    stop = free[12:15]
    cut = client.completions.create(model="quire-demo", prompt=PROMPT, temperature=0, max_tokens=60, stop=stop)
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].text == free[: free.index(stop)]


def test_bad_requests_are_answered_and_the_next_one_is_served(server: Server, client: openai.OpenAI) -> None:
    for body, code in (
        ({"prompt": "a", "temperature": -1}, "decimal_below_min_value"),
        ({"prompt": [99999]}, "invalid_value"),
        ({"prompt": "a", "max_tokens": "5"}, "invalid_type"),
        ({"prompt": "a " * 5000}, "context_length_exceeded"),
        ({"prompt": "a", "no_such_field": 1}, "unknown_parameter"),
    ):
        status, answer = server.post("/v1/completions", {"model": "quire-demo", **body})
        assert (status, answer["error"]["code"]) == (400, code), answer
        assert answer["error"]["type"] == "invalid_request_error"
    assert client.completions.create(model="quire-demo", prompt=PROMPT, max_tokens=2).choices[0].text


def test_clients_that_hang_up_at_random_leave_nothing_behind(server: Server) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> bool:
        rng = random.Random(number)
        stream = await client.completions.create(
            model="quire-demo",
            prompt=f"{number}. {PROMPT}" * rng.randint(1, 12),
            max_tokens=rng.randint(20, 100),
            stream=True,
            seed=number,
        )
        patience = rng.choice([0, 1, 5, 20, 1000])
        async for _ in stream:
            patience -= 1
            if patience < 0:
                await stream.close()
                return False
        return True

    async def everybody() -> list[bool]:
        async with openai.AsyncOpenAI(
            base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120
        ) as client:
            return await asyncio.gather(*(one(client, number) for number in range(32)))

    finished = asyncio.run(everybody())
    assert any(finished) and not all(finished)
    assert settled(server)


def test_a_client_that_hangs_up_on_a_long_answer_is_aborted(server: Server) -> None:
    def hang_up() -> None:
        body = {"model": "quire-demo", "prompt": PROMPT, "max_tokens": 900, "ignore_eos": True}
        request = urllib.request.Request(
            server.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with pytest.raises(OSError):
            urllib.request.urlopen(request, timeout=0.3).read()

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(hang_up) for _ in range(4)]:
            future.result()
    assert settled(server)


def test_sigterm_lets_running_requests_end_and_exits_cleanly(server: Server) -> None:
    engine = server.children()
    body = {"model": "quire-demo", "prompt": PROMPT, "max_tokens": 120, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        server.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        response.readline()
        server.process.send_signal(signal.SIGTERM)
        rest = response.read()
    assert rest.rstrip().endswith(b"data: [DONE]")
    assert server.process.wait(30) == 0
    assert engine and not any(Path(f"/proc/{pid}").exists() for pid in engine)
