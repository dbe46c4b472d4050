"""Routes that operate models: sleep, wake up, load, unload, LoRA adapters, profiles. There only with an option.

Paths, bodies and answers are vLLM's where it has them. With one model, `model` may be left out. What is unloaded here
is loaded again by the next request that needs it.
"""

from __future__ import annotations

from typing import ClassVar
from urllib.parse import urlsplit

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from quire.checks import Refused
from quire.errors import RequestError, echo
from quire.server.context import ServerContext, context_of
from quire.server.errors import HTTPProblem
from quire.server.json_io import json_response
from quire.server.parsing import QuerySchema, describe_query, parse_request, read_query
from quire.server.protocol import RequestModel, body_schema
from quire.server.served_model import ServedModel

MODEL: QuerySchema = {"model": {"type": "string"}}
SLEEP: QuerySchema = {"level": {"type": "integer", "enum": [1, 2], "default": 1}, **MODEL}

router = APIRouter()
profiler_router = APIRouter()


@router.post("/sleep", openapi_extra=describe_query(SLEEP))
async def sleep(request: Request) -> Response:
    """Free the memory of a model's KV cache, with level=2 also its weights'. 409 while it is used, or not loaded."""
    context = _checked(request)
    query = read_query(request, SLEEP)
    model = _named(context, query.get("model"))
    await context.models.sleep(model, query["level"])
    return _state(model)


@router.post("/wake_up", openapi_extra=describe_query(MODEL))
async def wake_up(request: Request) -> Response:
    """Allocate again what /sleep has freed. Does nothing for a model that does not sleep."""
    context, model = _target(request)
    if model.status == "sleeping":
        await context.models.load(model)
    return _state(model)


@router.get("/is_sleeping", openapi_extra=describe_query(MODEL))
async def is_sleeping(request: Request) -> Response:
    """Say whether a model sleeps."""
    _, model = _target(request)
    return json_response({"is_sleeping": model.status == "sleeping"})


@router.post("/reset_prefix_cache", openapi_extra=describe_query(MODEL))
async def reset_prefix_cache(request: Request) -> Response:
    """Forget the cached prefixes that no running request uses; a model that sleeps, or is not loaded, has none."""
    context, model = _target(request)
    if model.status == "loaded":
        async with context.models.using(model):
            await model.llm.reset_prefix_cache()
    return _state(model)


@router.post("/v1/models/{model_id:path}/load")
async def load(request: Request, model_id: str) -> Response:
    """Have a model loaded now, though no request needs it yet. 503 if it cannot be."""
    context, model = _target(request, model_id)
    await context.models.load(model)
    return _state(model)


@router.post("/v1/models/{model_id:path}/unload")
async def unload(request: Request, model_id: str) -> Response:
    """Free all memory of a model, also of a pinned one, until a request needs it. 409 while it is used."""
    context, model = _target(request, model_id)
    await context.models.unload(model)
    return _state(model)


@profiler_router.post("/start_profile", openapi_extra=describe_query(MODEL))
async def start_profile(request: Request) -> Response:
    """Begin to trace the steps of a model's engine. 409 while they are being traced."""
    context, model = _target(request)
    async with context.models.using(model):
        await model.llm.start_profile()
    return json_response({"model": model.names[0], "profiling": True})


@profiler_router.post("/stop_profile", openapi_extra=describe_query(MODEL))
async def stop_profile(request: Request) -> Response:
    """End the trace and write it; the answer has the paths on the server's machine. 409 if there is none."""
    context, model = _target(request)
    async with context.models.using(model):
        paths = await model.llm.stop_profile()
    return json_response({"model": model.names[0], "paths": paths})


def _target(request: Request, name: str | None = None) -> tuple[ServerContext, ServedModel]:
    """Return the context and the model that a request is about. Raises `QuireError` if the caller may not do this.

    Args:
        name: of the model, if the path has it and not the query.
    """
    context = _checked(request)
    query = read_query(request, MODEL if name is None else {})
    return context, _named(context, query.get("model", name))


def _named(context: ServerContext, name: str | None) -> ServedModel:
    if name is not None:
        return context.models.find(name)
    if len(context.models.models) > 1:
        raise RequestError(f"model is missing: one of {', '.join(context.models.names)}", param="model")
    return context.models.first


def _checked(request: Request) -> ServerContext:
    """Return the context. Raises `HTTPProblem` unless the key is valid for these routes, whatever the path looks like.

    Without keys, cross-site requests are refused: a browser sends those without a preflight.
    """
    context = context_of(request)
    if context.admin_keys.required:
        if context.admin_keys.get(request.scope["state"]["key_digest"]) is None:
            raise HTTPProblem(401, "the API key is not one for this route", code="invalid_api_key")
        return context
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise HTTPProblem(403, "pages of other sites may not operate this server", code="not_allowed")
    return context


def _state(model: ServedModel) -> Response:
    return json_response({"model": model.names[0], "status": model.status})


class LoadAdapterRequest(RequestModel):
    """POST /v1/load_lora_adapter. lora_path: the adapter's folder on the server's machine."""

    refused: ClassVar[Refused] = {"load_inplace": (False,), "is_3d_lora_weight": (False,)}

    lora_name: str
    lora_path: str
    model: str | None = None


class UnloadAdapterRequest(RequestModel):
    """POST /v1/unload_lora_adapter."""

    refused: ClassVar[Refused] = {}

    lora_name: str
    lora_int_id: int | None = None
    model: str | None = None


@router.post("/v1/load_lora_adapter", openapi_extra=body_schema(LoadAdapterRequest))
async def load_lora_adapter(request: Request) -> Response:
    """Load and check an adapter, and list it. 404 if there is no such folder, 400 with the reason if it is invalid."""
    context = _checked(request)
    body = await parse_request(request, LoadAdapterRequest)
    if any(item.answers_to(body.lora_name) for item in context.models.models):
        raise RequestError(f"lora_name is {echo(body.lora_name)}, which is taken already", param="lora_name")
    model = _model(context, body.model)
    await context.models.load_adapter(model, body.lora_name, body.lora_path)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", openapi_extra=body_schema(UnloadAdapterRequest))
async def unload_lora_adapter(request: Request) -> Response:
    """Unload an adapter. Running requests finish with it; new ones get 404."""
    context = _checked(request)
    body = await parse_request(request, UnloadAdapterRequest)
    holders = [item for item in context.models.models if item.llm.adapters.find(body.lora_name) is not None]
    model = holders[0] if holders else _model(context, body.model)
    await context.models.unload_adapter(model, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _model(context: ServerContext, name: str | None) -> ServedModel:
    """Return the model of this name, or else the first that has adapters."""
    if name is not None:
        return context.models.find(name)
    able = [model for model in context.models.models if model.llm.adapters.enabled]
    return able[0] if able else context.models.first
