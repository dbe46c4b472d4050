"""From the fields of a request to those of a chat completion, and from errors about the latter back to the former."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from quire.checks import INT64_MAX, Fields, Refused, check_int, check_string, list_items, wrong_type, wrong_value
from quire.errors import RequestError, UnsupportedError, echo
from quire.frontend.front_model import FrontModel
from quire.server.field_names import FieldNames
from quire.server.parsing import validate
from quire.server.protocol import ChatCompletionRequest, SamplingRequest
from quire.server.responses.conversation import Message
from quire.server.responses.custom_tools import CUSTOM, CUSTOM_FIELDS, custom_names, function_of
from quire.server.responses.protocol import (
    CHAT_FIELDS,
    MAX_PAIR_KEY,
    MAX_PAIR_VALUE,
    MAX_PAIRS,
    InputRequest,
    ResponseRequest,
)

LOGPROBS = "message.output_text.logprobs"
SEALED = "reasoning.encrypted_content"
INCLUDED = (LOGPROBS, SEALED)
MAX_TOP_LOGPROBS = 20
DEFAULT_EFFORT = "medium"
TOOL_FIELDS = ("type", "name", "description", "parameters", "strict")
TOOL_REFUSED: Refused = {"allowed_callers": (["direct"],), "defer_loading": (False,), "output_schema": ()}
REASONING_REFUSED: Refused = {
    "summary": ("auto",),
    "generate_summary": ("auto",),
    "context": ("auto",),
    "mode": ("standard",),
}
FORMATS: Mapping[str, tuple[str, ...]] = {
    "text": (),
    "json_object": (),
    "json_schema": ("name", "schema", "strict", "description"),
}
PASSED_ON = (*(name for name in SamplingRequest.model_fields if name != "model"), *CHAT_FIELDS, "user")
# Fields of chat completions, and their names here.
NAMES = FieldNames(
    {
        r"messages.*": "input",
        r"response_format(\.json_schema)?": "text.format",
        r"(tools\[\d+\])\.function": r"\1",
        r"tool_choice\.allowed_tools\.tools\[(\d+)\]\.function": r"tool_choice.tools[\1]",
        r"tool_choice\.(allowed_tools|function)": "tool_choice",
        r"reasoning_effort": "reasoning.effort",
        r"max(_completion)?_tokens": "max_output_tokens",
    }
)


def chat_request(body: ResponseRequest, messages: Sequence[Message]) -> ChatCompletionRequest:
    """Return the chat completion that a response is. Raises `RequestError` naming a field of either."""
    fields: dict[str, Any] = {name: getattr(body, name) for name in PASSED_ON}
    fields |= _conversation_fields(body)
    fields["stream"] = body.stream or body.background  # so that lookups see its progress
    alternatives = _alternatives(body)
    if alternatives is not None:
        fields |= {"logprobs": True, "top_logprobs": alternatives}
        fields["stream"] = True  # what comes step by step tells which tokens are those of the text
    if body.max_output_tokens is not None:
        fields["max_completion_tokens"] = check_int("max_output_tokens", body.max_output_tokens, 1, INT64_MAX)
    if body.max_tool_calls is not None:
        check_int("max_tool_calls", body.max_tool_calls, 1, INT64_MAX)
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    if body.background and not body.store:
        raise RequestError(
            "background needs store to be true: it is the only way to retrieve the response", param="background"
        )
    check_metadata(body.metadata)
    fields |= {"model": body.model, "messages": [*messages]}
    return validate(ChatCompletionRequest, fields, ignore_unknown=body.ignore_unknown)


def counted_request(body: InputRequest, messages: Sequence[Message]) -> ChatCompletionRequest:
    """Return the chat completion that has the prompt to count."""
    fields = {"parallel_tool_calls": body.parallel_tool_calls, **_conversation_fields(body)}
    fields |= {"model": "", "messages": [*messages]}
    return validate(ChatCompletionRequest, fields, ignore_unknown=body.ignore_unknown)


def without_default_effort(chat: ChatCompletionRequest, front: FrontModel) -> ChatCompletionRequest:
    """Return a chat without the effort that is the API's default, if the model's template knows no efforts at all."""
    if chat.reasoning_effort != DEFAULT_EFFORT or chat.chat_template is not None:
        return chat
    return chat if front.template().reads("reasoning_effort") else chat.model_copy(update={"reasoning_effort": None})


def _conversation_fields(body: InputRequest) -> dict[str, Any]:
    """Return effort, tools, which of them to call, and the form of the text."""
    fields: dict[str, Any] = {}
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
        Fields(dict(body.reasoning), "reasoning").only(("effort",), REASONING_REFUSED)
    if body.text is not None:
        fields["verbosity"] = body.text.verbosity
        Fields(dict(body.text), "text").only(("format", "verbosity"), {})
        if body.text.format is not None:
            fields["response_format"] = _response_format(body.fields.part(body.text.format, "text.format"))
    if body.tools is not None and body.tools != []:
        fields["tools"] = [_tool(tool) for tool in body.fields.parts("tools")]
        fields["tool_choice"] = _tool_choice(body, custom_names(body.tools))
    elif body.tool_choice not in (None, "auto", "none"):
        fields["tool_choice"] = _tool_choice(body, frozenset())
    return fields


def _response_format(form: Fields) -> dict[str, Any]:
    kind = form.choice("type", FORMATS)
    form.only(("type", *FORMATS[kind]))
    if kind != "json_schema":
        return {"type": kind}
    return {"type": kind, "json_schema": {name: item for name, item in form.given.items() if name != "type"}}


def _tool(tool: Fields) -> dict[str, Any]:
    kind = tool.required("type")
    if kind not in ("function", CUSTOM):
        place = tool.place("type")
        raise UnsupportedError(f"{place}: tools of the type {echo(kind)} are not supported by this server", param=place)
    tool.only(CUSTOM_FIELDS if kind == CUSTOM else TOOL_FIELDS, TOOL_REFUSED)
    if kind == CUSTOM:
        return {"type": "function", "function": function_of(tool)}
    return {"type": "function", "function": {name: tool.get(name) for name in TOOL_FIELDS if name != "type"}}


def _tool_choice(body: InputRequest, custom: Collection[str]) -> Any:
    if not isinstance(body.tool_choice, Mapping):
        return body.tool_choice
    choice = body.fields.object("tool_choice")
    place = choice.place("type")
    match choice.required("type"):
        case "function" | "custom":
            return _chosen(choice, custom)
        case "allowed_tools":
            tools = choice.only(("type", "mode", "tools")).get("tools")
            if isinstance(tools, list):
                tools = [_chosen(tool, custom) for tool in choice.parts("tools")]
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
        case str() as kind:
            message = f"{place}: tools of the type {echo(kind)} are not supported by this server"
            raise UnsupportedError(message, param=place)
        case kind:
            raise wrong_value(place, "function, custom or allowed_tools", kind)


def _chosen(tool: Fields, custom: Collection[str]) -> dict[str, Any]:
    """Return the named tool. Its type is checked here; whether it exists is checked later."""
    tool.only(("type", "name"))
    kind, name = tool.choice("type", ("function", CUSTOM), "function", expected="function or custom"), tool.get("name")
    if isinstance(name, str) and (name in custom) != (kind == CUSTOM):
        where = tool.place("name")
        raise RequestError(f"{where}: no {kind} tool is called {echo(name)}", param=where)
    return {"type": "function", "function": {"name": name}}


def check_include(include: Any) -> frozenset[str]:
    """Return the items of `include`. Raises `RequestError` for any that is not in `INCLUDED`."""
    if include is None:
        return frozenset()
    for where, name in list_items(include, "include"):
        if check_string(name, where) not in INCLUDED:
            raise UnsupportedError(
                f"{where}: {echo(name)} is not supported by this server; accepted are {' and '.join(INCLUDED)}",
                param=where,
            )
    return frozenset(include)


def _alternatives(body: ResponseRequest) -> int | None:
    """Return how many alternatives of each token are shown; None if no log-probabilities are."""
    shown = LOGPROBS in check_include(body.include)
    count = 0
    if body.top_logprobs is not None:
        count = check_int("top_logprobs", body.top_logprobs, 0, MAX_TOP_LOGPROBS)
    if count and not shown:
        raise RequestError(f"top_logprobs needs include to have {LOGPROBS}", param="top_logprobs")
    return count if shown else None


def conversation_id(body: InputRequest) -> str | None:
    """Return the id of the conversation that a request belongs to. Raises `RequestError`."""
    if body.conversation is None:
        return None
    if body.previous_response_id is not None:
        raise RequestError("give conversation or previous_response_id, not both", param="conversation")
    if isinstance(body.conversation, str):
        return body.conversation
    if not isinstance(body.conversation, Mapping):
        raise wrong_type("conversation", "a string or an object", body.conversation)
    return body.fields.object("conversation", ("id",)).string("id")


def check_metadata(given: Any) -> None:
    """Raise `RequestError` for metadata of other types, or too much of it."""
    if given is None:
        return
    metadata = Fields(given, "metadata")
    if len(given) > MAX_PAIRS:
        raise RequestError(
            f"metadata may have at most {MAX_PAIRS} pairs, got {len(given)}",
            param="metadata",
            code="object_above_max_properties",
        )
    for key, value in given.items():
        place = metadata.place(echo(key)[1:-1])
        check_string(value, place)
        for text, most, what in ((key, MAX_PAIR_KEY, f"the key {place}"), (value, MAX_PAIR_VALUE, place)):
            if len(text) > most:
                raise RequestError(
                    f"{what} may have at most {most} characters, got {len(text)}",
                    param="metadata",
                    code="string_above_max_length",
                )
