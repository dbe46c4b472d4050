"""Checks the messages of a conversation and normalizes them for chat templates. Text only."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

from quire.checks import Fields, Refused, check_not_empty, list_items, missing, wrong_type, wrong_value
from quire.errors import RequestError, UnsupportedError, echo
from quire.frontend.tools import check_name

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MAX_CALLS = 128
# Types of content parts, in any of the APIs, that are not text.
MEDIA = (
    *("image_url", "image", "input_image", "computer_screenshot", "input_audio", "output_audio", "audio_url", "audio"),
    *("file", "input_file", "video_url", "video", "document", "search_result", "container_upload"),
)
REASONING_FIELDS = ("reasoning", "reasoning_content")
STRINGS = ("name", *REASONING_FIELDS)
FIELDS = ("role", "content", "name", "refusal")
OWN_FIELDS = {"assistant": (*REASONING_FIELDS, "tool_calls"), "tool": ("tool_call_id",)}
REFUSED: Refused = {"function_call": (), "audio": (), "annotations": ([],)}

T = TypeVar("T")


def check_messages(body: Fields) -> list[dict[str, Any]]:
    """Return the conversation in `messages` for the template: texts, and roles it knows.

    Raises:
        RequestError: naming the place.
    """
    messages = body.given["messages"]
    if messages is None:
        raise wrong_type("messages", "a list of objects", messages)
    check_not_empty(messages, "messages")
    calls: set[str] = set()  # ids of all tool calls so far
    checked = []
    for message in body.parts("messages", "a list of objects"):
        checked.append(_check_message(message, calls))
        calls |= {call["id"] for call in checked[-1].get("tool_calls", ())}
    return checked


def _check_message(message: Fields, calls: set[str]) -> dict[str, Any]:
    role = message.string("role")
    if role == "function":
        where = message.place("role")
        raise UnsupportedError(f"{where}: the older role function is not supported; use tool", param=where)
    if role not in ROLES:
        raise wrong_value(message.place("role"), f"one of {', '.join(ROLES)}", role)
    message.only((*FIELDS, *OWN_FIELDS.get(role, ())), REFUSED)
    checked: dict[str, Any] = {"role": ROLES[role]}
    checked |= {name: message.string(name) for name in message.values if name in STRINGS}
    if role == "tool":
        checked["tool_call_id"] = _check_answered(message, calls)
    if role == "assistant" and message.get("tool_calls"):
        checked["tool_calls"] = _check_calls(message)
    content = message.get("content")
    if content is None and role == "assistant":
        content = message.get("refusal")
        if content is None and ("tool_calls" in checked or any(name in checked for name in REASONING_FIELDS)):
            return checked
    if content is None and "content" not in message.given:
        raise missing(message.place("content"))
    kinds = {"text": "text", **({"refusal": "refusal"} if role == "assistant" else {})}

    def read(part: Fields) -> dict[str, str]:
        field = kinds[text_type(part, kinds, expected="text")]
        return {"type": "text", "text": part.only(("type", field)).string(field)}

    checked["content"] = read_content(content, message, read)
    return checked


def read_content(
    content: Any, message: Fields, read: Callable[[Fields], T], expected: str = "parts", field: str = "content"
) -> str | list[T]:
    """Return content that is a string as it is, and of a list what `read` makes of each part.

    Args:
        message: what `content` is the `field` of. expected: what errors call the parts.
    """
    if isinstance(content, str):
        return content
    where = message.place(field)
    check_not_empty(content, where)
    parts = list_items(content, where, f"a string or a list of {expected}")
    return [read(message.part(part, place)) for place, part in parts]


def text_type(part: Fields, known: Collection[str], expected: str | None = None) -> str:
    """Return the type of a content part. Raises `UnsupportedError` for media, `RequestError` unless it is known."""
    kind, where = part.required("type"), part.place("type")
    if kind in MEDIA:
        message = f"{where}: this model reads text only, got {echo(kind)}"
        raise UnsupportedError(message, param=where, code="unsupported_content_type")
    if not isinstance(kind, str) or kind not in known:
        raise wrong_value(where, expected or " or ".join(known), kind)
    return kind


def _check_answered(message: Fields, calls: set[str]) -> str:
    """Return the id of the call that a tool message answers."""
    if not calls:
        raise RequestError(
            f"{message.where}: a message with role tool must answer one before it that has tool_calls",
            param=message.place("role"),
        )
    call_id, where = message.string("tool_call_id"), message.place("tool_call_id")
    if call_id not in calls:
        raise RequestError(f"{where}: no message before has a tool call with the id {echo(call_id)}", param=where)
    return call_id


def _check_calls(message: Fields) -> list[dict[str, Any]]:
    where = message.place("tool_calls")
    calls = [_check_call(call) for call in message.parts("tool_calls", most=MAX_CALLS)]
    ids = [call["id"] for call in calls]
    for index, call_id in enumerate(ids):
        if call_id in ids[:index]:
            place = f"{where}[{index}].id"
            raise RequestError(f"{place}: there are two calls with the id {echo(call_id)}", param=place)
    return calls


def _check_call(call: Fields) -> dict[str, Any]:
    """Return a tool call. The text of its arguments stays what it is; templates that read an object get one."""
    call.only(("id", "type", "function", "index"))
    call_id = call.string("id")
    if call.get("type", "function") != "function":
        raise wrong_value(call.place("type"), "function", call.get("type"))
    function = call.object("function", ("name", "arguments"))
    arguments = function.string("arguments")
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": check_name(function.get("name"), function.place("name")), "arguments": arguments},
    }
