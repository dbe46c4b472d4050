"""The routes of models that make vectors and scores: embeddings, rerank, score, classify, pooling.

Requests are checked here, also those that a model which generates text then refuses. `pooling_job.py` runs them and
writes the answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NoReturn, TypeVar

from fastapi import APIRouter
from pydantic import SkipValidation
from starlette.requests import Request
from starlette.responses import Response

from quire.checks import INT64_MAX, check_int, check_object, missing, wrong_type
from quire.errors import ContextLengthError, RequestError, UnsupportedError, echo
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.pooling import Pooled, PoolingInput, check_task, paired, score_inputs, scores, spec_of, with_prompt
from quire.frontend.processor import check_ids
from quire.pooling_params import PoolingParams
from quire.server.context import ModelContext, model_context
from quire.server.parsing import parse_request
from quire.server.pooling_job import (
    Answered,
    PoolingJob,
    classification_answer,
    embedding_answer,
    pooling_answer,
    rerank_answer,
    score_answer,
)
from quire.server.protocol import Harmless, RequestModel, ShortText, body_schema
from quire.server.tokenize import encode_text, tokenizer_of
from quire.tokenizer.tokenizer import check_text

MAX_INPUTS = 2048
YIELD_EVERY = 4
LONG_TEXT = 4096
Task = Literal["embed", "rerank", "score", "classify", "pool"]
VERBS: dict[Task, str] = {
    "embed": "embed texts",
    "rerank": "rank documents",
    "score": "score pairs of texts",
    "classify": "classify texts",
    "pool": "make vectors of texts",
}
REFUSED: Harmless = {
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "mm_processor_kwargs": (),
    "softmax": (),
    "activation": (),
}

router = APIRouter()

Items = list[tuple[str | list[int], str]]
R = TypeVar("R", bound="PoolingRequest")


class PoolingRequest(RequestModel):
    """What all of these bodies have in common."""

    refused: ClassVar[Harmless] = REFUSED

    model: str
    truncate_prompt_tokens: SkipValidation[int | None] = None
    add_special_tokens: bool = True
    use_activation: bool | None = None
    normalize: bool | None = None
    priority: int = 0
    user: ShortText | None = None


class EmbeddingRequest(PoolingRequest):
    """POST /v1/embeddings."""

    refused: ClassVar[Harmless] = {**REFUSED, "messages": ()}

    input: SkipValidation[str | list[str] | list[int] | list[list[int]] | None] = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: SkipValidation[int | None] = None
    prompt_name: ShortText | None = None


class RerankRequest(PoolingRequest):
    """POST /rerank."""

    refused: ClassVar[Harmless] = {**REFUSED, "max_chunks_per_doc": (), "rank_fields": (), "max_tokens_per_doc": ()}

    query: SkipValidation[str | None] = None
    documents: SkipValidation[list[str | dict[str, str]] | None] = None
    top_n: SkipValidation[int | None] = None
    return_documents: bool = True
    instruction: ShortText | None = None


class ScoreRequest(PoolingRequest):
    """POST /score. `queries` and `documents` are other names of `text_1` and `text_2`."""

    text_1: SkipValidation[str | list[str] | None] = None
    text_2: SkipValidation[str | list[str] | None] = None
    queries: SkipValidation[str | list[str] | None] = None
    documents: SkipValidation[str | list[str] | None] = None
    instruction: ShortText | None = None


class ClassifyRequest(PoolingRequest):
    """POST /classify."""

    refused: ClassVar[Harmless] = {**REFUSED, "messages": ()}

    input: SkipValidation[str | list[str] | list[int] | list[list[int]] | None] = None


class PoolRequest(EmbeddingRequest):
    """POST /pooling."""

    task: Literal["embed", "token_embed", "classify", "score"] | None = None


def _refuse(context: ModelContext, task: Task) -> NoReturn:
    raise UnsupportedError(
        f"the model {echo(context.name)} does not {VERBS[task]}: it generates text, with /v1/chat/completions, "
        "/v1/completions, /v1/responses and /v1/messages",
        param="model",
        code="unsupported_endpoint",
    )


@router.post("/v1/embeddings", openapi_extra=body_schema(EmbeddingRequest))
async def create_embeddings(request: Request) -> Response:
    """Make a vector of each text."""
    return await _embed(request, EmbeddingRequest, "embed")


@router.post("/pooling", openapi_extra=body_schema(PoolRequest))
async def pooling(request: Request) -> Response:
    """Make vectors of texts, of the kind that the model makes."""
    return await _embed(request, PoolRequest, "pool")


async def _embed(request: Request, model: type[EmbeddingRequest], task: Task) -> Response:
    body = await _parsed(request, model)
    context = await model_context(request, body.model)
    front = context.llm.front_model
    if body.dimensions is not None:
        spec = front.info.pooling
        size = front.info.hidden_size if spec is None else spec.dimensions(front.info.hidden_size)
        check_int("dimensions", body.dimensions, 1, size)
    items = split_inputs(body.input, "input")
    if front.info.pooling is None:
        await _encode(context, body, items)
        _refuse(context, task)
    inputs = await _inputs_of(context, body, items)
    kind, write = ("pool", pooling_answer) if task == "pool" else ("embd", embedding_answer)
    job = PoolingJob(context, body, kind)
    return await job.answer(request, inputs, partial(write, base64=body.encoding_format == "base64"))


async def _inputs_of(context: ModelContext, body: EmbeddingRequest, items: Items) -> list[PoolingInput]:
    front = context.llm.front_model
    task = body.task if isinstance(body, PoolRequest) else "embed"
    if task is not None:
        check_task(spec_of(front), task)
    params = pooling_params(body, task=task, dimensions=body.dimensions)
    texts = [(with_prompt(front, item, body.prompt_name), where) for item, where in items]
    return await _inputs(context, body, texts, params)


async def embed_texts(request: Request, context: ModelContext, body: EmbeddingRequest) -> list[Pooled]:
    """Return the vectors that a request asks for, for dialects; raises `QuireError` and `ClientGoneError`."""
    items = split_inputs(body.input, "input")
    if context.llm.front_model.info.pooling is None:
        _refuse(context, "embed")
    return await PoolingJob(context, body, "embd").run(request, await _inputs_of(context, body, items))


@router.post("/classify", openapi_extra=body_schema(ClassifyRequest))
async def classify(request: Request) -> Response:
    """Say to which class each text belongs."""
    body = await _parsed(request, ClassifyRequest)
    context = await model_context(request, body.model)
    items, spec = split_inputs(body.input, "input"), context.llm.front_model.info.pooling
    if spec is None:
        await _encode(context, body, items)
        _refuse(context, "classify")
    check_task(spec, "classify")
    inputs = await _inputs(context, body, items, pooling_params(body, task="classify"))
    write = partial(classification_answer, labels=spec.labels)
    return await PoolingJob(context, body, "classify").answer(request, inputs, write)


@router.post("/v2/rerank", openapi_extra=body_schema(RerankRequest), operation_id="rerank_v2")
@router.post("/v1/rerank", openapi_extra=body_schema(RerankRequest), operation_id="rerank_v1")
@router.post("/rerank", openapi_extra=body_schema(RerankRequest), operation_id="rerank")
async def rerank(request: Request) -> Response:
    """Put documents into the order in which they fit a query."""
    body = await _parsed(request, RerankRequest)
    context = await model_context(request, body.model)
    query = _texts(body.query, "query", single=True)
    if body.documents is None:
        raise missing("documents")
    documents = _texts(_documents(body.documents), "documents")
    if body.top_n is not None:
        check_int("top_n", body.top_n, 1, INT64_MAX)
    if context.llm.front_model.info.pooling is None:
        await _encode(context, body, [*query, *documents])
        _refuse(context, "rerank")
    shown = [str(text) for text, _ in documents] if body.return_documents else None
    write = partial(rerank_answer, documents=shown, top_n=body.top_n)
    return await _scored(request, context, body, (query, documents), ("rerank", write))


@router.post("/v1/score", openapi_extra=body_schema(ScoreRequest), operation_id="score_v1")
@router.post("/score", openapi_extra=body_schema(ScoreRequest), operation_id="score")
async def score(request: Request) -> Response:
    """Say how well pairs of texts fit each other."""
    body = await _parsed(request, ScoreRequest)
    context = await model_context(request, body.model)
    left = _one_of(body, "text_1", "queries")
    right = _one_of(body, "text_2", "documents")
    first, second = _texts(*left), _texts(*right)
    if len(first) not in (1, len(second)):
        raise RequestError(
            f"{left[1]} must have one text, or as many as {right[1]} ({len(second)}), got {len(first)}", param=left[1]
        )
    if context.llm.front_model.info.pooling is None:
        await _encode(context, body, [*first, *second])
        _refuse(context, "score")
    return await _scored(request, context, body, (first, second), ("score", score_answer))


async def _scored(
    request: Request,
    context: ModelContext,
    body: RerankRequest | ScoreRequest,
    sides: tuple[Items, Items],
    kind: tuple[str, Callable[[Answered], dict[str, Any]]],
) -> Response:
    """Score each text of one side with that of the other, and return what the kind of answer makes of it."""
    llm = context.llm
    queries, documents = [[str(text) for text, _ in side] for side in sides]
    labels = [name for _, name in sides[0]], [name for _, name in sides[1]]
    pairs, params = paired(queries, documents), pooling_params(body)
    context.server.check_room(context.model)
    front, processor = llm.front_model, llm.processor

    def make() -> list[PoolingInput]:
        return score_inputs(front, processor, queries, documents, pairs, params, body.instruction, names=labels)

    inputs = await asyncio.to_thread(make)
    return await PoolingJob(context, body, kind[0]).answer(
        request, inputs, kind[1], lambda found: scores(front, found, len(queries), pairs)
    )


async def _parsed(request: Request, model: type[R]) -> R:
    body = await parse_request(request, model)
    if body.truncate_prompt_tokens not in (None, -1):
        check_int("truncate_prompt_tokens", body.truncate_prompt_tokens, 1, INT64_MAX)
    return body


def pooling_params(body: PoolingRequest, **fields: Any) -> PoolingParams:
    """Return the parameters a request asks for. Raises `RequestError` naming the field."""
    return PoolingParams(
        use_activation=body.use_activation,
        normalize=body.normalize,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        **fields,
    )


async def _inputs(
    context: ModelContext, body: PoolingRequest, items: Sequence[tuple[Any, str]], params: PoolingParams
) -> list[PoolingInput]:
    """Return a request to the engine for each text; they are tokenized here only where that takes no special tokens."""
    context.server.check_room(context.model)
    if not body.add_special_tokens:
        ids = await _encode(context, body, items)
        return [PoolingInput(found, params, where) for found, (_, where) in zip(ids, items, strict=True)]
    for item, where in items:
        if isinstance(item, str) and body.truncate_prompt_tokens is None:
            await _check_long(context.llm, item, where)
    return [PoolingInput(item, params, where) for item, where in items]


def _one_of(body: ScoreRequest, name: str, other: str) -> tuple[Any, str]:
    """Return the value of a field that has two names, and the one the client used."""
    if getattr(body, name) is not None and getattr(body, other) is not None:
        raise RequestError(f"{other} is another name of {name}; give one of them", param=other)
    used = other if getattr(body, other) is not None else name
    return getattr(body, used), used


def _documents(documents: Any) -> Any:
    """Return documents as texts, where they are objects with a text."""
    if not isinstance(documents, list):
        raise wrong_type("documents", "a list of strings", documents)
    texts = []
    for index, document in enumerate(documents[: MAX_INPUTS + 1]):
        if isinstance(document, dict):
            where = f"documents[{index}]"
            document = check_object(document, where, ("text",)).get("text")
            if document is None:
                raise missing(f"{where}.text")
        texts.append(document)
    return texts


def _texts(value: Any, name: str, *, single: bool = False) -> list[tuple[str | list[int], str]]:
    """Return a text, or unless `single` a list of texts, with what errors call each."""
    if value is not None and not isinstance(value, str) and (single or not isinstance(value, list)):
        wanted = "a string" if single else "a string or a list of strings"
        raise wrong_type(name, f"{wanted}", value)
    if isinstance(value, list) and value and not isinstance(value[0], str):
        raise wrong_type(f"{name}[0]", "a string", value[0])
    return split_inputs(value, name)


def split_inputs(value: Any, name: str) -> list[tuple[str | list[int], str]]:
    """Return each text, or list of token ids, with what errors call it. Raises `RequestError`."""
    if value is None:
        raise missing(name)
    if isinstance(value, str):
        return [(_not_empty(value, name), name)]
    if not isinstance(value, list):
        raise wrong_type(name, "a string, a list of strings, of token ids, or of such lists", value)
    if not value:
        raise RequestError(f"{name} must not be empty", param=name, code="empty_array")
    kind = type(value[0])
    if kind not in (str, list):
        return [(value, name)]  # token ids, checked one by one where the vocabulary is known
    if len(value) > MAX_INPUTS:
        raise RequestError(
            f"{name} may have at most {MAX_INPUTS} items, got {len(value)}", param=name, code="array_above_max_length"
        )
    items = []
    for index, item in enumerate(value):
        where = f"{name}[{index}]"
        if type(item) is not kind:
            wanted = "a string" if kind is str else "a list of token ids"
            raise wrong_type(where, f"{wanted}, as {name}[0] is", item)
        items.append((_not_empty(item, where), where))
    return items


def _not_empty(item: Any, where: str) -> Any:
    if not item:
        code = "string_below_min_length" if isinstance(item, str) else "empty_array"
        raise RequestError(f"{where} must not be empty", param=where, code=code)
    return item


async def _encode(
    context: ModelContext, body: PoolingRequest, items: Sequence[tuple[str | list[int], str]]
) -> list[list[int]]:
    """Return the token ids of each text. Raises `RequestError`, and `ContextLengthError` for one that does not fit."""
    llm = context.llm
    encoded: list[list[int]] = []
    for count, (item, where) in enumerate(items, 1):
        if isinstance(item, str):
            if body.truncate_prompt_tokens is None:
                await _check_long(llm, item, where)
            ids = await encode_text(llm, item, body.add_special_tokens, where)
        else:
            check_ids(item, llm.vocab_size, where)
            ids = item
        keep = body.truncate_prompt_tokens
        if keep is not None:
            ids = ids[: llm.max_model_len if keep == -1 else keep]
        if len(ids) > llm.max_model_len:
            raise ContextLengthError(
                f"{where} has {len(ids)} tokens, but the context length is {llm.max_model_len} tokens", param=where
            )
        encoded.append(ids)
        if count % YIELD_EVERY == 0:
            await asyncio.sleep(0)  # many texts must not hold up everyone else
    return encoded


async def _check_long(llm: AsyncLLM, text: str, where: str) -> None:
    """Raise `ContextLengthError` for a text of which the beginning alone does not fit."""
    if len(text) <= LONG_TEXT:
        return
    tokenizer_of(llm)
    check_text(text, where)
    llm.processor.check_chars(len(text), where)
    await asyncio.to_thread(llm.processor.check_pieces, text, where)
