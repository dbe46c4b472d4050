"""GET / and its files, and GET /playground/state: a page to chat with the model, and a live view of its engine.

The files, package data in the folder `playground`, are open to everybody; what the page requests needs the API key.
However many pages poll, the engine gets one call for all of them, at most every `POLL_SECONDS`, and none unasked.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.messages import MAX_SHOWN
from quire.errors import QuireError
from quire.frontend.async_llm import AsyncLLM
from quire.server.context import ServerContext, context_of
from quire.server.fronts import FrontGoneError
from quire.server.json_io import json_response
from quire.server.metrics import HISTORY_SECONDS, Second, merged
from quire.server.parsing import QuerySchema, read_query
from quire.server.paths import PAGE_FOLDER, STATE_PATH, page_path
from quire.server.relay import forward, is_relayed
from quire.server.served_model import ServedModel
from quire.step import SchedulerStats
from quire.version import __version__

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.25
IDLE_SECONDS = 2.0
MAX_POLL_SECONDS = 5.0
ENGINE_SHARE = 0.05  # of the engine's time that snapshots may take
WAIT_SECONDS = 1.0  # how long a response waits for the engine; then it has the last snapshot
MAX_REQUESTS = 256  # of each queue
# `seen`: number of the snapshot that the client has. `since`: its latest second of history.
QUERY: QuerySchema = {"model": {"type": "string"}, "seen": {"type": "integer"}, "since": {"type": "integer"}}
INTERNAL = re.compile(r"-\d+-[0-9a-f]{12}$")  # what `Generation.submit` appends to the id of a response
CONTENT_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page; `etag` changes with its content."""

    data: bytes
    content_type: str
    etag: str


def load_files() -> dict[str, PageFile]:
    """Return all files by path."""
    found = {}
    for file in PAGE_FOLDER.iterdir():
        data = file.read_bytes()
        etag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
        found[page_path(file.name)] = PageFile(data, CONTENT_TYPES[file.name.rsplit(".", 1)[1]], etag)
    return found


def make_router() -> APIRouter:
    """Return the routes of the page, with the latest snapshots of the engines."""
    router = APIRouter(include_in_schema=False)
    snapshots: dict[str, EngineSnapshots] = {}

    async def state(request: Request) -> Response:
        """Describe an engine: its state, its statistics, the last minutes, and its KV cache."""
        context = context_of(request)
        leader = context.fronts.leader
        if leader != context.fronts.row and not is_relayed(request.scope):
            with contextlib.suppress(FrontGoneError):
                return await forward(request, leader)
        query = read_query(request, QUERY)
        model = context.models.first if "model" not in query else context.models.find(query["model"])
        numbers = await numbers_of_all(context, model, query.get("since", 0))
        latest = snapshots.setdefault(model.names[0], EngineSnapshots())
        await latest.refresh(model.llm, numbers.stats)
        digest = request.scope["state"].get("key_digest")
        tenant = context.keys.tenant(digest, None) if context.keys.several else None
        answer = _describe(context, model, latest, tenant, query, numbers)
        return json_response(answer, headers={"Cache-Control": "no-store"})

    for path, file in load_files().items():
        router.add_api_route(path, _file_route(file), methods=["GET", "HEAD"])
    router.add_api_route(STATE_PATH, state, methods=["GET"])
    return router


def _file_route(file: PageFile) -> Any:
    async def send(request: Request) -> Response:
        headers = {**HEADERS, "ETag": file.etag}
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if file.etag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        return Response(file.data, media_type=file.content_type, headers=headers)

    return send


def engine_state(context: ServerContext, model: ServedModel) -> str:
    """Return the state of an engine: ready, or the reason why it is not."""
    if context.draining:
        return "draining"
    if model.status != "loaded":
        return model.status
    if model.llm.recovering:
        return "restarting"
    return "stalled" if model.llm.stalled else "ready"


class Numbers(msgspec.Struct):
    """What a front knows of a model: the engine's statistics and when they came, and the last seconds."""

    stats: SchedulerStats
    time: float
    seconds: list[Second]


def _numbers(context: ServerContext, model: ServedModel, since: int) -> Numbers:
    metrics = None if context.metrics is None else context.metrics.model(model.names[0])
    return Numbers(model.llm.stats, model.llm.stats_time, [] if metrics is None else metrics.history.since(since))


async def numbers_of_all(context: ServerContext, model: ServedModel, since: int) -> Numbers:
    """Return the newest statistics that any front has, and the seconds of all of them."""
    found = [_numbers(context, model, since)]
    others = await context.fronts.ask_others("numbers", {"model": model.names[0], "since": since})
    found += [msgspec.convert(other, Numbers) for other in others.values()]
    newest = max(found, key=lambda numbers: numbers.time)
    return Numbers(newest.stats, newest.time, merged([numbers.seconds for numbers in found]))


