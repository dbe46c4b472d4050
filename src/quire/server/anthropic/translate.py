"""From Anthropic's requests to chats: bodies, tools, reasoning. Messages are translated in `conversation`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import SkipValidation

from quire.checks import (
    INT64_MAX,
    check_bool,
    check_choice,
    check_int,
    check_object,
    check_string,
    missing,
    required,
    wrong_type,
    wrong_value,
)
from quire.errors import RequestError, UnsupportedError, echo
from quire.frontend.front_model import FrontModel
from quire.frontend.tools import check_name
from quire.server.anthropic.conversation import Conversation, check_cache_control, without_nulls
from quire.server.dialects import FieldNames
from quire.server.parsing import refuse_unless_harmless
from quire.server.protocol import MAX_USER_LENGTH, Harmless, RequestModel
from quire.server.templates import THINKING_SWITCHES

MIN_BUDGET = 1024
MAX_USER_ID = 1024
EFFORTS = ("low", "medium", "high", "xhigh", "max")
DEFAULT_EFFORT = "high"
DISPLAYS = ("summarized", "omitted")
TOOL_FIELDS = ("type", "name", "description", "input_schema", "strict", "cache_control")
# Fields of tools with the values that change nothing.
HARMLESS_TOOL_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "eager_input_streaming": (True, False),
    "input_examples": ([],),
}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
SAMPLING = ("temperature", "top_k", "top_p")
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
        fields: of `ChatCompletionRequest`. names: for errors about it.
        shows_thinking: whether the response has the text of reasoning.
    """

    fields: dict[str, Any]
    names: FieldNames
    shows_thinking: bool


def translate(body: ConversationRequest, front: FrontModel, *, ignore_unknown: bool = False) -> Translation:
    """Return the chat for a request.

    Args:
        front: of the model. ignore_unknown: whether unknown fields are dropped instead of refused.

    Raises:
        RequestError: naming the field.
    """
    if body.cache_control is not None:
        check_cache_control(body.cache_control, "cache_control")
    conversation = Conversation(ignore_unknown)
    conversation.add_system(body.system, "system")
    conversation.add_all(body.messages)
    thinking, shows_thinking = _thinking(body, front)
    fields: dict[str, Any] = {
        "model": body.model,
        **conversation.fields(),
        **_tools(body, ignore_unknown),
        **_output(body.output_config, front, thinking, ignore_unknown),
        **thinking,
    }
    if isinstance(body, MessagesRequest):
        fields |= _generation(body, thinking, ignore_unknown)
    return Translation(fields, FieldNames(FIELDS, conversation.places), shows_thinking)


def _generation(body: MessagesRequest, thinking: Mapping[str, Any], ignore_unknown: bool) -> dict[str, Any]:
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
        fields |= _metadata(body.metadata, ignore_unknown)
    return fields


def _metadata(value: Any, ignore_unknown: bool) -> dict[str, Any]:
    user = check_object(value, "metadata", ["user_id"], ignore_unknown).get("user_id")
    where = "metadata.user_id"
    if user is None:
        return {}
    check_string(user, where)
    if len(user) > MAX_USER_ID:
        raise RequestError(
            f"{where} may have at most {MAX_USER_ID} characters, got {len(user)}",
            param=where,
            code="string_above_max_length",
        )
    if len(user) > MAX_USER_LENGTH:  # any digest tells users apart
        user = hashlib.sha256(user.encode("utf-8", "surrogatepass")).hexdigest()
    return {"user": user}


