"""Ten thousand requests at once, each with a secret of its own, while engines are killed: nobody gets another one's.

Each request may write three tokens only, which no other one near it may, and has a prompt of its own; tokens, text,
log-probabilities and usage must be its own. Some are streams, some have two choices.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.faults import engine_pid
from tests.helpers.server import Server, serve

REQUESTS = int(os.environ.get("QUIRE_CROSS_TALK", "10000"))
AT_ONCE = 64
DEATHS = 2


def secret(number: int) -> list[int]:
    """Return three token ids; neighbours within a hundred numbers share none."""
    start = 10 + 3 * (number % 120)
    return [start, start + 1, start + 2]


def body(number: int) -> dict[str, Any]:
    rng = random.Random(number)
    return {
        "model": "quire-demo",
        "prompt": [rng.randrange(10, 400) for _ in range(rng.randrange(1, 60))],
        "allowed_token_ids": secret(number),
        "max_tokens": rng.randrange(1, 12),
        "n": 2 if number % 7 == 0 else 1,
        "logprobs": 1,
        "seed": number,
        "ignore_eos": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stream": number % 3 == 0,
        "stream_options": {"include_usage": True} if number % 3 == 0 else None,
    }


def added_up(text: str) -> dict[str, Any]:
    """Return a stream's chunks as one answer."""
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    choices: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        whole = choices.setdefault(choice["index"], {"token_ids": [], "logprobs": {"tokens": []}})
        whole["token_ids"] += choice.get("token_ids") or []
        whole["logprobs"]["tokens"] += (choice["logprobs"] or {"tokens": []})["tokens"]
        whole["finish_reason"] = choice["finish_reason"]
    return {"choices": list(choices.values()), "usage": chunks[-1]["usage"]}


async def ask(http: httpx.AsyncClient, number: int) -> None:
    asked = body(number)
    answer = await http.post("/v1/completions", json=asked, headers={"x-request-id": f"r{number % 50}"})
    assert answer.status_code == 200, (number, answer.text)
    told = added_up(answer.text) if asked["stream"] else answer.json()
    assert len(told["choices"]) == asked["n"]
    for choice in told["choices"]:
        assert len(choice["token_ids"]) == asked["max_tokens"], number
        assert set(choice["token_ids"]) <= set(secret(number)), number
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]], number
        assert choice["finish_reason"] == "length"
    usage = told["usage"]
    assert usage["prompt_tokens"] == len(asked["prompt"])
    assert usage["completion_tokens"] == asked["n"] * asked["max_tokens"]


async def ask_all(server: Server) -> None:
    numbers = iter(range(REQUESTS))
    deaths = [REQUESTS * (index + 1) // (DEATHS + 1) for index in range(DEATHS)]
    async with httpx.AsyncClient(base_url=server.url, timeout=120, trust_env=False, verify=False) as http:

        async def client() -> None:
            for number in numbers:
                if number in deaths:
                    os.kill(engine_pid(server), signal.SIGKILL)
                await ask(http, number)

        await asyncio.gather(*(client() for _ in range(AT_ONCE)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nobody_gets_what_is_anothers(tmp_path: Path) -> None:
    with serve(tmp_path / "log", "--max-num-seqs", "48", "--num-gpu-blocks-override", "300") as server:
        asyncio.run(ask_all(server))
        assert server.metric("quire:engine_restarts_total") == DEATHS
        assert server.metric("vllm:num_requests_running") == 0
