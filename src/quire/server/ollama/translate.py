"""From Ollama's requests to chats and completions: messages, options, format, and whether to think."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import SkipValidation

from quire.checks import (
    INT64_MAX,
    check_int,
    check_object,
    choice_field,
    missing,
    unknown_field,
    wrong_type,
    wrong_value,
)
from quire.errors import RequestError, UnsupportedError, echo
from quire.frontend.front_model import FrontModel
from quire.frontend.tools import check_name
from quire.server.dialects import FieldNames
from quire.server.parsing import refuse_unless_harmless
from quire.server.protocol import Harmless, RequestModel
from quire.server.templates import THINKING_SWITCHES

ROLES = ("system", "user", "assistant", "tool")
MESSAGE_FIELDS = ("role", "content", "thinking", "tool_calls", "tool_name", "tool_call_id", "images")
CALL_FIELDS = ("id", "type", "function")
EFFORTS = ("low", "medium", "high")
DURATION = re.compile(r"-?(?:\d+(?:\.\d*)?(?:ns|us|\u00b5s|ms|s|m|h))+|-?\d+")
# Options that mean the same as a sampling field, and what that is called.
SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "stop": "stop",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
}
LIMITS = ("num_predict", "num_ctx", "repeat_last_n")
NEUTRAL_PENALTY = 1.0
# Options that are refused, with the values that change nothing: the server's options say how a model is run.
REFUSED_OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "tfs_z": (1, 1.0),
    "penalize_newline": (True,),
    "num_keep": (),
    **dict.fromkeys(("num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram"), ()),
    **dict.fromkeys(("f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock"), ()),
}
UNLIMITED = (-1, -2)
FIELDS = {
    r"tools\[(\d+)\]\.function": r"tools[\1].function",
    r"response_format": "format",
    r"reasoning_effort": "think",
    r"skip_special_tokens": "think",
    r"max_tokens": "options.num_predict",
    **{rf"{field}": f"options.{option}" for option, field in SAMPLING.items()},
}


def field_names(places: Sequence[str] = ()) -> FieldNames:
    """Return Ollama's names of the fields of a chat; `places` are as in `FieldNames`."""
    return FieldNames({**FIELDS, "messages": "prompt"} if places else FIELDS, places)


def chat_fields(
    body: ChatRequest | GenerateRequest, front: FrontModel, max_model_len: int, ignore_unknown: bool
) -> dict[str, Any]:
    """Return the fields of the chat for a request; messages keep their order.

    Raises:
        RequestError: naming the field.
    """
    fields: dict[str, Any] = {"model": body.model, "stream": True, **_options(body, max_model_len, ignore_unknown)}
    if isinstance(body, ChatRequest):
        fields["messages"] = _messages(body.messages, ignore_unknown)
        if body.tools is not None and body.tools != []:
            fields["tools"] = body.tools
        if fields["messages"][-1]["role"] == "assistant":
            fields["continue_final_message"] = True
    else:
        system = [{"role": "system", "content": body.system}] if body.system else []
        fields["messages"] = [*system, {"role": "user", "content": body.prompt}]
    if body.format not in (None, ""):
        fields["response_format"] = _format(body.format)
    return {**fields, **_think(body.think, front)}


def completion_fields(body: GenerateRequest, max_model_len: int, ignore_unknown: bool) -> dict[str, Any]:
    """Return the fields of the completion that a prompt without a template (`raw`) is. Raises `RequestError`."""
    if body.system:
        raise RequestError("system has no place in a prompt that is taken as it is (raw)", param="system")
    if body.think is not None:
        raise RequestError("think has no place in a prompt that is taken as it is (raw)", param="think")
    fields: dict[str, Any] = {"model": body.model, "prompt": body.prompt, "stream": True, "max_tokens": max_model_len}
    fields |= _options(body, max_model_len, ignore_unknown)
    if body.format not in (None, ""):
        fields["response_format"] = _format(body.format)
    return fields


def check_keep_alive(value: Any) -> None:
    """Check how long a model is to stay loaded. Clients cannot unload models, so that 0 is refused.

    Raises:
        RequestError: it is no duration. UnsupportedError: it asks for the model to be unloaded.
    """
    if value is None:
        return
    where = "keep_alive"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number and not (isinstance(value, str) and DURATION.fullmatch(value)):
        raise wrong_value(where, 'a number of seconds or a duration such as "5m"', value)
    if (value == 0) if number else not re.search("[1-9]", value):
        raise UnsupportedError(
            f"{where}: models are not unloaded at the wish of a client; give a duration above 0, or leave it out",
            param=where,
        )


