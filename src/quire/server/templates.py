"""Chat template arguments of requests: variables, documents, tools, effort, or a template of their own.

Arguments that the model's template does not read are refused by name, since they would change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.config import TEMPLATE_ARGUMENTS
from quire.errors import RequestError, UnsupportedError, echo
from quire.frontend.front_model import FrontModel
from quire.frontend.prompts import text_size
from quire.frontend.tools import ToolRequest
from quire.server.context import ModelContext
from quire.server.protocol import TemplateRequest

FORBIDDEN = TEMPLATE_ARGUMENTS | {"tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"}
MAX_VARIABLES = 65536  # characters
THINKING_SWITCHES = ("enable_thinking", "thinking")


def template_arguments(
    context: ModelContext,
    body: TemplateRequest,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the arguments of `AsyncLLM.chat_prompt`, but for the messages.

    Args:
        messages, tools: checked.

    Raises:
        RequestError: naming the field that is malformed, or contradicts another one.
    """
    if body.add_generation_prompt and body.continue_final_message:
        raise RequestError(
            "continue_final_message contradicts add_generation_prompt; give one of them", param="continue_final_message"
        )
    if body.chat_template is not None and not context.config.server.trust_request_chat_template:
        raise UnsupportedError(
            "chat_template is not supported by this server; one started with --trust-request-chat-template takes it",
            param="chat_template",
        )
    variables = dict(body.chat_template_kwargs or {})
    _check_variables(variables)
    if body.reasoning_effort is not None:
        variables = {**_effort(body.reasoning_effort, variables), **variables}
    if body.verbosity is not None:
        variables = {**_template_variables("verbosity", {"verbosity": body.verbosity}, variables), **variables}
    add_prompt = body.add_generation_prompt
    return {
        "add_generation_prompt": not body.continue_final_message if add_prompt is None else add_prompt,
        "continue_final_message": body.continue_final_message and _continued_field(messages[-1]),
        "chat_template": body.chat_template,
        "chat_template_kwargs": variables,
        "documents": body.documents,
        "tools": list(tools) or None,
    }


def _check_variables(variables: Mapping[str, Any]) -> None:
    if text_size(variables, enough=MAX_VARIABLES) > MAX_VARIABLES:
        raise RequestError(
            f"chat_template_kwargs may have about {MAX_VARIABLES} characters", param="chat_template_kwargs"
        )
    for name in variables:
        if name in FORBIDDEN or name.startswith("_") or not name.isidentifier():
            shown = echo(name)[1:-1]
            raise RequestError(
                f"chat_template_kwargs must not set {shown}",
                param=f"chat_template_kwargs.{shown}",
                code="invalid_value",
            )


def _effort(effort: str, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `reasoning_effort` means to templates."""
    found: dict[str, Any] = {"reasoning_effort": effort}
    if effort == "none":
        found |= dict.fromkeys(THINKING_SWITCHES, False)
    return _template_variables("reasoning_effort", found, variables)


def _template_variables(name: str, found: dict[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template's variables that a field sets. Raises `RequestError` if the request has other values."""
    for variable, value in found.items():
        if variables.get(variable, value) != value:
            raise RequestError(f"{name} contradicts chat_template_kwargs.{variable}; give one of them", param=name)
    return found


def _continued_field(message: Mapping[str, Any]) -> bool | str:
    """Return which part of the last message is continued: its reasoning if it has no content yet."""
    if message.get("tool_calls"):
        raise RequestError(
            "continue_final_message needs a last message without tool_calls, behind which nothing can come",
            param="continue_final_message",
        )
    reasoning = message.get("reasoning", message.get("reasoning_content"))
    return "reasoning_content" if reasoning is not None and "content" not in message else True


async def check_template(
    context: ModelContext, body: TemplateRequest, tools: ToolRequest, *, answered: bool = True
) -> None:
    """Raise `UnsupportedError` for tools that the template ignores, or tool calls that no parser could read.

    Of other arguments that it ignores the response warns. Called once the conversation is rendered, so that a template
    of the request's own is known to be sound.

    Args:
        answered: whether there will be an answer.
    """
    front = context.llm.front_model
    template = await context.llm.chat_template(body.chat_template, context.until_disconnect)
    if tools.callable and tools.choice != "none":
        if not template.reads("tools"):
            raise UnsupportedError("tools: this model's chat template has no place for tools", param="tools")
        if answered and not front.message_format.handles_tools:
            raise UnsupportedError(
                "tools: in which form this model calls tools is not known; --tool-call-parser tells the server",
                param="tools",
            )
    ignored = "has no effect: this model's chat template does not read it"
    if body.verbosity not in (None, "medium") and not template.reads("verbosity"):
        context.warn("verbosity", ignored)
    effort = body.reasoning_effort
    if effort is None or template.reads("reasoning_effort"):
        return
    switches = [switch for switch in THINKING_SWITCHES if template.reads(switch)]
    if effort == "none" and (switches or not front.message_format.can_reason):
        return
    hint = f"; chat_template_kwargs.{switches[0]} switches reasoning on and off" if switches else ""
    context.warn("reasoning_effort", ignored + hint)


def thinking_fields(front: FrontModel, on: bool, where: str) -> dict[str, Any]:
    """Return the fields of a chat that switch reasoning on or off.

    Args:
        where: the field of a dialect that asks for it.

    Raises:
        UnsupportedError: the model always reasons.
    """
    template = front.template()
    switches = [name for name in THINKING_SWITCHES if template.reads(name)]
    if switches:
        return {"chat_template_kwargs": dict.fromkeys(switches, on)}
    if on or not front.message_format.can_reason:
        return {}
    if not template.reads("reasoning_effort"):
        raise UnsupportedError(f"{where}: this model's reasoning cannot be disabled", param=where)
    return {"reasoning_effort": "none"}
