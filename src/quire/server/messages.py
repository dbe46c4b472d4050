"""The messages of a conversation, checked and brought into the form chat templates read. Text only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import RequestError, UnsupportedError, echo
from quire.server.parsing import refuse_unless_harmless, unknown_field
from quire.server.protocol import Harmless

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
TOOL_ROLES = ("tool", "function")
MEDIA_PARTS = ("image_url", "image", "input_image", "input_audio", "audio_url", "audio", "file", "video_url", "video")
REASONING_FIELDS = ("reasoning", "reasoning_content")
REFUSED: Harmless = {
    "tool_calls": ([],),
    "function_call": (),
    "tool_call_id": (),
    "audio": (),
    "annotations": ([],),
}
TEMPLATE_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
TEMPLATE_NAMES |= {"chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"}


def check_messages(messages: Any, *, ignore_unknown: bool = False) -> list[dict[str, Any]]:
    """Return the conversation for the template: texts, and roles it knows.

    Args:
        ignore_unknown: whether fields nobody knows are left out instead of refused.

    Raises:
        RequestError: naming the place.
    """
    if messages is None or not isinstance(messages, list):
        raise RequestError(
            f"messages must be a list of objects, got {echo(messages)}", param="messages", code="invalid_type"
        )
    if not messages:
        raise RequestError("messages must not be empty", param="messages", code="empty_array")
    return [_check_message(message, f"messages[{index}]", ignore_unknown) for index, message in enumerate(messages)]


def _check_message(message: Any, where: str, ignore_unknown: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object, got {echo(message)}", param=where, code="invalid_type")
    role = _check_role(message, f"{where}.role")
    checked: dict[str, Any] = {"role": ROLES[role]}
    for name, value in message.items():
        if name in ("role", "content", "refusal") or value is None:
            continue
        if name == "name" or (name in REASONING_FIELDS and role == "assistant"):
            checked[name] = _check_text(value, f"{where}.{name}")
        elif name in REFUSED:
            _refuse(where, name, value)
        elif not ignore_unknown:
            raise unknown_field(name, ["role", "content", "name", *REASONING_FIELDS], f"{where}.")
    content = message.get("content")
    if content is None and role == "assistant" and message.get("refusal") is not None:
        content = message["refusal"]
    if "content" not in message and content is None:
        raise _missing(f"{where}.content")
    checked["content"] = _check_content(content, f"{where}.content", role, ignore_unknown)
    return checked


def _refuse(where: str, name: str, value: Any) -> None:
    try:
        refuse_unless_harmless(name, value, REFUSED[name])
    except UnsupportedError as error:
        raise UnsupportedError(f"{where}.{error.message}", param=f"{where}.{name}") from None


def _check_role(message: Mapping[str, Any], where: str) -> str:
    role = message.get("role")
    if role is None:
        raise _missing(where)
    if not isinstance(role, str):
        raise RequestError(f"{where} must be a string, got {echo(role)}", param=where, code="invalid_type")
    if role in TOOL_ROLES:
        raise UnsupportedError(f"{where}: tools are not supported by this server, got {echo(role)}", param=where)
    if role not in ROLES:
        raise RequestError(f"{where} must be one of {', '.join(ROLES)}, got {echo(role)}", param=where)
    return role


def _check_content(content: Any, where: str, role: str, ignore_unknown: bool) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            f"{where} must be a string or a list of parts, got {echo(content)}", param=where, code="invalid_type"
        )
    if not content:
        raise RequestError(f"{where} must not be empty", param=where, code="empty_array")
    return [_check_part(part, f"{where}[{index}]", role, ignore_unknown) for index, part in enumerate(content)]


def _check_part(part: Any, where: str, role: str, ignore_unknown: bool) -> dict[str, str]:
    if not isinstance(part, Mapping):
        raise RequestError(f"{where} must be an object, got {echo(part)}", param=where, code="invalid_type")
    kind = part.get("type")
    if kind is None:
        raise _missing(f"{where}.type")
    if isinstance(kind, str) and kind in MEDIA_PARTS:
        raise UnsupportedError(
            f"{where}.type: this model reads text only, got {echo(kind)}",
            param=f"{where}.type",
            code="unsupported_content_type",
        )
    field = "refusal" if kind == "refusal" and role == "assistant" else "text"
    if kind != field:
        raise RequestError(f"{where}.type must be text, got {echo(kind)}", param=f"{where}.type")
    for name in part:
        if name not in ("type", field) and not ignore_unknown:
            raise unknown_field(name, ["type", field], f"{where}.")
    if part.get(field) is None:
        raise _missing(f"{where}.{field}")
    return {"type": "text", "text": _check_text(part[field], f"{where}.{field}")}


def _check_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{where} must be a string, got {echo(value)}", param=where, code="invalid_type")
    return value


def _missing(where: str) -> RequestError:
    return RequestError(f"{where} is required", param=where, code="missing_required_parameter")


def check_template_fields(
    add_generation_prompt: bool | None, continue_final_message: bool, variables: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the arguments of `AsyncLLM.chat_prompt`. Raises `RequestError` if they contradict each other.

    Args:
        add_generation_prompt: None means true, unless the last message is to be continued.
        variables: chat_template_kwargs; names that mean something to the renderer are refused.
    """
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "continue_final_message contradicts add_generation_prompt; give one of them", param="continue_final_message"
        )
    for name in variables or {}:
        if name in TEMPLATE_NAMES or name.startswith("_") or not name.isidentifier():
            shown = echo(name)[1:-1]
            raise RequestError(
                f"chat_template_kwargs must not set {shown}",
                param=f"chat_template_kwargs.{shown}",
                code="invalid_value",
            )
    return {
        "add_generation_prompt": not continue_final_message if add_generation_prompt is None else add_generation_prompt,
        "continue_final_message": continue_final_message,
        "chat_template_kwargs": variables,
    }
