"""Input items: what a client sends is checked and brought into the form in which items are stored and listed.

Every item gets an id. Places are named as the client wrote them: `input[0].content[1].type`.
"""

from __future__ import annotations

import base64
import binascii
import secrets
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.checks import check_object, check_string, missing, required, wrong_type, wrong_value
from quire.errors import RequestError, UnsupportedError, echo
from quire.frontend.tools import check_name
from quire.server.parsing import refuse_unless_harmless

Item = dict[str, Any]
FindItem = Callable[[str], Item | None]

MAX_ITEMS = 8192
MAX_ID_LENGTH = 256
STATUSES = ("in_progress", "completed", "incomplete")
ROLES = ("user", "assistant", "system", "developer")
PHASES = ("commentary", "final_answer")
# Field -> the values that ask for nothing, for all fields of items and their parts that exist but are not honoured.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "caller": (),
    "namespace": (),
    "prompt_cache_breakpoint": (),
}
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
    "additional_tools",
    "apply_patch_call",
    "apply_patch_call_output",
    "code_interpreter_call",
    "compaction",
    "compaction_trigger",
    "computer_call",
    "computer_call_output",
    "file_search_call",
    "image_generation_call",
    "local_shell_call",
    "local_shell_call_output",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "mcp_list_tools",
    "program",
    "program_output",
    "shell_call",
    "shell_call_output",
    "tool_search_call",
    "tool_search_output",
    "web_search_call",
)
MEDIA_PARTS = ("input_image", "input_file", "input_audio", "output_audio", "computer_screenshot")


def new_id(prefix: str) -> str:
    """Return an unguessable id."""
    return f"{prefix}_{secrets.token_hex(24)}"


def check_input(value: Any, find: FindItem, *, ignore_unknown: bool = False) -> list[Item]:
    """Return the items of a request.

    Args:
        find: returns the stored item of an id. ignore_unknown: whether unknown fields are left out instead of refused.

    Raises:
        RequestError: naming the place. NotFoundError: there is no item of an id.
    """
    if isinstance(value, str):
        content = [{"type": "input_text", "text": value}]
        return [{"id": new_id("msg"), "type": "message", "status": "completed", "role": "user", "content": content}]
    if not isinstance(value, list):
        raise wrong_type("input", "a string or a list of items", value)
    if len(value) > MAX_ITEMS:
        raise RequestError(
            f"input may have at most {MAX_ITEMS} items, got {len(value)}", param="input", code="array_above_max_length"
        )
    check = _Checker(find, ignore_unknown)
    return [check.item(item, f"input[{index}]") for index, item in enumerate(value)]


