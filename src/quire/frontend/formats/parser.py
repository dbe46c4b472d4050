"""`CallParser`: reads a message by the description of its format (`parts`). Harmony, in which everything is a channel,
has a parser of its own (`harmony`).

What is not a call after all is content: up to the point where a call's name and the beginning of its arguments are
known nothing is passed on, and the text is read again as content. Behind that point a call that goes wrong is broken:
it never ends, and the rest of it, up to where the format has its end, is dropped.
"""

from __future__ import annotations

from quire.frontend.formats.events import Events, Trimmed
from quire.frontend.formats.grammar import loose_after
from quire.frontend.formats.message import Event, MessageAsk
from quire.frontend.formats.parameters import read_arguments
from quire.frontend.formats.parts import (
    Arguments,
    Blank,
    CallFormat,
    CallId,
    Maybe,
    Name,
    Part,
    ReasoningFormat,
    Tagged,
    Text,
)
from quire.frontend.formats.source import Markers, Reading, Source

MAX_ID = 64

NO, YES, BROKEN, CUT = "no", "yes", "broken", "cut"


class CallParser:
    """`MessageParser` for formats that are described by parts.

    Args:
        calls: None where no calls are to be read. reasoning: None where there cannot be any.
    """

    def __init__(self, calls: CallFormat | None, reasoning: ReasoningFormat | None, ask: MessageAsk) -> None:
        self._calls = calls
        self._reasoning = reasoning
        self._ask = ask
        self._tools = {tool.name: tool for tool in ask.tools}
        self._source = Source()
        self._events = Events()
        stray = {*ask.special_tokens, *ask.end_tokens}
        self._ends = frozenset(ask.end_tokens)
        # Content in a form is all of the message, whatever stands in it.
        self._trigger = calls.trigger if calls is not None and ask.form is None else ""
        self._in_content = Markers(stray | {self._trigger})
        self._in_reasoning = Markers(stray | ({reasoning.end} if reasoning else set()))
        self._content = Trimmed(self._events.content, leading=False)
        self._call_id: str | None = None
        self._ids: set[str] = set()
        self._started = False
        self._reader = self._message()

    def feed(self, text: str) -> list[Event]:
        """As in `MessageParser`."""
        self._source.push(text)
        next(self._reader, None)
        return self._events.take()

    def finish(self) -> list[Event]:
        """As in `MessageParser`."""
        self._source.ended = True
        next(self._reader, None)
        return self._events.take()

    def _message(self) -> Reading[None]:
        if self._reasoning is not None:
            yield from self._read_reasoning(self._reasoning)
        if self._calls is not None and (self._calls.at_start or self._ask.form is not None):
            yield from self._read_calls(self._calls)
        while True:
            marker = yield from self._source.until(self._in_content, self._add_content)
            if not marker:
                self._content.flush()
                return
            if self._calls is not None and marker == self._trigger:
                self._source.pos -= len(marker)
                yield from self._read_calls(self._calls)

    def _add_content(self, text: str) -> None:
        if self._calls is None or self._ask.form is not None:
            self._events.content(text)  # nothing can follow, so nothing is held back
        else:
            self._content.add(text)

    # Reasoning

    def _read_reasoning(self, reasoning: ReasoningFormat) -> Reading[None]:
        if not self._ask.reasoning_open:
            self._source.mark()
            yield from self._source.blanks()
            if not (yield from self._source.literal(reasoning.start)):
                self._source.back()
                return
            self._source.forget()
        thoughts = Trimmed(self._events.reasoning, leading=True)
        while True:
            marker = yield from self._source.until(self._in_reasoning, thoughts.add)
            if not marker:
                return
            if marker == reasoning.end:
                break
        if loose_after(self._ask.form):
            yield from self._skip_blanks()
        elif reasoning.after:
            yield from self._source.literal(reasoning.after)

    def _skip_blanks(self) -> Reading[None]:
        while (yield from self._source.blanks()):
            pass

    # Calls

    def _read_calls(self, calls: CallFormat) -> Reading[None]:
        """Read one run of calls, from its trigger on; or only the trigger, as content, if there is no call."""
        self._source.mark()
        if not self._trigger:
            yield from self._source.blanks()
        outcome = yield from self._parts((*calls.opens, *calls.call))
        if outcome == CUT and not self._started and self._trigger:
            self._content.drop()  # a call had begun, if only its marker was there
        elif outcome == NO or (outcome == CUT and not self._started):
            self._source.back()
            yield from self._not_a_call()
            return
        while outcome == YES:
            self._content.leading = True
            self._source.mark()
            outcome = yield from self._parts((*calls.between, *calls.call))
            if outcome == NO:
                self._source.back()
        self._source.forget()
        self._content.leading = True
        if outcome == NO:
            yield from self._close(calls)
        elif outcome == BROKEN:
            yield from self._skip_broken(calls)

    def _not_a_call(self) -> Reading[None]:
        if not self._trigger:
            return
        yield from self._source.literal(self._trigger)
        if self._trigger not in self._ask.special_tokens:
            self._add_content(self._trigger)

    def _close(self, calls: CallFormat) -> Reading[None]:
        if calls.closes:
            self._source.mark()
            outcome = yield from self._parts(calls.closes)
            if outcome == NO:
                self._source.back()
            self._source.forget()

    def _skip_broken(self, calls: CallFormat) -> Reading[None]:
        """Drop the rest of a broken call, up to its end or another call."""
        last = [part.text for parts in (calls.call, calls.closes) for part in parts[-1:] if isinstance(part, Text)]
        ends = Markers([*(text for text in last if len(text) > 1), calls.trigger, *self._ask.end_tokens])
        marker = yield from self._source.until(ends, lambda text: None)
        if marker and marker == calls.trigger:
            self._source.pos -= len(marker)

    def _parts(self, parts: tuple[Part, ...]) -> Reading[str]:
        """Read these parts: YES; NO if they are not there; BROKEN or CUT (the text ended) if a call has begun."""
        self._started = False
        name = ""
        self._call_id = None
        for place, part in enumerate(parts):
            found = True
            match part:
                case Blank():
                    yield from self._source.blanks()
                case Name():
                    name = yield from self._source.literal(*self._tools)
                    found = bool(name)
                case Arguments():
                    found = yield from self._arguments(part, name, parts[place + 1 :])
                case _:
                    found = yield from self._part(part, name)
            if not found:
                return self._failure()
        if self._started:
            self._events.end()
        return YES

    def _failure(self) -> str:
        ended = self._source.ended and self._source.pos == len(self._source.text)
        if ended:
            return CUT
        return BROKEN if self._started else NO

    def _part(self, part: Part, name: str) -> Reading[bool]:
        match part:
            case Text(text=text):
                return bool((yield from self._source.literal(text)))
            case CallId():
                return (yield from self._id(part, name))
            case Maybe(parts=inner):
                assert isinstance(inner[0], Text), "what may be left out begins with a text"
                if not (yield from self._source.literal(inner[0].text)):
                    return True
                for one in inner[1:]:
                    if isinstance(one, Blank):
                        yield from self._source.blanks()
                    elif not (yield from self._part(one, name)):
                        return False
                return True
            case _:
                raise AssertionError(f"{part} stands by itself")

    def _id(self, part: CallId, name: str) -> Reading[bool]:
        found = ""
        while len(found) < MAX_ID:
            char = yield from self._source.peek()
            if not char.isascii() or not (char.isdigit() if not part.length else char.isalnum()):
                break
            found += char
            self._source.pos += 1
        call_id = found if part.bare else f"functions.{name}:{found}"
        self._call_id = None if call_id in self._ids else call_id
        self._ids.add(call_id)
        return bool(found)

    def _arguments(self, part: Arguments, name: str, rest: tuple[Part, ...]) -> Reading[bool]:
        """Begin the call, if its arguments begin, and read them."""
        stop = next((one.text for one in rest if isinstance(one, Text)), "")
        if isinstance(part.notation, Tagged):
            yield from self._source.blanks()
            opening = yield from self._source.literal(part.notation.key_open, stop)
            if not opening:
                return False
            self._source.pos -= len(opening)
        elif (yield from self._source.peek()) != "{" and stop != ")":
            return False
        self._source.forget()
        self._content.drop()
        self._started = True
        self._events.start(name, self._call_id)
        tool = self._tools[name]
        return (yield from read_arguments(self._source, self._events.arguments, part.notation, tool, self._ends, stop))
