"""Errors of chats in the words of other interfaces, whose requests were translated into chats.

A translation notes where each message came from; the names of fields are a table. Nothing here knows an interface.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from quire.errors import RequestError, retold

MESSAGE = re.compile(r"\bmessages\[(\d+)\](\.content\b(?:\[\d+\])?)?")

T = TypeVar("T")


class Words:
    """What an interface calls the fields of chats.

    Args:
        fields: regular expressions for fields of chats, and what is called so by the interface (may have groups).
        places: where each message of the chat came from: from another one, or from a field that is all content.
    """

    def __init__(self, fields: Mapping[str, str], places: Sequence[str] = ()) -> None:
        self._fields = [(re.compile(rf"^{pattern}(?![\w])"), name) for pattern, name in fields.items()]
        self._places = list(places)

    def tell(self, error: RequestError) -> RequestError:
        """Return the error as the client must hear it: another `param`, and this one in the message, too."""
        if error.param is None:
            return error
        param = self._place(error.param)
        for pattern, name in self._fields:
            if pattern.search(param):
                param = pattern.sub(name, param)
                break
        message = error.message.replace(error.param, param, 1) if param != error.param else error.message
        return retold(error, message, param)

    def _place(self, text: str) -> str:
        def name(found: re.Match[str]) -> str:
            index = int(found[1])
            if index >= len(self._places):
                return found[0]
            place = self._places[index]
            return f"{place}.content" if found[2] and place.startswith("messages") else place

        return MESSAGE.sub(name, text)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the errors of a block."""
        try:
            yield
        except RequestError as error:
            raise self.tell(error) from None

    async def telling_of(self, items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """Yield `items`; tell their errors."""
        with self.telling():
            async for item in items:
                yield item
