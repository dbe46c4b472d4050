"""Routes that load and unload LoRA adapters; there only if routes that operate models were asked for at start.

Paths, bodies and answers are vLLM's. With several models, `model` says which one the adapter belongs to.
"""

from __future__ import annotations

from typing import ClassVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from quire.errors import RequestError, echo
from quire.server.admin import check_caller
from quire.server.context import ServerContext, context_of
from quire.server.model_pool import ServedModel
from quire.server.parsing import parse_request
from quire.server.protocol import Harmless, RequestModel, body_schema

router = APIRouter()


class LoadAdapterRequest(RequestModel):
    """POST /v1/load_lora_adapter. lora_path: the adapter's folder on the server's machine."""

    refused: ClassVar[Harmless] = {"load_inplace": (False,), "is_3d_lora_weight": (False,)}

    lora_name: str
    lora_path: str
    model: str | None = None


class UnloadAdapterRequest(RequestModel):
    """POST /v1/unload_lora_adapter."""

    refused: ClassVar[Harmless] = {}

    lora_name: str
    lora_int_id: int | None = None
    model: str | None = None


@router.post("/v1/load_lora_adapter", openapi_extra=body_schema(LoadAdapterRequest))
async def load_lora_adapter(request: Request) -> Response:
    """Read and check an adapter, and offer it. 404 if there is no such folder, 400 with the reason if it is no good."""
    context = _checked(request)
    body = await parse_request(request, LoadAdapterRequest)
    if any(item.answers_to(body.lora_name) for item in context.models.models):
        raise RequestError(f"lora_name is {echo(body.lora_name)}, which is taken already", param="lora_name")
    model = _model(context, body.model)
    await context.models.acquire(model)
    try:
        await model.llm.adapters.load(body.lora_name, body.lora_path)
    finally:
        context.models.release(model)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", openapi_extra=body_schema(UnloadAdapterRequest))
async def unload_lora_adapter(request: Request) -> Response:
    """Offer an adapter no more. Requests that have begun go on with it; others get 404."""
    context = _checked(request)
    body = await parse_request(request, UnloadAdapterRequest)
    holders = [item for item in context.models.models if item.llm.adapters.find(body.lora_name) is not None]
    model = holders[0] if holders else _model(context, body.model)
    if model.open:
        await model.llm.adapters.unload(body.lora_name)
    else:
        model.llm.adapters.withdraw(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _checked(request: Request) -> ServerContext:
    context = context_of(request)
    check_caller(request, context)
    return context


def _model(context: ServerContext, name: str | None) -> ServedModel:
    """Return the model called so, or else the first that has adapters."""
    if name is not None:
        return context.models.find(name)
    able = [model for model in context.models.models if model.llm.adapters.enabled]
    return able[0] if able else context.models.first
