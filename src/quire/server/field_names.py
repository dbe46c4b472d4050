"""`FieldNames`: errors about fields of the engine's parameters, or of a chat, name the fields that the client sent."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from quire.errors import RequestError, rename_field

MESSAGE = r"messages\[(\d+)\](\.content\b(?:\[\d+\])?)?"

# The client's name: a text that may refer to groups of the pattern, or what a function makes of the match.
Name = str | Callable[[re.Match[str]], str]


class FieldNames:
    """Translates errors about our fields into errors about the fields that the client sent.

    Args:
        fields: regular expressions for the beginnings of our fields, and the client's name of each; the first that
            matches counts.
        places: where each message of a chat came from: another message, or a field that is its content.
    """

    def __init__(self, fields: Mapping[str, Name], places: Sequence[str] = ()) -> None:
        if places:
            fields = {MESSAGE: partial(_place, list(places)), **fields}
        self._fields = [(re.compile(rf"(?:{pattern})(?!\w)"), name) for pattern, name in fields.items()]

    def translate(self, error: RequestError) -> RequestError:
        """Return the error with the client's name of the field, also in the message."""
        param = error.param or ""
        new_name = self.name_of(param)
        return error if new_name == param else rename_field(error, param, new_name)

    def name_of(self, param: str) -> str:
        """Return the client's name of a field."""
        for pattern, name in self._fields:
            found = pattern.match(param)
            if found is not None:
                return (found.expand(name) if isinstance(name, str) else name(found)) + param[found.end() :]
        return param

    @contextmanager
    def translating(self) -> Iterator[None]:
        """Translate errors of the block."""
        try:
            yield
        except RequestError as error:
            raise self.translate(error) from None


def _place(places: Sequence[str], found: re.Match[str]) -> str:
    index = int(found[1])
    if index >= len(places):
        return found[0]
    place = places[index]
    return f"{place}.content" if found[2] and place.startswith("messages") else place
