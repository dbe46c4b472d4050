"""POST /api/chat and /api/generate, and those of Ollama's routes that are not offered."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.server.chat import ChatCompletion
from quire.server.completions import Completion
from quire.server.context import ModelContext
from quire.server.dialects import respond
from quire.server.errors import HTTPProblem
from quire.server.json_io import json_response
from quire.server.ollama import catalogue, embed
from quire.server.ollama.answer import Answer, Clock, LineStream, loaded
from quire.server.ollama.catalogue import named_model
from quire.server.ollama.translate import (
    ChatRequest,
    GenerateRequest,
    chat_fields,
    check_keep_alive,
    completion_fields,
    field_names,
)
from quire.server.parsing import parse_request, process_body, validate
from quire.server.protocol import ChatCompletionRequest, CompletionRequest, body_schema

# What of Ollama is not here: method, path, and why.
NOT_OFFERED = (
    ("POST", "/api/pull", "models are loaded as the server's options say; none are downloaded (quire pull does that)"),
    ("POST", "/api/push", "this server publishes no models"),
    ("POST", "/api/create", "this server makes no models"),
    ("POST", "/api/copy", "this server renames no models; --served-model-name gives one several names"),
    ("DELETE", "/api/delete", "this server deletes no models"),
)

router = APIRouter()
router.include_router(catalogue.router)
router.include_router(embed.router)


@router.post("/api/chat", openapi_extra=body_schema(ChatRequest, LineStream.media_type))
async def chat(request: Request) -> Response:
    """Answer a conversation, as Ollama does."""
    clock = Clock()
    body = await parse_request(request, ChatRequest, any_type=True)
    check_keep_alive(body.keep_alive)
    with clock.time_load():
        context = await named_model(request, body.model)
    if not body.messages and body.messages in (None, []):
        return json_response(loaded(context.name, in_message=True))
    return await _chat(request, context, body, clock)


@router.post("/api/generate", openapi_extra=body_schema(GenerateRequest, LineStream.media_type))
async def generate(request: Request) -> Response:
    """Answer one prompt, as Ollama does."""
    clock = Clock()
    body = await parse_request(request, GenerateRequest, any_type=True)
    check_keep_alive(body.keep_alive)
    with clock.time_load():
        context = await named_model(request, body.model)
    if not body.prompt:
        return json_response(loaded(context.name, in_message=False))
    if not body.raw and not body.suffix:
        return await _chat(request, context, body, clock)
    names = field_names()
    with names.translating():
        fields = completion_fields(body, context.llm.max_model_len)
        completion = Completion(context, validate(CompletionRequest, fields, ignore_unknown=body.ignore_unknown))
        await completion.start()
    answer = Answer(completion, clock, in_message=False)
    return await respond(request, answer, names, LineStream if body.stream else None)


async def _chat(request: Request, context: ModelContext, body: ChatRequest | GenerateRequest, clock: Clock) -> Response:
    in_message = isinstance(body, ChatRequest)
    names = (
        field_names()
        if isinstance(body, ChatRequest)
        else field_names(["system", "prompt"] if body.system else ["prompt"])
    )

    def make() -> ChatCompletion:
        fields = chat_fields(body, context.llm.front_model, context.llm.max_model_len)
        return ChatCompletion(context, validate(ChatCompletionRequest, fields, ignore_unknown=body.ignore_unknown))

    with names.translating():
        chat = await process_body(request, make)
        await chat.start()
    answer = Answer(chat, clock, in_message=in_message)
    return await respond(request, answer, names, LineStream if body.stream else None)


def _refuse(method: str, path: str, why: str) -> None:
    async def refuse(request: Request) -> Response:
        raise HTTPProblem(404, f"{path} is not offered: {why}", code="unsupported_endpoint", close=True)

    router.add_api_route(path, refuse, methods=[method], include_in_schema=False)


for _method, _path, _why in NOT_OFFERED:
    _refuse(_method, _path, _why)
