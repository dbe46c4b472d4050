"""Clients of every kind and mood at once, and engines that die meanwhile: afterwards everything is as it was before."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.fake_engine import FakeClient, FakeEngine, fake_front_model
from tests.helpers.live_server import LiveServer

NUM_CLIENTS = 12
NUM_REQUESTS = 8  # of each client
MAX_RUNNING = 8  # of a key at a time
KEYS = ("sk-one", "sk-two", "sk-three")
LONG = 2000  # context
STATUSES = {200, 400, 404, 429, 503, 504, 529}
CANARY = {"model": "fake", "prompt": "the canary", "max_tokens": 60, "seed": 3, "temperature": 1.0}


class Engines:
    """The engines of one server, one after the other."""

    def __init__(self) -> None:
        self.clients: list[FakeClient] = []

    def make_client(self) -> FakeClient:
        info = fake_front_model(max_model_len=LONG).info
        engine = FakeEngine(vocab_size=info.vocab_size, max_model_len=LONG, max_num_seqs=8)
        self.clients.append(FakeClient(engine))
        return self.clients[-1]


@pytest.fixture
def engines() -> Engines:
    return Engines()


@pytest.fixture
def stormy(tmp_path: Path, engines: Engines) -> Iterator[LiveServer]:
    """A server with limited keys whose engines are replaced."""
    file = tmp_path / "keys.yaml"
    fields = f"max_concurrency: {MAX_RUNNING}, tokens_per_minute: 10000000"
    file.write_text("".join([f"- {{key: {key}, name: {key[3:]}, {fields}}}\n" for key in KEYS]))
    live = LiveServer(
        llm={"max_model_len": LONG, "make_client": engines.make_client},
        api_key_file=str(file),
        max_num_seqs=8,
        max_num_queued_reqs=20,
        max_engine_restarts=1000,
        max_stored_responses=50,
    )
    live.http.headers["Authorization"] = f"Bearer {KEYS[0]}"
    yield live
    live.close()


def body_of(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a path and a body; some of the bodies are wrong."""
    size = rng.choice([1, 5, 40, 300])
    chat = [{"role": "user", "content": rng.choice(["hello", "what is this", "x" * 200])}]
    base: dict[str, Any] = {"model": "fake", "max_tokens": size}
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "once", "n": rng.choice([1, 3]), "stream": True, "logprobs": 2}),
        ("/v1/completions", {"prompt": ["a", "b", [1, 2, 3]], "stop": ["ab", "cd"], "stream": rng.random() < 0.5}),
        ("/v1/completions", {"prompt": "a", "n": 2, "best_of": 4, "temperature": 1.0, "stream_interval": 3}),
        ("/v1/completions", {"prompt": "a b c", "echo": True, "logprobs": 1, "prompt_logprobs": 1}),
        ("/v1/completions", {"prompt": "a", "use_beam_search": True, "n": 2, "temperature": 0}),
        ("/v1/completions", {"prompt": "late", "timeout": 0.02, "ignore_eos": True, "stream": rng.random() < 0.5}),
        ("/v1/chat/completions", {"messages": chat, "stream": True, "stream_options": {"include_usage": True}}),
        ("/v1/chat/completions", {"messages": chat, "logprobs": True, "top_logprobs": 3, "request_id": "the-same"}),
        ("/v1/messages", {"messages": chat, "stream": rng.random() < 0.5}),
        ("/v1/messages/count_tokens", {"messages": chat}),
        ("/tokenize", {"prompt": "how many"}),
        ("/v1/completions", {"prompt": "a", "temperature": "hot"}),
        ("/v1/completions", {"prompt": "x" * 9000}),
        ("/v1/embeddings", {"input": "a"}),
    ]
    path, fields = rng.choice(kinds)
    if path in ("/tokenize", "/v1/messages/count_tokens", "/v1/embeddings"):
        base.pop("max_tokens")
    return path, {**base, **fields}


async def ask(client: httpx.AsyncClient, rng: random.Random) -> None:
    """Do something that clients do, perhaps not to the end."""
    if rng.random() < 0.25:
        await respond(client, rng)
        return
    path, body = body_of(rng)
    headers = {"X-Request-Id": "everybodys"} if rng.random() < 0.3 else {}
    patience = rng.choice([0.0, 0.003, 0.02, 20.0, 20.0])
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience), client.stream("POST", path, json=body, headers=headers) as response:
            assert response.status_code in STATUSES, await response.aread()
            if rng.random() < 0.5:
                async for _ in response.aiter_raw():
                    if rng.random() < 0.1:
                        break
            else:
                await response.aread()


