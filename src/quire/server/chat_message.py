"""One choice of a chat answer: from generated text to its message, or to the deltas of a stream.

There is one way from text to events (`ChoiceReader.read`); a whole message is all events added up, a delta is what one
event says. So a stream and a whole answer hold the same, up to the random ids of calls, which come from one place too.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

from quire.frontend.formats.message import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentDelta,
    Event,
    Message,
    MessageParser,
    ReasoningDelta,
)


class PlainParser:
    """Reads a message that is nothing but content."""

    def feed(self, text: str) -> list[Event]:
        """Return the text as content."""
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[Event]:
        """Return nothing: nothing was kept back."""
        return []


class ChoiceReader:
    """Reads the text of one choice.

    Args:
        named: one certain function had to be called, so that calling it is no choice of the model's.
        reasoning: whether reasoning is shown.
    """

    def __init__(self, parser: MessageParser, *, named: bool = False, reasoning: bool = True) -> None:
        self._parser = parser
        self._named = named
        self._reasoning = reasoning
        self._called = False
        self._complete = False
        self._content = False

    def read(self, text: str, finished: bool) -> list[Event]:
        """Return what more text brings; with the last one, `finished`, also what was kept back till then."""
        events = self._parser.feed(text) if text else []
        if finished:
            events = [*events, *self._parser.finish()]
        return [self._noted(event) for event in joined(events) if self._reasoning or type(event) is not ReasoningDelta]

    def _noted(self, event: Event) -> Event:
        match event:
            case ContentDelta():
                self._content = True
            case CallStart():
                self._called = True
                return CallStart(event.index, event.name, event.id or new_call_id())
            case CallEnd():
                self._complete = True
        return event

    def finish_reason(self, reason: str | None) -> str | None:
        """Return why the message ended, given why the text did: complete calls are a reason of their own."""
        return "tool_calls" if reason == "stop" and self._complete and not self._named else reason

    @property
    def is_empty(self) -> bool:
        """Whether there was neither content nor a call; content is "" then, and null only beside calls."""
        return not self._content and not self._called


def joined(events: Iterable[Event]) -> list[Event]:
    """Return events without empty ones, neighbours that say more of the same in one."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        match event, last:
            case (ReasoningDelta(text=""), _) | (ContentDelta(text=""), _) | (CallArguments(text=""), _):
                continue
            case ReasoningDelta(), ReasoningDelta():
                result[-1] = ReasoningDelta(last.text + event.text)
            case ContentDelta(), ContentDelta():
                result[-1] = ContentDelta(last.text + event.text)
            case CallArguments(), CallArguments() if last.index == event.index:
                result[-1] = CallArguments(event.index, last.text + event.text)
            case _:
                result.append(event)
    return result


def new_call_id() -> str:
    """Return an id for a call that the model gave none."""
    return f"call_{secrets.token_hex(12)}"


def delta(event: Event) -> dict[str, Any] | None:
    """Return what an event adds to a streamed message, None for nothing."""
    match event:
        case ReasoningDelta():
            return {"reasoning": event.text}
        case ContentDelta():
            return {"content": event.text}
        case CallStart():
            function = {"name": event.name, "arguments": ""}
            return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
        case CallArguments():
            return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
        case CallEnd():
            return None


def whole_message(reader: ChoiceReader, text: str) -> dict[str, Any]:
    """Return the message that a text is."""
    message = Message()
    message.add(reader.read(text, finished=True))
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "" if reader.is_empty else message.content,
        "refusal": None,
    }
    if message.reasoning is not None:
        answer["reasoning"] = message.reasoning
    if message.tool_calls:
        answer["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return answer
