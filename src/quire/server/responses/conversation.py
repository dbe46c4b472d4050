"""From items to the messages of a chat, and which of them go when a conversation has become too long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.errors import RequestError, echo
from quire.server.messages import MAX_CALLS
from quire.server.responses.custom_tools import arguments_of
from quire.server.responses.items import CALL_TEXT, Item

Message = dict[str, Any]
ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}


def as_messages(instructions: str | None, earlier: Sequence[Item], items: Sequence[Item], source: str) -> list[Message]:
    """Return the messages that instructions, what was said earlier and new items are.

    Reasoning, a message and calls that follow one another are one message of the assistant's.

    Args:
        source: the field of the request that stands for what was said earlier.

    Raises:
        RequestError: naming the place among the items.
    """
    builder = _Builder()
    if instructions is not None:
        builder.say("system", [instructions])
    for index, item in enumerate(earlier):
        # What was cut off has no place in a conversation: it is no JSON.
        if item["type"] not in CALL_TEXT or item["status"] == "completed":
            builder.add(item, f"{source}.items[{index}]")
    for index, item in enumerate(items):
        builder.add(item, f"input[{index}]")
    return builder.messages


class _Builder:
    """Adds items to a conversation, one after the other."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._calls: dict[str, str] = {}  # id -> type

    def add(self, item: Item, where: str) -> None:
        """Add an item; `where` is what errors call it."""
        match item["type"]:
            case "message":
                self.say(ROLES[item["role"]], [part.get("text", part.get("refusal")) for part in item["content"]])
            case "reasoning":
                parts = item["content"] or item["summary"]
                if parts:
                    self._think("\n".join([part["text"] for part in parts]))
            case "function_call":
                self._call(item, item["arguments"], where)
            case "custom_tool_call":
                self._call(item, arguments_of(item["input"]), where)
            case "function_call_output" | "custom_tool_call_output":
                self._answer(item, where)

    def say(self, role: str, texts: list[str]) -> None:
        """Add a message."""
        parts = [{"type": "text", "text": text} for text in texts]
        content: Any = texts[0] if len(texts) == 1 else parts
        last = self.messages[-1] if self.messages else {}
        if role == "assistant" and last.get("role") == role and not last.keys() & {"content", "tool_calls"}:
            last["content"] = content
        elif role == "system" and len(self.messages) == 1 and last["role"] == role:
            # Many templates know one system message only.
            first = last["content"]
            last["content"] = [*([{"type": "text", "text": first}] if isinstance(first, str) else first), *parts]
        else:
            self.messages.append({"role": role, "content": content})

    def _think(self, text: str) -> None:
        last = self.messages[-1] if self.messages else {}
        if last.get("role") == "assistant" and not last.keys() & {"content", "tool_calls"}:
            last["reasoning"] += "\n" + text
        else:
            self.messages.append({"role": "assistant", "reasoning": text})

    def _call(self, item: Item, arguments: str, where: str) -> None:
        call_id = item["call_id"]
        if call_id in self._calls:
            raise RequestError(
                f"{where}.call_id: there are two calls with the id {echo(call_id)}", param=f"{where}.call_id"
            )
        self._calls[call_id] = item["type"]
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant"})
        calls = self.messages[-1].setdefault("tool_calls", [])
        if len(calls) == MAX_CALLS:
            raise RequestError(
                f"{where}: there may be at most {MAX_CALLS} calls in a row", param=where, code="array_above_max_length"
            )
        function = {"name": item["name"], "arguments": arguments}
        calls.append({"id": call_id, "type": "function", "function": function})

    def _answer(self, item: Item, where: str) -> None:
        call_id = item["call_id"]
        kind = item["type"].removesuffix("_output")
        if self._calls.get(call_id) != kind:
            raise RequestError(
                f"{where}.call_id: no item before is a {kind} with the call_id {echo(call_id)}",
                param=f"{where}.call_id",
            )
        output = item["output"]
        content = output if isinstance(output, str) else [{"type": "text", "text": part["text"]} for part in output]
        name = {} if "name" not in item else {"name": item["name"]}
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content, **name})


def turns(messages: Sequence[Message]) -> list[int]:
    """Return where a conversation may begin when its beginning goes: at each message of the user's but the first."""
    return [index for index, message in enumerate(messages) if message["role"] == "user"][1:]


def without_beginning(messages: Sequence[Message], start: int) -> list[Message]:
    """Return the conversation from `start` on, behind the system messages it begins with."""
    head = 0
    while messages[head]["role"] == "system":
        head += 1
    return [*messages[:head], *messages[start:]]
