"""`CallParser`: reads a message by the description of its format (`parts`). Harmony, in which everything is a channel,
has a parser of its own (`harmony`).

What is not a call after all is content: up to the point where a call's name and the beginning of its arguments are
known nothing is passed on, and the text is read again as content. Behind that point a call that goes wrong is broken:
it never ends, and the rest of it, up to where the format has its end, is dropped.
"""

from __future__ import annotations

from quire.frontend.formats.events import ReadingParser, Trimmed
from quire.frontend.formats.grammar import ignores_leading_blanks
from quire.frontend.formats.match import CUT, MORE, NO, Found, first_chars, match
from quire.frontend.formats.message import MessageSpec
from quire.frontend.formats.parameters import read_arguments
from quire.frontend.formats.parts import (
    Arguments,
    Blank,
    CallFormat,
    JsonObject,
    Notation,
    Part,
    ReasoningFormat,
    Text,
)
from quire.frontend.formats.source import Reading, markers_of


class CallParser(ReadingParser):
    """`MessageParser` for formats that are described by parts.

    Args:
        calls: None where no calls are to be read. reasoning: None where there cannot be any.
    """

    def __init__(self, calls: CallFormat | None, reasoning: ReasoningFormat | None, spec: MessageSpec) -> None:
        super().__init__()
        self._calls = calls
        self._reasoning = reasoning
        self._spec = spec
        self._tools = {tool.name: tool for tool in spec.tools}
        self._ends = frozenset(spec.end_tokens)
        # Content in a form is all of the message, whatever stands in it.
        self._trigger = calls.trigger if calls is not None and spec.structured_outputs is None else ""
        self._unexpected = frozenset((*spec.special_tokens, *spec.end_tokens))
        self._in_content = markers_of(self._unexpected | {self._trigger})
        self._in_reasoning = markers_of(self._unexpected | {reasoning.end if reasoning is not None else ""})
        self._content = Trimmed(self._events.content, leading=False)
        self._ids: set[str | None] = set()
        self._split(calls)
        self._reader = self._message()

    def _split(self, calls: CallFormat | None) -> None:
        """Take the description of a call apart: what is before, from and behind its arguments."""
        self._head: tuple[Part, ...] = ()
        self._again: tuple[Part, ...] = ()
        self._tail: tuple[Part, ...] = ()
        self._notation: Notation = JsonObject()
        self._stop = ""
        self._after: frozenset[str] | None = None
        if calls is not None:
            place = next(place for place, part in enumerate(calls.call) if isinstance(part, Arguments))
            self._again, self._tail = calls.call[: place + 1], calls.call[place + 1 :]
            self._head = (*calls.opens, *self._again)
            self._notation = calls.notation
            self._after = first_chars(self._head[1:], self._tools)
            self._stop = next((part.text for part in self._tail if isinstance(part, Text)), "")

    def _message(self) -> Reading[None]:
        if self._reasoning is not None:
            yield from self._read_reasoning(self._reasoning)
        if self._calls is not None and not self._trigger:
            yield from self._read_calls(self._calls)
        rejected = self._is_content if self._trigger else None
        while True:
            marker = yield from self._source.until(
                self._in_content, self._add_content, self._unexpected, self._trigger, rejected
            )
            if not marker:
                self._content.flush()
                return
            assert self._calls is not None, "nothing else is looked for"
            self._source.pos -= len(marker)
            yield from self._read_calls(self._calls)

    def _add_content(self, text: str) -> None:
        if self._calls is None or self._spec.structured_outputs is not None:
            self._events.content(text)  # nothing can follow, so nothing is held back
        else:
            self._content.add(text)

    def _is_content(self, end: int) -> bool:
        """Whether the trigger that ends there is none, for no call follows."""
        text = self._source.text
        if self._after is not None and end < len(text) and text[end] not in self._after:
            return True
        found = match(self._head[1:], text, end, self._source.ended, self._tools, self._stop)
        return found.at == NO

    # Reasoning

    def _read_reasoning(self, reasoning: ReasoningFormat) -> Reading[None]:
        if not self._spec.reasoning_open:
            found = yield from self._match((Blank(), Text(reasoning.start)))
            if found.at < 0:
                return
            self._source.pos = found.at
        thoughts = Trimmed(self._events.reasoning, leading=True)
        found_end = yield from self._source.until(
            self._in_reasoning, thoughts.add, self._unexpected, reasoning.end, closed=True
        )
        if not found_end:
            return
        if ignores_leading_blanks(self._spec.structured_outputs):
            yield from self._source.blanks()
        elif reasoning.after:
            yield from self._source.literal(reasoning.after)

    # Calls

    def _match(self, parts: tuple[Part, ...]) -> Reading[Found]:
        """Return whether these parts come next."""
        source = self._source
        while True:
            found = match(parts, source.text, source.pos, source.ended, self._tools, self._stop)
            if found.at != MORE:
                return found
            yield

    def _read_calls(self, calls: CallFormat) -> Reading[None]:
        """Read one run of calls, from its trigger on; or only the trigger, as content, if there is no call."""
        parts = self._head if self._trigger else (Blank(), *self._head)
        going = False
        while True:
            found = yield from self._match(parts)
            if found.at < 0:
                break
            self._content.drop()
            self._content.leading = going = True
            self._source.pos = found.at
            if not (yield from self._read_call(found)):
                yield from self._skip_broken(calls)
                return
            parts = (*calls.between, *self._again)
        if going:
            yield from self._close(calls, found)
        elif found.at == CUT and self._trigger:
            self._content.drop()  # a call had begun, if only its marker was there
            self._source.pos = len(self._source.text)
        elif self._trigger:
            yield from self._source.literal(self._trigger)
            if self._trigger not in self._unexpected:
                self._add_content(self._trigger)

    def _read_call(self, found: Found) -> Reading[bool]:
        """Read a call from its arguments on; return whether it came to its end."""
        call_id = None if found.call_id in self._ids else found.call_id
        self._ids.add(call_id)
        self._events.start(found.name, call_id)
        tool, sink = self._tools[found.name], self._events.arguments
        if not (yield from read_arguments(self._source, sink, self._notation, tool, self._ends, self._stop)):
            return False
        rest = yield from self._match(self._tail)
        if rest.at < 0:
            return False
        self._source.pos = rest.at
        self._events.end()
        return True

    def _close(self, calls: CallFormat, after: Found) -> Reading[None]:
        """Read what closes a run of calls; `after` says what became of the next call."""
        found = (yield from self._match(calls.closes)) if calls.closes else Found(NO)
        if found.at >= 0:
            self._source.pos = found.at
        elif after.at == CUT or found.at == CUT:
            self._source.pos = len(self._source.text)

    def _skip_broken(self, calls: CallFormat) -> Reading[None]:
        """Drop the rest of a broken call, up to its end or another call."""
        last = [part.text for parts in (calls.call, calls.closes) for part in parts[-1:] if isinstance(part, Text)]
        ends = markers_of(frozenset((*(text for text in last if len(text) > 1), self._trigger, *self._spec.end_tokens)))
        marker = yield from self._source.until(ends, lambda text: None)
        if marker and marker == self._trigger:
            self._source.pos -= len(marker)
