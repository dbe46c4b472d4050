"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.server.anthropic.answer import Answer
from quire.server.anthropic.translate import (
    ConversationRequest,
    CountTokensRequest,
    MessagesRequest,
    Translation,
    translate,
)
from quire.server.chat import ChatCompletion
from quire.server.context import ModelContext, model_context
from quire.server.dialects import respond
from quire.server.json_io import json_response
from quire.server.parsing import parse_request, process_body, validate
from quire.server.protocol import ChatCompletionRequest, body_schema
from quire.server.streaming import EventStream

router = APIRouter()

R = TypeVar("R", bound=ConversationRequest)


@router.post("/v1/messages", openapi_extra=body_schema(MessagesRequest, "text/event-stream"))
async def create_message(request: Request) -> Response:
    """Answer a conversation, as Anthropic's API does."""
    body, context, translation = await _translated(request, MessagesRequest)
    with translation.names.translating():
        chat = await process_body(request, lambda: _chat(context, body, translation))
        await chat.start()
    answer = Answer(chat, body.max_tokens, translation.shows_thinking)
    stream_type = EventStream if body.stream else None
    return await respond(request, answer, translation.names, stream_type, request_id_header(request))


@router.post("/v1/messages/count_tokens", openapi_extra=body_schema(CountTokensRequest))
async def count_tokens(request: Request) -> Response:
    """Return how many tokens the prompt of such a message has."""
    body, context, translation = await _translated(request, CountTokensRequest)
    with translation.names.translating():
        chat = await process_body(request, lambda: _chat(context, body, translation))
        token_ids = await chat.render()
    answer = {"input_tokens": len(token_ids)}
    return json_response(answer, headers=request_id_header(request))


async def _translated(request: Request, model: type[R]) -> tuple[R, ModelContext, Translation]:
    body = await parse_request(request, model)
    context = await model_context(request, body.model)
    front = context.llm.front_model
    translation = await process_body(request, lambda: translate(body, front))
    return body, context, translation


def _chat(context: ModelContext, body: ConversationRequest, translation: Translation) -> ChatCompletion:
    chat_body = validate(ChatCompletionRequest, translation.fields, ignore_unknown=body.ignore_unknown)
    return ChatCompletion(context, chat_body, "msg")


def request_id_header(request: Request) -> dict[str, str]:
    """Return the header in which Anthropic's clients look for the id of a request."""
    return {"request-id": request.scope["state"]["request_id"]}
