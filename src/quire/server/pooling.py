"""The routes of pooling models: embeddings, rerank, score, classify, pooling. Models that generate text refuse them."""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NoReturn, TypeVar

import numpy as np
from fastapi import APIRouter
from pydantic import SkipValidation
from starlette.requests import Request
from starlette.responses import Response

from quire.checks import INT64_MAX, Refused, check_int, check_unicode, list_items, missing, wrong_type
from quire.errors import ContextLengthError, GenerationError, QuireError, RequestError, UnsupportedError, echo
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.input_processor import check_ids
from quire.frontend.output_processor import RequestStream
from quire.frontend.pooling import (
    ABORTED,
    PairScoring,
    Pooled,
    check_task,
    spec_of,
    with_prompt,
)
from quire.frontend.prompts import RequestInput
from quire.outputs import ScoringRequestOutput
from quire.pooling_params import PoolingParams
from quire.server.context import ModelContext, model_context
from quire.server.job import EngineJob, estimate_tokens
from quire.server.json_io import large_json_response
from quire.server.limits import time_limit
from quire.server.parsing import parse_request, split_prompts
from quire.server.protocol import EngineBody, ShortText, body_schema
from quire.server.streaming import until_disconnect
from quire.server.tokenize import encode_text, tokenizer_of

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
REFUSED: Refused = {
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "mm_processor_kwargs": (),
    "softmax": (),
    "activation": (),
}

router = APIRouter()

Items = list[tuple[str | list[int], str]]  # a text or token ids, and its name in errors
Prompts = SkipValidation[str | list[str] | list[int] | list[list[int]] | None]
Texts = SkipValidation[str | list[str] | None]
R = TypeVar("R", bound="PoolingRequest")


class PoolingRequest(EngineBody):
    """Fields of all these bodies."""

    refused: ClassVar[Refused] = REFUSED

    truncate_prompt_tokens: SkipValidation[int | None] = None
    add_special_tokens: bool = True
    use_activation: bool | None = None
    normalize: bool | None = None


class EmbeddingRequest(PoolingRequest):
    """POST /v1/embeddings."""

    refused: ClassVar[Refused] = {**REFUSED, "messages": ()}

    input: Prompts = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: SkipValidation[int | None] = None
    prompt_name: ShortText | None = None


class PoolRequest(EmbeddingRequest):
    """POST /pooling."""

    task: Literal["embed", "token_embed", "classify", "score"] | None = None


class ClassifyRequest(PoolingRequest):
    """POST /classify."""

    refused: ClassVar[Refused] = {**REFUSED, "messages": ()}

    input: Prompts = None


class RerankRequest(PoolingRequest):
    """POST /rerank."""

    refused: ClassVar[Refused] = {**REFUSED, "max_chunks_per_doc": (), "rank_fields": (), "max_tokens_per_doc": ()}

    query: SkipValidation[str | None] = None
    documents: SkipValidation[list[str | dict[str, str]] | None] = None
    top_n: SkipValidation[int | None] = None
    return_documents: bool = True
    instruction: ShortText | None = None


class ScoreRequest(PoolingRequest):
    """POST /score. `queries` and `documents` are other names of `text_1` and `text_2`."""

    text_1: Texts = None
    text_2: Texts = None
    queries: Texts = None
    documents: Texts = None
    instruction: ShortText | None = None


