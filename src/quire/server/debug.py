"""GET /debug/blocks and /debug/prefixes: what the KV cache holds, and for whom. There only with an option.

The engine answers between two steps, in time linear in the number of blocks. Token ids, from which prompts can be read,
are left out unless the request asks for them, and refused where several keys share the server.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.messages import MAX_SHOWN
from quire.server.context import context_of, model_context
from quire.server.errors import HTTPProblem
from quire.server.json_io import json_response
from quire.server.parsing import QuerySchema, describe_query, read_query

PREFIXES_QUERY: QuerySchema = {
    "limit": {"type": "integer", "minimum": 0, "maximum": MAX_SHOWN},
    "tokens": {"type": "boolean"},
    "format": {"type": "string", "enum": ["json", "text"]},
    "model": {"type": "string"},
}
BLOCKS_QUERY: QuerySchema = {
    "start": {"type": "integer", "minimum": 0},
    "tier": {"type": "string", "enum": ["device", "host"]},
    **PREFIXES_QUERY,
}

router = APIRouter()


@router.get("/debug/blocks", openapi_extra=describe_query(BLOCKS_QUERY, "text/plain"))
async def blocks(request: Request) -> Response:
    """Show the queues, the sizes of all tiers, and the blocks of one, each with its state and its owners."""
    return await _show(request, "blocks", BLOCKS_QUERY)


@router.get("/debug/prefixes", openapi_extra=describe_query(PREFIXES_QUERY, "text/plain"))
async def prefixes(request: Request) -> Response:
    """Show the radix tree of the cached prefixes."""
    return await _show(request, "prefixes", PREFIXES_QUERY)


async def _show(request: Request, method: str, schema: QuerySchema) -> Response:
    arguments = read_query(request, schema)
    name, text = arguments.pop("model", None), arguments.pop("format", "json") == "text"
    if arguments.get("tokens") and context_of(request).keys.several:
        raise HTTPProblem(
            403, "token ids are not shown where several API keys share the server", code="not_allowed", param="tokens"
        )
    answer = await (await model_context(request, name)).llm.call(method, **arguments, text=text)
    if text:
        return Response(answer["text"] + "\n", media_type="text/plain")
    return json_response(answer)
