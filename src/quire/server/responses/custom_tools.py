"""Custom tools: to a model each is a function with one text, `input`; to the client, a tool that takes that text.

`InputReader` gets the text out of a call's arguments while they are still being written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from quire.checks import Fields
from quire.errors import UnsupportedError
from quire.frontend.tools import check_name

CUSTOM = "custom"
CUSTOM_FIELDS = ("type", "name", "description", "format")
ARGUMENT = "input"
PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {ARGUMENT: {"type": "string"}},
    "required": [ARGUMENT],
    "additionalProperties": False,
}
HEAD = re.compile(r'\s*\{\s*"' + ARGUMENT + r'"\s*:\s*"')
BODY = re.compile(r'(?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
ESCAPED_LENGTH = len(r"\u0000")


def custom_names(tools: Any) -> frozenset[str]:
    """Return the names of the custom tools of a request that has been checked."""
    return frozenset(tool["name"] for tool in tools or () if tool["type"] == CUSTOM)


def function_of(tool: Fields) -> dict[str, Any]:
    """Return the function that a custom tool is; its fields are known to be allowed ones.

    Raises:
        RequestError: naming the place. UnsupportedError: its input is to follow a grammar.
    """
    if "format" in tool:
        form = tool.object("format")
        place = form.place("type")
        if form.required("type") == "grammar":
            raise UnsupportedError(
                f"{place}: grammars for the input of custom tools are not supported by this server; the only value "
                "accepted is text",
                param=place,
            )
        form.choice("type", ("text",), expected="text")
        form.only(("type",))
    description = {"description": tool.get("description")} if "description" in tool else {}
    name = check_name(tool.get("name"), tool.place("name"))
    return {"name": name, **description, "parameters": PARAMETERS, "strict": True}


def arguments_of(text: str) -> str:
    """Return the arguments of the call that a custom call with this input is."""
    return json.dumps({ARGUMENT: text}, ensure_ascii=False)


def shown(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a custom tool as a response repeats it."""
    fields = {name: tool[name] for name in CUSTOM_FIELDS if tool.get(name) is not None}
    return {"format": {"type": "text"}, **fields}


class InputReader:
    """Reads the input out of `{"input": "..."}`, piece by piece."""

    def __init__(self) -> None:
        self._left = ""
        self._begun = False
        self._ended = False

    def feed(self, text: str) -> str:
        """Return what more of the arguments adds to the input."""
        if self._ended:
            return ""
        self._left += text
        if not self._begun:
            head = HEAD.match(self._left)
            if head is None:
                return ""
            self._begun = True
            self._left = self._left[head.end() :]
        body = BODY.match(self._left)
        assert body is not None, "it matches nothing at least"
        end = body.end()
        self._ended = self._left[end : end + 1] == '"'
        read: str = json.loads(f'"{body[0]}"', strict=False)
        if not self._ended and "\ud800" <= read[-1:] <= "\udbff":  # half of a character; the other one is to come
            read, end = read[:-1], end - ESCAPED_LENGTH
        self._left = self._left[end:]
        return LONE_SURROGATE.sub("\ufffd", read)

    def finish(self) -> str:
        """Return what to add at the end: arguments of another form as they are."""
        return "" if self._begun else self._left
