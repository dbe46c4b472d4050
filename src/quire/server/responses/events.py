"""`OutputBuilder`: from the message of a chat to the events of a stream and the equivalent output items."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from quire.frontend.formats.message import CallArguments, CallEnd, CallStart, ContentDelta, Event, ReasoningDelta
from quire.server.responses.custom_tools import InputReader
from quire.server.responses.items import Item, new_id, seal
from quire.server.streaming import typed_event

StreamEvent = dict[str, Any]
PAD_TO = 32
# Kinds of output items: prefix of ids, what the events of the text are called, and the field that has the text.
ITEMS = {
    "message": ("msg", "output_text", "text"),
    "reasoning": ("rs", "reasoning_text", "text"),
    "function_call": ("fc", "function_call_arguments", "arguments"),
    "custom_tool_call": ("ctc", "custom_tool_call_input", "input"),
}

_decode = msgspec.json.Decoder().decode


def encode_event(event: Mapping[str, Any], *, obfuscated: bool = False) -> bytes:
    """Return a server-sent event.

    Args:
        obfuscated: pad deltas, so that their sizes reveal less about their texts to observers of the connection.
    """
    if obfuscated and "delta" in event:
        fill = -len(event["delta"].encode()) % PAD_TO
        event = {**event, "obfuscation": secrets.token_hex(PAD_TO)[:fill]}
    return typed_event(event)


def obfuscated_event(data: bytes) -> bytes:
    """Return an encoded event with padding."""
    return encode_event(_decode(data.partition(b"\ndata: ")[2]), obfuscated=True)


class OutputBuilder:
    """The output of one response, so far.

    Args:
        sealed: whether reasoning comes with `encrypted_content`. custom: names of the tools that are custom ones.

    Attributes:
        sequence_number: of the next event.
    """

    def __init__(self, *, sealed: bool = False, custom: Collection[str] = ()) -> None:
        self.sequence_number = 0
        self._sealed = sealed
        self._custom = custom
        self._closed: list[Item] = []
        self._open: _OpenItem | None = None
        self._tokens = TokenQueue()

    def event(self, kind: str, **fields: Any) -> StreamEvent:
        """Return the next event."""
        event = {"type": kind, "sequence_number": self.sequence_number, **fields}
        self.sequence_number += 1
        return event

    @property
    def output(self) -> list[Item]:
        """The items so far; one that is not complete is in progress."""
        return [*self._closed, self._open.item("in_progress")] if self._open is not None else [*self._closed]

    def add(self, events: Sequence[Event], logprobs: Sequence[dict[str, Any]] = ()) -> list[StreamEvent]:
        """Return what more of the message means to a stream.

        Args:
            logprobs: of the tokens that brought it; those of reasoning, calls and marks are not shown.
        """
        self._tokens.add(logprobs)
        made: list[StreamEvent] = []
        for event in events:
            match event:
                case ReasoningDelta():
                    self._tokens.skip(event.text)
                    made += [*self._need("reasoning"), *self._delta(event.text)]
                case ContentDelta():
                    begun = self._need("message")
                    taken = self._tokens.take(event.text, begun=bool(begun), last=event is events[-1])
                    made += [*begun, *self._delta(event.text, taken)]
                case CallStart():
                    kind = "custom_tool_call" if event.name in self._custom else "function_call"
                    names = {"call_id": event.id or new_id("call"), "name": event.name}
                    made += [*self._close("completed"), *self._begin(_OpenItem(kind, names))]
                case CallArguments():
                    made += self._delta(event.text)
                case CallEnd():
                    made += self._close("completed")
        if events and not isinstance(events[-1], ContentDelta | ReasoningDelta):
            self._tokens.clear()
        return made

    def finish(self, *, complete: bool) -> list[StreamEvent]:
        """Return the end of what is open; a message that ended with nothing is an empty one.

        Args:
            complete: whether the message ended by itself. A call that it left open is incomplete all the same.
        """
        whole = complete and not (self._open is not None and self._open.is_call)
        made: list[StreamEvent] = []
        kinds = {item["type"] for item in self._closed} | ({self._open.kind} if self._open is not None else set())
        if complete and kinds <= {"reasoning"}:
            made += self._need("message")
        return [*made, *self._close("completed" if whole else "incomplete")]

    def _need(self, kind: str) -> list[StreamEvent]:
        """Begin an item of this kind, unless one is open."""
        if self._open is not None and self._open.kind == kind:
            return []
        return [*self._close("completed"), *self._begin(_OpenItem(kind, {}, sealed=self._sealed))]

    def _begin(self, item: _OpenItem) -> list[StreamEvent]:
        self._open = item
        added = item.item("in_progress", empty=True)
        made = [self.event("response.output_item.added", output_index=len(self._closed), item=added)]
        if not item.is_call:
            made.append(self.event("response.content_part.added", **self._place(item), part=item.part(empty=True)))
        return made

    def _delta(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> list[StreamEvent]:
        item = self._open
        assert item is not None, "a delta belongs to an open item"
        return self._delta_event(item, item.read(text), logprobs)

    def _delta_event(self, item: _OpenItem, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> list[StreamEvent]:
        if not text:
            return []
        extras: dict[str, Any] = {}
        if item.kind == "message":
            extras["logprobs"] = [*logprobs]
            item.logprobs += logprobs
        return [self.event(f"{item.stream}.delta", **self._place(item), delta=text, **extras)]

    def _close(self, status: str) -> list[StreamEvent]:
        item = self._open
        if item is None:
            return []
        place = self._place(item)
        made = self._delta_event(item, item.rest())
        made.append(self.event(f"{item.stream}.done", **place, **item.done()))
        if not item.is_call:
            made.append(self.event("response.content_part.done", **place, part=item.part()))
        whole = item.item(status)
        made.append(self.event("response.output_item.done", output_index=len(self._closed), item=whole))
        self._closed.append(whole)
        self._open = None
        return made

    def _place(self, item: _OpenItem) -> dict[str, Any]:
        place = {"item_id": item.item_id, "output_index": len(self._closed)}
        return place if item.is_call else {**place, "content_index": 0}


class _OpenItem:
    """An output item whose text grows: a message, reasoning, or a call, as `ITEMS` describes its kind.

    Args:
        names: of a call, `call_id` and `name`; empty for texts. sealed: whether reasoning has `encrypted_content`.

    Attributes:
        stream: what the types of the events of its text begin with. logprobs: of a message.
    """

    def __init__(self, kind: str, names: Mapping[str, str], *, sealed: bool = False) -> None:
        prefix, stream, self._field = ITEMS[kind]
        self.kind = kind
        self.stream = f"response.{stream}"
        self.item_id = new_id(prefix)
        self.is_call = bool(names)
        self.logprobs: list[dict[str, Any]] = []
        self._names = names
        self._sealed = sealed and kind == "reasoning"
        self._pieces: list[str] = []
        self._reader = InputReader() if kind == "custom_tool_call" else None

    @property
    def text(self) -> str:
        """The text so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return "".join(self._pieces)

    def read(self, text: str) -> str:
        """Add what the model wrote; return what that adds to the text."""
        return self._add(text if self._reader is None else self._reader.feed(text))

    def rest(self) -> str:
        """Add what the end adds to the text, and return it."""
        return self._add("" if self._reader is None else self._reader.finish())

    def _add(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text

    def part(self, *, empty: bool = False) -> dict[str, Any]:
        """Return the only part of a message or of reasoning."""
        text = "" if empty else self.text
        if self.kind == "message":
            logprobs = [] if empty else [*self.logprobs]
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        return {"type": "reasoning_text", "text": text}

    def done(self) -> dict[str, Any]:
        """Return the fields of the event that says that the text is complete."""
        if self.kind == "function_call":
            return {"name": self._names["name"], self._field: self.text}
        extras: dict[str, Any] = {"logprobs": self.logprobs} if self.kind == "message" else {}
        return {self._field: self.text, **extras}

    def item(self, status: str, *, empty: bool = False) -> Item:
        """Return the item; `empty`: without its text, as it is when it is added."""
        item: Item = {"id": self.item_id, "type": self.kind, "status": status}
        if self.is_call:
            return {**item, **self._names, self._field: "" if empty else self.text}
        own: Item = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        item |= own
        if self._sealed and status != "in_progress":
            item["encrypted_content"] = seal(self.text)
        return {**item, "content": [] if empty else [self.part()]}


TokenEntry = dict[str, Any]  # one of a chat's log-probabilities; `bytes` is what the token adds to the text


class TokenQueue:
    """Tokens in order, from when they come until the text that they make has come out of the parser.

    A parser keeps text back that may be a mark, and takes marks and blanks out; so one step may bring the end of the
    reasoning, all of the content and the beginning of a call.
    """

    def __init__(self) -> None:
        self._entries: list[TokenEntry] = []
        self._rest = b""  # of the last token that was taken: what has not come out yet

    def add(self, entries: Sequence[TokenEntry]) -> None:
        """Take up new tokens."""
        self._entries += entries

    def clear(self) -> None:
        """Forget all of them."""
        self._entries, self._rest = [], b""

    def skip(self, text: str) -> None:
        """Drop the tokens of a text that is not content, and all before."""
        data, ends = self._spelled()
        place = data.find(text.encode())
        if place < 0:
            self.clear()
            return
        behind = place + len(text.encode())
        self._rest = b""
        del self._entries[: sum(1 for end in ends if end <= behind)]

    def take(self, text: str, *, begun: bool, last: bool) -> list[TokenEntry]:
        """Return the tokens of a piece of content, and drop all before.

        Args:
            begun: whether content begins here, rather than continues. last: whether only content follows.
        """
        target = text.encode()
        if begun:
            self._rest = b""
        elif self._rest:
            count = min(len(self._rest), len(target))
            fits = self._rest[:count] == target[:count]
            target, self._rest = (target[count:], self._rest[count:]) if fits else (target, b"")
        if not target:
            return []
        data, ends = self._spelled()
        place = self._place(data, ends, target, begun, last)
        if place < 0:  # parts of characters, which the text shows as U+FFFD
            taken = [] if begun and not last else self._entries
            self._entries = []
            return taken
        behind = place + len(target)
        first = sum(1 for end in ends if end <= place)
        stop = next(index for index, end in enumerate(ends) if end >= behind) + 1
        taken = self._entries[first:stop]
        self._rest = data[behind : ends[stop - 1]]
        del self._entries[:stop]
        return taken

    def _spelled(self) -> tuple[bytes, list[int]]:
        """Return what the tokens spell, and where each of them ends."""
        pieces = [bytes(entry["bytes"] or ()) for entry in self._entries]
        return b"".join(pieces), list(itertools.accumulate(map(len, pieces)))

    @staticmethod
    def _place(data: bytes, ends: Sequence[int], target: bytes, begun: bool, last: bool) -> int:
        """Return where a text begins in what the tokens spell, -1 for nowhere."""
        if not begun:
            return data.find(target)  # at 0, but for blanks that the parser took out
        # Behind marks: most likely with a token of its own, and not within a mark, which comes before.
        starts = [start for start in (0, *ends[:-1]) if data.startswith(target, start)]
        if starts:
            return starts[-1] if last else starts[0]
        return data.rfind(target) if last else data.find(target)
