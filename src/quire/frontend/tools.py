"""Tools and which of them may be called: `tools`, `tool_choice` and `parallel_tool_calls`, checked.

Whether a tool's schema can be enforced is found out where the grammar is made; `explain` tells it in OpenAI's words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from quire.checks import check_object, missing, wrong_type, wrong_value
from quire.errors import RequestError, UnsupportedError, echo, rename_field
from quire.frontend.formats.message import Tool

MAX_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MODES = ("none", "auto", "required")
TOOL_FIELDS = ("type", "function")
FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
PARAMETERS = re.compile(r"tools\[(\d+)\]\.function\.parameters")


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
    checked = check_tools(tools, ignore_unknown=ignore_unknown)
    mode, allowed = _check_choice("auto" if choice is None else choice, [tool.name for tool in checked])
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


def check_tools(tools: Any, *, ignore_unknown: bool = False) -> list[Tool]:
    """Return the tools of a request. Raises as `requested_tools`."""
    if not isinstance(tools, list):
        raise wrong_type("tools", "a list", tools)
    if not tools:
        raise RequestError("tools must not be empty; leave it out", param="tools", code="empty_array")
    if len(tools) > MAX_TOOLS:
        raise RequestError(
            f"tools may have at most {MAX_TOOLS} items, got {len(tools)}", param="tools", code="array_above_max_length"
        )
    checked: list[Tool] = []
    for index, tool in enumerate(tools):
        made = _check_tool(tool, f"tools[{index}]", ignore_unknown)
        if any(made.name == other.name for other in checked):
            where = f"tools[{index}].function.name"
            raise RequestError(f"{where}: there are two tools called {echo(made.name)}", param=where)
        checked.append(made)
    return checked


def _check_tool(tool: Any, where: str, ignore_unknown: bool) -> Tool:
    tool = check_object(tool, where, TOOL_FIELDS, ignore_unknown)
    kind = tool.get("type", "function")
    if kind != "function":
        raise UnsupportedError(f"{where}.type must be function, got {echo(kind)}", param=f"{where}.type")
    where = f"{where}.function"
    if tool.get("function") is None:
        raise missing(where)
    function = check_object(tool["function"], where, FUNCTION_FIELDS, ignore_unknown)
    return Tool(
        name=check_name(function.get("name"), f"{where}.name"),
        parameters=_check_parameters(function.get("parameters"), f"{where}.parameters"),
        description=_typed(function, "description", str, "a string", where),
        strict=_typed(function, "strict", bool, "true or false", where) or False,
    )


def _typed(value: Mapping[str, Any], name: str, kind: type, shown: str, where: str) -> Any:
    item = value.get(name)
    if item is not None and not isinstance(item, kind):
        where = f"{where}.{name}"
        raise wrong_type(where, f"{shown}", item)
    return item


def check_name(name: Any, where: str) -> str:
    """Return the name of a function. Raises `RequestError`."""
    if name is None:
        raise missing(where)
    if not isinstance(name, str):
        raise wrong_type(where, "a string", name)
    if not NAME.fullmatch(name):
        raise wrong_value(where, "1 to 64 of the characters A-Za-z0-9_-", name)
    return name


def _check_parameters(schema: Any, where: str) -> dict[str, Any]:
    """Return the schema of a function's arguments, which are an object in any case."""
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(schema, Mapping):
        raise wrong_type(where, "a JSON schema", schema)
    if schema.get("type", "object") != "object":
        raise RequestError(
            f"{where} must be the schema of an object, got type {echo(schema['type'])} (at #/type)",
            param=where,
            code="invalid_function_parameters",
        )
    return {"type": "object", **schema}


def _check_mode(choice: Any) -> None:
    if isinstance(choice, str):
        if choice not in MODES:
            raise wrong_value("tool_choice", f"one of {', '.join(MODES)}, or name a function", choice)
    elif not isinstance(choice, Mapping):
        raise wrong_type("tool_choice", "a string or an object", choice)


def _check_choice(choice: Any, names: list[str]) -> tuple[str, list[str]]:
    """Return the choice as in `MessageSpec`, and which functions it admits."""
    _check_mode(choice)
    if isinstance(choice, str):
        return choice, names
    kind = choice.get("type")
    if kind == "function":
        name = _chosen(choice, "tool_choice", names)
        return f"function:{name}", [name]
    if kind == "allowed_tools":
        return _check_allowed(choice.get("allowed_tools"), "tool_choice.allowed_tools", names)
    where = "tool_choice.type"
    if kind is None:
        raise missing(where)
    raise wrong_value(where, "function or allowed_tools", kind)


def _chosen(value: Any, where: str, names: list[str]) -> str:
    """Return the name in {"type": "function", "function": {"name": ...}}."""
    value = check_object(value, where, TOOL_FIELDS, False)
    if value.get("function") is None:
        raise missing(f"{where}.function")
    function = check_object(value["function"], f"{where}.function", ("name",), False)
    name = check_name(function.get("name"), f"{where}.function.name")
    if name not in names:
        raise RequestError(
            f"{where}.function.name: no tool is called {echo(name)}; there is {', '.join(names[:20])}",
            param=f"{where}.function.name",
        )
    return name


def _check_allowed(value: Any, where: str, names: list[str]) -> tuple[str, list[str]]:
    if value is None:
        raise missing(where)
    value = check_object(value, where, ("mode", "tools"), False)
    if value.get("mode") not in ("auto", "required"):
        raise RequestError(
            f"{where}.mode must be auto or required, got {echo(value.get('mode'))}", param=f"{where}.mode"
        )
    tools = value.get("tools")
    if not isinstance(tools, list):
        raise RequestError(
            f"{where}.tools must be a list, got {echo(tools)}", param=f"{where}.tools", code="invalid_type"
        )
    if not tools:
        raise RequestError(f"{where}.tools must not be empty", param=f"{where}.tools", code="empty_array")
    allowed = [_chosen(tool, f"{where}.tools[{index}]", names) for index, tool in enumerate(tools)]
    return str(value["mode"]), allowed


def explain(error: RequestError, tools: ToolRequest) -> RequestError:
    """Return an error about the parameters of a tool with the field as `param`: the pointer is in the message."""
    found = PARAMETERS.match(error.param or "")
    if found is None:
        return error
    # The front numbers the tools that may be called, a client all of them.
    ours, theirs = found[0], f"tools[{tools.places[int(found[1])]}].function.parameters"
    code = "invalid_function_parameters" if error.code == "invalid_json_schema" else error.code
    return rename_field(error, ours, theirs, code)
