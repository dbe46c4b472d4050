"""The response object: what it repeats of the request, and what becomes of it."""

from __future__ import annotations

import time
from typing import Any

from quire.errors import QuireError, RequestError
from quire.server.chat import ChatCompletion
from quire.server.errors import error_object
from quire.server.generation import Usage
from quire.server.responses.custom_tools import CUSTOM, shown
from quire.server.responses.protocol import Reasoning, ResponseRequest
from quire.server.responses.translate import TOOL_FIELDS


def new_response(body: ResponseRequest, chat: ChatCompletion, response_id: str) -> dict[str, Any]:
    """Return the response at its beginning."""
    params = chat.params
    text = body.text
    response: dict[str, Any] = {
        "id": response_id,
        "object": "response",
        "created_at": chat.created,
        "status": "queued" if body.background else "in_progress",
        "completed_at": None,
        "background": body.background,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": chat.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": _reasoning(body.reasoning),
        "service_tier": "default",
        "store": body.store,
        "temperature": float(getattr(params, "temperature", 1.0)),
        "text": {"format": _format(None if text is None else text.format), "verbosity": "medium"},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [_tool(tool) for tool in body.tools or []],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": float(getattr(params, "top_p", 1.0)),
        "truncation": body.truncation,
        "metadata": body.metadata or {},
    }
    for name in ("user", "safety_identifier", "prompt_cache_key"):  # the schema knows no null in the first
        if getattr(body, name) is not None:
            response[name] = getattr(body, name)
    return response


def _format(value: dict[str, Any] | None) -> dict[str, Any]:
    fields = {"type": "text"} if value is None else value
    return {name: item for name, item in fields.items() if item is not None}


def _reasoning(reasoning: Reasoning | None) -> dict[str, Any]:
    if reasoning is None:
        return {"effort": None, "summary": None}
    return {"effort": reasoning.effort, "summary": reasoning.summary or reasoning.generate_summary}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool["type"] == CUSTOM:
        return shown(tool)
    fields = {name: tool.get(name) for name in TOOL_FIELDS}
    return {**fields, "strict": tool.get("strict") or False}


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return the token counts; nothing is written to a cache that is not written anyway."""
    counts = usage.as_json()
    reasoning = counts.get("completion_tokens_details", {"reasoning_tokens": 0})
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning["reasoning_tokens"]},
        "total_tokens": counts["total_tokens"],
    }


def complete(response: dict[str, Any], finish_reason: str | None) -> None:
    """Note that the text has ended, and why."""
    if finish_reason in ("length", "repetition"):
        response["status"] = "incomplete"
        # The schema has no word for a text that goes round in circles.
        response["incomplete_details"] = {"reason": "max_output_tokens"} if finish_reason == "length" else {}
    else:
        response["status"] = "completed"
        response["completed_at"] = int(time.time())


def fail(response: dict[str, Any], error: QuireError) -> None:
    """Note that the engine gave up, or that the request can never be served."""
    response["status"] = "failed"
    code = "invalid_prompt" if isinstance(error, RequestError) else "server_error"
    response["error"] = {"code": code, "message": error_object(error)["error"]["message"]}
