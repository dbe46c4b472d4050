"""POST /tokenize and /detokenize: texts and conversations to token ids, and back."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.checks import check_unicode, wrong_type
from quire.errors import RequestError, UnsupportedError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.input_processor import check_ids
from quire.frontend.prompts import TokensOfText
from quire.frontend.tools import requested_tools
from quire.server.context import model_context
from quire.server.json_io import json_response, large_json_response, run_in_thread_if
from quire.server.messages import check_messages
from quire.server.parsing import parse_request, process_body
from quire.server.protocol import DetokenizeRequest, TemplateRequest, TokenizeRequest, body_schema
from quire.server.templates import check_template, template_arguments
from quire.tokenizer.tokenizer import Tokenizer

THREAD_SIZE = 4096  # characters or token ids
CHARS_PER_ID = 16  # as JSON, with its text
router = APIRouter()

T = TypeVar("T")


@router.post("/tokenize", openapi_extra=body_schema(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """Return the token ids of a text or a conversation."""
    body = await parse_request(request, TokenizeRequest)
    context = await model_context(request, body.model)
    llm = context.llm
    tokenizer = tokenizer_of(llm)
    if body.messages is not None and body.prompt is not None:
        raise RequestError("give prompt or messages, not both", param="messages")
    if body.messages is not None:
        messages = await process_body(request, lambda: check_messages(body.fields))
        tools = requested_tools(body.tools, None, True, ignore_unknown=body.ignore_unknown)
        arguments = template_arguments(context, body, messages, tools.shown)
        tokens = await llm.chat_prompt(messages, **arguments, wait=context.until_disconnect)
        await check_template(context, body, tools, answered=False)
        if body.add_special_tokens:
            tokens = with_special_tokens(llm, tokens)
    elif body.prompt is not None:
        _check_no_chat(body)
        tokens = await encode_text(llm, body.prompt, body.add_special_tokens is not False, "prompt")
    else:
        raise RequestError("prompt is required", param="prompt", code="missing_required_parameter")

    def build() -> dict[str, Any]:
        answer = {"count": len(tokens), "max_model_len": llm.max_model_len, "tokens": tokens}
        if body.return_token_strs:
            answer["token_strs"] = [tokenizer.id_to_token(token) for token in tokens]
        return answer

    return await large_json_response(CHARS_PER_ID * len(tokens), build)


def _check_no_chat(body: TokenizeRequest) -> None:
    """Raise `RequestError` for a field that only conversations have: beside a prompt it would be ignored."""
    for name in TemplateRequest.model_fields:
        if getattr(body, name) not in (None, False):
            raise RequestError(f"{name} needs messages; a prompt is tokenized as it is", param=name)


@router.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """Return the text of token ids, control tokens included."""
    body = await parse_request(request, DetokenizeRequest)
    context = await model_context(request, body.model)
    llm = context.llm
    tokenizer = tokenizer_of(llm)
    tokens = body.tokens
    if not isinstance(tokens, list):
        raise wrong_type("tokens", "a list of token ids", tokens)

    def decode() -> str:
        check_ids(tokens, llm.vocab_size, "tokens")
        return tokenizer.decode(tokens, skip_special_tokens=False)

    # One after the other: side by side they would be no faster, and take memory for each of them.
    return json_response({"prompt": await run_in_thread_if(len(tokens) > THREAD_SIZE, decode)})


def tokenizer_of(llm: AsyncLLM) -> Tokenizer:
    """Return the tokenizer. Raises `UnsupportedError` if the engine runs without one."""
    if llm.tokenizer is None:
        raise UnsupportedError("this server runs without a tokenizer; it works on token ids only", param="prompt")
    return llm.tokenizer


async def encode_text(llm: AsyncLLM, text: str, add_special_tokens: bool, param: str) -> list[int]:
    """Tokenize a text of bounded length. Raises `ContextLengthError` if it cannot fit the context however read."""
    tokenizer = tokenizer_of(llm)
    check_unicode(text, param)
    llm.processor.limit.check_chars(len(text), param)
    encode = partial(tokenizer.encode, text, add_special_tokens=add_special_tokens)
    return TokensOfText(await asyncio.to_thread(encode) if len(text) > THREAD_SIZE else encode())


def with_special_tokens(llm: AsyncLLM, token_ids: list[int]) -> list[int]:
    """Return ids with the tokens in front that the tokenizer puts before every text."""
    return TokensOfText([*tokenizer_of(llm).encode(""), *token_ids])
