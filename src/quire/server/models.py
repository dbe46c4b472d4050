"""The routes that generate nothing: models, health, version, metrics."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.server.context import ServerContext, context_of
from quire.server.errors import JSON, HTTPProblem
from quire.version import __version__

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """List the names of the model."""
    context = context_of(request)
    return _json({"object": "list", "data": [_model(context, name) for name in context.names]})


@router.get("/v1/models/{model_id:path}")
async def get_model(request: Request, model_id: str) -> Response:
    """Describe one model."""
    context = context_of(request)
    return _json(_model(context, context.check_model(model_id)))


def _model(context: ServerContext, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "quire",
        "root": context.names[0],
        "parent": None,
        "max_model_len": context.llm.max_model_len,
    }


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> Response:
    """Say whether requests are served: 200 {"status": "ok"}, or 503 with loading, draining or dead."""
    context = context_of(request)
    if context.llm.errored:
        status = "dead"
    elif context.draining:
        status = "draining"
    elif not context.llm.ready:
        status = "loading"
    else:
        return _json({"status": "ok"})
    return Response(msgspec.json.encode({"status": status}), 503, media_type=JSON)


@router.get("/version")
async def version(request: Request) -> Response:
    """Return the version of the server."""
    return _json({"version": __version__})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return the metrics for Prometheus."""
    context = context_of(request)
    if context.metrics is None:
        raise HTTPProblem(404, "this server counts nothing", code="unknown_url")
    text, content_type = context.metrics.render(request.headers.get("accept", ""))
    return Response(text, media_type=content_type)


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type=JSON)
