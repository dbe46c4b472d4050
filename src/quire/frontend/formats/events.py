"""The events of a message: what parsers have in common (`ReadingParser`), collecting and trimming events."""

from __future__ import annotations

from quire.frontend.formats.message import CallArguments, CallEnd, CallStart, ContentDelta, Event, ReasoningDelta
from quire.frontend.formats.parts import BLANKS
from quire.frontend.formats.source import Reading, Sink, Source


class Events:
    """Collects events; neighbours of one kind become one."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self.calls = 0

    def take(self) -> list[Event]:
        """Return what was collected, joined."""
        taken, self._events = self._events, []
        joined: list[Event] = []
        start = 0
        while start < len(taken):
            end = start + 1
            first = taken[start]
            if isinstance(first, ContentDelta | ReasoningDelta | CallArguments):
                while end < len(taken) and type(taken[end]) is type(first):
                    end += 1
            joined.append(first if end == start + 1 else _join(taken[start:end]))
            start = end
        return joined

    def content(self, text: str) -> None:
        """Add content."""
        self._events.append(ContentDelta(text))

    def reasoning(self, text: str) -> None:
        """Add reasoning."""
        self._events.append(ReasoningDelta(text))

    def start(self, name: str, call_id: str | None = None) -> None:
        """Begin the next call."""
        self._events.append(CallStart(self.calls, name, call_id))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """Add to the arguments of the last call."""
        self._events.append(CallArguments(self.calls - 1, text))

    def end(self) -> None:
        """End the last call."""
        self._events.append(CallEnd(self.calls - 1))


def _join(events: list[Event]) -> Event:
    # All are deltas of one kind. Those of two calls never touch: a call's start lies between.
    texts = [event.text for event in events if not isinstance(event, CallStart | CallEnd)]
    match events[0]:
        case CallArguments(index=index):
            return CallArguments(index, "".join(texts))
        case ReasoningDelta():
            return ReasoningDelta("".join(texts))
        case _:
            return ContentDelta("".join(texts))


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
    """`MessageParser` around `_reader`, a generator that takes from `_source` and tells `_events`; it is set last."""

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