class PoolingJob(EngineJob):
    """The engine's requests of one HTTP request for vectors or scores."""

    body: PoolingRequest

    def __init__(self, context: ModelContext, body: PoolingRequest, prefix: str) -> None:
        super().__init__(context, body, f"{prefix}-{uuid.uuid4().hex}")

    async def answer(self, inputs: Sequence[RequestInput], build: Callable[[list[Pooled]], dict[str, Any]]) -> Response:
        """Run the requests and respond with `build(outputs)`, id and usage; aborts if the client disconnects.

        Raises:
            QuireError: as `AsyncLLM.submit`, or one of the requests failed.
        """
        outputs = await self.run(inputs)
        num_tokens = sum([len(output.prompt_token_ids) for output in outputs])
        usage = {
            "prompt_tokens": num_tokens,
            "total_tokens": num_tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": sum([output.num_cached_tokens for output in outputs])},
        }
        head = {"id": self.response_id, "created": self.created, "model": self.model}
        return await large_json_response(num_values(outputs), lambda: {**head, **build(outputs), "usage": usage})

    async def run(self, inputs: Sequence[RequestInput]) -> list[Pooled]:
        """Run the requests; return their outputs in order. Raises `QuireError`."""

        def add(stream: RequestStream) -> None:
            self.add(stream, inputs[len(self.streams)].params)

        self.register({})
        try:
            num_tokens = sum([estimate_tokens(item.prompt) for item in inputs])
            await self.limit(num_tokens, num_tokens)
            work = self.context.llm.pool_all(inputs, note=add, **self.engine_options())
            async with time_limit(self.deadline):
                return await until_disconnect(self.context.request.receive, work)
        except QuireError as error:
            self.count_rejection(error)
            if isinstance(error, GenerationError) and error.code == ABORTED:
                raise self.aborted() from None
            raise
        finally:
            self.close()


def num_values(outputs: Sequence[Pooled]) -> int:
    """Return how many numbers the outputs have."""
    return sum([output.outputs.data.size for output in outputs])


@router.post("/v1/embeddings", openapi_extra=body_schema(EmbeddingRequest))
async def create_embeddings(request: Request) -> Response:
    """Make a vector of each text."""
    return await _embed(request, EmbeddingRequest, "embed", ("embd", "embedding", "embedding"))


@router.post("/pooling", openapi_extra=body_schema(PoolRequest))
async def pooling(request: Request) -> Response:
    """Make vectors of texts, of the kind that the model makes."""
    return await _embed(request, PoolRequest, "pool", ("pool", "pooling", "data"))


async def _embed(request: Request, model: type[EmbeddingRequest], task: Task, names: tuple[str, str, str]) -> Response:
    """Respond with a vector of each text; `names` are the id's prefix, the kind of object, and the vector's field."""
    body = await _parse(request, model)
    context = await model_context(request, body.model)
    prefix, kind, field = names
    inputs = await embedding_inputs(context, body, task)

    def build(outputs: list[Pooled]) -> dict[str, Any]:
        vectors = [_encoded(output.outputs.data, body.encoding_format) for output in outputs]
        data = [{"object": kind, "index": index, field: vector} for index, vector in enumerate(vectors)]
        return {"object": "list", "data": data}

    return await PoolingJob(context, body, prefix).answer(inputs, build)


async def embedding_inputs(context: ModelContext, body: EmbeddingRequest, task: Task = "embed") -> list[RequestInput]:
    """Return the engine's requests of a body. Raises `RequestError`."""
    front = context.llm.front_model
    spec = front.info.pooling
    if body.dimensions is not None:
        size = front.info.hidden_size if spec is None else spec.dimensions(front.info.hidden_size)
        check_int("dimensions", body.dimensions, 1, size)
    items = split_inputs(body.input, "input")
    if spec is None:
        await _refuse(context, body, items, task)
    kind = body.task if isinstance(body, PoolRequest) else "embed"
    if kind is not None:
        check_task(spec_of(front), kind)
    params = _params(body, task=kind, dimensions=body.dimensions)
    texts: Any = [(with_prompt(front, item, body.prompt_name), where) for item, where in items]
    return await _inputs(context, body, texts, params)


@router.post("/classify", openapi_extra=body_schema(ClassifyRequest))
async def classify(request: Request) -> Response:
    """Say to which class each text belongs."""
    body = await _parse(request, ClassifyRequest)
    context = await model_context(request, body.model)
    items, spec = split_inputs(body.input, "input"), context.llm.front_model.info.pooling
    if spec is None:
        await _refuse(context, body, items, "classify")
    check_task(spec, "classify")
    labels = spec.labels

    def build(outputs: list[Pooled]) -> dict[str, Any]:
        data = []
        for index, output in enumerate(outputs):
            probs = output.outputs.data
            label = labels[int(probs.argmax())]
            data.append({"index": index, "label": label, "probs": probs.tolist(), "num_classes": len(probs)})
        return {"object": "list", "data": data}

    inputs = await _inputs(context, body, items, _params(body, task="classify"))
    return await PoolingJob(context, body, "classify").answer(inputs, build)


