"""Routes that operate models rather than use them: sleep, wake up, load, unload. There only if asked for at start.

vLLM's names where it has them. With one model, `model` may be left out. Whatever is put away here is fetched again by
the next request that needs it.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.checks import unknown_field, wrong_value
from quire.errors import RequestError
from quire.server.context import ServerContext, context_of
from quire.server.errors import HTTPProblem
from quire.server.json_io import json_response
from quire.server.served_model import ServedModel

LEVELS = {"1": 1, "2": 2}
MODEL = {"name": "model", "in": "query", "required": False, "schema": {"type": "string"}}
LEVEL = {"name": "level", "in": "query", "required": False, "schema": {"type": "integer", "enum": [1, 2], "default": 1}}

router = APIRouter()


@router.post("/sleep", openapi_extra={"parameters": [LEVEL, MODEL]})
async def sleep(request: Request) -> Response:
    """Free the memory of a model's KV cache, with level=2 also its weights'. 409 while it is used, or not loaded."""
    context, model = _asked(request, "level", "model")
    level = request.query_params.get("level", "1")
    if level not in LEVELS:
        raise wrong_value("level", "1 or 2", level)
    await context.models.sleep(model, LEVELS[level])
    return _state(model)


@router.post("/wake_up", openapi_extra={"parameters": [MODEL]})
async def wake_up(request: Request) -> Response:
    """Allocate again what /sleep has freed. Does nothing for a model that does not sleep."""
    context, model = _asked(request, "model")
    if model.llm.is_sleeping:
        await context.models.load(model)
    return _state(model)


@router.get("/is_sleeping", openapi_extra={"parameters": [MODEL]})
async def is_sleeping(request: Request) -> Response:
    """Say whether a model sleeps."""
    _, model = _asked(request, "model")
    return json_response({"is_sleeping": model.llm.is_sleeping})


@router.post("/reset_prefix_cache", openapi_extra={"parameters": [MODEL]})
async def reset_prefix_cache(request: Request) -> Response:
    """Forget the cached prefixes that no running request uses; a model that sleeps, or is not loaded, has none."""
    context, model = _asked(request, "model")
    if model.open:
        await context.models.acquire(model)
        try:
            await model.llm.reset_prefix_cache()
        finally:
            context.models.release(model)
    return _state(model)


@router.post("/v1/models/{model_id:path}/load")
async def load(request: Request, model_id: str) -> Response:
    """Have a model loaded now, though no request needs it yet. 503 if it cannot be."""
    context, model = _asked(request, name=model_id)
    await context.models.load(model)
    return _state(model)


@router.post("/v1/models/{model_id:path}/unload")
async def unload(request: Request, model_id: str) -> Response:
    """Free all memory of a model, also of a pinned one, until a request needs it. 409 while it is used."""
    context, model = _asked(request, name=model_id)
    await context.models.unload(model)
    return _state(model)


def _asked(request: Request, *parameters: str, name: str | None = None) -> tuple[ServerContext, ServedModel]:
    """Return the context and the model that a request is about. Raises `QuireError` if it must not be carried out."""
    context = context_of(request)
    check_caller(request, context)
    for parameter in request.query_params:
        if parameter not in parameters:
            raise unknown_field(parameter, parameters)
    name = request.query_params.get("model") if name is None else name
    if name is not None:
        return context, context.models.find(name)
    if len(context.models.models) > 1:
        raise RequestError(f"model is missing: one of {', '.join(context.models.names)}", param="model")
    return context, context.models.first


def check_caller(request: Request, context: ServerContext) -> None:
    """Make sure that the key is one for these routes, whatever the gate made of the path.

    Without keys, what a page of another site made a browser send is refused: it needs no leave to send it.
    """
    if context.admin_keys.required:
        if context.admin_keys.rules(request.scope["state"]["key_digest"]) is None:
            raise HTTPProblem(401, "the API key is not one for this route", code="invalid_api_key")
        return
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise HTTPProblem(403, "pages of other sites may not operate this server", code="not_allowed")


def _state(model: ServedModel) -> Response:
    return json_response({"model": model.names[0], "status": model.status})
