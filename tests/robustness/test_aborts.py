"""A hundred thousand requests aborted at random moments: nothing of them is left behind.

    pytest -m slow -s tests/robustness/test_aborts.py          # QUIRE_ABORTS=100000, QUIRE_HTTP_ABORTS=100000

In the engine alone, and over HTTP: while a request is sent, parsed, compiled, queued, computed or answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from quire import SamplingParams
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.messages import AbortRequests
from quire.engine_request import EngineRequest, ResumedSequence
from quire.executor.null import NullExecutor
from quire.sampling_params import BeamSearchParams
from tests.helpers.fake_engine import model_info
from tests.helpers.faults import show
from tests.helpers.server import Server, serve
from tests.robustness.test_soak import processes

ABORTS = int(os.environ.get("QUIRE_ABORTS", "100000"))
HTTP_ABORTS = int(os.environ.get("QUIRE_HTTP_ABORTS", "5000"))
AT_ONCE = 16
MAX_GROWTH = 20 * 2**20
CHECK_EVERY = 1000
OPTIONS = {
    "plain": {},
    "swapping": {"preemption_mode": "swap", "swap_space": "8MiB"},
    "prefill-first": {"scheduler": "prefill-first", "max_num_batched_tokens": 256, "watermark": 0.0},
    "fair": {"scheduling_policy": "fair"},
}


def make_core(**options: object) -> EngineCore:
    settings = {"block_size": 4, "num_gpu_blocks_override": 120, "max_num_batched_tokens": 48, "max_num_seqs": 12}
    config = EngineConfig.from_kwargs(**{**settings, **options})
    return EngineCore(config, executor=NullExecutor(), info=model_info(1000, 256, ()))


def make_request(rng: random.Random, name: str) -> EngineRequest:
    kind = rng.random()
    count = rng.choice([1, 1, 1, 2, 4]) if kind < 0.8 else 1
    start = rng.randrange(3)  # prompts begin alike, so that blocks are shared
    prompt = [*range(start, start + rng.randrange(1, 90)), rng.randrange(1000)]
    resumed = None
    if kind < 0.1:
        resumed = [ResumedSequence([rng.randrange(1000) for _ in range(rng.randrange(1, 9))]) for _ in range(count)]
    return EngineRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(temperature=1.0),
        arrival_time=0.0,
        sequence_ids=[name] if count == 1 else [f"{name}-{index}" for index in range(count)],
        seeds=list(range(count)),
        stop_ids=[],
        max_tokens=rng.randrange(1, 60),
        tenant=f"t{rng.randrange(3)}",
        beam=BeamSearchParams(beam_width=3, max_tokens=20) if kind >= 0.9 else None,
        grammar="start: /a*/" if 0.8 <= kind < 0.85 else None,
        resumed=resumed,
    )


def check_free(core: EngineCore) -> None:
    core.call("check_integrity")
    stats = core.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_swapped) == (0, 0, 0)
    assert (stats.num_free_blocks, stats.num_free_host_blocks) == (stats.num_blocks, stats.num_host_blocks)
    assert not core.has_unfinished()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_is_left_of_what_was_aborted(name: str) -> None:
    core = make_core(**OPTIONS[name])
    rng = random.Random(name)
    live: list[EngineRequest] = []
    num_added = num_aborted = next_check = 0
    while num_aborted < ABORTS // len(OPTIONS):
        for _ in range(rng.choice([0, 1, 2, 5])):
            live.append(make_request(rng, f"r{num_added}"))
            num_added += 1
            core.add(live[-1])
        for _ in range(rng.choice([0, 1, 2, 4])):
            if live:
                request = live.pop(rng.randrange(len(live)))
                if rng.random() < 0.3 and len(request.sequence_ids) > 1:  # one after another, and with a step between
                    for sequence_id in rng.sample(request.sequence_ids, len(request.sequence_ids)):
                        core.abort(AbortRequests([sequence_id]))
                        if rng.random() < 0.2:
                            core.step()
                else:
                    core.abort(AbortRequests([request.request_id]))
                num_aborted += 1
        if rng.random() < 0.8:
            core.step()
        if num_aborted >= next_check:
            next_check += CHECK_EVERY
            core.call("check_integrity")
            core.abort(AbortRequests([request.request_id for request in live]))
            live.clear()
            while core.has_unfinished():
                core.step()
            check_free(core)
    print(f"{name}: {num_added} requests, {num_aborted} aborted one by one")


def http_request(rng: random.Random, number: int) -> bytes:
    """Return a request of one of many kinds; few would end soon by themselves."""
    body: dict[str, Any] = {
        "model": "quire-demo",
        "prompt": [rng.randrange(5, 400) for _ in range(rng.choice((1, 20, 20, 300, 900)))],
        "max_tokens": 500,
        "ignore_eos": True,
        "stream": rng.random() < 0.7,
    }
    kind = rng.random()
    if kind < 0.2:
        body |= {"n": rng.choice((2, 4)), "logprobs": 3}
    elif kind < 0.3:
        body |= {"structured_outputs": {"regex": f"[a-z]{{{number % 500 + 100}}}"}, "ignore_eos": False}
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def abort_over_http(server: Server, count: int, seed: int) -> int:
    """Send so many requests and break each off at a random moment; return how many had begun to answer."""
    url = urlsplit(server.url)
    numbers = iter(range(count))
    num_answered = 0

    async def work() -> None:
        nonlocal num_answered
        for number in numbers:
            rng = random.Random(f"{seed} {number}")
            data = http_request(rng, number)
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            writer.write(data[: rng.randrange(len(data))] if rng.random() < 0.05 else data)
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(rng.choice((0, 0.001, 0.01, 0.1, 0.3))):
                    for _ in range(rng.randrange(1, 20)):
                        answer = await reader.read(4096)
                        num_answered += answer.startswith(b"HTTP/1.1 200 ")
            writer.transport.abort()

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return num_answered


def at_rest(server: Server) -> tuple[int, int, int]:
    """Wait until no request is left; return bytes in memory, files and threads of all processes."""
    deadline = time.monotonic() + 60
    busy = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    while any(server.metric(name) for name in busy) or server.metric("quire:http_requests_open") > 1:
        assert time.monotonic() < deadline, "something still runs"
        time.sleep(0.1)
    found = processes(server)
    memory = sum(process.memory_info().rss for process in found)
    return memory, sum(process.num_fds() for process in found), sum(process.num_threads() for process in found)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_nothing_is_left_of_what_was_aborted_over_http(tmp_path: Path) -> None:
    rows: list[tuple[Any, ...]] = [("aborted", "of them answering", "seconds", "MiB", "files", "threads")]
    options = ("--num-gpu-blocks-override", "512", "--max-num-seqs", "24", "--max-num-queued-reqs", "64")
    with serve(tmp_path / "log", *options, "--disable-access-log") as server:
        asyncio.run(abort_over_http(server, max(HTTP_ABORTS // 5, 2000), 0))  # caches fill
        before = at_rest(server)
        for part in range(1, 6):
            began = time.monotonic()
            answered = asyncio.run(abort_over_http(server, HTTP_ABORTS // 5, part))
            seconds = time.monotonic() - began
            memory, files, threads = at_rest(server)
            rows.append((HTTP_ABORTS // 5, answered, seconds, memory / 2**20, files, threads))
        assert server.metric("quire:engine_restarts_total") == 0
        assert "Traceback" not in (tmp_path / "log").read_text()
    show(f"aborted over HTTP; before: {before[0] / 2**20:.1f} MiB, {before[1]} files, {before[2]} threads", rows)
    assert memory - before[0] < MAX_GROWTH
    assert (files, threads) <= (before[1] + 2, before[2] + 2)
