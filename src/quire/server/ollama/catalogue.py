"""Ollama's routes about models: GET /api/tags, /api/ps and /api/version, POST /api/show.

Of a model that is not loaded nothing is known but its names. Sizes and digests are of files that Ollama keeps itself;
there are none here, and they are left out.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.checks import missing
from quire.errors import NotFoundError, RequestError
from quire.frontend.front_model import FrontModel
from quire.server.context import ModelContext, context_of, model_context
from quire.server.json_io import json_response
from quire.server.ollama.translate import ShowRequest
from quire.server.parsing import parse_request
from quire.server.protocol import body_schema
from quire.server.served_model import ServedModel
from quire.version import __version__

FORMAT = "safetensors"
DEFAULT_TAG = ":latest"

router = APIRouter()


@router.get("/api/version")
async def version(request: Request) -> Response:
    """Return the version of the server, which is not one of Ollama."""
    return json_response({"version": __version__})


@router.get("/api/tags")
async def tags(request: Request) -> Response:
    """List the models."""
    models = context_of(request).models.models
    return json_response({"models": [_entry(model, name) for model in models for name in model.names]})


@router.get("/api/ps")
async def running(request: Request) -> Response:
    """List the models that are loaded."""
    models = [model for model in context_of(request).models.models if model.status == "loaded"]
    return json_response(
        {
            "models": [
                {**_entry(model, name), "context_length": model.llm.max_model_len}
                for model in models
                for name in model.names
            ]
        }
    )


@router.post("/api/show", openapi_extra=body_schema(ShowRequest))
async def show(request: Request) -> Response:
    """Describe a model."""
    body = await parse_request(request, ShowRequest, any_type=True)
    if body.model is not None and body.name is not None and body.model != body.name:
        raise RequestError("name is the older name of model; give one of them", param="name")
    name = body.model if body.model is not None else body.name
    if name is None:
        raise missing("model")
    context = await named_model(request, name)
    front = context.llm.front_model
    defaults = front.sampling_defaults
    answer = {
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value}" for name, value in defaults.items()),
        "template": "" if front.chat_template is None else front.chat_template.source,
        "details": _details(context.model),
        "model_info": _model_info(context),
        "capabilities": _capabilities(front),
        "modified_at": _time(context.model.created),
    }
    return json_response(answer)


async def named_model(request: Request, name: str) -> ModelContext:
    """Return the context of a model, which Ollama's clients may call "NAME:latest". Raises `NotFoundError`."""
    try:
        return await model_context(request, name)
    except NotFoundError:
        if not name.endswith(DEFAULT_TAG):
            raise
        return await model_context(request, name.removesuffix(DEFAULT_TAG))


def _model_info(context: ModelContext) -> dict[str, Any]:
    info = context.llm.front_model.info
    kind = info.model_type
    return {
        "general.architecture": kind,
        f"{kind}.context_length": context.llm.max_model_len,
        f"{kind}.embedding_length": info.hidden_size,
        f"{kind}.block_count": info.num_hidden_layers,
        f"{kind}.attention.head_count": info.num_attention_heads,
        f"{kind}.attention.head_count_kv": info.num_key_value_heads,
        f"{kind}.vocab_size": info.vocab_size,
    }


def _capabilities(front: FrontModel) -> list[str]:
    if front.info.pooling is not None:
        return ["embedding"] if front.info.pooling.task == "embed" else []
    found = ["completion"]
    if front.message_format.handles_tools and front.chat_template is not None and front.chat_template.reads("tools"):
        found.append("tools")
    if front.message_format.can_reason:
        found.append("thinking")
    return found


def _entry(model: ServedModel, name: str) -> dict[str, Any]:
    return {"name": name, "model": name, "modified_at": _time(model.created), "details": _details(model)}


def _details(model: ServedModel) -> dict[str, Any]:
    details: dict[str, Any] = {"parent_model": "", "format": FORMAT}
    if model.llm.ready:
        info = model.llm.front_model.info
        details |= {"family": info.model_type, "families": [info.model_type]}
    return details


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
