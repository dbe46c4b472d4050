"""Dialects are APIs whose requests are translated into chats or completions.

A dialect maps fields, errors about them (`FieldNames`), and outputs to its own events (`DialectAnswer`).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.formats.message import Event as MessageEvent
from quire.outputs import CompletionOutput
from quire.server.field_names import FieldNames
from quire.server.generation import Generation
from quire.server.json_io import THREAD_CHARS, json_response
from quire.server.streaming import EventStream, merge, typed_event, until_disconnect

Event = dict[str, Any]  # of a stream


class DialectAnswer(ABC):
    """The answer of a dialect to one request, whole or streamed: both come from the same events.

    A subclass makes the events of its streams (`begin`, `add`, `end`), and keeps what the whole answer needs. A dialect
    without events of its own kind returns the parts of its answer.

    Args:
        generation: started, with one choice.
    """

    encode: Callable[[Event], bytes] = staticmethod(typed_event)

    def __init__(self, generation: Generation) -> None:
        self.generation = generation

    def begin(self) -> list[Event]:
        """Return the events that come before those of the first output."""
        return []

    @abstractmethod
    def add(self, output: CompletionOutput, events: list[MessageEvent]) -> list[Event]:
        """Return the events of an output of the only choice, given what its text adds to the message."""

    def end(self) -> list[Event]:
        """Return the events that come after the last output."""
        return []

    @abstractmethod
    def result(self) -> dict[str, Any]:
        """Return the whole answer, after the last output."""

    async def steps(self) -> AsyncGenerator[list[Event], None]:
        """Yield the events, as they come. Raises as `Generation.accept`."""
        read = self.generation.reader().read
        begun = False
        async with aclosing(merge(self.generation.streams)) as outputs:
            async for index, output in outputs:
                self.generation.accept(index, output)
                [completion] = output.outputs
                text, finished = completion.text, completion.finished
                if len(text) > THREAD_CHARS:
                    events = await asyncio.to_thread(read, text, finished)
                else:
                    events = read(text, finished)
                made = self.add(completion, events) if begun else [*self.begin(), *self.add(completion, events)]
                begun = True
                if made:
                    yield made
        made = self.end()
        if made:
            yield made

    async def whole(self) -> dict[str, Any]:
        """Return the answer once it is complete. Raises as `steps`."""
        async with aclosing(self.steps()) as steps:
            async for _ in steps:
                pass
        return self.result()

    async def events(self, names: FieldNames) -> AsyncGenerator[bytes, None]:
        """Yield the encoded events of a stream. Raises as `steps`, with the client's names of fields."""
        with names.translating():
            async with aclosing(self.steps()) as steps:
                async for made in steps:
                    yield b"".join(map(self.encode, made))

    def close(self) -> None:
        """End what is unfinished."""
        self.generation.close()


def rename_warnings(request: Request, names: FieldNames) -> None:
    """Give the warnings of a response the client's names of fields."""
    state = request.scope["state"]
    state["warnings"] = {names.name_of(field): message for field, message in state.get("warnings", {}).items()}


async def respond(
    request: Request,
    answer: DialectAnswer,
    names: FieldNames,
    stream_type: type[EventStream] | None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return the response, streamed if there is a `stream_type`; aborts if the client disconnects."""
    rename_warnings(request, names)
    if stream_type is not None:
        stream = stream_type(answer.events(names), answer.close)
        stream.headers.update(headers or {})
        return stream
    try:
        with names.translating():
            return json_response(await until_disconnect(request.receive, answer.whole()), headers=headers)
    finally:
        answer.close()
