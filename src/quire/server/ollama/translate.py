"""From Ollama's requests to chats and completions: messages, options, format, and whether to think."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import SkipValidation

from quire.checks import INT64_MAX, Fields, Refused, check_int, wrong_value
from quire.errors import RequestError, UnsupportedError, echo
from quire.frontend.front_model import FrontModel
from quire.frontend.tools import check_name
from quire.sampling_params import names_in
from quire.server.field_names import FieldNames
from quire.server.protocol import RequestModel
from quire.server.templates import thinking_fields

ROLES = ("system", "user", "assistant", "tool")
MESSAGE_FIELDS = ("role", "content", "thinking", "tool_calls", "tool_name", "tool_call_id")
CALL_FIELDS = ("id", "type", "function")
EFFORTS = ("low", "medium", "high")
DURATION = re.compile(r"-?(?:\d+(?:\.\d*)?(?:ns|us|\u00b5s|ms|s|m|h))+|-?\d+")
# Options that mean the same as a sampling field, and what that is called.
SAMPLING = names_in("ollama")
LIMITS = ("num_predict", "num_ctx", "repeat_last_n")
NEUTRAL_PENALTY = 1.0
# How Ollama is to run a model. They change no text; here the server's options say it. No context is ever shifted, so
# that nothing of it need be kept.
RUNNER_NUMBERS = ("num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep")
RUNNER_FLAGS = ("numa", "low_vram", "f16_kv", "use_mmap", "use_mlock")
# Options that are refused, with the values that change nothing.
REFUSED_OPTIONS: Refused = {
    "tfs_z": (1, 1.0),
    "penalize_newline": (True,),
    **dict.fromkeys(("logits_all", "vocab_only"), (False,)),
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


def chat_fields(body: ChatRequest | GenerateRequest, front: FrontModel, max_model_len: int) -> dict[str, Any]:
    """Return the fields of the chat for a request; messages keep their order.

    Raises:
        RequestError: naming the field.
    """
    fields: dict[str, Any] = {"model": body.model, "stream": True, **_options(body, max_model_len)}
    if isinstance(body, ChatRequest):
        build = _Messages().message
        fields["messages"] = [build(message) for message in body.fields.parts("messages", "a list of objects")]
        if body.tools is not None and body.tools != []:
            fields["tools"] = body.tools
        if fields["messages"][-1]["role"] == "assistant":
            fields["continue_final_message"] = True
    else:
        system = [{"role": "system", "content": body.system}] if body.system else []
        fields["messages"] = [*system, {"role": "user", "content": body.prompt}]
    return {**fields, **_format(body.format), **_think(body.think, front)}


def completion_fields(body: GenerateRequest, max_model_len: int) -> dict[str, Any]:
    """Return the fields of the completion of a prompt without a template: `raw`, or with a `suffix`.

    Raises `RequestError`.
    """
    why = "has no place in a prompt that is taken as it is (raw, or with a suffix)"
    if body.system:
        raise RequestError(f"system {why}", param="system")
    if body.think is not None:
        raise RequestError(f"think {why}", param="think")
    fields = {"model": body.model, "prompt": body.prompt, "stream": True, "max_tokens": max_model_len}
    fields["suffix"] = body.suffix
    return {**fields, **_options(body, max_model_len), **_format(body.format)}


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
            f"{where}: clients cannot unload models; give a duration above 0, or leave it out", param=where
        )


def _options(body: AnswerRequest, max_model_len: int) -> dict[str, Any]:
    """Return the sampling fields for `options`."""
    given = {} if body.options is None else body.options
    known = (*SAMPLING, *LIMITS, *RUNNER_NUMBERS, *RUNNER_FLAGS)
    options = body.fields.part(given, "options").only(known, REFUSED_OPTIONS)
    for name in RUNNER_NUMBERS:
        if name in options:
            check_int(options.place(name), options.get(name), -1, INT64_MAX)
    for name in RUNNER_FLAGS:
        options.boolean(name, False)
    fields = {field: options.get(name) for name, field in SAMPLING.items() if name in options}
    if fields.get("mirostat") == 0 and type(fields["mirostat"]) is int:
        del fields["mirostat"]
    if "repeat_last_n" in options:
        where = options.place("repeat_last_n")
        last = check_int(where, options.get("repeat_last_n"), -1, INT64_MAX)
        if last == 0:  # penalties apply to the whole text (-1), or not at all (0)
            fields.pop("repetition_penalty", None)
        elif last > 0 and fields.get("repetition_penalty", NEUTRAL_PENALTY) != NEUTRAL_PENALTY:
            raise UnsupportedError(
                f"{where}: repeat_penalty is about the whole text here; the only values accepted are -1 and 0",
                param=where,
            )
    if "num_ctx" in options:
        check_int(options.place("num_ctx"), options.get("num_ctx"), 1, max_model_len)
    most = options.get("num_predict")
    if most is None or (type(most) is int and most in UNLIMITED):
        return fields
    return {**fields, "max_tokens": check_int(options.place("num_predict"), most, 1, INT64_MAX)}


def _format(value: Any) -> dict[str, Any]:
    """Return the field for structured output, if `format` asks for it."""
    if value in (None, ""):
        return {}
    if value == "json":
        return {"response_format": {"type": "json_object"}}
    if not isinstance(value, Mapping):
        code = "invalid_value" if isinstance(value, str) else "invalid_type"
        raise wrong_value("format", '"json" or a JSON schema', value, code)
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "format", "schema": value}}}


def _think(value: Any, front: FrontModel) -> dict[str, Any]:
    """Return the fields for reasoning and its effort."""
    if value is None:
        return {}
    if not isinstance(value, bool) and (not isinstance(value, str) or value not in EFFORTS):
        raise wrong_value("think", f"true, false or one of {', '.join(EFFORTS)}", value)
    if value is not False and not front.message_format.can_reason:
        raise UnsupportedError("think: this model does not reason", param="think")
    return {"reasoning_effort": value} if isinstance(value, str) else thinking_fields(front, value, "think")


class _Messages:
    """Builds messages with ids for tool calls: Ollama's clients may leave them out, and send results in order."""

    def __init__(self) -> None:
        self._open: list[tuple[str, str]] = []  # id and name of calls that have no result yet
        self._count = 0

    def message(self, message: Fields) -> dict[str, Any]:
        """Return a message of a chat."""
        message.only(MESSAGE_FIELDS, {"images": ([],)})
        role = message.choice("role", ROLES)
        made: dict[str, Any] = {"role": role, "content": message.string("content", "")}
        thinking = message.string("thinking", "")
        if thinking:
            made["reasoning"] = thinking
        calls = [self._call(call) for call in message.parts("tool_calls")]
        if calls:
            made["tool_calls"] = calls
            if not made["content"]:
                del made["content"]
        for field, name in (("reasoning", "thinking"), ("tool_calls", "tool_calls")):
            if field in made and role != "assistant":
                where = message.place(name)
                raise RequestError(f"{where} has no place in a message of the role {role}", param=where)
        if role == "tool":
            made["tool_call_id"] = self._answered(message)
        return made

    def _call(self, call: Fields) -> dict[str, Any]:
        call.only(CALL_FIELDS)
        call.choice("type", ("function",), "function", expected="function")
        function = call.object("function", ("name", "arguments", "index"))
        name = check_name(function.get("name"), function.place("name"))
        if "index" in function:
            check_int(function.place("index"), function.get("index"), 0, INT64_MAX)
        arguments = Fields(function.get("arguments", {}), function.place("arguments"))
        self._count += 1
        call_id = call.string("id", "") or f"call_{self._count}"
        self._open.append((call_id, name))
        text = json.dumps(arguments.given, ensure_ascii=False)
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}

    def _answered(self, message: Fields) -> str:
        """Return the id of the call that a tool message answers: the one it names, or the first without a result."""
        for field, place in (("tool_call_id", 0), ("tool_name", 1)):
            name = message.string(field, "")
            found = next((call for call in self._open if call[place] == name), None) if name else None
            if found is not None:
                self._open.remove(found)
                return found[0]
            if name:
                where = message.place(field)
                raise RequestError(f"{where}: no message before has an unanswered call of {echo(name)}", param=where)
        if not self._open:
            raise RequestError(
                f"{message.where}: a message with role tool must answer one before it that has tool_calls",
                param=message.place("role"),
            )
        return self._open.pop(0)[0]


REFUSED: Refused = {
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

    refused: ClassVar[Refused] = REFUSED

    messages: SkipValidation[list[dict[str, Any]] | None] = None
    tools: SkipValidation[list[dict[str, Any]] | None] = None


class GenerateRequest(AnswerRequest):
    """POST /api/generate."""

    refused: ClassVar[Refused] = {
        **REFUSED,
        "context": ([],),
        "images": ([],),
        "template": ("",),
        "width": (),
        "height": (),
        "steps": (),
    }

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    raw: bool = False


class ShowRequest(RequestModel):
    """POST /api/show. `name` is the older name of `model`."""

    refused: ClassVar[Refused] = {"system": ("",), "template": ("",), "options": ({},)}

    model: str | None = None
    name: str | None = None
    verbose: bool = False
