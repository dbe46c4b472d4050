"""Checks the messages of a conversation and normalizes them for chat templates. Text only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.checks import check_object, check_string, missing, required, unknown_field, wrong_type, wrong_value
from quire.errors import RequestError, UnsupportedError, echo
from quire.frontend.tools import check_name
from quire.server.parsing import refuse_unless_harmless
from quire.server.protocol import Harmless

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MAX_CALLS = 128
MEDIA_PARTS = ("image_url", "image", "input_image", "input_audio", "audio_url", "audio", "file", "video_url", "video")
REASONING_FIELDS = ("reasoning", "reasoning_content")
CHECKED_APART = ("tool_calls", "tool_call_id")
OWN_FIELDS = {"assistant": (*REASONING_FIELDS, "tool_calls"), "tool": ("tool_call_id",)}
REFUSED: Harmless = {
    "function_call": (),
    "audio": (),
    "annotations": ([],),
}


def check_messages(messages: Any, *, ignore_unknown: bool = False) -> list[dict[str, Any]]:
    """Return the conversation for the template: texts, and roles it knows.

    Args:
        ignore_unknown: whether unknown fields are dropped instead of refused.

    Raises:
        RequestError: naming the place.
    """
    if messages is None or not isinstance(messages, list):
        raise wrong_type("messages", "a list of objects", messages)
    if not messages:
        raise RequestError("messages must not be empty", param="messages", code="empty_array")
    calls: set[str] = set()  # ids of all tool calls so far
    checked = []
    for index, message in enumerate(messages):
        checked.append(_check_message(message, f"messages[{index}]", ignore_unknown, calls))
        calls |= {call["id"] for call in checked[-1].get("tool_calls", ())}
    return checked


def _check_message(message: Any, where: str, ignore_unknown: bool, calls: set[str]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise wrong_type(where, "an object", message)
    role = _check_role(message, f"{where}.role")
    checked: dict[str, Any] = {"role": ROLES[role]}
    known = ["role", "content", "name", *OWN_FIELDS.get(role, ())]
    for name, value in message.items():
        if value is None or name in ("role", "content", "refusal"):
            continue
        if name in CHECKED_APART and name in known:
            continue
        if name in known:
            checked[name] = check_string(value, f"{where}.{name}")
        elif name in REFUSED:
            _refuse(where, name, value)
        elif not ignore_unknown:
            raise unknown_field(name, known, f"{where}.")
    if role == "tool":
        checked["tool_call_id"] = _check_answered(message.get("tool_call_id"), where, calls)
    if role == "assistant" and message.get("tool_calls"):
        checked["tool_calls"] = _check_calls(message["tool_calls"], f"{where}.tool_calls", ignore_unknown)
    content = message.get("content")
    if content is None and role == "assistant":
        content = message.get("refusal")
        if content is None and ("tool_calls" in checked or any(name in checked for name in REASONING_FIELDS)):
            return checked
    if "content" not in message and content is None:
        raise missing(f"{where}.content")
    checked["content"] = _check_content(content, f"{where}.content", role, ignore_unknown)
    return checked


def _check_answered(call_id: Any, where: str, calls: set[str]) -> str:
    """Return the id of the call that a tool message answers."""
    if not calls:
        raise RequestError(
            f"{where}: a message with role tool must answer one before it that has tool_calls", param=f"{where}.role"
        )
    where = f"{where}.tool_call_id"
    if call_id is None:
        raise missing(where)
    if check_string(call_id, where) not in calls:
        raise RequestError(f"{where}: no message before has a tool call with the id {echo(call_id)}", param=where)
    return str(call_id)


def _check_calls(calls: Any, where: str, ignore_unknown: bool) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise wrong_type(where, "a list", calls)
    if len(calls) > MAX_CALLS:
        raise RequestError(
            f"{where} may have at most {MAX_CALLS} items, got {len(calls)}", param=where, code="array_above_max_length"
        )
    checked = [_check_call(call, f"{where}[{index}]", ignore_unknown) for index, call in enumerate(calls)]
    ids = [call["id"] for call in checked]
    for index, call_id in enumerate(ids):
        if call_id in ids[:index]:
            raise RequestError(
                f"{where}[{index}].id: there are two calls with the id {echo(call_id)}", param=f"{where}[{index}].id"
            )
    return checked


def _check_call(call: Any, where: str, ignore_unknown: bool) -> dict[str, Any]:
    """Return a tool call. The text of its arguments stays what it is; templates that read an object get one."""
    call = check_object(call, where, ["id", "type", "function", "index"], ignore_unknown)
    if call.get("id") is None:
        raise missing(f"{where}.id")
    if call.get("type", "function") != "function":
        raise wrong_value(f"{where}.type", "function", call["type"])
    if call.get("function") is None:
        raise missing(f"{where}.function")
    function = check_object(call["function"], f"{where}.function", ["name", "arguments"], ignore_unknown)
    if function.get("arguments") is None:
        raise missing(f"{where}.function.arguments")
    return {
        "id": check_string(call["id"], f"{where}.id"),
        "type": "function",
        "function": {
            "name": check_name(function.get("name"), f"{where}.function.name"),
            "arguments": check_string(function["arguments"], f"{where}.function.arguments"),
        },
    }


def _refuse(where: str, name: str, value: Any) -> None:
    try:
        refuse_unless_harmless(name, value, REFUSED[name])
    except UnsupportedError as error:
        raise UnsupportedError(f"{where}.{error.message}", param=f"{where}.{name}") from None


def _check_role(message: Mapping[str, Any], where: str) -> str:
    role = message.get("role")
    if role is None:
        raise missing(where)
    check_string(role, where)
    if role == "function":
        raise UnsupportedError(f"{where}: the older role function is not supported; use tool", param=where)
    if role not in ROLES:
        raise wrong_value(where, f"one of {', '.join(ROLES)}", role)
    return role


def _check_content(content: Any, where: str, role: str, ignore_unknown: bool) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong_type(where, "a string or a list of parts", content)
    if not content:
        raise RequestError(f"{where} must not be empty", param=where, code="empty_array")
    return [_check_part(part, f"{where}[{index}]", role, ignore_unknown) for index, part in enumerate(content)]


def _check_part(part: Any, where: str, role: str, ignore_unknown: bool) -> dict[str, str]:
    if not isinstance(part, Mapping):
        raise wrong_type(where, "an object", part)
    kind = required(part, "type", where)
    if isinstance(kind, str) and kind in MEDIA_PARTS:
        raise UnsupportedError(
            f"{where}.type: this model reads text only, got {echo(kind)}",
            param=f"{where}.type",
            code="unsupported_content_type",
        )
    field = "refusal" if kind == "refusal" and role == "assistant" else "text"
    if kind != field:
        raise wrong_value(f"{where}.type", "text", kind)
    for name in part:
        if name not in ("type", field) and not ignore_unknown:
            raise unknown_field(name, ["type", field], f"{where}.")
    if part.get(field) is None:
        raise missing(f"{where}.{field}")
    return {"type": "text", "text": check_string(part[field], f"{where}.{field}")}