class _Checker:
    """Checks the items of one request."""

    def __init__(self, find: FindItem, ignore_unknown: bool) -> None:
        self._find = find
        self._ignore_unknown = ignore_unknown

    def item(self, value: Any, where: str) -> Item:
        """Return a checked item."""
        if not isinstance(value, Mapping):
            raise wrong_type(where, "an object", value)
        kind = value.get("type")
        if kind is None:
            kind = "message" if "role" in value else "item_reference" if "id" in value else None
        match kind:
            case "message":
                return self._message(value, where)
            case "function_call" | "custom_tool_call":
                return self._call(kind, value, where)
            case "function_call_output" | "custom_tool_call_output":
                return self._call_output(kind, value, where)
            case "reasoning":
                return self._reasoning(value, where)
            case "item_reference":
                return self._referenced(value, where)
            case None:
                raise missing(f"{where}.type")
        place = f"{where}.type"
        if kind in UNSUPPORTED_TYPES:
            raise UnsupportedError(f"{place}: items of the type {kind} are not supported by this server", param=place)
        known = ", ".join([*PREFIXES, "item_reference"])
        raise wrong_value(place, f"one of {known}", kind)

    def _fields(self, value: Any, where: str, known: Sequence[str], refused: Sequence[str] = ()) -> dict[str, Any]:
        """Return the fields that are there and not null."""
        checked = check_object(value, where, [*known, *refused], self._ignore_unknown)
        for name in refused:
            if checked.get(name) is not None:
                self._refuse(checked[name], name, where)
        return {name: item for name, item in checked.items() if item is not None and name in known}

    @staticmethod
    def _refuse(value: Any, name: str, where: str) -> None:
        try:
            refuse_unless_harmless(name, value, REFUSED[name])
        except UnsupportedError as error:
            raise UnsupportedError(f"{where}.{error.message}", param=f"{where}.{name}") from None

    def _head(self, fields: Mapping[str, Any], kind: str, where: str) -> Item:
        """Return what all items begin with."""
        item_id = _text(fields["id"], f"{where}.id", MAX_ID_LENGTH) if "id" in fields else new_id(PREFIXES[kind])
        status = fields.get("status", "completed")
        if status not in STATUSES:
            place = f"{where}.status"
            raise wrong_value(place, f"one of {', '.join(STATUSES)}", status)
        return {"id": item_id, "type": kind, "status": status}

    def _message(self, value: Any, where: str) -> Item:
        fields = self._fields(value, where, ("type", "id", "status", "role", "content", "phase"))
        role = required(fields, "role", where)
        if role not in ROLES:
            place = f"{where}.role"
            raise wrong_value(place, f"one of {', '.join(ROLES)}", role)
        if "content" not in fields:
            raise missing(f"{where}.content")
        content = self._parts(fields["content"], f"{where}.content", answer=role == "assistant")
        item = {**self._head(fields, "message", where), "role": role, "content": content}
        if "phase" not in fields:
            return item
        place = f"{where}.phase"
        if role != "assistant":
            raise RequestError(f"{place} is for messages of the role assistant only", param=place)
        if fields["phase"] not in PHASES:
            raise wrong_value(place, f"one of {', '.join(PHASES)}", fields["phase"])
        return {**item, "phase": fields["phase"]}  # a label, which no model here is shown

    def _parts(self, content: Any, where: str, *, answer: bool) -> list[dict[str, Any]]:
        if isinstance(content, str):
            return [_output_text(content) if answer else {"type": "input_text", "text": content}]
        if not isinstance(content, list):
            raise wrong_type(where, "a string or a list of parts", content)
        if not content:
            raise RequestError(f"{where} must not be empty", param=where, code="empty_array")
        return [self._part(part, f"{where}[{index}]", answer) for index, part in enumerate(content)]

    def _part(self, part: Any, where: str, answer: bool) -> dict[str, Any]:
        if not isinstance(part, Mapping):
            raise wrong_type(where, "an object", part)
        kind = part.get("type")
        place = f"{where}.type"
        if kind is None:
            raise missing(place)
        if isinstance(kind, str) and kind in MEDIA_PARTS:
            raise UnsupportedError(
                f"{place}: this model reads text only, got {echo(kind)}", param=place, code="unsupported_content_type"
            )
        known = ("input_text", "output_text", "refusal") if answer else ("input_text",)
        if kind not in known:
            raise wrong_value(place, f"{' or '.join(known)}", kind)
        name = "refusal" if kind == "refusal" else "text"
        if kind == "output_text":  # log-probabilities come back with answers that are sent in again
            fields = self._fields(part, where, ("type", name, "logprobs"), ("annotations",))
        else:
            fields = self._fields(part, where, ("type", name), ("prompt_cache_breakpoint",))
        if name not in fields:
            raise missing(f"{where}.{name}")
        text = _text(fields[name], f"{where}.{name}")
        if kind == "refusal":
            return {"type": "refusal", "refusal": text}
        return _output_text(text) if answer else {"type": "input_text", "text": text}

    def _call(self, kind: str, value: Any, where: str) -> Item:
        text = CALL_TEXT[kind]
        known = ("type", "id", "status", "call_id", "name", text)
        fields = self._fields(value, where, known, ("caller", "namespace"))
        for name in ("call_id", "name", text):
            if name not in fields:
                raise missing(f"{where}.{name}")
        return {
            **self._head(fields, kind, where),
            "call_id": _text(fields["call_id"], f"{where}.call_id", MAX_ID_LENGTH),
            "name": check_name(fields["name"], f"{where}.name"),
            text: _text(fields[text], f"{where}.{text}"),
        }

    def _call_output(self, kind: str, value: Any, where: str) -> Item:
        known = ("type", "id", "status", "call_id", "name", "output")
        fields = self._fields(value, where, known, ("caller", "namespace"))
        for name in ("call_id", "output"):
            if name not in fields:
                raise missing(f"{where}.{name}")
        output = fields["output"]
        if not isinstance(output, str):
            output = self._parts(output, f"{where}.output", answer=False)
        item = {
            **self._head(fields, kind, where),
            "call_id": _text(fields["call_id"], f"{where}.call_id", MAX_ID_LENGTH),
            "output": output,
        }
        return item if "name" not in fields else {**item, "name": check_name(fields["name"], f"{where}.name")}

    def _reasoning(self, value: Any, where: str) -> Item:
        known = ("type", "id", "status", "summary", "content", "encrypted_content")
        fields = self._fields(value, where, known)
        content = self._texts(fields.get("content", []), "reasoning_text", f"{where}.content")
        if "encrypted_content" in fields:
            place = f"{where}.encrypted_content"
            restored = unseal(_text(fields["encrypted_content"], place), place)
            content = content or [{"type": "reasoning_text", "text": restored}]
        return {
            **self._head(fields, "reasoning", where),
            "summary": self._texts(fields.get("summary", []), "summary_text", f"{where}.summary"),
            "content": content,
        }

    def _texts(self, parts: Any, kind: str, where: str) -> list[dict[str, str]]:
        if not isinstance(parts, list):
            raise wrong_type(where, "a list", parts)
        texts = []
        for index, part in enumerate(parts):
            place = f"{where}[{index}]"
            fields = self._fields(part, place, ("type", "text"))
            if fields.get("type", kind) != kind:
                raise wrong_value(f"{place}.type", f"{kind}", fields["type"])
            if "text" not in fields:
                raise missing(f"{place}.text")
            texts.append({"type": kind, "text": _text(fields["text"], f"{place}.text")})
        return texts

    def _referenced(self, value: Any, where: str) -> Item:
        fields = self._fields(value, where, ("type", "id"))
        if "id" not in fields:
            raise missing(f"{where}.id")
        item_id = _text(fields["id"], f"{where}.id", MAX_ID_LENGTH)
        item = self._find(item_id)
        if item is None:
            raise RequestError(
                f"{where}.id: there is no item {echo(item_id)}, or it is not stored any more",
                param=f"{where}.id",
                code="item_not_found",
            )
        return item


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _text(value: Any, where: str, most: int | None = None) -> str:
    """Return a text; one with a bound must not be empty."""
    check_string(value, where)
    if most is not None and not value:
        raise RequestError(f"{where} must not be empty", param=where, code="string_below_min_length")
    if most is not None and len(value) > most:
        raise RequestError(
            f"{where} must be at most {most} characters long, got {len(value)}",
            param=where,
            code="string_above_max_length",
        )
    return value


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
