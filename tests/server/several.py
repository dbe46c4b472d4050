"""An app with several models on fake engines, driven without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import httpx

from quire.config import EngineConfig
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.stats import StatListener
from quire.server.app import build_app
from quire.server.metrics import Metrics
from quire.server.model_entry import ModelEntry
from quire.server.run import create_pool
from tests.helpers.fake_engine import FakeClient, fake_async_llm
from tests.helpers.live_server import server_config

T = TypeVar("T")


class Several:
    """Models "a", "b", ..., each of which says its name, as an app.

    Args:
        options: of the server. pinned, at_start: names of the models that are so.

    Attributes:
        clients: of each model, the ways to its engines, the present one last.
    """

    def __init__(self, names: str, *, pinned: str = "", at_start: str = "", **options: Any) -> None:
        self.clients: dict[str, list[FakeClient]] = {name: [] for name in names}
        self.metrics = Metrics()
        entries = [
            ModelEntry(
                config=server_config(models="models.yaml", **{**options, "served_model_name": name}),
                pinned=name in pinned,
                at_start=name in at_start,
                max_model_len=77,
            )
            for name in names
        ]
        config = entries[0].config
        self.pool = create_pool(entries, config.server, self._make, self.metrics)
        self.app = build_app(self.pool, config, self.metrics)

    def _make(self, config: EngineConfig, listeners: Sequence[StatListener]) -> AsyncLLM:
        name = config.model.served_model_name[0]
        llm, client = fake_async_llm(config=config, listeners=listeners, reply_text=f"I am {name}.")
        self.clients[name].append(client)
        return llm

    def run(self, work: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
        """Start the models, run `work` with a client, end the models."""

        async def main() -> T:
            await self.pool.start()
            transport = httpx.ASGITransport(self.app)
            try:
                async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
                    return await work(http)
            finally:
                await self.pool.close()

        return asyncio.run(main())

    def status(self) -> dict[str, str]:
        """Return how each model is."""
        return {model.names[0]: model.status for model in self.pool.models}


async def complete(http: httpx.AsyncClient, model: str | None, **options: Any) -> httpx.Response:
    """Ask a model for a completion."""
    return await http.post("/v1/completions", json={"model": model, "prompt": "x", **options})


async def call_and_leave(app: Any, body: dict[str, Any], left: asyncio.Event) -> list[dict[str, Any]]:
    """Post a completion as a client that goes away when `left` is set; return what the server sent."""
    data = json.dumps(body).encode()
    parts = [{"type": "http.request", "body": data, "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if parts:
            return parts.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"host", b"server"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "scheme": "http",
        "client": ("127.0.0.1", 1),
        "server": ("server", 80),
        "state": {},
    }
    await app(scope, receive, send)
    return sent
