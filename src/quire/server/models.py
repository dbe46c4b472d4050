"""The routes that generate nothing and are not for probes: models, version, metrics."""

from __future__ import annotations

import os
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.frontend.adapters import RegisteredAdapter
from quire.server.context import context_of
from quire.server.errors import HTTPProblem
from quire.server.json_io import json_response
from quire.server.protocol import responds_with
from quire.server.served_model import ServedModel
from quire.version import __version__

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """List the models, each under all of its names, and say which are loaded."""
    context = context_of(request)
    models = context.models.models
    data = [_model(model, name) for model in models for name in model.names]
    data += [_adapter(model, item) for model in models for item in model.llm.adapters.registered]
    return json_response({"object": "list", "data": data})


@router.get("/v1/models/{model_id:path}")
async def get_model(request: Request, model_id: str) -> Response:
    """Describe one model."""
    model = context_of(request).models.find(model_id)
    for item in model.llm.adapters.registered:
        if item.request.lora_name == model_id:
            return json_response(_adapter(model, item))
    return json_response(_model(model, model_id if model_id in model.names else model.names[0]))


def _model(model: ServedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "quire",
        "root": model.names[0],
        "parent": None,
        "status": {"value": model.status},
        **({} if model.max_model_len is None else {"max_model_len": model.max_model_len}),
    }


def _adapter(model: ServedModel, item: RegisteredAdapter) -> dict[str, Any]:
    """Like `_model`. The root is the adapter's folder, but without the place of it on this machine."""
    return {
        **_model(model, item.request.lora_name),
        "created": item.created,
        "root": os.path.basename(os.path.normpath(item.request.lora_path)),
        "parent": model.names[0],
    }


@router.get("/version")
async def version(request: Request) -> Response:
    """Return the version of the server."""
    return json_response({"version": __version__})


@router.get("/metrics", openapi_extra=responds_with("text/plain"))
async def metrics(request: Request) -> Response:
    """Return the metrics for Prometheus."""
    context = context_of(request)
    if context.metrics is None:
        raise HTTPProblem(404, "this server counts nothing", code="unknown_url")
    text, content_type = await context.metrics.render(request.headers.get("accept", ""))
    return Response(text, media_type=content_type)
