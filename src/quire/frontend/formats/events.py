"""The events of a message: what parsers have in common (`ReadingParser`), collecting and trimming events."""

from __future__ import annotations

from collections.abc import Callable

from quire.frontend.formats.message import CallArguments, CallEnd, CallStart, ContentDelta, Event, ReasoningDelta
from quire.frontend.formats.parts import BLANKS
from quire.frontend.formats.source import Reading, Sink, Source


class Events:
    """Collects events; neighbouring texts of one kind become one event."""

    def __init__(self) -> None:
        self.calls = 0
        self._events: list[Event] = []
        self._make: Callable[[str], Event] = ContentDelta
        self._texts: list[str] = []

    def take(self) -> list[Event]:
        """Return what was collected."""
        self._join()
        taken, self._events = self._events, []
        return taken

    def content(self, text: str) -> None:
        """Add content."""
        self._add(ContentDelta, text)

    def reasoning(self, text: str) -> None:
        """Add reasoning."""
        self._add(ReasoningDelta, text)

    def arguments(self, text: str) -> None:
        """Add to the arguments of the last call."""
        self._add(self._arguments, text)

    def start(self, name: str, call_id: str | None = None) -> None:
        """Begin the next call."""
        self._join()
        self._events.append(CallStart(self.calls, name, call_id))
        self.calls += 1

    def end(self) -> None:
        """End the last call."""
        self._join()
        self._events.append(CallEnd(self.calls - 1))

    def _arguments(self, text: str) -> Event:
        return CallArguments(self.calls - 1, text)

    def _add(self, make: Callable[[str], Event], text: str) -> None:
        if make != self._make:
            self._join()
            self._make = make
        self._texts.append(text)

    def _join(self) -> None:
        if self._texts:
            self._events.append(self._make("".join(self._texts)))
            self._texts.clear()


class Trimmed:
    """Passes text on without the blanks at its beginning (if `leading`) and at its end (if `drop` ends it)."""

    def __init__(self, sink: Sink, leading: bool) -> None:
        self._sink = sink
        self.leading = leading
        self._buffered: list[str] = []

    def add(self, text: str) -> None:
        """Take more text."""
        if self.leading:
            text = text.lstrip(BLANKS)
            if not text:
                return
            self.leading = False
        kept = text.rstrip(BLANKS)
        if kept:
            self._buffered.append(kept)
            self._sink("".join(self._buffered))
            self._buffered.clear()
        if len(kept) < len(text):
            self._buffered.append(text[len(kept) :])

    def flush(self) -> None:
        """Pass on the blanks at the end."""
        if self._buffered:
            self._sink("".join(self._buffered))
        self._buffered.clear()

    def drop(self) -> None:
        """Drop the blanks at the end."""
        self._buffered.clear()


class ReadingParser:
    """A `MessageParser` whose `_reader` is a generator that reads `_source` and adds to `_events`."""

    _reader: Reading[None]

    def __init__(self) -> None:
        self._source = Source()
        self._events = Events()

    def feed(self, text: str) -> list[Event]:
        self._source.push(text)
        next(self._reader, None)
        return self._events.take()

    def finish(self) -> list[Event]:
        self._source.end()
        next(self._reader, None)
        return self._events.take()
