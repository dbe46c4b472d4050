"""GET /debug/blocks and /debug/prefixes: what the KV cache holds, and for whom. There only with an option.

The engine answers between two steps, in time linear in the number of blocks. Token ids, from which prompts can be read,
are left out unless the request asks for them, and refused where several keys share the server.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.checks import wrong_value
from quire.engine.messages import MOST_SHOWN
from quire.server.context import context_of, model_context
from quire.server.errors import HTTPProblem
from quire.server.json_io import json_response
from quire.server.parsing import check_query, describe_query

MAX_DIGITS = 9
CHOICES = {"tier": ("device", "host"), "format": ("json", "text"), "tokens": ("false", "true")}
NUMBERS = {"limit": MOST_SHOWN, "start": 10**MAX_DIGITS - 1}
SCHEMAS: dict[str, dict[str, Any]] = {
    **{name: {"type": "integer", "minimum": 0, "maximum": most} for name, most in NUMBERS.items()},
    **{name: {"type": "string", "enum": list(choices)} for name, choices in CHOICES.items()},
    "model": {"type": "string"},
}
BLOCKS_QUERY = ("limit", "start", "tier", "tokens", "format", "model")
PREFIXES_QUERY = ("limit", "tokens", "format", "model")

router = APIRouter()


@router.get(
    "/debug/blocks", openapi_extra=describe_query("text/plain", **{name: SCHEMAS[name] for name in BLOCKS_QUERY})
)
async def blocks(request: Request) -> Response:
    """Show the queues, the sizes of all tiers, and the blocks of one, each with its state and its owners."""
    return await _show(request, "blocks", BLOCKS_QUERY)


@router.get(
    "/debug/prefixes", openapi_extra=describe_query("text/plain", **{name: SCHEMAS[name] for name in PREFIXES_QUERY})
)
async def prefixes(request: Request) -> Response:
    """Show the radix tree of the cached prefixes."""
    return await _show(request, "prefixes", PREFIXES_QUERY)


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
    """Return the arguments of the engine's call. Raises `RequestError` naming a bad parameter of the query."""
    check_query(request, names)
    arguments: dict[str, int | bool | str] = {}
    for name, value in request.query_params.items():
        if name == "model":
            continue  # it selects the engine
        if name in NUMBERS:
            plain = value.isascii() and value.isdigit() and len(value) <= MAX_DIGITS
            if not plain or int(value) > NUMBERS[name]:
                raise wrong_value(name, f"an integer from 0 to {NUMBERS[name]}", value)
            arguments[name] = int(value)
        elif value not in CHOICES[name]:
            raise wrong_value(name, f"one of {', '.join(CHOICES[name])}", value)
        elif name == "format":
            arguments["text"] = value == "text"
        else:
            arguments[name] = value == "true" if name == "tokens" else value
    return arguments
