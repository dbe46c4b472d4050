"""From Anthropic's messages, made of content blocks, to messages of a chat. Text only; other blocks are refused.

Tool results become messages of their own; neighbours with the same role become one. The origin of each message of the
chat is kept, so that errors can name it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.checks import (
    check_bool,
    check_object,
    choice_field,
    missing,
    required,
    string_field,
    wrong_type,
    wrong_value,
)
from quire.errors import RequestError, UnsupportedError, echo
from quire.frontend.tools import check_name

ROLES = ("user", "assistant", "system")
MAX_MESSAGES = 100_000
MEDIA_BLOCKS = ("image", "document", "search_result", "container_upload", "video", "audio")
# Which blocks a message of a role may have, with the fields of each.
BLOCKS: Mapping[str, tuple[str, ...]] = {
    "text": ("type", "text", "cache_control", "citations"),
    "tool_use": ("type", "id", "name", "input", "cache_control", "caller", "toolset_name"),
    "tool_result": ("type", "tool_use_id", "content", "is_error", "cache_control", "toolset_name"),
    "thinking": ("type", "thinking", "signature"),
}
ALLOWED: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking"),
    "system": ("text",),
}
ERROR_MARK = "Error: "


class Conversation:
    """Builds the messages of a chat.

    Attributes:
        messages: so far. places: the field or message that each came from.
    """

    def __init__(self, ignore_unknown: bool = False) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []
        self._ignore_unknown = ignore_unknown
        self._calls: set[str] = set()

    def fields(self) -> dict[str, Any]:
        """Return the fields of the chat: messages, and whether its last one is continued."""
        last = self.messages[-1]
        fields: dict[str, Any] = {"messages": [_finished(message) for message in self.messages]}
        if last["role"] == "assistant":
            if "tool_calls" in last:
                raise RequestError(
                    f"{self.places[-1]}: the last message has tool_use blocks that no tool_result answers",
                    param=self.places[-1],
                )
            fields["continue_final_message"] = True
        return fields

    def add_system(self, content: Any, where: str) -> None:
        """Add the field `system`."""
        if content is not None:
            self._add_content("system", content, where)

    def add_all(self, messages: Any) -> None:
        """Add the field `messages`. Raises `RequestError` naming the place."""
        if not isinstance(messages, list):
            raise wrong_type("messages", "a list of objects", messages)
        if not messages:
            raise RequestError("messages must not be empty", param="messages", code="empty_array")
        if len(messages) > MAX_MESSAGES:
            raise RequestError(
                f"messages may have at most {MAX_MESSAGES} items, got {len(messages)}",
                param="messages",
                code="array_above_max_length",
            )
        for index, message in enumerate(messages):
            where = f"messages[{index}]"
            message = check_object(message, where, ("role", "content"), self._ignore_unknown)
            role = choice_field(message, "role", where, ROLES)
            if message.get("content") is None:
                raise missing(f"{where}.content")
            self._add_content(role, message["content"], f"{where}.content")

    def _add_content(self, role: str, content: Any, where: str) -> None:
        if isinstance(content, str):
            self._last_of(role, where)["content"].append({"type": "text", "text": content})
            return
        if not isinstance(content, list):
            raise wrong_type(where, "a string or a list of blocks", content)
        if not content:
            raise RequestError(f"{where} must not be empty", param=where, code="empty_array")
        for index, block in enumerate(content):
            self._add_block(role, block, f"{where}[{index}]")

    def _last_of(self, role: str, where: str) -> dict[str, Any]:
        """Return the last message, a new one if its role is another."""
        if not self.messages or self.messages[-1]["role"] != role:
            self._append({"role": role, "content": []}, where)
        return self.messages[-1]

    def _append(self, message: dict[str, Any], where: str) -> None:
        self.messages.append(message)
        self.places.append(where.partition(".")[0])

    def _add_block(self, role: str, block: Any, where: str) -> None:
        kind = check_kind(block, where)
        if kind not in ALLOWED[role]:
            allowed = ", ".join(ALLOWED[role])
            raise wrong_value(f"{where}.type", f"one of {allowed} in a message of the role {role}", kind)
        block = without_nulls(check_object(block, where, BLOCKS[kind], self._ignore_unknown))
        if "cache_control" in block:
            check_cache_control(block["cache_control"], f"{where}.cache_control")
        if block.get("toolset_name") is not None:
            raise UnsupportedError(f"{where}.toolset_name: there are no toolsets here", param=f"{where}.toolset_name")
        match kind:
            case "text":
                part = {"type": "text", "text": _text_of(block, where)}
                self._last_of(role, where)["content"].append(part)
            case "tool_result":
                self._append(self._result(block, where), where)
            case "tool_use":
                self._last_of(role, where).setdefault("tool_calls", []).append(self._call(block, where))
            case "thinking":
                self._add_thinking(self._last_of(role, where), block, where)

    def _add_thinking(self, message: dict[str, Any], block: Mapping[str, Any], where: str) -> None:
        for name in ("thinking", "signature"):
            string_field(block, name, where)
        if block["thinking"]:
            before = message.get("reasoning")
            message["reasoning"] = block["thinking"] if before is None else f"{before}\n\n{block['thinking']}"

    def _call(self, block: Mapping[str, Any], where: str) -> dict[str, Any]:
        call_id = string_field(block, "id", where)
        if call_id in self._calls:
            raise RequestError(f"{where}.id: there are two calls with the id {echo(call_id)}", param=f"{where}.id")
        self._calls.add(call_id)
        name = check_name(block.get("name"), f"{where}.name")
        if "input" not in block:
            raise missing(f"{where}.input")
        if not isinstance(block["input"], Mapping):
            raise wrong_type(f"{where}.input", "an object", block["input"])
        if block.get("caller", {"type": "direct"}) != {"type": "direct"}:
            raise UnsupportedError(
                f"{where}.caller: only calls of the model's own (direct) are supported", param=f"{where}.caller"
            )
        arguments = json.dumps(block["input"], ensure_ascii=False)
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _result(self, block: Mapping[str, Any], where: str) -> dict[str, Any]:
        call_id = string_field(block, "tool_use_id", where)
        if call_id not in self._calls:
            raise RequestError(
                f"{where}.tool_use_id: no message before has a tool_use block with the id {echo(call_id)}",
                param=f"{where}.tool_use_id",
            )
        content = self._result_content(block.get("content", ""), f"{where}.content")
        if "is_error" in block and check_bool(f"{where}.is_error", block["is_error"]):
            content = [{"type": "text", "text": ERROR_MARK}, *content]
            content = [{"type": "text", "text": "".join(part["text"] for part in content)}]
        return {"role": "tool", "tool_call_id": call_id, "content": content}

    def _result_content(self, content: Any, where: str) -> list[dict[str, Any]]:
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise wrong_type(where, "a string or a list of blocks", content)
        parts = []
        for index, block in enumerate(content):
            place = f"{where}[{index}]"
            kind = check_kind(block, place)
            if kind != "text":
                raise wrong_value(f"{place}.type", "text", kind)
            block = without_nulls(check_object(block, place, BLOCKS["text"], self._ignore_unknown))
            if "cache_control" in block:
                check_cache_control(block["cache_control"], f"{place}.cache_control")
            parts.append({"type": "text", "text": _text_of(block, place)})
        return parts or [{"type": "text", "text": ""}]


def check_kind(block: Any, where: str) -> str:
    """Return the type of a block. Raises `UnsupportedError` for types that are not supported."""
    if not isinstance(block, Mapping):
        raise wrong_type(where, "an object", block)
    kind = string_field(block, "type", where)
    where = f"{where}.type"
    if kind in MEDIA_BLOCKS:
        raise UnsupportedError(
            f"{where}: this model reads text only, got {echo(kind)}", param=where, code="unsupported_content_type"
        )
    if kind == "redacted_thinking":
        raise UnsupportedError(f"{where}: what is in redacted_thinking blocks can be read by nobody here", param=where)
    if kind not in BLOCKS:
        raise UnsupportedError(f"{where} must be one of {', '.join(BLOCKS)}, got {echo(kind)}", param=where)
    return kind


def check_cache_control(value: Any, where: str) -> None:
    """Check a cache breakpoint. It has no effect: every prefix is cached, and none for a certain time."""
    value = check_object(value, where, ("type", "ttl"))
    if required(value, "type", where) != "ephemeral":
        raise wrong_value(f"{where}.type", "ephemeral", value["type"])
    if value.get("ttl") not in (None, "5m", "1h"):
        raise wrong_value(f"{where}.ttl", "5m or 1h", value["ttl"])


def without_nulls(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object without its null fields, which are absent ones."""
    return {name: item for name, item in value.items() if item is not None}


def _text_of(block: Mapping[str, Any], where: str) -> str:
    if block.get("citations", []) != []:
        raise UnsupportedError(f"{where}.citations are not supported", param=f"{where}.citations")
    return string_field(block, "text", where)


def _finished(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its content as a string where that is equivalent."""
    finished = dict(message)
    content = finished["content"]
    if len(content) == 1:
        finished["content"] = content[0]["text"]
    elif not content:
        # Beside something else empty content is left out: templates look at whether there is any.
        del finished["content"]
        if not ("tool_calls" in finished or "reasoning" in finished):
            finished["content"] = ""
    return finished
