"""A server in front of a real scheduler without a model, whose steps the test makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx

from quire.engine.core import EngineCore
from quire.executor.null import NullExecutor
from tests.helpers.fake_engine import fake_front_model
from tests.helpers.live_server import LiveServer, server_config
from tests.server.checks import COMPLETIONS

Ask = Callable[..., Future[httpx.Response]]


def make_core(**options: Any) -> EngineCore:
    """Return an engine whose model adds one to the last token."""
    front = fake_front_model()
    options = {"num_gpu_blocks_override": 40, "block_size": 4, "swap_space": 0, **options}
    return EngineCore(server_config(**options), executor=NullExecutor(front.info.vocab_size), info=front.info)


@contextmanager
def asking(server: LiveServer) -> Iterator[Ask]:
    """Hold the engine, and yield what sends a completion request from a thread of its own; in the end let it run."""
    server.do(server.fake_client.hold)
    with ThreadPoolExecutor() as threads:

        def post(key: str = "a", **body: Any) -> Future[httpx.Response]:
            whole = {"model": "fake", "ignore_eos": True, "max_tokens": 30, "temperature": 1.0, **body}
            headers = {"Authorization": f"Bearer {key}"}
            return threads.submit(lambda: server.http.post(COMPLETIONS, json=whole, headers=headers))

        yield post
        server.do(server.fake_client.resume)


def step(server: LiveServer, core: EngineCore, count: int, num_requests: int) -> None:
    """Wait for so many requests, then make so many steps, the outputs of which are dropped."""
    server.wait_until(lambda: len(core.scheduler.requests) == num_requests)
    server.do(lambda: [core.step() for _ in range(count)])