def _options(body: AnswerRequest, max_model_len: int, ignore_unknown: bool) -> dict[str, Any]:
    """Return the sampling fields for `options`."""
    if body.options is None:
        return {}
    if not isinstance(body.options, Mapping):
        raise wrong_type("options", "an object", body.options)
    options = {name: value for name, value in body.options.items() if value is not None}
    known = (*SAMPLING, *LIMITS, *REFUSED_OPTIONS)
    for name, value in options.items():
        if name in REFUSED_OPTIONS:
            refuse_unless_harmless(f"options.{name}", value, REFUSED_OPTIONS[name])
        elif name not in known and not ignore_unknown:
            raise unknown_field(name, known, "options.")
    fields = {field: options[name] for name, field in SAMPLING.items() if name in options}
    if fields.get("mirostat") == 0 and type(fields["mirostat"]) is int:
        del fields["mirostat"]
    _check_window(options, fields)
    return {**fields, **_lengths(options, max_model_len)}


def _check_window(options: Mapping[str, Any], fields: dict[str, Any]) -> None:
    """Accept `repeat_last_n` of 0 and -1: penalties apply to the whole text, or not at all."""
    where = "options.repeat_last_n"
    if "repeat_last_n" not in options:
        return
    last = check_int(where, options["repeat_last_n"], -1, INT64_MAX)
    if last == 0:
        fields.pop("repetition_penalty", None)
    elif last > 0 and fields.get("repetition_penalty", NEUTRAL_PENALTY) != NEUTRAL_PENALTY:
        raise UnsupportedError(
            f"{where}: repeat_penalty is about the whole text here; the only values accepted are -1 and 0", param=where
        )


def _lengths(options: Mapping[str, Any], max_model_len: int) -> dict[str, Any]:
    if "num_ctx" in options:
        check_int("options.num_ctx", options["num_ctx"], 1, max_model_len)
    where = "options.num_predict"
    if "num_predict" not in options:
        return {}
    most = options["num_predict"]
    if type(most) is int and most in UNLIMITED:
        return {}
    return {"max_tokens": check_int(where, most, 1, INT64_MAX)}


def _format(value: Any) -> dict[str, Any]:
    if value == "json":
        return {"type": "json_object"}
    if not isinstance(value, Mapping):
        raise wrong_value(
            "format", '"json" or a JSON schema', value, "invalid_value" if isinstance(value, str) else "invalid_type"
        )
    return {"type": "json_schema", "json_schema": {"name": "format", "schema": value}}


def _think(value: Any, front: FrontModel) -> dict[str, Any]:
    """Return the fields for reasoning and its effort."""
    if value is None:
        return {}
    if not isinstance(value, bool) and (not isinstance(value, str) or value not in EFFORTS):
        raise wrong_value("think", f"true, false or one of {', '.join(EFFORTS)}", value)
    can = front.message_format.can_reason
    if value is not False and not can:
        raise UnsupportedError("think: this model does not reason", param="think")
    if isinstance(value, str):
        return {"reasoning_effort": value}
    template = front.template()
    switches = [name for name in THINKING_SWITCHES if template.reads(name)]
    if switches:
        return {"chat_template_kwargs": dict.fromkeys(switches, value)}
    if value or not can:
        return {}
    if not template.reads("reasoning_effort"):
        raise UnsupportedError("think: this model's reasoning cannot be switched off", param="think")
    return {"reasoning_effort": "none"}


def _messages(messages: Any, ignore_unknown: bool) -> list[dict[str, Any]]:
    if not isinstance(messages, list):
        raise wrong_type("messages", "a list of objects", messages)
    calls = _Calls(ignore_unknown)
    return [calls.message(message, f"messages[{index}]") for index, message in enumerate(messages)]


