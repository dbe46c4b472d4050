"""Input items: what a client sends is checked and brought into the form in which items are stored and listed.

Every item gets an id. Places are named as the client wrote them: `input[0].content[1].type`.
"""

from __future__ import annotations

import base64
import binascii
import secrets
import zlib
from collections.abc import Callable, Container, Sequence
from typing import Any

from quire.checks import Fields, Refused, check_length, missing, wrong_value
from quire.errors import RequestError, UnsupportedError, echo
from quire.frontend.tools import check_name
from quire.server.messages import read_content, text_type

Item = dict[str, Any]
FindItem = Callable[[str], Item | None]

MAX_ITEMS = 8192
REFERENCE = "item_reference"
MAX_ID_LENGTH = 256
STATUSES = ("in_progress", "completed", "incomplete")
ROLES = ("user", "assistant", "system", "developer")
PHASES = ("commentary", "final_answer")
REFUSED_IN_CALLS: Refused = {"caller": (), "namespace": ()}
REFUSED_IN_INPUT: Refused = {"prompt_cache_breakpoint": ()}
PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
CALL_TEXT = {"function_call": "arguments", "custom_tool_call": "input"}  # the field with what is called for
UNSUPPORTED_TYPES = (
    *("additional_tools", "apply_patch_call", "apply_patch_call_output", "code_interpreter_call"),
    *("compaction", "compaction_trigger", "computer_call", "computer_call_output", "file_search_call"),
    *("image_generation_call", "local_shell_call", "local_shell_call_output", "mcp_approval_request"),
    *("mcp_approval_response", "mcp_call", "mcp_list_tools", "program", "program_output", "shell_call"),
    *("shell_call_output", "tool_search_call", "tool_search_output", "web_search_call"),
)


def new_id(prefix: str) -> str:
    """Return an unguessable id."""
    return f"{prefix}_{secrets.token_hex(24)}"


def check_input(body: Fields, find: FindItem) -> list[Item]:
    """Return the items of a request's `input`; arguments and errors as for `check_items`."""
    value = body.get("input")
    if isinstance(value, str):
        content = [{"type": "input_text", "text": value}]
        return [{"id": new_id("msg"), "type": "message", "status": "completed", "role": "user", "content": content}]
    return check_items(body, "input", find, MAX_ITEMS, "a string or a list of items")


def check_items(body: Fields, name: str, find: FindItem, most: int, expected: str = "a list of items") -> list[Item]:
    """Return the items of a field.

    Args:
        find: returns the stored item of an id. most, expected: as for `Fields.parts`.

    Raises:
        RequestError: naming the place. NotFoundError: there is no item of an id.
    """
    return [_item(item, find) for item in body.parts(name, expected, most=most)]


def check_new(items: Sequence[Item], known: Container[str], name: str) -> None:
    """Raise `RequestError` if one of the items of a field has an id that is in `known`, or that of another one."""
    seen: set[str] = set()
    for index, item in enumerate(items):
        if item["id"] in known or item["id"] in seen:
            where = f"{name}[{index}].id"
            raise RequestError(f"{where}: the conversation already has an item {echo(item['id'])}", param=where)
        seen.add(item["id"])


def references(value: Any) -> list[str]:
    """Return the ids of stored items that items, not yet checked, refer to."""
    given = value[:MAX_ITEMS] if isinstance(value, list) else []
    items = [Fields(item, "input") for item in given if isinstance(item, dict)]
    named = [item.get("id") for item in items if _kind(item) == REFERENCE]
    return [item_id for item_id in named if isinstance(item_id, str)]


def _kind(item: Fields) -> Any:
    """Return the type of an item, which may go without saying."""
    kind = item.get("type")
    return ("message" if "role" in item else REFERENCE if "id" in item else None) if kind is None else kind


def _item(item: Fields, find: FindItem) -> Item:
    """Return a checked item."""
    kind, place = _kind(item), item.place("type")
    match kind:
        case "message":
            return _message(item)
        case "function_call" | "custom_tool_call":
            return _call(kind, item)
        case "function_call_output" | "custom_tool_call_output":
            return _call_output(kind, item)
        case "reasoning":
            return _reasoning(item)
        case "item_reference":
            return _referenced(item, find)
        case None:
            raise missing(place)
    if kind in UNSUPPORTED_TYPES:
        raise UnsupportedError(f"{place}: items of the type {kind} are not supported by this server", param=place)
    raise wrong_value(place, f"one of {', '.join([*PREFIXES, 'item_reference'])}", kind)