def _tools(body: ConversationRequest, ignore_unknown: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if body.tools is not None:
        if not isinstance(body.tools, list):
            raise wrong_type("tools", "a list", body.tools)
        if body.tools:
            fields["tools"] = [_tool(tool, f"tools[{index}]", ignore_unknown) for index, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        fields |= _tool_choice(body.tool_choice, [tool["function"]["name"] for tool in fields.get("tools", ())])
    return fields


def _tool(tool: Any, where: str, ignore_unknown: bool) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise wrong_type(where, "an object", tool)
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise UnsupportedError(
            f"{where}.type: only tools of the client's own (custom) are supported, got {echo(kind)}",
            param=f"{where}.type",
        )
    tool = without_nulls(tool)
    check_object(tool, where, (*TOOL_FIELDS, *HARMLESS_TOOL_FIELDS), ignore_unknown)
    for name, harmless in HARMLESS_TOOL_FIELDS.items():
        if name in tool:
            refuse_unless_harmless(f"{where}.{name}", tool[name], harmless)
    if "cache_control" in tool:
        check_cache_control(tool["cache_control"], f"{where}.cache_control")
    if "input_schema" not in tool:
        raise missing(f"{where}.input_schema")
    function = {"name": check_name(tool.get("name"), f"{where}.name"), "parameters": tool["input_schema"]}
    function |= {name: tool[name] for name in ("description", "strict") if name in tool}
    return {"type": "function", "function": function}


def _tool_choice(choice: Any, names: list[str]) -> dict[str, Any]:
    where = "tool_choice"
    known = ("type", "name", "disable_parallel_tool_use")
    choice = without_nulls(check_object(choice, where, known))
    kind = required(choice, "type", where)
    if not isinstance(kind, str) or kind not in (*CHOICES, "tool"):
        raise wrong_value(f"{where}.type", "auto, any, tool or none", kind)
    if not names and kind != "none":
        raise RequestError("tool_choice needs tools", param=where)
    fields: dict[str, Any] = {}
    if "disable_parallel_tool_use" in choice:
        single = check_bool(f"{where}.disable_parallel_tool_use", choice["disable_parallel_tool_use"])
        fields["parallel_tool_calls"] = not single
    if kind != "tool":
        if "name" in choice:
            raise RequestError(f"{where}.name needs {where}.type to be tool", param=f"{where}.name")
        return {**fields, "tool_choice": CHOICES[kind]}
    name = check_name(choice.get("name"), f"{where}.name")
    if name not in names:
        raise RequestError(
            f"{where}.name: no tool is called {echo(name)}; there is {', '.join(names[:20])}", param=f"{where}.name"
        )
    return {**fields, "tool_choice": {"type": "function", "function": {"name": name}}}


def _thinking(body: ConversationRequest, front: FrontModel) -> tuple[dict[str, Any], bool]:
    """Return the fields for reasoning, and whether its text is in the response."""
    if body.thinking is None:
        return {}, True
    where = "thinking"
    value = without_nulls(check_object(body.thinking, where, ("type", "budget_tokens", "display")))
    kind = required(value, "type", where)
    if not isinstance(kind, str) or kind not in ("enabled", "disabled", "adaptive"):
        raise wrong_value(f"{where}.type", "enabled, disabled or adaptive", kind)
    for name, kinds in (("budget_tokens", ("enabled",)), ("display", ("enabled", "adaptive"))):
        if name in value and kind not in kinds:
            raise RequestError(f"{where}.{name} has no place beside type {kind}", param=f"{where}.{name}")
    display = value.get("display", DISPLAYS[0])
    if display not in DISPLAYS:
        raise wrong_value(f"{where}.display", f"{' or '.join(DISPLAYS)}", display)
    fields: dict[str, Any] = {}
    if kind == "enabled":
        if value.get("budget_tokens") is None:
            raise missing(f"{where}.budget_tokens")
        budget = check_int(f"{where}.budget_tokens", value["budget_tokens"], MIN_BUDGET, INT64_MAX)
        if not front.message_format.can_reason:
            raise UnsupportedError(
                "thinking.type: this model does not reason; leave thinking out, or give disabled or adaptive",
                param="thinking.type",
            )
        fields["thinking_token_budget"] = budget
    switches = _switches(front)
    if switches:
        fields["chat_template_kwargs"] = dict.fromkeys(switches, kind != "disabled")
    elif kind == "disabled" and front.message_format.can_reason:
        if not front.template().reads("reasoning_effort"):
            raise UnsupportedError("thinking.type: this model's reasoning cannot be disabled", param="thinking.type")
        fields["reasoning_effort"] = "none"
    return fields, display == DISPLAYS[0]


def _switches(front: FrontModel) -> list[str]:
    template = front.template()
    return [name for name in THINKING_SWITCHES if template.reads(name)]


def _output(value: Any, front: FrontModel, thinking: Mapping[str, Any], ignore_unknown: bool) -> dict[str, Any]:
    where = "output_config"
    if value is None:
        return {}
    value = without_nulls(check_object(value, where, ("effort", "format"), ignore_unknown))
    fields: dict[str, Any] = {}
    if "effort" in value:
        effort = value["effort"]
        check_choice(effort, f"{where}.effort", EFFORTS)
        reads = front.template().reads("reasoning_effort")
        if "reasoning_effort" not in thinking and (reads or effort != DEFAULT_EFFORT):
            fields["reasoning_effort"] = effort
    if "format" in value:
        fields["response_format"] = _format(value["format"], f"{where}.format", ignore_unknown)
    return fields


def _format(value: Any, where: str, ignore_unknown: bool) -> dict[str, Any]:
    value = check_object(value, where, ("type", "schema"), ignore_unknown)
    kind = required(value, "type", where)
    if kind != "json_schema":
        raise wrong_value(f"{where}.type", "json_schema", kind)
    if value.get("schema") is None:
        raise missing(f"{where}.schema")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": value["schema"], "strict": True}}


REFUSED: Harmless = {
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


class ConversationRequest(RequestModel):
    """What both routes have in common: a conversation and what may follow it."""

    refused: ClassVar[Harmless] = REFUSED

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
