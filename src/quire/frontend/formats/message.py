"""What an assistant's message may contain, and the parsed message: plain data that formats, server and `LLM` share.

A message is reasoning, content and tool calls. A parser turns the generated text into the events below, however it is
cut into pieces; `Message` adds the events up. So a stream and a whole answer cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from quire.structured_outputs import StructuredOutputParams


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call. `parameters`: JSON schema of its arguments; `strict`: enforce all of it."""

    name: str
    parameters: dict[str, Any] = {}
    description: str | None = None
    strict: bool = False


class MessageSpec(msgspec.Struct, frozen=True):
    """What the next message may contain.

    Attributes:
        tools: may be called, as `choice` says: "auto", "none", "required", or "function:NAME". parallel: several
            times. structured_outputs: constrains the content; where tools may be called, the message is either.
        reasoning_open: the prompt ends inside reasoning. can_reason: reasoning may come first.
        special_tokens: texts and ids of the tokenizer's special tokens; end_tokens: texts of those that end a message.
    """

    tools: list[Tool] = []
    choice: str = "auto"
    parallel: bool = True
    structured_outputs: StructuredOutputParams | None = None
    reasoning_open: bool = False
    can_reason: bool = False
    special_tokens: dict[str, int] = {}
    end_tokens: list[str] = []


class ReasoningDelta(msgspec.Struct, frozen=True):
    """More reasoning."""

    text: str


class ContentDelta(msgspec.Struct, frozen=True):
    """More content."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """Tool call number `index` (0, 1, ...) begins. `id`: given by the model, or None: the server makes one up."""

    index: int
    name: str
    id: str | None = None


class CallArguments(msgspec.Struct, frozen=True):
    """More of the JSON text of the arguments of call `index`."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True):
    """Call `index` is complete: its arguments are a JSON object. A call that was cut off never gets this."""

    index: int


Event = ReasoningDelta | ContentDelta | CallStart | CallArguments | CallEnd


class MessageParser(Protocol):
    """Reads one message. Linear in the length of the text, and indifferent to where it is cut."""

    def feed(self, text: str) -> list[Event]:
        """Return the events of more text; text that may be the beginning of a marker is held back."""

    def finish(self) -> list[Event]:
        """End the message; return the events of the text that was held back."""


class ToolCall(msgspec.Struct):
    """A tool call so far. `arguments`: JSON text, as the model wrote it or as converted from the model's notation."""

    name: str
    arguments: str = ""
    id: str | None = None
    complete: bool = False


class Message(msgspec.Struct):
    """A message so far; texts are None until there is some."""

    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[ToolCall] = []

    def add(self, events: Iterable[Event]) -> None:
        """Take over what a parser returned."""
        for event in events:
            match event:
                case ReasoningDelta():
                    self.reasoning = (self.reasoning or "") + event.text
                case ContentDelta():
                    self.content = (self.content or "") + event.text
                case CallStart():
                    assert event.index == len(self.tool_calls), "calls come one after the other"
                    self.tool_calls.append(ToolCall(event.name, id=event.id))
                case CallArguments():
                    self.tool_calls[event.index].arguments += event.text
                case CallEnd():
                    self.tool_calls[event.index].complete = True