class _Calls:
    """Builds messages with ids for tool calls: Ollama's clients may leave them out, and send results in order."""

    def __init__(self, ignore_unknown: bool) -> None:
        self._ignore_unknown = ignore_unknown
        self._open: list[tuple[str, str]] = []  # id and name of calls that have no result yet
        self._count = 0

    def message(self, message: Any, where: str) -> dict[str, Any]:
        """Return a message of a chat."""
        message = check_object(message, where, MESSAGE_FIELDS, self._ignore_unknown)
        message = {name: value for name, value in message.items() if value is not None}
        role = choice_field(message, "role", where, ROLES)
        if message.get("images", []) != []:
            raise UnsupportedError(f"{where}.images: this model reads text only", param=f"{where}.images")
        made: dict[str, Any] = {"role": role, "content": _text(message, "content", where)}
        thinking = _text(message, "thinking", where)
        if thinking:
            made["reasoning"] = thinking
        calls = self._begin(message.get("tool_calls", []), f"{where}.tool_calls")
        if calls:
            made["tool_calls"] = calls
            if not made["content"]:
                del made["content"]
        for field, name in (("reasoning", "thinking"), ("tool_calls", "tool_calls")):
            if field in made and role != "assistant":
                raise RequestError(
                    f"{where}.{name} has no place in a message of the role {role}", param=f"{where}.{name}"
                )
        if role == "tool":
            made["tool_call_id"] = self._answered(message, where)
        return made

    def _begin(self, calls: Any, where: str) -> list[dict[str, Any]]:
        if not isinstance(calls, list):
            raise wrong_type(where, "a list", calls)
        return [self._call(call, f"{where}[{index}]") for index, call in enumerate(calls)]

    def _call(self, call: Any, where: str) -> dict[str, Any]:
        call = check_object(call, where, CALL_FIELDS, self._ignore_unknown)
        if call.get("type") not in (None, "function"):
            raise wrong_value(f"{where}.type", "function", call["type"])
        if call.get("function") is None:
            raise missing(f"{where}.function")
        function = check_object(
            call["function"], f"{where}.function", ("name", "arguments", "index"), self._ignore_unknown
        )
        name = check_name(function.get("name"), f"{where}.function.name")
        if function.get("index") is not None:
            check_int(f"{where}.function.index", function["index"], 0, INT64_MAX)
        arguments = {} if function.get("arguments") is None else function["arguments"]
        if not isinstance(arguments, Mapping):
            where = f"{where}.function.arguments"
            raise wrong_type(where, "an object", arguments)
        self._count += 1
        call_id = _text(call, "id", where) or f"call_{self._count}"
        self._open.append((call_id, name))
        text = json.dumps(arguments, ensure_ascii=False)
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}

    def _answered(self, message: Mapping[str, Any], where: str) -> str:
        """Return the id of the call whose result a message is: the one it names, or the first without one."""
        for field, place in (("tool_call_id", 0), ("tool_name", 1)):
            name = _text(message, field, where)
            found = next((call for call in self._open if call[place] == name), None) if name else None
            if found is not None:
                self._open.remove(found)
                return found[0]
            if name:
                raise RequestError(
                    f"{where}.{field}: no message before has an unanswered call of {echo(name)}",
                    param=f"{where}.{field}",
                )
        if not self._open:
            raise RequestError(
                f"{where}: a message with role tool must answer one before it that has tool_calls",
                param=f"{where}.role",
            )
        return self._open.pop(0)[0]


def _text(value: Mapping[str, Any], name: str, where: str) -> str:
    text = value.get(name)
    if text is None:
        return ""
    if not isinstance(text, str):
        where = f"{where}.{name}"
        raise wrong_type(where, "a string", text)
    return text


REFUSED: Harmless = {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "truncate": (),
    "shift": (),
    "dimensions": (),
}


class AnswerRequest(RequestModel):
    """What chats and single prompts have in common. A stream is what clients get unless they say otherwise."""

    model: str
    stream: bool = True
    format: SkipValidation[str | dict[str, Any] | None] = None
    options: SkipValidation[dict[str, Any] | None] = None
    think: SkipValidation[bool | str | None] = None
    keep_alive: SkipValidation[str | float | None] = None


class ChatRequest(AnswerRequest):
    """POST /api/chat."""

    refused: ClassVar[Harmless] = REFUSED

    messages: SkipValidation[list[dict[str, Any]] | None] = None
    tools: SkipValidation[list[dict[str, Any]] | None] = None


class GenerateRequest(AnswerRequest):
    """POST /api/generate."""

    refused: ClassVar[Harmless] = {
        **REFUSED,
        "context": ([],),
        "images": ([],),
        "suffix": ("",),
        "template": ("",),
        "width": (),
        "height": (),
        "steps": (),
    }

    prompt: str = ""
    system: str = ""
    raw: bool = False


class ShowRequest(RequestModel):
    """POST /api/show. `name` is the older name of `model`."""

    refused: ClassVar[Harmless] = {"system": ("",), "template": ("",), "options": ({},)}

    model: str | None = None
    name: str | None = None
    verbose: bool = False
