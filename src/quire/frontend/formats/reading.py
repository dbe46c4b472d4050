"""What parsers of messages have in common: text comes in, a generator reads it as far as it can, events come out."""

from __future__ import annotations

from quire.frontend.formats.events import Events
from quire.frontend.formats.message import Event
from quire.frontend.formats.source import Reading, Source


class ReadingParser:
    """`MessageParser` around `_reader`, a generator that takes from `_source` and tells `_events`; it is set last."""

    _reader: Reading[None]

    def __init__(self) -> None:
        self._source = Source()
        self._events = Events()

    def feed(self, text: str) -> list[Event]:
        """As in `MessageParser`."""
        self._source.push(text)
        next(self._reader, None)
        return self._events.take()

    def finish(self) -> list[Event]:
        """As in `MessageParser`."""
        self._source.end()
        next(self._reader, None)
        return self._events.take()
