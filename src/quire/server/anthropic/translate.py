"""From Anthropic's requests to chats: bodies, tools, reasoning. Messages are translated in `conversation`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import SkipValidation

from quire.checks import INT64_MAX, Fields, Refused, check_int, check_length, wrong_type
from quire.errors import RequestError, UnsupportedError, echo
from quire.frontend.front_model import FrontModel
from quire.frontend.tools import check_name
from quire.server.anthropic.conversation import Conversation, check_cache_control
from quire.server.field_names import FieldNames
from quire.server.protocol import MAX_USER_LENGTH, RequestModel
from quire.server.templates import thinking_fields

MIN_BUDGET = 1024
MAX_USER_ID = 1024
EFFORTS = ("low", "medium", "high", "xhigh", "max")
DEFAULT_EFFORT = "high"
DISPLAYS = ("summarized", "omitted")
TOOL_FIELDS = ("type", "name", "description", "input_schema", "strict", "cache_control")
TOOL_REFUSED: Refused = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "eager_input_streaming": (True, False),
    "input_examples": ([],),
}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
SAMPLING = ("temperature", "top_k", "top_p")
# Types of `thinking` -> the fields that belong to them.
THINKING: Mapping[str, tuple[str, ...]] = {
    "enabled": ("budget_tokens", "display"),
    "disabled": (),
    "adaptive": ("display",),
}
FIELDS = {
    r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    r"response_format\.json_schema": "output_config.format",
    r"response_format": "output_config.format",
    r"thinking_token_budget": "thinking.budget_tokens",
    r"reasoning_effort": "output_config.effort",
    r"stop": "stop_sequences",
    r"user": "metadata.user_id",
    r"skip_special_tokens": "thinking",
}


@dataclass(frozen=True, slots=True)
class Translation:
    """A request translated to a chat.

    Attributes:
        fields: of the `ChatCompletionRequest`. names: for errors about it.
        shows_thinking: whether the response has the text of reasoning.
    """

    fields: dict[str, Any]
    names: FieldNames
    shows_thinking: bool


def translate(body: ConversationRequest, front: FrontModel) -> Translation:
    """Return the chat for a request.

    Args:
        front: of the model.

    Raises:
        RequestError: naming the field.
    """
    check_cache_control(body.fields)
    conversation = Conversation(body.fields)
    thinking, shows_thinking = _thinking(body, front)
    fields: dict[str, Any] = {
        "model": body.model,
        **conversation.fields(),
        **_tools(body),
        **_output(body, front, thinking),
        **thinking,
    }
    if isinstance(body, MessagesRequest):
        fields |= _generation(body, thinking)
    return Translation(fields, FieldNames(FIELDS, conversation.places), shows_thinking)


def _generation(body: MessagesRequest, thinking: Mapping[str, Any]) -> dict[str, Any]:
    most = check_int("max_tokens", body.max_tokens, 1, INT64_MAX)
    budget = thinking.get("thinking_token_budget", 0)
    if budget >= most:
        raise RequestError(
            f"thinking.budget_tokens must be less than max_tokens ({most}), got {budget}",
            param="thinking.budget_tokens",
            code="integer_above_max_value",
        )
    fields: dict[str, Any] = {"max_tokens": most, "stream": body.stream}
    fields |= {name: getattr(body, name) for name in SAMPLING if getattr(body, name) is not None}
    if body.stop_sequences is not None:
        if not isinstance(body.stop_sequences, list):
            raise wrong_type("stop_sequences", "a list of strings", body.stop_sequences)
        fields["stop"] = body.stop_sequences
    if body.top_k is not None:
        check_int("top_k", body.top_k, 0, INT64_MAX)
    if body.metadata is not None:
        metadata = body.fields.object("metadata", ["user_id"])
        if "user_id" in metadata:
            fields["user"] = _user(metadata)
    return fields


def _user(metadata: Fields) -> str:
    user = check_length(metadata.string("user_id"), metadata.place("user_id"), MAX_USER_ID)
    if len(user) <= MAX_USER_LENGTH:
        return user
    return hashlib.sha256(user.encode()).hexdigest()  # any digest tells users apart


def _tools(body: ConversationRequest) -> dict[str, Any]:
    tools = [_tool(tool) for tool in body.fields.parts("tools")]
    fields: dict[str, Any] = {"tools": tools} if tools else {}
    if body.tool_choice is not None:
        choice = body.fields.object("tool_choice", ("type", "name", "disable_parallel_tool_use"))
        fields |= _tool_choice(choice, [tool["function"]["name"] for tool in tools])
    return fields


def _tool(tool: Fields) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        where = tool.place("type")
        kind = echo(tool.get("type"))
        raise UnsupportedError(
            f"{where}: only tools of the client's own (custom) are supported, got {kind}", param=where
        )
    tool.only(TOOL_FIELDS, TOOL_REFUSED)
    check_cache_control(tool)
    schema = tool.required("input_schema")
    function = {"name": check_name(tool.get("name"), tool.place("name")), "parameters": schema}
    function |= {name: tool.get(name) for name in ("description", "strict") if name in tool}
    return {"type": "function", "function": function}


def _tool_choice(choice: Fields, names: list[str]) -> dict[str, Any]:
    kind = choice.choice("type", (*CHOICES, "tool"), expected="auto, any, tool or none")
    if not names and kind != "none":
        raise RequestError("tool_choice needs tools", param="tool_choice")
    fields: dict[str, Any] = {}
    if "disable_parallel_tool_use" in choice:
        fields["parallel_tool_calls"] = not choice.boolean("disable_parallel_tool_use", False)
    where = choice.place("name")
    if kind != "tool":
        if "name" in choice:
            raise RequestError(f"{where} needs {choice.place('type')} to be tool", param=where)
        return {**fields, "tool_choice": CHOICES[kind]}
    name = check_name(choice.get("name"), where)
    if name not in names:
        raise RequestError(f"{where}: no tool is called {echo(name)}; there is {', '.join(names[:20])}", param=where)
    return {**fields, "tool_choice": {"type": "function", "function": {"name": name}}}


def _thinking(body: ConversationRequest, front: FrontModel) -> tuple[dict[str, Any], bool]:
    """Return the fields for reasoning, and whether its text is in the response."""
    if body.thinking is None:
        return {}, True
    value = body.fields.object("thinking", ("type", "budget_tokens", "display"))
    kind = value.choice("type", THINKING, expected="enabled, disabled or adaptive")
    for name in ("budget_tokens", "display"):
        if name in value and name not in THINKING[kind]:
            raise RequestError(f"{value.place(name)} has no place beside type {kind}", param=value.place(name))
    shown = value.choice("display", DISPLAYS, DISPLAYS[0], expected=" or ".join(DISPLAYS)) == DISPLAYS[0]
    where = value.place("type")
    fields: dict[str, Any] = {}
    if kind == "enabled":
        budget = check_int(value.place("budget_tokens"), value.required("budget_tokens"), MIN_BUDGET, INT64_MAX)
        if not front.message_format.can_reason:
            raise UnsupportedError(
                f"{where}: this model does not reason; leave thinking out, or give disabled or adaptive", param=where
            )
        fields["thinking_token_budget"] = budget
    return {**fields, **thinking_fields(front, kind != "disabled", where)}, shown


def _output(body: ConversationRequest, front: FrontModel, thinking: Mapping[str, Any]) -> dict[str, Any]:
    if body.output_config is None:
        return {}
    output = body.fields.object("output_config", ("effort", "format"))
    fields: dict[str, Any] = {}
    if "effort" in output:
        effort = output.choice("effort", EFFORTS)
        reads = front.template().reads("reasoning_effort")
        if "reasoning_effort" not in thinking and (reads or effort != DEFAULT_EFFORT):
            fields["reasoning_effort"] = effort
    if "format" in output:
        form = output.object("format", ("type", "schema"))
        form.choice("type", ("json_schema",), expected="json_schema")
        schema = {"name": "output", "schema": form.required("schema"), "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


class ConversationRequest(RequestModel):
    """What both routes have in common: a conversation and what may follow it."""

    refused: ClassVar[Refused] = {
        "container": (),
        "context_management": (),
        "diagnostics": (),
        "inference_geo": (),
        "mcp_servers": ([],),
        "output_format": (),
        "speed": ("standard",),
        "user_profile_id": (),
        "workspace_id": (),
    }

    model: str
    messages: SkipValidation[list[dict[str, Any]]]
    system: SkipValidation[str | list[dict[str, Any]] | None] = None
    tools: SkipValidation[list[dict[str, Any]] | None] = None
    tool_choice: SkipValidation[dict[str, Any] | None] = None
    thinking: SkipValidation[dict[str, Any] | None] = None
    output_config: SkipValidation[dict[str, Any] | None] = None
    cache_control: SkipValidation[dict[str, Any] | None] = None


class MessagesRequest(ConversationRequest):
    """POST /v1/messages."""

    max_tokens: SkipValidation[int]
    stop_sequences: SkipValidation[list[str] | None] = None
    stream: bool = False
    temperature: SkipValidation[float | None] = None
    top_k: SkipValidation[int | None] = None
    top_p: SkipValidation[float | None] = None
    metadata: SkipValidation[dict[str, Any] | None] = None
    service_tier: Literal["auto", "standard_only"] = "auto"


class CountTokensRequest(ConversationRequest):
    """POST /v1/messages/count_tokens."""
