"""Ollama's routes about models: GET /api/tags, /api/ps and /api/version, POST /api/show.

Of a model that is not loaded nothing is known but its names. Ollama's program needs a digest of every model, which
changes with the model: here it is one of the names, sizes and times of its files, or of its name alone.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
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
NEVER = "2318-01-01T00:00:00Z"  # when a model is unloaded that stays

router = APIRouter()


@router.get("/api/version")
async def version(request: Request) -> Response:
    """Return the version of the server, which is not one of Ollama."""
    return json_response({"version": __version__})


@router.get("/api/tags")
async def tags(request: Request) -> Response:
    """List the models."""
    return json_response({"models": await _entries(context_of(request).models.models)})


@router.get("/api/ps")
async def running(request: Request) -> Response:
    """List the models that are loaded."""
    models = [model for model in context_of(request).models.models if model.status == "loaded"]
    lengths = {name: model.llm.max_model_len for model in models for name in model.names}
    return json_response(
        {
            "models": [
                {**entry, "context_length": lengths[entry["name"]], "expires_at": NEVER}
                for entry in await _entries(models)
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


async def _entries(models: Sequence[ServedModel]) -> list[dict[str, Any]]:
    """Return an entry for each name of each model. Files are looked at in a thread, for they may be slow."""
    found = []
    for model in models:
        files = await asyncio.to_thread(_files, model.llm.front_model.info.path) if model.llm.ready else []
        described = str(files or model.names[0]).encode()
        entry = {
            "modified_at": _time(model.created),
            "size": sum(size for _, size, _ in files),
            "digest": hashlib.sha256(described).hexdigest(),
            "details": _details(model),
        }
        found += [{"name": name, "model": name, **entry} for name in model.names]
    return found


def _files(path: Path) -> list[tuple[str, int, int]]:
    """Return names, sizes and times of modification [ns] of a file, or of the files in a folder."""
    try:
        paths = sorted(path.iterdir()) if path.is_dir() else [path]
        stats = [(item.name, item.stat()) for item in paths if item.is_file()]
    except OSError:
        return []
    return [(name, found.st_size, found.st_mtime_ns) for name, found in stats]


def _details(model: ServedModel) -> dict[str, Any]:
    details: dict[str, Any] = {"parent_model": "", "format": FORMAT}
    if model.llm.ready:
        info = model.llm.front_model.info
        details |= {"family": info.model_type, "families": [info.model_type]}
    return details


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
