"""Half an hour of everything at once: nothing grows, nothing leaks, nothing fails that should not.

    pytest -m soak -s tests/robustness/test_soak.py          # QUIRE_SOAK_MINUTES=30

Chats, completions, answers with a form or with tools, long prompts, other interfaces, streams that are read to their
end or dropped, requests that are wrong: by 12 clients. Memory, files and threads of all processes of the server are
taken down meanwhile; after a warm-up they may not grow. Not a timing: that the machine does other things does no harm.
"""

from __future__ import annotations

import asyncio
import collections
import os
import random
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.helpers.server import Server, serve

MINUTES = float(os.environ.get("QUIRE_SOAK_MINUTES", "30"))
CLIENTS = 12
WARM_UP = 0.25  # of the time; caches fill
MAX_GROWTH = 0.02  # of the memory, over the rest of the time
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
Sample = tuple[float, int, int, int]  # minutes, bytes in memory, files, threads


def processes(server: Server) -> list[psutil.Process]:
    root = psutil.Process(server.process.pid)
    return [root, *root.children(recursive=True)]


def sample(server: Server, began: float) -> Sample:
    found = processes(server)
    memory = sum(process.memory_info().rss for process in found)
    files = sum(process.num_fds() for process in found)
    return (time.monotonic() - began) / 60, memory, files, sum(process.num_threads() for process in found)


def request(rng: random.Random) -> tuple[str, dict[str, Any], int]:
    """Return a route, a body, and the status that is right."""
    words = " ".join(
        rng.choice(["alpha", "beta", "gamma", "delta", "to be", "or not"]) for _ in range(rng.randrange(200))
    )
    messages = [{"role": "user", "content": words or "hello"}]
    small = {"model": "quire-demo", "max_tokens": rng.randrange(1, 40), "seed": rng.randrange(2**31)}
    chat: dict[str, Any] = {**small, "messages": messages, "stream": rng.random() < 0.5}
    form = {"type": "json_schema", "json_schema": {"name": f"n{rng.randrange(40)}", "schema": SCHEMA}}
    kinds: list[tuple[str, dict[str, Any], int]] = [
        ("/v1/chat/completions", chat, 200),
        ("/v1/completions", {**small, "prompt": words or "a", "n": rng.choice([1, 1, 3]), "logprobs": 2}, 200),
        ("/v1/chat/completions", {**chat, "response_format": form}, 200),
        ("/v1/chat/completions", {**chat, "tools": [TOOL], "tool_choice": "required"}, 200),
        ("/v1/completions", {**small, "prompt": [rng.randrange(5, 400) for _ in range(900)], "stream": True}, 200),
        ("/v1/responses", {"model": "quire-demo", "input": words or "a", "max_output_tokens": 20}, 200),
        ("/v1/messages", {"model": "quire-demo", "messages": messages, "max_tokens": 20}, 200),
        ("/api/chat", {"model": "quire-demo", "messages": messages, "options": {"num_predict": 10}}, 200),
        ("/v1/completions", {**small, "prompt": "a", "temperature": 9}, 400),
        ("/v1/chat/completions", {**chat, "model": "none"}, 404),
        ("/v1/chat/completions", {**chat, "response_format": {"type": "json_schema", "json_schema": {}}}, 400),
    ]
    return rng.choice(kinds)


async def client(url: str, seed: int, until: float, told: collections.Counter[str]) -> None:
    rng = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False, verify=False) as http:
        while time.monotonic() < until:
            path, body, expected = request(rng)
            dropped = rng.random() < 0.15
            async with http.stream("POST", path, json=body) as answer:
                told[f"{path} {answer.status_code}"] += 1
                assert answer.status_code == expected, (path, body, await answer.aread())
                if dropped:
                    told["dropped"] += 1
                    continue
                text = await answer.aread()
            if expected == 200 and body.get("stream"):
                assert text.rstrip().endswith(b"data: [DONE]"), text[-300:]


async def watch(server: Server, until: float, samples: list[Sample], began: float) -> None:
    while time.monotonic() < until:
        samples.append(await asyncio.to_thread(sample, server, began))
        await asyncio.sleep(max(MINUTES * 60 / 120, 0.5))


async def load(server: Server, told: collections.Counter[str], samples: list[Sample]) -> None:
    began = time.monotonic()
    until = began + MINUTES * 60
    clients = [client(server.url, seed, until, told) for seed in range(CLIENTS)]
    await asyncio.gather(watch(server, until, samples, began), *clients)


def growth(samples: list[Sample], column: int) -> float:
    """Return the growth over the time after the warm-up, as a share of the mean, by a straight line."""
    rest = [item for item in samples if item[0] >= WARM_UP * MINUTES]
    times, values = [item[0] for item in rest], [item[column] for item in rest]
    mean_time, mean = sum(times) / len(rest), sum(values) / len(rest)
    square = sum((moment - mean_time) ** 2 for moment in times)
    slope = sum((moment - mean_time) * (value - mean) for moment, value in zip(times, values, strict=True)) / square
    return slope * (times[-1] - times[0]) / mean


@pytest.mark.soak
@pytest.mark.timeout(MINUTES * 60 + 300)
def test_nothing_grows(tmp_path: Path) -> None:
    told: collections.Counter[str] = collections.Counter()
    samples: list[Sample] = []
    options = ("--num-gpu-blocks-override", "512", "--max-num-seqs", "32", "--log-format", "json")
    with serve(tmp_path / "log", *options) as server:
        before = {process.pid for process in processes(server)}
        asyncio.run(load(server, told, samples))
        deadline = time.monotonic() + 20
        while server.metric("vllm:num_requests_running") or server.metric("vllm:kv_cache_usage_perc"):
            assert time.monotonic() < deadline, "something still runs"
            time.sleep(0.1)
        assert before <= {process.pid for process in processes(server)}, "a process was replaced"
    grown = {name: growth(samples, column) for column, name in enumerate(("memory", "files", "threads"), 1)}
    print(f"\n{MINUTES:g} minutes, {sum(told.values()) - told['dropped']} requests, {told['dropped']} dropped")
    print("\n".join(f"  {count:8d} {name}" for name, count in sorted(told.items())))
    for moment, memory, files, threads in samples[:: max(len(samples) // 12, 1)]:
        print(f"  {moment:6.1f} min  {memory / 2**20:8.1f} MiB  {files:4d} files  {threads:3d} threads")
    print("growth after the warm-up:", {name: f"{100 * value:.2f} %" for name, value in grown.items()})
    assert "Traceback" not in (tmp_path / "log").read_text()
    assert grown["memory"] < MAX_GROWTH and grown["files"] < 0.1 and grown["threads"] < 0.1