def answer_fronts(context: ServerContext) -> None:
    """Answer what other fronts ask about a model."""

    async def numbers(value: dict[str, Any]) -> Any:
        return msgspec.to_builtins(_numbers(context, context.models.find(value["model"]), value["since"]))

    context.fronts.handlers["numbers"] = numbers


def _describe(
    context: ServerContext,
    model: ServedModel,
    latest: EngineSnapshots,
    tenant: str | None,
    query: Mapping[str, Any],
    numbers: Numbers,
) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "state": engine_state(context, model),
        "model": model.names[0],
        "version": __version__,
        "ask_again": latest.interval,
        "stats": {**msgspec.to_builtins(numbers.stats), "kv_usage": numbers.stats.kv_cache_usage},
    }
    if context.metrics is not None:
        history = context.metrics.model(model.names[0]).history
        answer["history"] = {"now": history.now(), "length": HISTORY_SECONDS, "seconds": numbers.seconds}
    answer["picture_number"] = latest.number
    if latest.snapshot is not None:
        answer["picture_age"] = round(time.monotonic() - latest.taken, 3)
        if query.get("seen") != latest.number:
            answer["picture"] = latest.visible_to(tenant)
    return answer


class EngineSnapshots:
    """The latest snapshot of one engine, shared by all clients.

    Attributes:
        snapshot: the result of the engine's `blocks` call; None while there is no engine. number: changes with it.
        taken: when [monotonic seconds]. interval: seconds until the next one.
    """

    def __init__(self) -> None:
        self.snapshot: dict[str, Any] | None = None
        self.number = time.monotonic_ns() // 1_000_000  # no other front has begun with that
        self.taken = 0.0
        self.interval = POLL_SECONDS
        self._due = 0.0
        self._task: asyncio.Task[None] | None = None
        self._views: dict[str | None, msgspec.Raw] = {}

    async def refresh(self, llm: AsyncLLM, stats: SchedulerStats) -> None:
        """Take a snapshot unless the last one is recent enough; wait for one that is being taken, but not for long.

        Args:
            stats: of the engine, the newest that any front has.
        """
        if not llm.ready or llm.recovering or llm.is_sleeping:
            self._put(None)
            return
        if self._task is None and time.monotonic() >= self._due and not self._is_idle(llm, stats):
            self._task = asyncio.create_task(self._take(llm), name="quire-snapshot")
        if self._task is not None:
            await asyncio.wait((self._task,), timeout=WAIT_SECONDS)

    def _is_idle(self, llm: AsyncLLM, stats: SchedulerStats) -> bool:
        """Whether nothing can have changed since the last snapshot except without a step, such as by a reset."""
        snapshot = self.snapshot
        if snapshot is None or llm.num_unfinished or any(snapshot["queues"].values()):
            return False
        return snapshot["num_steps"] == stats.num_steps and time.monotonic() < self.taken + IDLE_SECONDS

    async def _take(self, llm: AsyncLLM) -> None:
        seconds = 0.0
        try:
            snapshot: dict[str, Any] | None = await llm.call("blocks", cells=MAX_SHOWN, limit=MAX_REQUESTS)
            assert snapshot is not None
            seconds = snapshot.pop("seconds")
        except QuireError as error:
            logger.debug("no snapshot of the engine: %s", error)
            snapshot = None
        except Exception:  # task boundary: log it here, or it is lost
            logger.exception("the snapshot of the engine failed")
            snapshot = None
        finally:
            self._task = None
            self.interval = min(max(POLL_SECONDS, seconds / ENGINE_SHARE), MAX_POLL_SECONDS)
            self.taken = time.monotonic()
            self._due = self.taken + self.interval
        self._put(snapshot)

    def _put(self, snapshot: dict[str, Any] | None) -> None:
        if snapshot != self.snapshot:
            self.snapshot = snapshot
            self.number += 1
            self._views.clear()

    def visible_to(self, tenant: str | None) -> msgspec.Raw:
        """Return the snapshot as JSON, without the ids of other tenants' requests; None may see all."""
        assert self.snapshot is not None
        if tenant not in self._views:
            requests = [_visible_request(row, tenant) for row in self.snapshot["requests"]]
            self._views[tenant] = msgspec.Raw(msgspec.json.encode({**self.snapshot, "requests": requests}))
        return self._views[tenant]


def _visible_request(row: Mapping[str, Any], tenant: str | None) -> dict[str, Any]:
    """Return a request with the id of its response as `id`; None if it is another tenant's."""
    fields = {name: value for name, value in row.items() if name not in ("request_id", "tenant")}
    foreign = tenant is not None and row["tenant"] != tenant
    return {"id": None if foreign else INTERNAL.sub("", row["request_id"]), **fields}