def _head(item: Fields, kind: str) -> Item:
    """Return what all items begin with."""
    item_id = _id(item, "id") if "id" in item else new_id(PREFIXES[kind])
    return {"id": item_id, "type": kind, "status": item.choice("status", STATUSES, "completed")}


def _id(item: Fields, name: str) -> str:
    value, where = item.string(name), item.place(name)
    if not value:
        raise RequestError(f"{where} must not be empty", param=where, code="string_below_min_length")
    return check_length(value, where, MAX_ID_LENGTH)


def _message(item: Fields) -> Item:
    item.only(("type", "id", "status", "role", "content", "phase"))
    role = item.choice("role", ROLES)
    content = _parts(item, "content", answer=role == "assistant")
    message = {**_head(item, "message"), "role": role, "content": content}
    if "phase" not in item:
        return message
    if role != "assistant":
        place = item.place("phase")
        raise RequestError(f"{place} is for messages of the role assistant only", param=place)
    return {**message, "phase": item.choice("phase", PHASES)}  # a label, which no model here is shown


def _parts(item: Fields, field: str, *, answer: bool) -> list[dict[str, Any]]:
    """Return the parts of a field, those of an answer or of input."""

    def made(text: str) -> dict[str, Any]:
        if answer:
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {"type": "input_text", "text": text}

    def read(part: Fields) -> dict[str, Any]:
        match text_type(part, ("input_text", "output_text", "refusal") if answer else ("input_text",)):
            case "refusal":
                return {
                    "type": "refusal",
                    "refusal": part.only(("type", "refusal"), REFUSED_IN_INPUT).string("refusal"),
                }
            case "output_text":  # log-probabilities come back with answers that are sent in again
                return made(part.only(("type", "text", "logprobs"), {"annotations": ([],)}).string("text"))
            case _:
                return made(part.only(("type", "text"), REFUSED_IN_INPUT).string("text"))

    content = read_content(item.required(field), item, read, field=field)
    return [made(content)] if isinstance(content, str) else content


def _call(kind: str, item: Fields) -> Item:
    text = CALL_TEXT[kind]
    item.only(("type", "id", "status", "call_id", "name", text), REFUSED_IN_CALLS)
    call = {"call_id": _id(item, "call_id"), "name": check_name(item.get("name"), item.place("name"))}
    return {**_head(item, kind), **call, text: item.string(text)}


def _call_output(kind: str, item: Fields) -> Item:
    item.only(("type", "id", "status", "call_id", "name", "output"), REFUSED_IN_CALLS)
    call_id, output = _id(item, "call_id"), item.required("output")
    if not isinstance(output, str):
        output = _parts(item, "output", answer=False)
    name = {"name": check_name(item.get("name"), item.place("name"))} if "name" in item else {}
    return {**_head(item, kind), "call_id": call_id, "output": output, **name}


def _reasoning(item: Fields) -> Item:
    item.only(("type", "id", "status", "summary", "content", "encrypted_content"))
    content = _texts(item, "content", "reasoning_text")
    if "encrypted_content" in item:
        restored = unseal(item.string("encrypted_content"), item.place("encrypted_content"))
        content = content or [{"type": "reasoning_text", "text": restored}]
    return {**_head(item, "reasoning"), "summary": _texts(item, "summary", "summary_text"), "content": content}


def _texts(item: Fields, field: str, kind: str) -> list[dict[str, str]]:
    texts = []
    for part in item.parts(field):
        part.only(("type", "text"))
        part.choice("type", (kind,), kind, expected=kind)
        texts.append({"type": kind, "text": part.string("text")})
    return texts


def _referenced(item: Fields, find: FindItem) -> Item:
    item_id, place = _id(item.only(("type", "id")), "id"), item.place("id")
    found = find(item_id)
    if found is None:
        message = f"{place}: there is no item {echo(item_id)}, or it is not stored any more"
        raise RequestError(message, param=place, code="item_not_found")
    return found


VERSION = "qr1"


def seal(text: str) -> str:
    """Return a text as `encrypted_content`."""
    data = text.encode()
    return f"{VERSION}.{zlib.crc32(data):08x}.{base64.urlsafe_b64encode(data).decode()}"


def unseal(sealed: str, where: str) -> str:
    """Return the text that `seal` was given. Raises `RequestError` if it was not, or if some of it is missing."""
    version, _, rest = sealed.partition(".")
    checksum, _, encoded = rest.partition(".")
    if version == VERSION:
        try:
            data = base64.b64decode(encoded, altchars=b"-_", validate=True)
            if checksum == f"{zlib.crc32(data):08x}":
                return data.decode()
        except (binascii.Error, ValueError):
            pass
    raise wrong_value(where, "as a reasoning item of this server had it", sealed)