@router.post("/v2/rerank", openapi_extra=body_schema(RerankRequest), operation_id="rerank_v2")
@router.post("/v1/rerank", openapi_extra=body_schema(RerankRequest), operation_id="rerank_v1")
@router.post("/rerank", openapi_extra=body_schema(RerankRequest), operation_id="rerank")
async def rerank(request: Request) -> Response:
    """Put documents into the order in which they fit a query."""
    body = await _parse(request, RerankRequest)
    context = await model_context(request, body.model)
    query = _texts(body.query, "query", single=True)
    if body.documents is None:
        raise missing("documents")
    documents = _texts(_documents(body), "documents")
    if body.top_n is not None:
        check_int("top_n", body.top_n, 1, INT64_MAX)

    def build(scored: list[ScoringRequestOutput]) -> dict[str, Any]:
        values = [output.outputs.score for output in scored]
        order = sorted(range(len(values)), key=lambda index: -values[index])[: body.top_n]  # ties keep their order
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": values[index]} for index in order]
        if body.return_documents:
            for result in results:
                result["document"] = {"text": documents[result["index"]][0]}
        return {"results": results}

    return await _score(context, body, "rerank", (query, documents), build)


@router.post("/v1/score", openapi_extra=body_schema(ScoreRequest), operation_id="score_v1")
@router.post("/score", openapi_extra=body_schema(ScoreRequest), operation_id="score")
async def score(request: Request) -> Response:
    """Say how well pairs of texts fit each other."""
    body = await _parse(request, ScoreRequest)
    context = await model_context(request, body.model)
    left = _one_of(body, "text_1", "queries")
    right = _one_of(body, "text_2", "documents")
    first, second = _texts(*left), _texts(*right)
    if len(first) not in (1, len(second)):
        raise RequestError(
            f"{left[1]} must have one text, or as many as {right[1]} ({len(second)}), got {len(first)}", param=left[1]
        )

    def build(scored: list[ScoringRequestOutput]) -> dict[str, Any]:
        values = [output.outputs.score for output in scored]
        return {
            "object": "list",
            "data": [{"object": "score", "index": index, "score": value} for index, value in enumerate(values)],
        }

    return await _score(context, body, "score", (first, second), build)


async def _score(
    context: ModelContext,
    body: RerankRequest | ScoreRequest,
    task: Task,
    sides: tuple[Items, Items],
    build: Callable[[list[ScoringRequestOutput]], dict[str, Any]],
) -> Response:
    """Score each text of one side with that of the other, and respond with `build(scores)`."""
    if context.llm.front_model.info.pooling is None:
        await _refuse(context, body, [*sides[0], *sides[1]], task)
    llm = context.llm
    queries, documents = [[str(text) for text, _ in side] for side in sides]
    names = [name for _, name in sides[0]], [name for _, name in sides[1]]
    params = _params(body)
    context.server.check_room(context.model)

    def make() -> PairScoring:
        return PairScoring(llm.front_model, llm.processor, queries, documents, params, body.instruction, names=names)

    scoring = await asyncio.to_thread(make)
    return await PoolingJob(context, body, task).answer(scoring.inputs, lambda outputs: build(scoring.scores(outputs)))


async def _refuse(context: ModelContext, body: PoolingRequest, items: Items, task: Task) -> NoReturn:
    """Raise `UnsupportedError` for a model that generates text, unless there is more to say about the texts."""
    await _encode(context.llm, body, items)
    raise UnsupportedError(
        f"the model {echo(context.name)} does not {VERBS[task]}: it generates text, with /v1/chat/completions, "
        "/v1/completions, /v1/responses and /v1/messages",
        param="model",
        code="unsupported_endpoint",
    )


async def _parse(request: Request, model: type[R]) -> R:
    body = await parse_request(request, model)
    if body.truncate_prompt_tokens not in (None, -1):
        check_int("truncate_prompt_tokens", body.truncate_prompt_tokens, 1, INT64_MAX)
    return body


