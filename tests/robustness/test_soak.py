"""Half an hour of everything at once: nothing grows, nothing leaks, nothing fails that should not.

    pytest -m soak -s tests/robustness/test_soak.py          # QUIRE_SOAK_MINUTES=30

Chats, completions, answers with a form or with tools, long prompts, other interfaces, streams that are read to their
end or dropped, requests that are wrong. Memory, files and threads of all processes of the server are taken down
meanwhile; after a warm-up they may not grow. In the first test 12 clients send one request after the other; that the
machine does other things does no harm. In the second, requests arrive at random times, and beside them, in every other
part of the run, a tenth of the traffic is hostile (`tests/helpers/hostile.py`). Every text must be the one of the part
without, where the same requests arrive at the same times, and the latencies are compared, which takes a quiet machine.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.helpers.background import in_background
from tests.helpers.faults import show
from tests.helpers.prober import probing
from tests.helpers.server import Server, serve

MINUTES = float(os.environ.get("QUIRE_SOAK_MINUTES", "30"))
CLIENTS = 12
WARM_UP = 0.25  # of the time; caches fill
MAX_GROWTH = 0.02  # of the memory, over the rest of the time
PER_SECOND = 9.0  # requests that arrive, without the hostile ones
PARTS = 6  # with and without the hostile ones, each
MAX_RATIO = 1.3  # of the 99th percentiles of latencies with and without them
KEY = "sk-" + "5ea1ed" * 8
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
        ("/v1/completions", {**small, "prompt": "a", "temperature": -1}, 400),
        ("/v1/chat/completions", {**chat, "model": "none"}, 404),
        ("/v1/chat/completions", {**chat, "response_format": {"type": "json_schema", "json_schema": {}}}, 400),
    ]
    return rng.choice(kinds)


async def client(url: str, seed: int, until: float, counts: collections.Counter[str]) -> None:
    rng = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False, verify=False) as http:
        while time.monotonic() < until:
            path, body, expected = request(rng)
            dropped = rng.random() < 0.15
            async with http.stream("POST", path, json=body) as answer:
                counts[f"{path} {answer.status_code}"] += 1
                assert answer.status_code == expected, (path, body, await answer.aread())
                if dropped:
                    counts["dropped"] += 1
                    continue
                text = await answer.aread()
            if expected == 200 and body.get("stream"):
                assert text.rstrip().endswith(b"data: [DONE]"), text[-300:]


async def watch(server: Server, samples: list[Sample], began: float) -> None:
    while True:
        samples.append(await asyncio.to_thread(sample, server, began))
        await asyncio.sleep(max(MINUTES * 60 / 120, 0.5))


async def load(server: Server, counts: collections.Counter[str], samples: list[Sample]) -> None:
    began = time.monotonic()
    until = began + MINUTES * 60
    watching = asyncio.create_task(watch(server, samples, began))
    await asyncio.gather(*[client(server.url, seed, until, counts) for seed in range(CLIENTS)])
    watching.cancel()


def growth(samples: list[Sample], column: int) -> float:
    """Return the growth over the time after the warm-up, as a share of the mean, by a straight line."""
    rest = [item for item in samples if item[0] >= WARM_UP * samples[-1][0]]
    times, values = [item[0] for item in rest], [item[column] for item in rest]
    mean_time, mean = sum(times) / len(rest), sum(values) / len(rest)
    square = sum((moment - mean_time) ** 2 for moment in times)
    slope = sum((moment - mean_time) * (value - mean) for moment, value in zip(times, values, strict=True)) / square
    return slope * (times[-1] - times[0]) / mean


@pytest.mark.soak
@pytest.mark.timeout(MINUTES * 60 + 300)
def test_nothing_grows(tmp_path: Path) -> None:
    counts: collections.Counter[str] = collections.Counter()
    samples: list[Sample] = []
    options = ("--num-gpu-blocks-override", "512", "--max-num-seqs", "32", "--log-format", "json")
    with serve(tmp_path / "log", *options) as server:
        before = {process.pid for process in processes(server)}
        asyncio.run(load(server, counts, samples))
        deadline = time.monotonic() + 20
        while server.metric("vllm:num_requests_running") or server.metric("vllm:kv_cache_usage_perc"):
            assert time.monotonic() < deadline, "something still runs"
            time.sleep(0.1)
        assert before <= {process.pid for process in processes(server)}, "a process was replaced"
    print(f"\n{MINUTES:g} minutes, {sum(counts.values()) - counts['dropped']} requests, {counts['dropped']} dropped")
    print("\n".join(f"  {count:8d} {name}" for name, count in sorted(counts.items())))
    assert "Traceback" not in (tmp_path / "log").read_text()
    check_growth(samples)


def check_growth(samples: list[Sample]) -> None:
    """Print the samples, and fail if something grows."""
    rows = [(moment, memory / 2**20, files, threads) for moment, memory, files, threads in samples]
    show("the server's processes", [("minute", "MiB", "files", "threads"), *rows[:: max(len(rows) // 12, 1)]])
    grown = {name: growth(samples, column) for column, name in enumerate(("memory", "files", "threads"), 1)}
    print("growth after the warm-up:", {name: f"{100 * value:.2f} %" for name, value in grown.items()})
    assert grown["memory"] < MAX_GROWTH and grown["files"] < 0.1 and grown["threads"] < 0.1


@dataclass
class Latencies:
    """Of streams: seconds to the first event, and between two; of all other requests: in all."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)


