"""POST /api/embed, and /api/embeddings, which is older: vectors as Ollama's clients ask for them."""

from __future__ import annotations

from typing import Any, ClassVar

from fastapi import APIRouter
from pydantic import SkipValidation
from starlette.requests import Request
from starlette.responses import Response

from quire.checks import Refused
from quire.frontend.pooling import Pooled
from quire.server.field_names import FieldNames
from quire.server.json_io import large_json_response
from quire.server.ollama.answer import Clock
from quire.server.ollama.catalogue import named_model
from quire.server.ollama.translate import check_keep_alive
from quire.server.parsing import parse_request, validate
from quire.server.pooling import EmbeddingRequest, PoolingJob, embedding_inputs, num_values
from quire.server.protocol import RequestModel, body_schema

router = APIRouter()


class EmbedRequest(RequestModel):
    """POST /api/embed."""

    refused: ClassVar[Refused] = {"options": ({},)}

    model: str
    input: SkipValidation[str | list[str] | None] = None
    truncate: bool = True
    dimensions: SkipValidation[int | None] = None
    keep_alive: SkipValidation[str | float | None] = None


class OldEmbedRequest(RequestModel):
    """POST /api/embeddings."""

    refused: ClassVar[Refused] = {"options": ({},)}

    model: str
    prompt: SkipValidation[str | None] = None
    keep_alive: SkipValidation[str | float | None] = None


@router.post("/api/embed", openapi_extra=body_schema(EmbedRequest))
async def embed(request: Request) -> Response:
    """Embed texts; texts beyond the context are truncated, unless `truncate` is false."""
    body = await parse_request(request, EmbedRequest, any_type=True)
    fields = {"input": body.input, "dimensions": body.dimensions}
    return await _answer(request, body, fields, body.truncate, lambda found: {"embeddings": _vectors(found)})


@router.post("/api/embeddings", openapi_extra=body_schema(OldEmbedRequest))
async def embeddings(request: Request) -> Response:
    """Make a vector of one text."""
    body = await parse_request(request, OldEmbedRequest, any_type=True)
    with FieldNames({"input": "prompt"}).translating():
        return await _answer(
            request, body, {"input": body.prompt}, True, lambda found: {"embedding": _vectors(found)[0]}, timed=False
        )


async def _answer(
    request: Request, body: Any, fields: dict[str, Any], truncate: bool, write: Any, *, timed: bool = True
) -> Response:
    clock = Clock()
    check_keep_alive(body.keep_alive)
    with clock.time_load():
        context = await named_model(request, body.model)
    cut = {"truncate_prompt_tokens": -1} if truncate else {}
    inner = validate(EmbeddingRequest, {"model": body.model, **fields, **cut})
    found = await PoolingJob(context, inner, "embd").run(await embedding_inputs(context, inner))

    def build() -> dict[str, Any]:
        answer: dict[str, Any] = write(found)
        if timed:
            num_tokens = sum([len(output.prompt_token_ids) for output in found])
            answer = {"model": context.name, **answer, **clock.times(), "prompt_eval_count": num_tokens}
        return answer

    return await large_json_response(num_values(found), build)


def _vectors(found: list[Pooled]) -> list[list[float]]:
    return [output.outputs.data.tolist() for output in found]