def _params(body: PoolingRequest, **fields: Any) -> PoolingParams:
    return PoolingParams(
        use_activation=body.use_activation,
        normalize=body.normalize,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        **fields,
    )


async def _inputs(
    context: ModelContext, body: PoolingRequest, items: Items, params: PoolingParams
) -> list[RequestInput]:
    """Return the engine's request of each text; texts are tokenized here only without special tokens."""
    context.server.check_room(context.model)
    if not body.add_special_tokens:
        ids = await _encode(context.llm, body, items)
        return [RequestInput(found, params, where) for found, (_, where) in zip(ids, items, strict=True)]
    for item, where in items:
        if isinstance(item, str) and body.truncate_prompt_tokens is None:
            await _check_long(context.llm, item, where)
    return [RequestInput(item, params, where) for item, where in items]


async def _encode(llm: AsyncLLM, body: PoolingRequest, items: Items) -> list[list[int]]:
    """Return the token ids of each text. Raises `RequestError`, also for one that is too long."""
    encoded: list[list[int]] = []
    keep = body.truncate_prompt_tokens
    for count, (item, where) in enumerate(items, 1):
        if isinstance(item, str):
            if keep is None:
                await _check_long(llm, item, where)
            ids = await encode_text(llm, item, body.add_special_tokens, where)
        else:
            check_ids(item, llm.vocab_size, where)
            ids = item
        if keep is not None:
            ids = type(ids)(ids[: llm.max_model_len if keep == -1 else keep])
        if len(ids) > llm.max_model_len:
            raise ContextLengthError(
                f"{where} has {len(ids)} tokens, but the context length is {llm.max_model_len} tokens", param=where
            )
        encoded.append(ids)
        if count % YIELD_EVERY == 0:
            await asyncio.sleep(0)  # many texts must not hold up other requests
    return encoded


async def _check_long(llm: AsyncLLM, text: str, where: str) -> None:
    """Raise `ContextLengthError` for a text of which the beginning alone does not fit."""
    if len(text) <= LONG_TEXT:
        return
    tokenizer_of(llm)
    check_unicode(text, where)
    llm.processor.limit.check_chars(len(text), where)
    await asyncio.to_thread(llm.processor.limit.check_pieces, text, where)


def _one_of(body: ScoreRequest, name: str, other: str) -> tuple[Any, str]:
    """Return the value of a field that has two names, and the one the client used."""
    if getattr(body, name) is not None and getattr(body, other) is not None:
        raise RequestError(f"{other} is another name of {name}; give one of them", param=other)
    used = other if getattr(body, other) is not None else name
    return getattr(body, used), used


def _documents(body: RerankRequest) -> list[Any]:
    """Return the texts of documents, which may be objects with a text."""
    fields = body.fields
    return [
        fields.part(document, where).only(("text",)).required("text") if isinstance(document, dict) else document
        for where, document in list_items(body.documents, "documents", "a list of strings", most=MAX_INPUTS)
    ]


def _texts(value: Any, name: str, *, single: bool = False) -> Items:
    """Return a text, or unless `single` a list of texts, with their names in errors."""
    if value is not None and not isinstance(value, str) and (single or not isinstance(value, list)):
        raise wrong_type(name, "a string" if single else "a string or a list of strings", value)
    if isinstance(value, list) and value and not isinstance(value[0], str):
        raise wrong_type(f"{name}[0]", "a string", value[0])
    return split_inputs(value, name)


def split_inputs(value: Any, name: str) -> Items:
    """As `split_prompts`; no text may be empty."""
    items = split_prompts(value, name, MAX_INPUTS)
    for item, where in items:
        if not item:
            code = "string_below_min_length" if isinstance(item, str) else "empty_array"
            raise RequestError(f"{where} must not be empty", param=where, code=code)
    return items


def _encoded(vector: np.ndarray, encoding: str) -> Any:
    """Return numbers as a list, or the base64 text of their float32 bytes."""
    if encoding == "float":
        return vector.tolist()
    return base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode("ascii")
