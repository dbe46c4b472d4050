"""One choice of a chat: from generated text to its message, or to the deltas of a stream.

`ChoiceReader.read` is the only way from text to events; a whole message is all events added up, a delta is one event.
So a stream and a whole response have the same content, up to the random ids of tool calls.
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
        """Return nothing: no text is held back."""
        return []


class ChoiceReader:
    """Reads the text of one choice.

    Args:
        named: `tool_choice` named a function, so that calling it is no finish reason of its own.
        reasoning: whether the message includes reasoning.
    """

    def __init__(self, parser: MessageParser, *, named: bool = False, reasoning: bool = True) -> None:
        self._parser = parser
        self._named = named
        self._reasoning = reasoning
        self._called = False
        self._complete = False
        self._content = False

    def read(self, text: str, finished: bool) -> list[Event]:
        """Return the events of more text; with the last one, `finished`, also of text held back till then."""
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
        """Return the finish reason of the message, given that of the text: complete calls have their own."""
        return "tool_calls" if reason == "stop" and self._complete and not self._named else reason

    @property
    def is_empty(self) -> bool:
        """Whether there was neither content nor a call; content is "" then, and null only beside calls."""
        return not self._content and not self._called


def joined(events: Iterable[Event]) -> list[Event]:
    """Return events without empty ones, adjacent deltas of the same part merged."""
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
    """Return a new id for a call to which the model gave none."""
    return f"call_{secrets.token_hex(12)}"


def delta(event: Event) -> dict[str, Any] | None:
    """Return the delta of a streamed message for an event, None if there is none."""
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
    """Return the message for a whole text."""
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
