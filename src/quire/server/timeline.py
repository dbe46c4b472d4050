"""`GET /requests` and `GET /requests/{id}`: what happened to a request, and why it took so long.

The front knows when a request arrived, was scheduled, and got its tokens (`Timings`); the engine's flight recorder
(`engine/recorder.py`) knows its steps. A timeline joins both. The recorder forgets after some thousand steps, so the
engine's part is fetched when a request ends, unless too many end at the same time. A client sees only the requests of
its own key.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import NotFoundError, QuireError, echo
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.output_processor import RequestStream
from quire.outputs import RequestMetrics
from quire.server.fronts import Fronts
from quire.server.json_io import json_response
from quire.server.relay import forward, is_relayed

MAX_FINISHED = 1000  # records of finished requests that are kept
MAX_FINISHED_PROMPTS = 8000  # prompts of all of these
MAX_ENGINE_PROMPTS = 4  # prompts of one request whose steps are fetched from the engine
MAX_LISTED = 1000
FETCHES_PER_SECOND = 20
ENGINE_SECONDS = 2.0
MAX_SENTENCES = 6
MIN_SHARE = 0.02  # of the whole time, below which a part gets no sentence
WAITS = {
    "seats": "for a place in the batch (--max-num-seqs)",
    "kv_cache": "for room in the KV cache",
    "budget": "for its share of the tokens of a step (--max-num-batched-tokens)",
    "turn": "for its turn",
}

router = APIRouter()

Part = tuple[float, str]  # seconds, and the sentence about them


@dataclass(frozen=True, slots=True)
class Timings:
    """Counts and times of one prompt.

    Attributes:
        engine_id: its id within the engine. finish_reasons: of its sequences, None for those that are running.
    """

    engine_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int
    finish_reasons: list[str | None]
    metrics: RequestMetrics

    @classmethod
    def of(cls, stream: RequestStream) -> Timings:
        """Return the timings of a stream so far."""
        state = stream.state
        return cls(
            engine_id=state.request_id,
            num_prompt_tokens=len(state.prompt_token_ids),
            num_cached_tokens=state.num_cached_tokens,
            num_tokens=state.num_generated_tokens,
            finish_reasons=[completion.finish_reason for completion in state.completions],
            metrics=replace(state.metrics),
        )

    @property
    def num_sequences(self) -> int:
        """Sequences of the prompt."""
        return len(self.finish_reasons)

    @property
    def mean_token_seconds(self) -> float | None:
        """Mean time from a token to the next one of the same sequence."""
        return self.metrics.mean_token_seconds(self.num_tokens, self.num_sequences)


def response_metrics(streams: Sequence[RequestStream]) -> dict[str, Any] | None:
    """Return `metrics` of a response, under vLLM's names [ms]; None for more than one sequence.

    `tokens_per_second` is the rate from the first token to the last one.
    """
    if len(streams) != 1:
        return None
    timings = Timings.of(streams[0])
    if timings.num_sequences != 1:
        return None
    mean = timings.mean_token_seconds
    return {
        "time_to_first_token_ms": _milliseconds(timings.metrics.ttft_seconds),
        "generation_time_ms": _milliseconds(timings.metrics.decode_seconds),
        "queue_time_ms": _milliseconds(timings.metrics.queue_seconds),
        "mean_itl_ms": _milliseconds(mean),
        "tokens_per_second": round(1.0 / mean, 3) if mean else None,
    }


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)


class RequestRecord:
    """The record of an HTTP request that runs in an engine, kept after its end.

    Args:
        response_id, request_id: as the client knows them. given_id: the body's `request_id`. key_digest: of its key.
        streams: one for each prompt; filled while they are submitted. parameters: attributes for its traces.
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
        self._engine_timelines: bytes | None = None

    @property
    def names(self) -> set[tuple[bytes | None, str]]:
        """(digest of the key, id) for each id under which it is found."""
        return {(self._key_digest, name) for name in (self.response_id, self.request_id, self._given_id) if name}

    @property
    def timings(self) -> list[Timings]:
        """The timings of each prompt."""
        return self._timings if self._timings is not None else [Timings.of(stream) for stream in self._streams]

    def end(self) -> None:
        """Keep the timings, and release the streams."""
        self._num_restarts = self.num_restarts
        self.ended = time.monotonic()
        self._timings = self.timings
        self._streams = ()

    @property
    def num_restarts(self) -> int:
        """How often the engine was replaced while it ran."""
        llm = self._llm()
        if self.ended is not None or llm is None:
            return self._num_restarts
        return llm.num_restarts - self._restarts_before

    async def fetch(self) -> dict[str, dict[str, Any]]:
        """Return the engine's timeline of each prompt by engine id; those of finished requests are kept."""
        if self._engine_timelines is not None:
            kept: dict[str, dict[str, Any]] = msgspec.msgpack.decode(self._engine_timelines)
            return kept
        timelines: dict[str, dict[str, Any]] = {}
        llm = self._llm()
        try:
            async with asyncio.timeout(ENGINE_SECONDS):
                for timings in self.timings[:MAX_ENGINE_PROMPTS]:
                    if llm is not None and llm.ready:
                        timelines[timings.engine_id] = await llm.call("timeline", **_engine_arguments(timings))
        except (QuireError, TimeoutError):
            return timelines  # the engine is dead or busy: for now there is only the frontend's part
        if self.ended is not None:
            self._engine_timelines = msgspec.msgpack.encode(timelines)  # a tenth of the objects' memory
        return timelines

    def summary(self) -> dict[str, Any]:
        """Return its entry in the list of requests."""
        timings = self.timings
        if self.ended is not None:
            state = "finished"
        else:
            state = "generating" if any(item.metrics.first_token_time is not None for item in timings) else "waiting"
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

    def timeline(self, engine_timelines: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return the whole timeline, JSON-like; points in time are seconds since its arrival."""
        prompts = [_prompt(item, engine_timelines.get(item.engine_id), self.started) for item in self.timings]
        seconds = (self.ended or time.monotonic()) - self.started
        return {
            **self.summary(),
            "cached_tokens": sum(item.num_cached_tokens for item in self.timings),
            "engine_restarts": self.num_restarts,
            "why": explain_latency(prompts, seconds, self.num_restarts),
            "prompts": prompts,
        }


class RequestRecords:
    """Records of the running requests of one front, and of the last finished ones."""

    def __init__(self) -> None:
        self._live: dict[RequestRecord, None] = {}
        self._finished: OrderedDict[RequestRecord, None] = OrderedDict()
        self._num_prompts = 0  # of the finished ones
        self._by_name: dict[tuple[bytes | None, str], RequestRecord] = {}
        self._fetched: deque[float] = deque(maxlen=FETCHES_PER_SECOND)
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self, record: RequestRecord) -> None:
        """Add a running request; of several with the same id, the latest one is found by it."""
        self._live[record] = None
        for name in record.names:
            self._by_name[name] = record

    def end(self, record: RequestRecord) -> None:
        """Note that a request has ended; later calls do nothing."""
        if record not in self._live:
            return
        del self._live[record]
        record.end()
        self._finished[record] = None
        self._num_prompts += len(record.timings)
        while len(self._finished) > MAX_FINISHED or (
            self._num_prompts > MAX_FINISHED_PROMPTS and len(self._finished) > 1
        ):
            self._forget(next(iter(self._finished)))
        now = time.monotonic()
        if len(self._fetched) < FETCHES_PER_SECOND or now - self._fetched[0] > 1.0:
            self._fetched.append(now)
            task = asyncio.ensure_future(record.fetch())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _forget(self, record: RequestRecord) -> None:
        del self._finished[record]
        self._num_prompts -= len(record.timings)
        for name in record.names:
            if self._by_name.get(name) is record:
                del self._by_name[name]

    def find(self, key_digest: bytes | None, name: str) -> RequestRecord | None:
        """Return the record of this id that belongs to this key."""
        return self._by_name.get((key_digest, name))

    def live(self, key_digest: bytes | None) -> list[RequestRecord]:
        """Return the records of this key's running requests, the oldest first."""
        return [record for record in self._live if (key_digest, record.response_id) in record.names]

    def summaries(self, key_digest: bytes | None) -> list[dict[str, Any]]:
        """Return the entries of the first of this key's running requests, and one too many if there are more."""
        return [record.summary() for record in self.live(key_digest)[: MAX_LISTED + 1]]

    def answer_fronts(self, fronts: Fronts) -> None:
        """Answer what other fronts ask: for the running requests of a key, and when the latest of an id has begun."""

        async def summaries(key: str | None) -> list[dict[str, Any]]:
            return self.summaries(_digest(key))

        async def started(value: dict[str, Any]) -> float | None:
            record = self.find(_digest(value["key"]), value["name"])
            return None if record is None else record.started

        fronts.handlers["requests"] = summaries
        fronts.handlers["request"] = started


def _digest(key: str | None) -> bytes | None:
    return None if key is None else bytes.fromhex(key)


@router.get("/requests")
async def list_requests(request: Request) -> Response:
    """List the requests of this key that are not finished."""
    context, digest = request.app.state.context, request.scope["state"].get("key_digest")
    data = context.records.summaries(digest)
    others = await context.fronts.ask_others("requests", None if digest is None else digest.hex())
    if others:
        data = sorted([*data, *itertools.chain.from_iterable(others.values())], key=lambda entry: entry["created"])
    return json_response({"object": "list", "data": data[:MAX_LISTED], "has_more": len(data) > MAX_LISTED})


@router.get("/requests/{id}")
async def get_request(request: Request, id: str) -> Response:
    """Tell what happened to a request and why it took so long, by the id of its answer or its X-Request-Id."""
    context, digest = request.app.state.context, request.scope["state"].get("key_digest")
    record = context.records.find(digest, id)
    if not is_relayed(request.scope):
        asked = {"key": None if digest is None else digest.hex(), "name": id}
        others = await context.fronts.ask_others("request", asked)
        begun = {row: started for row, started in others.items() if started is not None}
        latest = max(begun, key=begun.__getitem__, default=None)
        if latest is not None and (record is None or begun[latest] > record.started):
            return await forward(request, latest)
    if record is None:
        raise NotFoundError(
            f"no request {echo(id)} runs here, nor is it one of the last {MAX_FINISHED} that have ended",
            param="id",
            code="request_not_found",
        )
    return json_response(record.timeline(await record.fetch()))


def _engine_arguments(timings: Timings) -> dict[str, int | bool | str]:
    """Return the arguments of the engine's `timeline` call."""
    metrics = timings.metrics
    until = 0 if metrics.finished_time is None else int(1e6 * metrics.finished_time) + 1
    return {
        "request_id": timings.engine_id,
        "num_sequences": timings.num_sequences,
        "since_us": int(1e6 * metrics.arrival_time),
        "until_us": until,
    }


def _prompt(timings: Timings, engine: Mapping[str, Any] | None, started: float) -> dict[str, Any]:
    """Return the timeline of one prompt; `engine` is the engine's part, if it is known."""
    metrics = timings.metrics

    def since_start(moment: float | None) -> float | None:
        return None if moment is None else _round(moment - started)

    prompt: dict[str, Any] = {
        "arrived_at": since_start(metrics.arrival_time),
        "queue_seconds": _round(metrics.queue_seconds),
        "prefill_seconds": _round(metrics.prefill_seconds),
        "decode_seconds": _round(metrics.decode_seconds),
        "first_token_at": since_start(metrics.first_token_time),
        "finished_at": since_start(metrics.finished_time),
        "mean_token_seconds": _round(timings.mean_token_seconds),
        "prompt_tokens": timings.num_prompt_tokens,
        "cached_tokens": timings.num_cached_tokens,
        "completion_tokens": timings.num_tokens,
        "preemptions": metrics.num_preemptions,
        "finish_reasons": timings.finish_reasons,
        "complete": False,
    }
    if engine is None:
        return prompt
    return prompt | {
        "complete": engine["complete"],
        "grammar_seconds": _round(engine["grammar_seconds"]),
        "events": [_since(event, started) for event in engine["events"]],
        "chunks": [_since(chunk, started) for chunk in engine["chunks"]],
        "num_chunks": engine["num_chunks"],
        "steps": {name: _round(value) for name, value in engine["steps"].items()},
        "slowest_steps": [_since(step, started) for step in engine["slowest"]],
    }


def _since(entry: Mapping[str, Any], started: float) -> dict[str, Any]:
    """Return an entry with its points in time counted from the request's arrival."""
    moments = {name: _round(entry[name] - started) for name in ("at", "resumed") if name in entry}
    return {name: _round(value) if isinstance(value, float) else value for name, value in entry.items()} | moments


def _round(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value


def explain_latency(prompts: Sequence[Mapping[str, Any]], seconds: float, num_restarts: int) -> list[str]:
    """Return sentences about the largest parts of a request's latency, the largest first.

    Preemptions and restarts are among them however little time they took.

    Args:
        prompts: as in the timeline, one for each of the request's prompts. seconds: the whole time.
    """
    incidents: list[Part] = []
    parts: list[Part] = []
    for number, prompt in enumerate(prompts):
        name = f" (prompt {number})" if len(prompts) > 1 else ""
        incidents += [(took, text + name) for took, text in _preemptions(prompt)]
        parts += [(took, text + name) for took, text in _parts(prompt)]
    if num_restarts:
        text = f"the engine was restarted {_times(num_restarts)}; what it had computed was computed again"
        incidents.append((seconds, text))
    parts = [part for part in parts if part[0] >= MIN_SHARE * seconds]
    shown = sorted([*incidents, *parts], key=lambda part: -part[0])[:MAX_SENTENCES]
    shown += [part for part in incidents if part not in shown][:MAX_SENTENCES]
    return [text for _, text in shown]


def _preemptions(prompt: Mapping[str, Any]) -> Iterator[Part]:
    events = [event for event in prompt.get("events", ()) if event["event"] == "preempted"]
    for how in sorted({event["how"] for event in events}):
        alike = [event for event in events if event["how"] == how]
        lost = sum(event.get("seconds") or 0.0 for event in alike)
        counts = ", ".join([str(event["tokens"]) for event in alike])
        tokens = f"{counts} token{'' if counts == '1' else 's'}"
        back = all(event.get("seconds") is not None for event in alike)
        lasted = _time(lost) if back else f"{_time(lost)}, and not back yet" if lost else "not back yet"
        text = f"preempted {_times(len(alike))} ({how}) after {tokens}: {lasted}"
        again = sum(event.get("recomputed") or 0 for event in alike)
        if again:
            text += f", of which some to compute {_count(again)} again"
        yield lost, text
    unknown = prompt["preemptions"] - len(events)
    if unknown > 0:
        yield 0.0, f"preempted {_times(unknown)}; when is not known any more"


def _parts(prompt: Mapping[str, Any]) -> Iterator[Part]:
    events: Sequence[Mapping[str, Any]] = prompt.get("events", ())
    scheduled: Mapping[str, Any] = next((event for event in events if event["event"] == "scheduled"), {})
    grammar = prompt.get("grammar_seconds") or 0.0
    if grammar:
        yield grammar, f"waited {_time(grammar)} until its grammar was compiled"
    queued = (prompt["queue_seconds"] or 0.0) - grammar
    if queued > 0:
        yield queued, f"waited {_time(queued)} {WAITS.get(scheduled.get('waited_for', ''), 'in the queue')}"
    if prompt["arrived_at"] and prompt["arrived_at"] > 0:
        yield prompt["arrived_at"], f"took {_time(prompt['arrived_at'])} before it was handed to the engine's queue"
    if prompt["prefill_seconds"]:
        yield prompt["prefill_seconds"], _prefill(prompt)
    if prompt["decode_seconds"]:
        yield prompt["decode_seconds"], _decode(prompt)


def _prefill(prompt: Mapping[str, Any]) -> str:
    text = f"computing its {_count(prompt['prompt_tokens'], 'prompt token')} took {_time(prompt['prefill_seconds'])}"
    chunks = prompt.get("num_chunks") or 0
    if chunks > 1:
        text += f", in {chunks} steps"
    others = max((chunk["others"] for chunk in prompt.get("chunks", ())), default=0)
    if others:
        text += f" shared with up to {_count(others, 'other sequence')}"
    if prompt["cached_tokens"]:
        text += f"; {prompt['cached_tokens']} of them came from the cache"
    return text


def _decode(prompt: Mapping[str, Any]) -> str:
    text = f"generating {_count(prompt['completion_tokens'])} took {_time(prompt['decode_seconds'])}"
    if prompt["mean_token_seconds"]:
        text += f", {_time(prompt['mean_token_seconds'])} each"
    steps = prompt.get("steps") or {}
    beside = steps.get("mean_sequences", 1.0) - 1.0
    if beside >= 0.5:
        text += f", beside {_count(round(beside), 'other sequence')} on average"
    slowest = max(prompt.get("slowest_steps", ()), key=lambda step: step["seconds"] or 0.0, default=None)
    if slowest is not None and slowest["seconds"] and slowest["seconds"] > 3 * steps.get("p50", slowest["seconds"]):
        text += f"; the slowest step took {_time(slowest['seconds'])}"
        foreign = slowest["prompt_tokens"] - (slowest["own_tokens"] if slowest["own_tokens"] > 1 else 0)
        if foreign > 0:
            text += f", for it computed {_count(foreign, 'prompt token')} of others"
    return text


def _count(count: int, name: str = "token") -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _time(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:.0f} s"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.{0 if seconds >= 0.1 else 1}f} ms"