def texts_in(value: Any) -> Iterator[str]:
    """Yield what was generated, in its order."""
    if isinstance(value, dict):
        for name, item in value.items():
            if isinstance(item, str) and name in ("text", "content", "arguments"):
                yield item
            else:
                yield from texts_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts_in(item)


async def ask(http: httpx.AsyncClient, seed: int, salt: str, latencies: Latencies) -> str | None:
    """Send the request of a seed and read the answer; return its text if each request with this seed has the same.

    Args:
        salt: keeps it from finding in the prefix cache what the same request left in another part of the run.
    """
    rng = random.Random(seed)
    path, body, expected = request(rng)
    if "seed" in body:
        body["cache_salt"] = salt
    streamed = bool(body.get("stream")) and expected == 200
    dropped = rng.random() < 0.15
    started = last = time.perf_counter()
    data = b""
    async with http.stream("POST", path, json=body) as answer:
        assert answer.status_code == expected, (path, body, await answer.aread())
        async for piece in answer.aiter_raw():
            now = time.perf_counter()
            if streamed:
                (latencies.between if data else latencies.first).append(now - last)
                last = now
                if dropped:
                    return None
            data += piece
    if not streamed:
        latencies.whole.append(time.perf_counter() - started)
        return "".join(texts_in(json.loads(data))) if expected == 200 and "seed" in body else None
    assert data.rstrip().endswith(b"data: [DONE]"), data[-300:]
    return "".join("".join(texts_in(json.loads(event))) for event in re.findall(rb"^data: (\{.*)", data, re.MULTILINE))


async def ask_at_random_times(
    server: Server, part: int, salt: str, latencies: Latencies, samples: list[Sample], began: float
) -> dict[int, str | None]:
    """Have requests arrive for a part of the run; return their texts by seed. What arrives when, `part` decides."""
    rng = random.Random(part)
    texts: dict[int, str | None] = {}
    headers = {"Authorization": f"Bearer {KEY}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=50)
    watching = asyncio.create_task(watch(server, samples, began))
    async with (
        httpx.AsyncClient(
            base_url=server.url, timeout=120, trust_env=False, verify=False, headers=headers, limits=limits
        ) as http,
        asyncio.TaskGroup() as tasks,
    ):

        async def one(seed: int) -> None:
            texts[seed] = await ask(http, seed, salt, latencies)

        due = time.monotonic()
        until = due + MINUTES * 60 / PARTS
        while (due := due + rng.expovariate(PER_SECOND)) < until:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.create_task(one(rng.randrange(2**40)))
    watching.cancel()
    return texts


@pytest.mark.soak
@pytest.mark.timeout(MINUTES * 150 + 600)
def test_hostile_clients_cost_others_little(tmp_path: Path) -> None:
    """QUIRE_SOAK_MINUTES with them, and as many without."""
    options = ["--num-gpu-blocks-override", "512", "--max-num-seqs", "32", "--log-format", "json"]
    options += ["--api-key", KEY, "--trust-request-chat-template"]
    latencies = {False: Latencies(), True: Latencies()}
    probes: dict[bool, list[list[float]]] = {False: [], True: []}
    counts: collections.Counter[str] = collections.Counter()
    samples: list[Sample] = []
    num_texts = 0
    with serve(tmp_path / "log", *options) as server:
        began = time.monotonic()
        asyncio.run(ask_at_random_times(server, -1, "warm-up", Latencies(), [], began))
        for part in range(PARTS):
            texts = {}
            for hostile in (False, True):
                with contextlib.ExitStack() as stack:
                    found = stack.enter_context(probing(server.url))
                    if hostile:
                        attack = ("tests.helpers.hostile", server.url, KEY, str(part), str(PER_SECOND / 9))
                        attacked = stack.enter_context(in_background(*attack))
                    salt = f"{part} {hostile}"
                    texts[hostile] = asyncio.run(
                        ask_at_random_times(server, part, salt, latencies[hostile], samples, began)
                    )
                probes[hostile].append(found)
            counts.update(attacked[0])
            assert texts[True] == texts[False]
            num_texts += len([text for text in texts[True].values() if text is not None])
        deadline = time.monotonic() + 20
        headers = {"Authorization": f"Bearer {KEY}"}
        while httpx.get(server.url + "/load", headers=headers, trust_env=False).json()["server_load"]:
            assert time.monotonic() < deadline, "something still runs"
            time.sleep(0.1)
    print(f"\n{MINUTES:g} minutes each; {num_texts} texts alike; responses to the hostile ones:")
    print("\n".join(f"  {count:8d} {name}" for name, count in sorted(counts.items())))
    rows: list[tuple[Any, ...]] = [("99th percentile [ms]", "requests", "without", "with", "ratio")]
    for name in ("first", "between", "whole"):
        values = [sorted(getattr(latencies[hostile], name)) for hostile in (False, True)]
        without, beside = (1000 * times[int(0.99 * (len(times) - 1))] for times in values)
        rows.append((name, len(values[1]), without, beside, beside / without))
    show("latencies", rows)
    show(
        "/livez [ms]",
        [("hostile", "median", "p99", "longest"), *[(key, *row) for key in probes for row in probes[key]]],
    )
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log and KEY not in log
    assert "it is replaced" not in log, "a front has ended"
    assert not [name for name in counts if name.endswith(("never ended", " 500"))]
    check_growth(samples)
    assert max(row[-1] for row in rows[1:]) < MAX_RATIO
