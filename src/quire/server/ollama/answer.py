"""From the outputs of a chat or completion to Ollama's response: one object, or a stream of lines of JSON."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec

from quire.frontend.formats.message import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentDelta,
    Event,
    Message,
    ReasoningDelta,
)
from quire.outputs import RequestOutput
from quire.server.chat_message import ChoiceReader
from quire.server.generation import Generation
from quire.server.streaming import EventStream

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
    def loading(self) -> Iterator[None]:
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


class Answer:
    """The answer to one request.

    Args:
        generation: started, with one stream of outputs. reader: of its text.
        in_message: whether the text is in a message (chats), or a field of its own.
    """

    def __init__(self, generation: Generation, reader: ChoiceReader, clock: Clock, *, in_message: bool) -> None:
        self._generation = generation
        self._reader = reader
        self._clock = clock
        self._in_message = in_message
        self._message = Message()
        self._num_shown = 0  # calls in the response so far

    def _part(self, content: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        extra = {"thinking": thinking} if thinking else {}
        if not self._in_message:
            return {**head(self._generation.model), "response": content, **extra, "done": False}
        message: dict[str, Any] = {"role": "assistant", "content": content, **extra}
        if calls:
            message["tool_calls"] = calls
        return {**head(self._generation.model), "message": message, "done": False}

    def _part_of(self, events: Iterable[Event]) -> dict[str, Any] | None:
        """Return the part of the response for events; None for nothing yet."""
        content = thinking = ""
        calls: list[dict[str, Any]] = []
        for event in events:
            self._message.add([event])
            match event:
                case ContentDelta():
                    content += event.text
                case ReasoningDelta():
                    thinking += event.text
                case CallEnd():
                    calls.append(self._call(event.index))
                case CallStart() | CallArguments():
                    pass  # calls are sent when they are complete
        return self._part(content, thinking, calls) if content or thinking or calls else None

    def _call(self, index: int) -> dict[str, Any]:
        call = self._message.tool_calls[index]
        function = {"index": index, "name": call.name, "arguments": json.loads(call.arguments)}
        return {"id": call.id, "function": function}

    def _ending(self, output: RequestOutput) -> dict[str, Any]:
        reason = output.outputs[0].finish_reason
        return {
            "done": True,
            "done_reason": "length" if reason == "length" else "stop",
            **self._clock.times(),
            "prompt_eval_count": len(output.prompt_token_ids),
            "prompt_eval_duration": _ns(output.metrics.prefill_seconds),
            "eval_count": output.num_generated_tokens,
            "eval_duration": _ns(output.metrics.decode_seconds),
        }

    async def parts(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the response in parts; the last one has the counts. Raises `QuireError`."""
        async with contextlib.aclosing(_outputs(self._generation)) as outputs:
            async for output in outputs:
                completion = output.outputs[0]
                part = self._part_of(self._reader.read(completion.text, completion.finished))
                if part is not None:
                    yield part
                if completion.finished:
                    yield {**self._part("", "", []), **self._ending(output)}

    async def whole(self) -> dict[str, Any]:
        """Return the response in one piece. Raises `QuireError`."""
        calls: list[dict[str, Any]] = []
        last: dict[str, Any] = {}
        async with contextlib.aclosing(self.parts()) as parts:
            async for last in parts:
                calls += last.get("message", {}).get("tool_calls", ())
        whole = self._part(self._message.content or "", self._message.reasoning or "", calls)
        return {**last, **whole, "done": True}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as lines of JSON."""
        async with contextlib.aclosing(self.parts()) as parts:
            async for part in parts:
                yield _encode(part) + b"\n"

    def close(self) -> None:
        """End what is unfinished."""
        self._generation.close()


async def _outputs(generation: Generation) -> AsyncGenerator[RequestOutput, None]:
    async for output in generation.streams[0]:
        generation.check(output.outputs)
        yield output


def head(model: str) -> dict[str, Any]:
    """Return the first fields of every object of a response."""
    return {"model": model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


def loaded(model: str, *, in_message: bool) -> dict[str, Any]:
    """Return the response to a request without a prompt, which only loads the model."""
    empty: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if in_message else {"response": ""}
    return {**head(model), **empty, "done": True, "done_reason": "load"}
