"""Dialects are APIs whose requests are translated into chats or completions. They share errors and responses."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError, rename_field
from quire.server.json_io import json_response
from quire.server.streaming import EventStream, until_disconnect

MESSAGE = re.compile(r"\bmessages\[(\d+)\](\.content\b(?:\[\d+\])?)?")

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
            async for item in items:
                yield item


class DialectAnswer(Protocol):
    """The response to a started chat or completion, in one piece or streamed."""

    async def whole(self) -> dict[str, Any]:
        """Return the response once it is complete."""

    def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the encoded events of a stream."""

    def close(self) -> None:
        """End what is unfinished."""


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
