"""Real text through the running server: its scores equal the trainer's, and every way of asking gives one answer."""

from __future__ import annotations

import asyncio

import openai
import pytest

from quire import LLM, SamplingParams
from tests.helpers.passages import passages
from tests.helpers.server import Server

CONCURRENCY = 64
CONTINUATION = 16


async def ask_all(url: str, texts: list[str]) -> list[tuple[float, int, str, str]]:
    """For each text: sum and number of prompt log-probabilities, and its continuation not streamed and streamed."""
    gate = asyncio.Semaphore(CONCURRENCY)
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=600) as client:

        async def one(text: str) -> tuple[float, int, str, str]:
            async with gate:
                scored = await client.completions.create(
                    model="quire-demo",
                    prompt=text,
                    temperature=0,
                    max_tokens=CONTINUATION,
                    extra_body={"prompt_logprobs": 0},
                )
                choice = scored.choices[0]
                entries = (choice.model_extra or {})["prompt_logprobs"]
                logprobs = [next(iter(entry.values()))["logprob"] for entry in entries if entry is not None]
                stream = await client.completions.create(
                    model="quire-demo", prompt=text, temperature=0, max_tokens=CONTINUATION, stream=True
                )
                streamed = "".join([chunk.choices[0].text async for chunk in stream])
                return sum(logprobs), len(logprobs), choice.text, streamed

        return await asyncio.gather(*map(one, texts))


def check(texts: list[str], server: Server) -> tuple[float, int]:
    """Assert one truth for all texts; return the mean loss [nats] and the number of tokens it is over."""
    answers = asyncio.run(ask_all(server.url, texts))
    with LLM() as llm:
        params = SamplingParams(temperature=0, max_tokens=CONTINUATION)
        offline = [output.outputs[0].text for output in llm.generate(texts, params, use_tqdm=False)]
    for text, (_, _, whole, streamed), alone in zip(texts, answers, offline, strict=True):
        assert whole == streamed == alone, text[:80]
    count = sum(number for _, number, _, _ in answers)
    return -sum(total for total, _, _, _ in answers) / count, count


def test_a_sample_of_held_back_passages(demo_server: Server) -> None:
    loss, count = check(passages()[0][::30], demo_server)
    assert count > 1000
    assert 0.3 < loss < 5.0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_servers_perplexity_is_the_trainers(demo_server: Server) -> None:
    texts, figures = passages()
    assert len(texts) == figures["num_passages"]
    loss, count = check(texts, demo_server)
    print(f"server: {loss:.6f} nats over {count} tokens; trainer: {figures['test_loss']:.6f}")
    assert count == figures["num_predicted_tokens"]
    assert loss == pytest.approx(figures["test_loss"], abs=1e-3)
