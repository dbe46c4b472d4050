"""Sends requests to a server at given times and records when each piece of the responses arrived."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.cli.bench.http1 import HttpClient, HttpError


@dataclass(slots=True)
class RequestResult:
    """The response to one request. Times in seconds.

    Attributes:
        start: when it was sent, `time.perf_counter()`. ttft: from then to the first token. latency: to the last one.
        itls: gaps between the pieces that followed. output_len: tokens, by the server's count where it gives one.
        error: why it failed; empty if it did not.
    """

    prompt_len: int
    start: float = 0.0
    ttft: float = 0.0
    itls: list[float] = field(default_factory=list)
    latency: float = 0.0
    output_len: int = 0
    text: str = ""
    error: str = ""

    @property
    def success(self) -> bool:
        """Whether tokens came and the answer was complete."""
        return not self.error

    @property
    def tpot(self) -> float:
        """Mean time per output token after the first; 0 if there was only one."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request to send: its JSON body and the length of its prompt in tokens."""

    body: bytes
    prompt_len: int


def arrival_times(rng: np.random.Generator, count: int, rate: float, burstiness: float) -> list[float]:
    """Return when each request is sent, in seconds from the start.

    Gaps follow a gamma distribution with mean 1 / rate and shape `burstiness`; shape 1 makes them exponential, so that
    arrivals are a Poisson process. An infinite rate sends everything at once.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = rng.gamma(burstiness, 1.0 / (rate * burstiness), count)
    return [float(value) for value in np.cumsum(gaps) - gaps[0]] if count else []


async def run_load(
    client: HttpClient,
    endpoint: str,
    requests: Sequence[LoadRequest],
    times: Sequence[float],
    max_concurrency: int | None = None,
    on_done: Callable[[], None] = lambda: None,
) -> list[RequestResult]:
    """Send request i at times[i], whether or not earlier ones have completed (an open loop); return all results.

    `max_concurrency` limits how many run at once; the clock of a request starts when it is sent.
    """
    room = asyncio.Semaphore(max_concurrency) if max_concurrency is not None else contextlib.nullcontext()
    begin = time.perf_counter()

    async def at_its_time(request: LoadRequest, when: float) -> RequestResult:
        await asyncio.sleep(begin + when - time.perf_counter())
        async with room:
            result = await send(client, endpoint, request)
        on_done()
        return result

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(at_its_time(request, when)) for request, when in zip(requests, times, strict=True)]
    return [task.result() for task in tasks]


async def send(client: HttpClient, endpoint: str, request: LoadRequest) -> RequestResult:
    """Send one streaming request and time its response; failures are recorded, not raised."""
    result = RequestResult(request.prompt_len, start=time.perf_counter())
    try:
        async with contextlib.aclosing(client.lines("POST", endpoint, request.body)) as lines:
            done = False
            async for line in lines:
                if line.startswith(b"data:"):
                    done = _record_event(result, line.removeprefix(b"data:").strip(), time.perf_counter()) or done
    except HttpError as error:
        result.error = error.message
        return result
    if not done:
        result.error = "the stream ended without [DONE]"
    elif not result.ttft:
        result.error = "the answer held no token"
    return result


def _record_event(result: RequestResult, data: bytes, now: float) -> bool:
    """Record one event; return whether it was the last."""
    if data == b"[DONE]":
        return True
    try:
        event = json.loads(data)
    except ValueError:
        raise HttpError("the stream holds something that is not JSON") from None
    if not isinstance(event, dict) or "error" in event:
        raise HttpError(f"the stream holds {data[:200]!r}")
    for choice in event.get("choices") or []:
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or delta.get("reasoning") or ""
        # A piece without text is a token all the same (part of a character), unless it only opens or ends the result.
        if text or ("text" in choice and choice.get("finish_reason") is None):
            _record_piece(result, text, now)
    usage = event.get("usage")
    if usage:
        result.output_len = int(usage["completion_tokens"])
    return False


def _record_piece(result: RequestResult, text: str, now: float) -> None:
    elapsed = now - result.start
    if result.ttft:
        result.itls.append(elapsed - result.latency)
    else:
        result.ttft = elapsed
    result.latency = elapsed
    result.text += text
    result.output_len += 1


def request_body(backend: str, model: str, prompt: Any, output_len: int, extra: dict[str, Any]) -> bytes:
    """Return the JSON body of a streaming request.

    Args:
        backend: "openai" (completions; `prompt` is token ids or a text) or "openai-chat" (`prompt` is a text).
        extra: more fields, which override the others.
    """
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    if backend == "openai-chat":
        body |= {"messages": [{"role": "user", "content": prompt}], "max_completion_tokens": output_len}
    else:
        body |= {"prompt": prompt, "max_tokens": output_len}
    return json.dumps(body | extra).encode()
