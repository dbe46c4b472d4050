"""GET / and its files, and GET /playground/state: a page to chat with the model, and a live picture of its engine.

The files hold nothing and are open to everybody; what they ask the server for needs the API key like anything else.
However many look, the engine is asked once for all of them, at most every `LOOK_SECONDS`, and never by itself.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.checks import unknown_field, wrong_value
from quire.engine.messages import MOST_SHOWN
from quire.errors import QuireError
from quire.frontend.async_llm import AsyncLLM
from quire.server.context import ServerContext, context_of
from quire.server.json_io import json_response
from quire.server.model_pool import ServedModel
from quire.server.playground_files import STATE_PATH, PageFile, load_files
from quire.server.recent import SECONDS
from quire.version import __version__

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
IDLE_SECONDS = 2.0
MOST_LOOK_SECONDS = 5.0
ENGINE_SHARE = 0.05  # of the engine's time that pictures may take
PATIENCE = 1.0  # how long an answer waits for the engine; then it is without news
MOST_REQUESTS = 256  # told of each queue
MOST_DIGITS = 9
INTERNAL = re.compile(r"-\d+-[0-9a-f]{12}$")  # what `Generation` puts behind the id of an answer
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


def make_router() -> APIRouter:
    """Return the routes of the page, with what they remember of the engines."""
    router = APIRouter(include_in_schema=False)
    watches: dict[str, EngineWatch] = {}

    async def state(request: Request) -> Response:
        """Say how an engine is: its state, its numbers, the last minutes, and what its KV cache holds."""
        context = context_of(request)
        query = _query(request)
        model = context.models.first if "model" not in query else context.models.find(query["model"])
        watch = watches.setdefault(model.names[0], EngineWatch())
        await watch.look(model.llm)
        digest = request.scope["state"].get("key_digest")
        tenant = context.keys.tenant(digest, None) if context.keys.several else None
        answer = _describe(context, model, watch, tenant, query)
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


def _query(request: Request) -> dict[str, Any]:
    """Return the query: `model`, `seen` (the picture one has), `since` (the second up to which one has all)."""
    query: dict[str, Any] = {}
    for name, value in request.query_params.items():
        if name not in ("model", "seen", "since"):
            raise unknown_field(name, ("model", "seen", "since"))
        if name != "model" and not (value.isascii() and value.isdigit() and len(value) <= MOST_DIGITS):
            raise wrong_value(name, f"a number of at most {MOST_DIGITS} digits", value)
        query[name] = value if name == "model" else int(value)
    return query


def engine_state(context: ServerContext, model: ServedModel) -> str:
    """Return in a word how an engine is: ready, or what keeps it from being so."""
    if context.draining:
        return "draining"
    if model.status != "loaded":
        return model.status
    if model.llm.recovering:
        return "restarting"
    return "stalled" if model.llm.stalled else "ready"


def _describe(
    context: ServerContext, model: ServedModel, watch: EngineWatch, tenant: str | None, query: Mapping[str, Any]
) -> dict[str, Any]:
    llm = model.llm
    answer: dict[str, Any] = {
        "state": engine_state(context, model),
        "model": model.names[0],
        "version": __version__,
        "ask_again": watch.interval,
        "stats": {**msgspec.to_builtins(llm.stats), "kv_usage": llm.stats.kv_cache_usage},
    }
    if context.metrics is not None:
        recent = context.metrics.model(model.names[0]).recent
        seconds = recent.since(query.get("since", 0))
        answer["history"] = {"now": recent.now(), "length": SECONDS, "seconds": seconds}
    answer["picture_number"] = watch.number
    if watch.picture is not None:
        answer["picture_age"] = round(time.monotonic() - watch.taken, 3)
        if query.get("seen") != watch.number:
            answer["picture"] = watch.seen_by(tenant)
    return answer


class EngineWatch:
    """The latest picture of one engine, taken for all who look.

    Attributes:
        picture: what the call "blocks" answered; None while there is no engine to ask. number: changes with it.
        taken: when [monotonic seconds]. interval: seconds after which there may be news.
    """

    def __init__(self) -> None:
        self.picture: dict[str, Any] | None = None
        self.number = 0
        self.taken = 0.0
        self.interval = LOOK_SECONDS
        self._due = 0.0
        self._task: asyncio.Task[None] | None = None
        self._views: dict[str | None, msgspec.Raw] = {}

    async def look(self, llm: AsyncLLM) -> None:
        """Take a picture, unless the last one is recent enough; wait for one that is being taken, but not for long."""
        if not llm.ready or llm.recovering or llm.is_sleeping:
            self._put(None)
            return
        if self._task is None and time.monotonic() >= self._due and not self._is_idle(llm):
            self._task = asyncio.create_task(self._take(llm), name="quire-picture")
        if self._task is not None:
            await asyncio.wait((self._task,), timeout=PATIENCE)

    def _is_idle(self, llm: AsyncLLM) -> bool:
        """Whether nothing can have happened since the last picture but what comes without steps, such as a reset."""
        picture = self.picture
        if picture is None or llm.num_unfinished or any(picture["queues"].values()):
            return False
        return picture["num_steps"] == llm.stats.num_steps and time.monotonic() < self.taken + IDLE_SECONDS

    async def _take(self, llm: AsyncLLM) -> None:
        seconds = 0.0
        try:
            picture: dict[str, Any] | None = await llm.call("blocks", cells=MOST_SHOWN, limit=MOST_REQUESTS)
            assert picture is not None
            seconds = picture.pop("seconds")
        except QuireError as error:
            logger.debug("no picture of the engine: %s", error)
            picture = None
        except Exception:  # task boundary: nobody else would hear of it
            logger.exception("the picture of the engine failed")
            picture = None
        finally:
            self._task = None
            self.interval = min(max(LOOK_SECONDS, seconds / ENGINE_SHARE), MOST_LOOK_SECONDS)
            self.taken = time.monotonic()
            self._due = self.taken + self.interval
        self._put(picture)

    def _put(self, picture: dict[str, Any] | None) -> None:
        if picture != self.picture:
            self.picture = picture
            self.number += 1
            self._views.clear()

    def seen_by(self, tenant: str | None) -> msgspec.Raw:
        """Return the picture as JSON.

        Args:
            tenant: who asks, and is not told what others call their requests; None where that is no secret.
        """
        assert self.picture is not None
        if tenant not in self._views:
            requests = [_seen_request(row, tenant) for row in self.picture["requests"]]
            self._views[tenant] = msgspec.Raw(msgspec.json.encode({**self.picture, "requests": requests}))
        return self._views[tenant]


def _seen_request(row: Mapping[str, Any], tenant: str | None) -> dict[str, Any]:
    """Return what is told of a request. Its `id` is that of its answer; None if it is another key's."""
    told = {name: value for name, value in row.items() if name not in ("request_id", "tenant")}
    foreign = tenant is not None and row["tenant"] != tenant
    return {"id": None if foreign else INTERNAL.sub("", row["request_id"]), **told}
