"""Messages as a chat template sees them: plain JSON data, marked, in the form that the template reads.

What transformers shows a template is what is shown here: messages without their nulls, reasoning under each of its
names, everything else as given. `TemplateTraits` adds what transformers leaves to the caller: it finds out, by trying
the template on small conversations, whether it takes content as parts, tool arguments as an object or as a text, and
ids of any length.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

from quire.checks import wrong_type, wrong_value
from quire.errors import RequestError, echo

MAX_INTEGER_BITS = 13_288  # 4000 digits; Python writes 4300 of an integer
MAX_DEPTH = 64
ROLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_ .-]{0,63}")
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
PROBES = ("quire probe one", "quire probe two")
PROBE_ARGUMENTS = {"quire_probe": "value 7"}
PROBE_ID = "quire0000"  # nine letters and digits, as Mistral's templates demand
LONG_ID = "call_quire0000quire0000quire0000"
SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")

Marker = Callable[[str], str]


class TemplateTraits:
    """In what form a template takes content and tool calls; found out when first needed.

    Args:
        render: renders messages with the template, or returns None if it fails on them.
        content_format: "auto", or "string" or "openai", which decides about content.
    """

    def __init__(self, render: Callable[[list[dict[str, Any]]], str | None], content_format: str = "auto") -> None:
        self._render = render
        self.content_format = content_format
        self._takes_parts: dict[str, bool] = {}

    def takes_parts(self, role: str) -> bool:
        """Whether messages of this role may have a list of parts as content."""
        if self.content_format != "auto":
            return self.content_format == "openai"
        if role not in ("system", "user", "assistant", "tool"):
            role = "system" if role == "developer" else "user"
        if role not in self._takes_parts:
            self._takes_parts[role] = self._find_parts(role)
        return self._takes_parts[role]

    def _find_parts(self, role: str) -> bool:
        parts = [{"type": "text", "text": probe} for probe in PROBES]
        text = self._render(self._conversation(role, parts))
        if text is None and role != "user" and self._render(self._conversation(role, PROBES[0])) is None:
            return self.takes_parts("user")  # it knows no such role, or not like this
        return text is not None and all(
            probe in text and f"'{probe}'" not in text and f'"{probe}"' not in text for probe in PROBES
        )

    def _conversation(self, role: str, content: Any) -> list[dict[str, Any]]:
        user = {"role": "user", "content": "x"}
        message = {"role": role, "content": content}
        if role == "tool":
            return self._answered(content)
        return {"system": [message, user], "user": [message], "assistant": [user, message]}[role]

    def _answered(self, content: Any, call_id: str = PROBE_ID) -> list[dict[str, Any]]:
        """Return a conversation with a tool call and an answer to it."""
        call = {**_call({} if self.takes_arguments[0] else "{}", call_id), "content": self._text("")}
        answer = {"role": "tool", "tool_call_id": call_id, "name": "probe", "content": content}
        return [{"role": "user", "content": self._text("x")}, call, answer]

    @cached_property
    def takes_arguments(self) -> tuple[bool, bool]:
        """Whether the arguments of tool calls may be objects, and whether they may be texts."""
        raw = json.dumps(PROBE_ARGUMENTS)
        as_object, as_text = self._calls(PROBE_ARGUMENTS), self._calls(raw)
        return (
            as_object is not None and "quire_probe" in as_object and "'quire_probe'" not in as_object,
            as_text is not None and raw in as_text,
        )

    @cached_property
    def needs_short_ids(self) -> bool:
        """Whether the template fails on ids of calls that are longer than nine letters and digits."""
        content = self._text("x")
        long, short = self._answered(content, LONG_ID), self._answered(content)
        return self._render(long) is None and self._render(short) is not None

    @cached_property
    def needs_content(self) -> bool:
        """Whether the template fails on tool calls without content, but not with an empty one."""
        arguments: Any = PROBE_ARGUMENTS if self.takes_arguments[0] else json.dumps(PROBE_ARGUMENTS)
        return self._calls(arguments, with_content=False) is None and self._calls(arguments) is not None

    def _calls(self, arguments: Any, with_content: bool = True) -> str | None:
        call = {**_call(arguments), "content": self._text("")} if with_content else _call(arguments)
        return self._render([{"role": "user", "content": self._text("x")}, call])

    def _text(self, text: str) -> Any:
        return [{"type": "text", "text": text}] if self.content_format == "openai" else text


def _call(arguments: Any, call_id: str = PROBE_ID) -> dict[str, Any]:
    function = {"name": "probe", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": call_id, "type": "function", "function": function}]}


def prepare_message(message: Any, index: int, traits: TemplateTraits, mark: Marker) -> dict[str, Any]:
    """Return message number `index` as the template sees it, every text but the role marked.

    Raises:
        RequestError: it is malformed, or has what the template cannot show; param names the place.
    """
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise wrong_type(where, "an object", message)
    role = message.get("role")
    if role is None:
        raise RequestError(f"{where}.role is missing", param=f"{where}.role", code="missing_required_parameter")
    if not isinstance(role, str) or not ROLE.fullmatch(role):
        raise RequestError(f"{where}.role must be a plain word, got {echo(role)}", param=f"{where}.role")
    shown = {key: value for key, value in message.items() if value is not None}
    content = shown.get("content")
    if isinstance(content, list | tuple):
        texts = _texts_of(content, f"{where}.content")
        if not traits.takes_parts(role):
            shown["content"] = "\n".join(texts)
    elif isinstance(content, str) and traits.content_format == "openai":
        shown["content"] = [{"type": "text", "text": content}]
    if shown.get("tool_calls"):
        calls, place = shown["tool_calls"], f"{where}.tool_calls"
        if not isinstance(calls, list | tuple):
            raise wrong_type(place, "a list of objects", calls)
        shown["tool_calls"] = [_shown_call(call, traits, f"{place}[{index}]") for index, call in enumerate(calls)]
        if "content" not in shown and traits.needs_content:
            shown["content"] = [] if traits.content_format == "openai" else ""
    if "tool_call_id" in shown:
        shown["tool_call_id"] = _shown_id(shown["tool_call_id"], traits)
    plain: dict[str, Any] = plain_data(shown, where, mark)
    plain["role"] = str.__str__(role)
    reasoning = next((plain[key] for key in REASONING_KEYS if key in plain), None)
    if reasoning is not None:  # templates read it under either of two names
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _texts_of(parts: Sequence[Any], where: str) -> list[str]:
    """Return the texts of content parts. Raises `RequestError` for parts of another kind."""
    texts = []
    for index, part in enumerate(parts):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise RequestError(
                f"{where}[{index}] is not a text; this model takes text only",
                param=f"{where}[{index}]",
                code="unsupported_content_type",
            )
        texts.append(text)
    return texts


def _shown_call(call: Any, traits: TemplateTraits, where: str) -> Any:
    """Return a tool call with its arguments as an object, or as a text for templates that cannot read objects."""
    if not isinstance(call, Mapping):
        raise wrong_type(where, "an object", call)
    function = call.get("function")
    nested = isinstance(function, Mapping)
    holder = function if isinstance(function, Mapping) else call
    arguments = holder.get("arguments")
    objects, texts = traits.takes_arguments
    if isinstance(arguments, str) and objects:
        place = f"{where}.function.arguments" if nested else f"{where}.arguments"
        holder = {**holder, "arguments": _read_arguments(arguments, place, keep=texts)}
    elif isinstance(arguments, Mapping) and texts and not objects:
        plain = plain_data(arguments, f"{where}.function.arguments", lambda text: text)
        holder = {**holder, "arguments": json.dumps(plain, ensure_ascii=False)}
    shown = {**call, "function": holder} if nested else {**holder}
    if "id" in shown:
        shown["id"] = _shown_id(shown["id"], traits)
    return shown


def _shown_id(call_id: Any, traits: TemplateTraits) -> Any:
    """Return an id, or a short one made of it for templates that refuse others; equal ids stay equal."""
    if not isinstance(call_id, str) or SHORT_ID.fullmatch(call_id) or not traits.needs_short_ids:
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]


def _read_arguments(text: str, where: str, keep: bool) -> Any:
    """Return the object that `text` stands for; if it is none, refuse it, or keep it for templates that take texts."""
    if not text.strip():
        return {}
    try:
        arguments = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        if keep:
            return text
        raise wrong_value(where, "the JSON text of an object for this model's chat template", text)
    return arguments


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def check_documents(documents: Any) -> None:
    """Raise `RequestError` unless documents are a list of objects."""
    if not isinstance(documents, list | tuple):
        raise wrong_type("documents", "a list of objects", documents)
    for index, document in enumerate(documents):
        if not isinstance(document, Mapping):
            place = f"documents[{index}]"
            raise wrong_type(place, "an object", document)


def plain_data(value: Any, path: str, mark: Marker, depth: int = 0) -> Any:
    """Copy JSON-like data, every text marked. Raises `RequestError` for anything else: templates see only data."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return mark(str.__str__(value))
    if isinstance(value, int):
        if value.bit_length() > MAX_INTEGER_BITS:
            raise RequestError(
                f"{path[:100]} is an integer of too many digits (expected at most 4000)", param=path.split("[")[0]
            )
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if depth >= MAX_DEPTH:
        raise RequestError(f"{path[:100]} is nested deeper than {MAX_DEPTH} levels", param=path.split("[")[0])
    if isinstance(value, Mapping):
        return {
            _plain_key(key, path, mark): plain_data(item, f"{path}.{key}", mark, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain_data(item, f"{path}[{index}]", mark, depth + 1) for index, item in enumerate(value)]
    raise RequestError(f"{path} must be JSON data, got {type(value).__name__}", param=path, code="invalid_type")


def _plain_key(key: Any, path: str, mark: Marker) -> str:
    if not isinstance(key, str):
        raise RequestError(f"{path} has key {echo(key)}; keys must be texts", param=path, code="invalid_type")
    return mark(key)
