"""GET /debug/blocks and /debug/prefixes: what the KV cache holds, and for whom. There only if asked for at start.

The engine answers between two steps, in time linear in the number of blocks. Token ids, from which prompts can be read,
are left out unless the request asks for them, and refused where several keys share the server.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.checks import unknown_field, wrong_value
from quire.engine.messages import MOST_SHOWN
from quire.server.context import context_of, model_context
from quire.server.errors import HTTPProblem
from quire.server.json_io import json_response

MOST_DIGITS = 9
CHOICES = {"tier": ("device", "host"), "format": ("json", "text"), "tokens": ("false", "true")}
NUMBERS = {"limit": MOST_SHOWN, "start": 10**MOST_DIGITS - 1}

router = APIRouter()


def _described(*names: str) -> dict[str, Any]:
    """Return the part of the API's description that lists these query parameters."""
    kinds: dict[str, dict[str, Any]] = {
        **{name: {"type": "integer", "minimum": 0, "maximum": most} for name, most in NUMBERS.items()},
        **{name: {"type": "string", "enum": list(choices)} for name, choices in CHOICES.items()},
        "model": {"type": "string"},
    }
    return {"parameters": [{"name": name, "in": "query", "required": False, "schema": kinds[name]} for name in names]}


@router.get("/debug/blocks", openapi_extra=_described("limit", "start", "tier", "tokens", "format", "model"))
async def blocks(request: Request) -> Response:
    """Show the queues, the sizes of all tiers, and the blocks of one, each with its state and its owners."""
    return await _show(request, "blocks", ("limit", "start", "tier", "tokens", "format", "model"))


@router.get("/debug/prefixes", openapi_extra=_described("limit", "tokens", "format", "model"))
async def prefixes(request: Request) -> Response:
    """Show the radix tree of the cached prefixes."""
    return await _show(request, "prefixes", ("limit", "tokens", "format", "model"))


async def _show(request: Request, method: str, names: tuple[str, ...]) -> Response:
    context = context_of(request)
    arguments = _arguments(request, names)
    if arguments.get("tokens") and context.keys.several:
        raise HTTPProblem(
            403, "token ids are not shown where several API keys share the server", code="not_allowed", param="tokens"
        )
    name = request.query_params.get("model")
    answer = await (await model_context(request, name)).llm.call(method, **arguments)
    if arguments.get("text"):
        return Response(answer["text"] + "\n", media_type="text/plain")
    return json_response(answer)


def _arguments(request: Request, names: tuple[str, ...]) -> dict[str, int | bool | str]:
    """Return the arguments of the engine's call that the query asks for. Raises `RequestError` naming a bad one."""
    arguments: dict[str, int | bool | str] = {}
    for name, value in request.query_params.items():
        if name not in names:
            raise unknown_field(name, names)
        if name == "model":
            continue  # whose engine is asked
        if name in NUMBERS:
            arguments[name] = _number(name, value)
        elif value not in CHOICES[name]:
            raise wrong_value(name, f"one of {', '.join(CHOICES[name])}", value)
        elif name == "format":
            arguments["text"] = value == "text"
        else:
            arguments[name] = value == "true" if name == "tokens" else value
    return arguments


def _number(name: str, value: str) -> int:
    plain = value.isascii() and value.isdigit() and len(value) <= MOST_DIGITS
    if not plain or int(value) > NUMBERS[name]:
        raise wrong_value(name, f"an integer from 0 to {NUMBERS[name]}", value)
    return int(value)