async def respond(client: httpx.AsyncClient, rng: random.Random) -> None:
    """Use the Responses API: in the background, followed, cancelled, deleted, gone on from, or dropped."""
    fields = {"background": rng.random() < 0.6, "stream": rng.random() < 0.4}
    body = {"model": "fake", "input": "go on", "max_output_tokens": rng.choice([16, 400]), **fields}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(rng.choice([0.01, 20.0])):
            response = await client.post("/v1/responses", json=body)
            assert response.status_code in STATUSES, response.text
            if response.status_code != 200 or fields["stream"]:
                return
            path = "/v1/responses/" + response.json()["id"]
            after = await client.request(*rng.choice([("POST", path + "/cancel"), ("DELETE", path), ("GET", path)]))
            assert after.status_code in STATUSES, after.text
            more = {"model": "fake", "input": "more", "previous_response_id": path.rsplit("/", 1)[1]}
            assert (await client.post("/v1/responses", json=more)).status_code in STATUSES


async def storm(live: LiveServer, engines: Engines, seed: int, num_deaths: int) -> None:
    """Let all clients loose, and kill engines meanwhile."""
    rng = random.Random(seed)

    async def one(number: int) -> None:
        own = random.Random(f"{seed} {number}")
        headers = {"Authorization": f"Bearer {KEYS[number % 3]}"}
        async with httpx.AsyncClient(
            base_url=live.url, headers=headers, timeout=30, trust_env=False, verify=False
        ) as client:
            count = 0
            while count < NUM_REQUESTS or not killer.done():
                await ask(client, own)
                count += 1

    async def kill() -> None:
        for number in range(num_deaths):
            await asyncio.sleep(rng.uniform(0.01, 0.06))
            latest = engines.clients[-1] if engines.clients else live.fake_client
            await asyncio.to_thread(live.do, partial(latest.die, suspects=["nobody"]))
            await asyncio.to_thread(live.wait_until, lambda: len(engines.clients) > number)  # noqa: B023

    killer = asyncio.create_task(kill())
    await asyncio.gather(*[one(number) for number in range(NUM_CLIENTS)])
    await killer


def held(live: LiveServer) -> dict[str, int]:
    """Return what the server holds on to; all of it must be nothing once nobody wants anything."""
    context, llm = live.context, live.llm
    outputs = llm._requests.outputs
    return {
        "open requests": context.num_open,
        "jobs": len(context.jobs),
        "users of the model": context.models.first.num_users,
        "waiting for the model": len(context.models.first.waiters),
        "unfinished requests": llm.num_unfinished,
        "sequences": len(outputs._sequences),
        "ids": len(outputs._ids),
        "calls": len(llm._calls),
        "waiting prompt tokens": llm.ttft.num_queued_tokens if llm.num_unfinished else 0,
        "held of the limits of keys": len(context.fronts.quotas._share._held),
        "records": len(context.records._live),
        "tasks of records": len(context.records._tasks),
        "unfinished responses": len(context.responses._running),
        "tasks of responses": len(context.responses._tasks),
        "connections": len(live.connections),
    }


def census(live: LiveServer) -> dict[str, int]:
    """Return what must be as much as before."""
    return {
        "tasks": live.do(lambda: len(asyncio.all_tasks())),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len([thread for thread in threading.enumerate() if not thread.name.startswith("asyncio_")]),
    }


@pytest.mark.parametrize("num_deaths", [0, 6])
def test_nothing_is_left_of_a_storm(stormy: LiveServer, engines: Engines, num_deaths: int) -> None:
    calm = stormy.http.post("/v1/completions", json=CANARY).json()["choices"][0]["text"]
    stormy.http.post("/v1/completions", json={**CANARY, "prompt": "x" * 5000})  # threads for texts begin
    stormy.http.close()
    stormy.wait_until(lambda: not any(held(stormy).values()))
    before = census(stormy)
    asyncio.run(storm(stormy, engines, seed=num_deaths, num_deaths=num_deaths))
    with contextlib.suppress(TimeoutError):
        stormy.wait_until(lambda: not any(held(stormy).values()))
    assert not {name: count for name, count in stormy.do(lambda: held(stormy)).items() if count}
    latest = engines.clients[-1].engine if engines.clients else stormy.engine
    assert stormy.do(lambda: latest.live) == []
    assert len(engines.clients) == num_deaths and stormy.llm.num_poison_requests == 0
    assert stormy.call(stormy.context.responses.totals)[0] <= 50
    after = census(stormy)
    assert after["tasks"] <= before["tasks"] and after["threads"] <= before["threads"] + 4
    assert after["files"] <= before["files"] + 2
    with httpx.Client(base_url=stormy.url, headers={"X-Api-Key": KEYS[1]}, trust_env=False, verify=False) as client:
        again = client.post("/v1/completions", json=CANARY).json()["choices"][0]["text"]
    assert again == calm
