"""From Anthropic's messages, made of content blocks, to messages of a chat. Text only; other blocks are refused.

Tool results become messages of their own; neighbours with the same role become one. The origin of each message of the
chat is kept, so that errors can name it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.checks import Fields, Refused, check_not_empty, wrong_value
from quire.errors import RequestError, UnsupportedError, echo
from quire.frontend.tools import check_name
from quire.server.messages import read_content, text_type

ROLES = ("user", "assistant", "system")
MAX_MESSAGES = 100_000
# The fields of each type of block, and those that are refused.
BLOCKS: Mapping[str, tuple[tuple[str, ...], Refused]] = {
    "text": (("type", "text", "cache_control"), {"citations": ([],)}),
    "tool_use": (
        ("type", "id", "name", "input", "cache_control"),
        {"caller": ({"type": "direct"},), "toolset_name": ()},
    ),
    "tool_result": (("type", "tool_use_id", "content", "is_error", "cache_control"), {"toolset_name": ()}),
    "thinking": (("type", "thinking", "signature"), {}),
}
# The types of blocks that a message of a role may have.
ALLOWED: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking"),
    "system": ("text",),
}
ERROR_MARK = "Error: "


class Conversation:
    """The messages of a chat, made of a body's `system` and `messages`.

    Attributes:
        messages: of the chat. places: the field or message that each came from.

    Raises:
        RequestError: naming the place.
    """

    def __init__(self, body: Fields) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []
        self._calls: set[str] = set()
        if "system" in body:
            self._add_content("system", body, "system")
        check_not_empty(body.get("messages"), "messages")
        for message in body.parts("messages", "a list of objects", most=MAX_MESSAGES):
            role = message.only(("role", "content")).choice("role", ROLES)
            self._add_content(role, message, "content")

    def fields(self) -> dict[str, Any]:
        """Return the fields of the chat: messages, and whether its last one is continued."""
        last, place = self.messages[-1], self.places[-1]
        fields: dict[str, Any] = {"messages": [_with_plain_content(message) for message in self.messages]}
        if last["role"] == "assistant":
            if "tool_calls" in last:
                raise RequestError(
                    f"{place}: the last message has tool_use blocks that no tool_result answers", param=place
                )
            fields["continue_final_message"] = True
        return fields

    def _add_content(self, role: str, message: Fields, field: str) -> None:
        content, where = message.required(field), message.place(field)
        if isinstance(content, str):
            self._last_of(role, where)["content"].append({"type": "text", "text": content})
            return
        check_not_empty(content, where)
        for block in message.parts(field, "a string or a list of blocks"):
            kind = _check_block(block)
            if kind not in ALLOWED[role]:
                allowed = f"one of {', '.join(ALLOWED[role])} in a message of the role {role}"
                raise wrong_value(block.place("type"), allowed, kind)
            self._add_block(role, kind, block)

    def _last_of(self, role: str, where: str) -> dict[str, Any]:
        """Return the last message, a new one if its role is another."""
        if not self.messages or self.messages[-1]["role"] != role:
            self._append({"role": role, "content": []}, where)
        return self.messages[-1]

    def _append(self, message: dict[str, Any], where: str) -> None:
        self.messages.append(message)
        self.places.append(where.partition(".")[0])

    def _add_block(self, role: str, kind: str, block: Fields) -> None:
        if kind == "tool_result":
            self._append(self._result(block), block.where)
            return
        message = self._last_of(role, block.where)
        match kind:
            case "text":
                message["content"].append({"type": "text", "text": block.string("text")})
            case "tool_use":
                message.setdefault("tool_calls", []).append(self._call(block))
            case "thinking":
                thinking = block.string("thinking")
                block.string("signature")
                if thinking:
                    before = message.get("reasoning")
                    message["reasoning"] = thinking if before is None else f"{before}\n\n{thinking}"

    def _call(self, block: Fields) -> dict[str, Any]:
        call_id, where = block.string("id"), block.place("id")
        if call_id in self._calls:
            raise RequestError(f"{where}: there are two calls with the id {echo(call_id)}", param=where)
        self._calls.add(call_id)
        name = check_name(block.get("name"), block.place("name"))
        arguments = json.dumps(block.object("input").given, ensure_ascii=False)
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _result(self, block: Fields) -> dict[str, Any]:
        call_id, where = block.string("tool_use_id"), block.place("tool_use_id")
        if call_id not in self._calls:
            raise RequestError(
                f"{where}: no message before has a tool_use block with the id {echo(call_id)}", param=where
            )
        given = block.get("content", "")
        content = read_content(given, block, _result_text, "blocks") if given != [] else ""
        texts = [content] if isinstance(content, str) else content
        if block.boolean("is_error", False):
            texts = [ERROR_MARK + "".join(texts)]
        return {"role": "tool", "tool_call_id": call_id, "content": [{"type": "text", "text": text} for text in texts]}


def _result_text(block: Fields) -> str:
    kind = _check_block(block)
    if kind != "text":
        raise wrong_value(block.place("type"), "text", kind)
    return block.string("text")


def _check_block(block: Fields) -> str:
    """Check the fields of a block; return its type. Raises `UnsupportedError` for types that are not supported."""
    where = block.place("type")
    if block.string("type") == "redacted_thinking":
        raise UnsupportedError(f"{where}: redacted_thinking blocks cannot be read by this server", param=where)
    kind = text_type(block, BLOCKS, f"one of {', '.join(BLOCKS)}")
    block.only(*BLOCKS[kind])
    check_cache_control(block)
    return kind


def check_cache_control(fields: Fields) -> None:
    """Check a cache breakpoint, if there is one. It has no effect: every prefix is cached, for as long as possible."""
    if "cache_control" in fields:
        control = fields.object("cache_control", ("type", "ttl"))
        control.choice("type", ("ephemeral",), expected="ephemeral")
        control.choice("ttl", ("5m", "1h"), "5m", expected="5m or 1h")


def _with_plain_content(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its content as a string where that is equivalent."""
    plain = dict(message)
    content = plain["content"]
    if len(content) == 1:
        plain["content"] = content[0]["text"]
    elif not content:
        # Beside something else empty content is left out: templates look at whether there is any.
        del plain["content"]
        if not ("tool_calls" in plain or "reasoning" in plain):
            plain["content"] = ""
    return plain
