"""Tools and which of them may be called: `tools`, `tool_choice` and `parallel_tool_calls`, checked.

Whether a tool's schema can be enforced is found out where the grammar is made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from quire.checks import Fields, check_not_empty, check_string, list_items, missing, wrong_type, wrong_value
from quire.errors import RequestError, UnsupportedError, echo
from quire.frontend.formats.message import Tool

MAX_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MODES = ("none", "auto", "required")
TOOL_FIELDS = ("type", "function")
FUNCTION_FIELDS = ("name", "description", "parameters", "strict")


class ToolRequest(msgspec.Struct, frozen=True):
    """What a request says of tools.

    Attributes:
        shown: as the chat template gets them. callable: those that may be called, at these `places` among all.
        choice: as in `MessageSpec`.
    """

    shown: list[dict[str, Any]] = []
    callable: list[Tool] = []
    places: list[int] = []
    choice: str = "none"
    parallel: bool = True

    @property
    def named(self) -> bool:
        """Whether one certain function must be called."""
        return self.choice.startswith("function:")


def requested_tools(tools: Any, choice: Any, parallel: bool, *, ignore_unknown: bool = False) -> ToolRequest:
    """Return what `tools`, `tool_choice` and `parallel_tool_calls` ask for.

    Raises:
        RequestError: naming the place. UnsupportedError: a tool that is no function.
    """
    if tools is None:
        if choice not in (None, "none"):
            _check_mode(choice)
            raise RequestError("tool_choice needs tools", param="tool_choice")
        return ToolRequest()
    checked = _check_tools(tools, ignore_unknown)
    mode, allowed = _check_choice("auto" if choice is None else choice, [tool.name for tool in checked], ignore_unknown)
    places = [place for place, tool in enumerate(checked) if tool.name in allowed]
    shown = [{"type": "function", "function": _without_nulls(tool["function"])} for tool in tools]
    return ToolRequest(
        shown=shown,
        callable=[checked[place] for place in places],
        places=places,
        choice=mode,
        parallel=parallel and not mode.startswith("function:"),
    )


def _without_nulls(function: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in function.items() if value is not None and name in FUNCTION_FIELDS}


def _check_tools(tools: Any, ignore_unknown: bool) -> list[Tool]:
    if tools == []:
        raise RequestError("tools must not be empty; leave it out", param="tools", code="empty_array")
    checked: dict[str, Tool] = {}
    for where, item in list_items(tools, "tools", most=MAX_TOOLS):
        tool = _check_tool(Fields(item, where, ignore_unknown=ignore_unknown))
        if tool.name in checked:
            where = f"{where}.function.name"
            raise RequestError(f"{where}: there are two tools called {echo(tool.name)}", param=where)
        checked[tool.name] = tool
    return list(checked.values())


def _check_tool(tool: Fields) -> Tool:
    kind = tool.only(TOOL_FIELDS).get("type", "function")
    if kind != "function":
        raise UnsupportedError(f"{tool.place('type')} must be function, got {echo(kind)}", param=tool.place("type"))
    function = tool.object("function", FUNCTION_FIELDS)
    return Tool(
        name=check_name(function.get("name"), function.place("name")),
        parameters=_check_parameters(function.get("parameters"), function.place("parameters")),
        description=function.string("description") if "description" in function else None,
        strict=function.boolean("strict", False),
    )


def check_name(name: Any, where: str) -> str:
    """Return the name of a function. Raises `RequestError`."""
    if name is None:
        raise missing(where)
    if not NAME.fullmatch(check_string(name, where)):
        raise wrong_value(where, "1 to 64 of the characters A-Za-z0-9_-", name)
    return str(name)


def _check_parameters(schema: Any, where: str) -> dict[str, Any]:
    """Return the schema of a function's arguments, which are an object in any case."""
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(schema, Mapping):
        raise wrong_type(where, "a JSON schema", schema)
    if schema.get("type", "object") != "object":
        message = f"{where} must be the schema of an object, got type {echo(schema['type'])} (at #/type)"
        raise RequestError(message, param=where, code="invalid_function_parameters")
    return {"type": "object", **schema}


def _check_mode(choice: Any) -> None:
    if isinstance(choice, str):
        if choice not in MODES:
            raise wrong_value("tool_choice", f"one of {', '.join(MODES)}, or name a function", choice)
    elif not isinstance(choice, Mapping):
        raise wrong_type("tool_choice", "a string or an object", choice)


def _check_choice(choice: Any, names: list[str], ignore_unknown: bool) -> tuple[str, list[str]]:
    """Return the choice as in `MessageSpec`, and which functions it admits."""
    _check_mode(choice)
    if isinstance(choice, str):
        return choice, names
    fields = Fields(choice, "tool_choice", ignore_unknown=ignore_unknown)
    kind = fields.choice("type", ("function", "allowed_tools"), expected="function or allowed_tools")
    if kind == "function":
        name = _chosen(fields, names)
        return f"function:{name}", [name]
    allowed = fields.object("allowed_tools", ("mode", "tools"))
    mode = allowed.choice("mode", ("auto", "required"), expected="auto or required")
    check_not_empty(allowed.required("tools"), allowed.place("tools"))
    return mode, [_chosen(tool, names) for tool in allowed.parts("tools")]


def _chosen(tool: Fields, names: list[str]) -> str:
    """Return the name in {"type": "function", "function": {"name": ...}}."""
    function = tool.only(TOOL_FIELDS).object("function", ("name",))
    name = check_name(function.get("name"), function.place("name"))
    if name not in names:
        where = function.place("name")
        raise RequestError(f"{where}: no tool is called {echo(name)}; there is {', '.join(names[:20])}", param=where)
    return name
