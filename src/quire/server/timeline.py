"""`GET /requests` and `GET /requests/{id}`: what happens to a request, and why it took so long.

The front knows when a request came, was scheduled, and got its tokens; the engine's flight recorder knows the steps
(`engine/recorder.py`). Both are put together when somebody asks. The recorder forgets after some thousand steps, so
for requests that have ended its part is fetched at once, unless too many end at the same time. Nobody sees requests
of another key.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import NotFoundError, QuireError, echo
from quire.frontend.output_processor import RequestStream
from quire.server.json_io import json_response
from quire.server.timings import Timings
from quire.server.why import explain

if TYPE_CHECKING:
    from quire.frontend.async_llm import AsyncLLM

MOST_KEPT = 1000
MOST_KEPT_PROMPTS = 8000  # of all of them
MOST_PROMPTS = 4  # of one request, whose steps are told of
MOST_LISTED = 1000
FETCHES_PER_SECOND = 20
ENGINE_SECONDS = 2.0

router = APIRouter()


class Visited:
    """A request that generates: what is known of it while it runs, and after.

    Args:
        response_id, request_id: as the client knows them. given_id: what it wanted to be called. key_digest: of whom.
        streams: one for each prompt; filled while they are submitted. parameters: what traces say of the request.
    """

    def __init__(
        self,
        response_id: str,
        request_id: str,
        given_id: str | None,
        key_digest: bytes | None,
        model: str,
        llm: AsyncLLM,
        streams: Sequence[RequestStream],
        parameters: Mapping[str, Any],
    ) -> None:
        self.response_id = response_id
        self.request_id = request_id
        self.model = model
        self.parameters = parameters
        self.created = time.time()
        self.started = time.monotonic()
        self.ended: float | None = None
        self._key_digest = key_digest
        self._given_id = given_id
        self._llm = weakref.ref(llm)  # a model that was unloaded meanwhile must not stay for this
        self._streams: Sequence[RequestStream] = streams
        self._timings: list[Timings] | None = None
        self._restarts_before = llm.num_restarts
        self._num_restarts = 0
        self._stories: bytes | None = None

    @property
    def names(self) -> set[tuple[bytes | None, str]]:
        """Under what it is found: by whom, and how it may be called."""
        return {(self._key_digest, name) for name in (self.response_id, self.request_id, self._given_id) if name}

    @property
    def timings(self) -> list[Timings]:
        """Where its time went, for each prompt."""
        return self._timings if self._timings is not None else [Timings.of(stream) for stream in self._streams]

    def end(self) -> None:
        """Keep the figures, and let go of everything else."""
        self._num_restarts = self.num_restarts
        self.ended = time.monotonic()
        self._timings = self.timings
        self._streams = ()

    @property
    def num_restarts(self) -> int:
        """How often the engine was replaced meanwhile."""
        llm = self._llm()
        if self.ended is not None or llm is None:
            return self._num_restarts
        return llm.num_restarts - self._restarts_before

    async def fetch(self) -> dict[str, dict[str, Any]]:
        """Return the engine's part of the story, by engine id; of requests that have ended it is kept."""
        if self._stories is not None:
            kept: dict[str, dict[str, Any]] = msgspec.msgpack.decode(self._stories)
            return kept
        stories = {}
        llm = self._llm()
        try:
            async with asyncio.timeout(ENGINE_SECONDS):
                for timings in self.timings[:MOST_PROMPTS]:
                    if llm is not None and llm.ready:
                        stories[timings.engine_id] = await llm.call("timeline", **_asked(timings))
        except (QuireError, TimeoutError):
            pass  # the engine is gone, or busy: what the front knows is true anyway
        if self.ended is not None:
            self._stories = msgspec.msgpack.encode(stories)  # a tenth of what the objects take
        return stories

    def summary(self) -> dict[str, Any]:
        """Return what a list says of it."""
        timings = self.timings
        if self.ended is not None:
            state = "finished"
        else:
            state = "generating" if any(item.first_token is not None for item in timings) else "waiting"
        return {
            "id": self.response_id,
            "request_id": self.request_id,
            "model": self.model,
            "state": state,
            "created": round(self.created, 3),
            "seconds": round((self.ended or time.monotonic()) - self.started, 6),
            "prompt_tokens": sum(item.num_prompt_tokens for item in timings),
            "completion_tokens": sum(item.num_tokens for item in timings),
        }

    def tell(self, stories: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return the whole story, JSON-like; points in time are seconds since its arrival."""
        prompts = [_prompt(item, stories.get(item.engine_id), self.started) for item in self.timings]
        seconds = (self.ended or time.monotonic()) - self.started
        return {
            **self.summary(),
            "cached_tokens": sum(item.num_cached_tokens for item in self.timings),
            "engine_restarts": self.num_restarts,
            "why": explain(prompts, seconds, self.num_restarts),
            "prompts": prompts,
        }


class Timelines:
    """The requests of one server that run, and the last ones that have ended."""

    def __init__(self) -> None:
        self._live: dict[Visited, None] = {}
        self._ended: OrderedDict[Visited, None] = OrderedDict()
        self._num_prompts = 0  # of those that have ended
        self._by_name: dict[tuple[bytes | None, str], Visited] = {}
        self._fetched: deque[float] = deque(maxlen=FETCHES_PER_SECOND)
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self, visited: Visited) -> None:
        """Take up a request; of several with the same name, the latest one is found by it."""
        self._live[visited] = None
        for name in visited.names:
            self._by_name[name] = visited

    def end(self, visited: Visited) -> None:
        """Note that it has ended. Later calls do nothing."""
        if visited not in self._live:
            return
        del self._live[visited]
        visited.end()
        self._ended[visited] = None
        self._num_prompts += len(visited.timings)
        while len(self._ended) > MOST_KEPT or (self._num_prompts > MOST_KEPT_PROMPTS and len(self._ended) > 1):
            self._forget(next(iter(self._ended)))
        now = time.monotonic()
        if len(self._fetched) < FETCHES_PER_SECOND or now - self._fetched[0] > 1.0:
            self._fetched.append(now)
            task = asyncio.ensure_future(visited.fetch())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _forget(self, visited: Visited) -> None:
        del self._ended[visited]
        self._num_prompts -= len(visited.timings)
        for name in visited.names:
            if self._by_name.get(name) is visited:
                del self._by_name[name]

    def find(self, key_digest: bytes | None, name: str) -> Visited:
        """Return the request called so that was made with this key. Raises `NotFoundError`."""
        try:
            return self._by_name[key_digest, name]
        except KeyError:
            raise NotFoundError(
                f"no request {echo(name)} runs here, nor is it one of the last {MOST_KEPT} that have ended",
                param="id",
                code="request_not_found",
            ) from None

    def live(self, key_digest: bytes | None) -> list[Visited]:
        """Return those that run and were made with this key, the oldest first."""
        return [visited for visited in self._live if (key_digest, visited.response_id) in visited.names]


@router.get("/requests")
async def list_requests(request: Request) -> Response:
    """List the requests of this key that are not finished."""
    live = _timelines(request).live(request.scope["state"].get("key_digest"))
    data = [visited.summary() for visited in live[:MOST_LISTED]]
    return json_response({"object": "list", "data": data, "has_more": len(live) > MOST_LISTED})


@router.get("/requests/{id}")
async def get_request(request: Request, id: str) -> Response:
    """Tell what happened to a request and why it took so long, by the id of its answer or its X-Request-Id."""
    visited = _timelines(request).find(request.scope["state"].get("key_digest"), id)
    return json_response(visited.tell(await visited.fetch()))


def _timelines(request: Request) -> Timelines:
    timelines: Timelines = request.app.state.context.timelines
    return timelines


def _asked(timings: Timings) -> dict[str, int | bool | str]:
    """Return the arguments of the engine's call."""
    until = 0 if timings.finished is None else int(1e6 * timings.finished) + 1
    return {
        "request_id": timings.engine_id,
        "num_sequences": timings.num_sequences,
        "since_us": int(1e6 * timings.arrival),
        "until_us": until,
    }


def _prompt(timings: Timings, story: Mapping[str, Any] | None, started: float) -> dict[str, Any]:
    """Return the story of one prompt."""
    told: dict[str, Any] = {
        "arrived_at": _round(timings.arrival - started),
        "queue_seconds": _round(timings.queue_seconds),
        "prefill_seconds": _round(timings.prefill_seconds),
        "decode_seconds": _round(timings.decode_seconds),
        "first_token_at": _round(None if timings.first_token is None else timings.first_token - started),
        "finished_at": _round(None if timings.finished is None else timings.finished - started),
        "mean_token_seconds": _round(timings.mean_token_seconds),
        "prompt_tokens": timings.num_prompt_tokens,
        "cached_tokens": timings.num_cached_tokens,
        "completion_tokens": timings.num_tokens,
        "preemptions": timings.num_preemptions,
        "finish_reasons": timings.finish_reasons,
        "complete": False,
    }
    if story is None:
        return told
    told["complete"] = story["complete"]
    told["grammar_seconds"] = _round(story["grammar_seconds"])
    told["events"] = [_since(event, started) for event in story["events"]]
    told["chunks"] = [_since(chunk, started) for chunk in story["chunks"]]
    told["num_chunks"] = story["num_chunks"]
    told["steps"] = {name: _round(value) for name, value in story["steps"].items()}
    told["slowest_steps"] = [_since(step, started) for step in story["slowest"]]
    return told


def _since(entry: Mapping[str, Any], started: float) -> dict[str, Any]:
    """Return an entry with its points in time counted from the request's arrival."""
    moments = {name: _round(entry[name] - started) for name in ("at", "resumed") if name in entry}
    return {name: _round(value) if isinstance(value, float) else value for name, value in entry.items()} | moments


def _round(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value
