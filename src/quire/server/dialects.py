"""Dialects are APIs whose requests are translated into chats or completions.

A dialect maps fields and their errors (`FieldNames`), and updates to its own events (`DialectAnswer`).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError, rename_field
from quire.server.generation import ChoiceUpdate, Generation
from quire.server.json_io import json_response
from quire.server.streaming import EventStream, typed_event, until_disconnect

MESSAGE = re.compile(r"\bmessages\[(\d+)\](\.content\b(?:\[\d+\])?)?")

Event = dict[str, Any]  # of a stream

T = TypeVar("T")


class FieldNames:
    """Translates errors about fields of a chat into errors about the fields that the client sent.

    Args:
        fields: regular expressions for fields of chats, and the dialect's name of each (which may refer to groups).
        places: where each message of the chat came from: another message, or a field that is its content.
    """

    def __init__(self, fields: Mapping[str, str], places: Sequence[str] = ()) -> None:
        self._fields = [(re.compile(rf"^{pattern}(?![\w])"), name) for pattern, name in fields.items()]
        self._places = list(places)

    def translate(self, error: RequestError) -> RequestError:
        """Return the error with the client's name of the field, also in the message."""
        if error.param is None:
            return error
        param = MESSAGE.sub(self._place, error.param)
        for pattern, name in self._fields:
            if pattern.search(param):
                param = pattern.sub(name, param)
                break
        return rename_field(error, error.param, param)

    def _place(self, found: re.Match[str]) -> str:
        index = int(found[1])
        if index >= len(self._places):
            return found[0]
        place = self._places[index]
        return f"{place}.content" if found[2] and place.startswith("messages") else place

    @contextmanager
    def translating(self) -> Iterator[None]:
        """Translate errors of the block."""
        try:
            yield
        except RequestError as error:
            raise self.translate(error) from None

    async def translating_items(self, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """Yield `items`; translate their errors."""
        with self.translating():
            async with aclosing(items):
                async for item in items:
                    yield item


class DialectAnswer(ABC):
    """The answer of a dialect to one request, whole or streamed: both come from the same events.

    A subclass translates updates to the events of its streams (`begin`, `add`, `end`), and keeps what the whole answer
    needs. A dialect without events of its own kind returns the parts of its answer.

    Args:
        generation: started, with one choice.
    """

    encode: Callable[[Event], bytes] = staticmethod(typed_event)

    def __init__(self, generation: Generation) -> None:
        self.generation = generation

    def begin(self) -> list[Event]:
        """Return the events that come before those of the first update."""
        return []

    @abstractmethod
    def add(self, update: ChoiceUpdate) -> list[Event]:
        """Take in an update; return its events."""

    def end(self) -> list[Event]:
        """Return the events that come after the last update."""
        return []

    @abstractmethod
    def result(self) -> dict[str, Any]:
        """Return the whole answer, after the last update."""

    async def steps(self) -> AsyncGenerator[list[Event], None]:
        """Yield the events, as they come. Raises as `Generation.updates`."""
        begun = False
        async with aclosing(self.generation.updates()) as batches:
            async for (update,) in batches:
                made = self.add(update) if begun else [*self.begin(), *self.add(update)]
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

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the encoded events of a stream. Raises as `steps`."""
        async with aclosing(self.steps()) as steps:
            async for made in steps:
                yield b"".join(map(self.encode, made))

    def close(self) -> None:
        """End what is unfinished."""
        self.generation.close()


async def respond(
    request: Request,
    answer: DialectAnswer,
    names: FieldNames,
    stream_type: type[EventStream] | None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return the response, streamed if there is a `stream_type`; aborts if the client disconnects."""
    if stream_type is not None:
        stream = stream_type(names.translating_items(answer.events()), answer.close)
        stream.headers.update(headers or {})
        return stream
    try:
        with names.translating():
            return json_response(await until_disconnect(request.receive, answer.whole()), headers=headers)
    finally:
        answer.close()
