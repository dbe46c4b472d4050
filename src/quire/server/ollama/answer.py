"""From the outputs of a chat or completion to Ollama's response: one object, or a stream of lines of JSON."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec

from quire.frontend.formats.message import CallEnd, ContentDelta, Event, Message, ReasoningDelta
from quire.outputs import CompletionOutput
from quire.server.dialects import DialectAnswer
from quire.server.generation import Generation
from quire.server.streaming import EventStream
from quire.server.timeline import Timings

NANOSECONDS = 1e9

_encode = msgspec.json.Encoder().encode


class LineStream(EventStream):
    """A stream of JSON objects, one a line."""

    media_type = "application/x-ndjson"
    keep_alive = b""  # JSON has no comments


class Clock:
    """Times a request, and the loading of its model."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.load_seconds = 0.0

    @contextlib.contextmanager
    def time_load(self) -> Iterator[None]:
        """Time the block as loading of the model."""
        begin = time.perf_counter()
        yield
        self.load_seconds = time.perf_counter() - begin

    def times(self) -> dict[str, int]:
        """Return the durations so far [ns]."""
        total = time.perf_counter() - self.started
        return {"total_duration": _ns(total), "load_duration": _ns(self.load_seconds)}


def _ns(seconds: float | None) -> int:
    return max(0, round((seconds or 0.0) * NANOSECONDS))


class Answer(DialectAnswer):
    """The answer to one request. The events of its stream are parts of the response; the last one has the counts.

    Args:
        generation: started. in_message: whether the text is in a message (chats), or a field of its own.
    """

    def __init__(self, generation: Generation, clock: Clock, *, in_message: bool) -> None:
        super().__init__(generation)
        self._clock = clock
        self._in_message = in_message
        self._message = Message()
        self._complete: list[int] = []  # numbers of the calls that are complete
        self._ending: dict[str, Any] = {}

    @staticmethod
    def encode(event: dict[str, Any]) -> bytes:
        """Return a line of JSON."""
        return _encode(event) + b"\n"

    def _part(self, content: str, thinking: str, calls: Iterable[int]) -> dict[str, Any]:
        """Return a part of the response; `calls` are the numbers of complete calls."""
        text = {"content": content, **({"thinking": thinking} if thinking else {})}
        if not self._in_message:
            return {**head(self.generation.model), "response": text.pop("content"), **text, "done": False}
        message: dict[str, Any] = {"role": "assistant", **text}
        shown = [self._call(index) for index in calls]
        if shown:
            message["tool_calls"] = shown
        return {**head(self.generation.model), "message": message, "done": False}

    def _call(self, index: int) -> dict[str, Any]:
        call = self._message.tool_calls[index]
        function = {"index": index, "name": call.name, "arguments": json.loads(call.arguments)}
        return {"id": call.id, "function": function}

    def add(self, output: CompletionOutput, events: list[Event]) -> list[dict[str, Any]]:
        """As `DialectAnswer.add`. Calls are sent when they are complete."""
        self._message.add(events)
        content = "".join([event.text for event in events if isinstance(event, ContentDelta)])
        thinking = "".join([event.text for event in events if isinstance(event, ReasoningDelta)])
        calls = [event.index for event in events if isinstance(event, CallEnd)]
        self._complete += calls
        parts = [self._part(content, thinking, calls)] if content or thinking or calls else []
        if output.finished:
            self._ending = self._counts(output.finish_reason)
            parts.append({**self._part("", "", []), **self._ending})
        return parts

    def _counts(self, finish_reason: str | None) -> dict[str, Any]:
        timings = Timings.of(self.generation.streams[0])
        return {
            "done": True,
            "done_reason": "length" if finish_reason == "length" else "stop",
            **self._clock.times(),
            "prompt_eval_count": timings.num_prompt_tokens,
            "prompt_eval_duration": _ns(timings.metrics.prefill_seconds),
            "eval_count": timings.num_tokens,
            "eval_duration": _ns(timings.metrics.decode_seconds),
        }

    def result(self) -> dict[str, Any]:
        """As `DialectAnswer.result`."""
        message = self._message
        return {**self._part(message.content or "", message.reasoning or "", self._complete), **self._ending}


def head(model: str) -> dict[str, Any]:
    """Return the first fields of every object of a response."""
    return {"model": model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


def loaded(model: str, *, in_message: bool) -> dict[str, Any]:
    """Return the response to a request without a prompt, which only loads the model."""
    empty: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if in_message else {"response": ""}
    return {**head(model), **empty, "done": True, "done_reason": "load"}
