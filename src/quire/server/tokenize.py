"""POST /tokenize and /detokenize: texts and conversations to token ids, and back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError, UnsupportedError, echo
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.processor import check_ids
from quire.frontend.tools import requested_tools
from quire.server.context import context_of, model_context
from quire.server.errors import JSON
from quire.server.messages import check_messages
from quire.server.parsing import at_ease, parse_request
from quire.server.protocol import DetokenizeRequest, TokenizeRequest, body_schema
from quire.server.templates import check_template, template_arguments
from quire.tokenizer.tokenizer import Tokenizer, check_text

THREAD_SIZE = 4096
CHAT_FIELDS = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "tools",
    "reasoning_effort",
)

router = APIRouter()

T = TypeVar("T")


@router.post("/tokenize", openapi_extra=body_schema(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """Return the token ids of a text or a conversation."""
    server = context_of(request).config.server
    body = await parse_request(
        request, TokenizeRequest, limit=server.max_body_bytes, ignore_unknown=server.ignore_unknown_fields
    )
    context = await model_context(request, body.model)
    llm = context.llm
    tokenizer = tokenizer_of(llm)
    if body.messages is not None and body.prompt is not None:
        raise RequestError("give prompt or messages, not both", param="messages")
    if body.messages is not None:
        messages = await at_ease(
            request, lambda: check_messages(body.messages, ignore_unknown=server.ignore_unknown_fields)
        )
        tools = requested_tools(body.tools, None, True, ignore_unknown=server.ignore_unknown_fields)
        tokens = await llm.chat_prompt(messages, **template_arguments(context, body, messages, tools.shown))
        check_template(llm.front_model, body, tools, answered=False)
        if body.add_special_tokens:
            tokens = with_special_tokens(llm, tokens)
    elif body.prompt is not None:
        _check_no_chat(body)
        tokens = await encode_text(llm, body.prompt, body.add_special_tokens is not False, "prompt")
    else:
        raise RequestError("prompt is required", param="prompt", code="missing_required_parameter")

    def build() -> bytes:
        answer = {"count": len(tokens), "max_model_len": llm.max_model_len, "tokens": tokens}
        if body.return_token_strs:
            answer["token_strs"] = [tokenizer.id_to_token(token) for token in tokens]
        return msgspec.json.encode(answer)

    return Response(await _maybe_in_thread(len(tokens), build), media_type=JSON)


def _check_no_chat(body: TokenizeRequest) -> None:
    """Raise `RequestError` for a field that only conversations have: beside a prompt it would be ignored."""
    for name in CHAT_FIELDS:
        if getattr(body, name) not in (None, False):
            raise RequestError(f"{name} needs messages; a prompt is tokenized as it is", param=name)


@router.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """Return the text of token ids, control tokens included."""
    server = context_of(request).config.server
    body = await parse_request(
        request, DetokenizeRequest, limit=server.max_body_bytes, ignore_unknown=server.ignore_unknown_fields
    )
    context = await model_context(request, body.model)
    llm = context.llm
    tokenizer = tokenizer_of(llm)
    tokens = body.tokens
    if not isinstance(tokens, list):
        raise RequestError(
            f"tokens must be a list of token ids, got {echo(tokens)}", param="tokens", code="invalid_type"
        )
    await _maybe_in_thread(len(tokens), lambda: check_ids(tokens, llm.vocab_size, "tokens"))
    text = await _maybe_in_thread(len(tokens), lambda: tokenizer.decode(tokens, skip_special_tokens=False))
    return Response(msgspec.json.encode({"prompt": text}), media_type=JSON)


def tokenizer_of(llm: AsyncLLM) -> Tokenizer:
    """Return the tokenizer. Raises `UnsupportedError` if the engine runs without one."""
    if llm.tokenizer is None:
        raise UnsupportedError("this server runs without a tokenizer; it works on token ids only", param="prompt")
    return llm.tokenizer


async def encode_text(llm: AsyncLLM, text: str, add_special_tokens: bool, param: str) -> list[int]:
    """Tokenize a text of bounded length. Raises `ContextLengthError` if it cannot fit the context however read."""
    tokenizer = tokenizer_of(llm)
    check_text(text, param)
    llm.processor.check_chars(len(text), param)
    return await _maybe_in_thread(len(text), lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))


def with_special_tokens(llm: AsyncLLM, token_ids: list[int]) -> list[int]:
    """Return ids with the tokens in front that the tokenizer puts before every text."""
    return [*tokenizer_of(llm).encode(""), *token_ids]


async def _maybe_in_thread(size: int, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if size > THREAD_SIZE else work()
