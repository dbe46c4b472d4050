"""The routes of the Responses API: make a response, look it up, follow, cancel or delete it, count its tokens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import TypeVar

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.checks import missing
from quire.errors import ConflictError, NotFoundError, RequestError, UnsupportedError
from quire.server.chat import ChatCompletion
from quire.server.context import ModelContext, context_of, model_context
from quire.server.dialects import rename_warnings, respond
from quire.server.fronts import FrontGoneError
from quire.server.json_io import json_response, large_json_response
from quire.server.parsing import QuerySchema, describe_query, parse_request, process_body, read_query
from quire.server.protocol import ChatCompletionRequest, body_schema
from quire.server.relay import forward
from quire.server.responses.conversation import Message, as_messages
from quire.server.responses.custom_tools import custom_names
from quire.server.responses.database import RESPONSE, EncodedItem
from quire.server.responses.events import OutputBuilder, encode_event, obfuscated_event
from quire.server.responses.items import Item, check_input, check_new, new_id, references
from quire.server.responses.protocol import InputRequest, InputTokensRequest, ResponseRequest
from quire.server.responses.running import ResponseRun, lease, new_response, spawn, start_fitting
from quire.server.responses.store import RemoteResponse, ResponseStore, StoredResponse, decode_items
from quire.server.responses.translate import (
    INCLUDED,
    NAMES,
    SEALED,
    chat_request,
    check_include,
    conversation_id,
    counted_request,
    without_default_effort,
)
from quire.server.streaming import EventStream

router = APIRouter()

FOLLOWED_AT_ONCE = 256  # stored events
LARGE = 65536  # bytes of a conversation from which on nothing is done to it on the event loop
PREFIX = "/v1/responses"

M = TypeVar("M", bound=InputRequest)

INCLUDE: QuerySchema = {"include": {"type": "array", "items": {"enum": [*INCLUDED]}}}
RESPONSE_QUERY: QuerySchema = {
    **INCLUDE,
    "stream": {"type": "boolean"},
    "starting_after": {"type": "integer", "minimum": 0},
    "include_obfuscation": {"type": "boolean"},
}
ITEMS_QUERY: QuerySchema = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string"},
    **INCLUDE,
}


def store_of(request: Request) -> ResponseStore:
    """Return the store of the server."""
    return context_of(request).responses


def owner_of(request: Request) -> bytes:
    """Return the owner of the responses that a request may see: its API key."""
    return request.scope["state"].get("key_digest") or b""


def check_keeps(request: Request, name: str, param: str | None = None) -> None:
    """Raise `UnsupportedError` if the server stores nothing: then it cannot do what has this name."""
    if not context_of(request).config.server.max_stored_responses:
        raise UnsupportedError(
            f"{name} is not supported by this server, which keeps no responses (--max-stored-responses)", param=param
        )


@router.post(PREFIX, openapi_extra=body_schema(ResponseRequest, "text/event-stream"))
async def create_response(request: Request) -> Response:
    """Answer a conversation; by default the answer is kept."""
    body = await parse_request(request, ResponseRequest)
    store, owner = store_of(request), owner_of(request)
    if body.background:
        check_keeps(request, "background", "background")
    conversation = conversation_id(body)
    with contextlib.ExitStack() as locked:
        if conversation is not None:
            with _about_conversation():
                await store.lock(owner, conversation)
            locked.callback(store.unlock, owner, conversation)
        earlier, items, messages = await _conversation(request, body)
        with NAMES.translating():
            chat_body = await process_body(request, lambda: chat_request(body, messages))
            context = await model_context(request, body.model)
            response_id = new_id("resp")
            chat = await process_body(request, lambda: _chat(context, chat_body, response_id))
            await start_fitting(chat, truncate=body.truncation == "auto")
        keeps_events = body.background and body.stream
        response = new_response(body, chat, response_id)
        stored = StoredResponse(owner, response, earlier, items, events=keeps_events)
        builder = OutputBuilder(sealed=SEALED in check_include(body.include), custom=custom_names(body.tools))
        obfuscated = body.stream_options is not None and body.stream_options.include_obfuscation is True
        kept = body.store or conversation is not None
        run = ResponseRun(chat, stored, store if kept else None, builder, obfuscated=obfuscated)
        locked.pop_all()  # the end of the run unlocks it
    if not body.background:
        return await respond(request, run, NAMES, EventStream if body.stream else None)
    try:
        if run.added is not None:
            await asyncio.shield(run.added)
        scope = await lease(context)
    except BaseException:
        run.close()
        raise
    spawn(run, scope, store)
    rename_warnings(request, NAMES)
    if body.stream:
        return EventStream(_follow(stored, 0, obfuscated), lambda: None)
    return json_response(stored.resource())


def _chat(context: ModelContext, body: ChatCompletionRequest, response_id: str) -> ChatCompletion:
    chat = ChatCompletion(context, without_default_effort(body, context.llm.front_model), "resp")
    if body.request_id is None:
        chat.response_id = response_id
    return chat


async def _conversation(request: Request, body: InputRequest) -> tuple[Sequence[Item], list[Item], list[Message]]:
    """Return what was said earlier, what is new, and the messages that both are."""
    store, owner = store_of(request), owner_of(request)
    previous, said = None, b"[]"
    conversation = conversation_id(body)
    if body.previous_response_id is not None:
        previous = await store.previous(owner, body.previous_response_id)
    elif conversation is not None:
        with _about_conversation():
            said = await store.run(lambda database: database.said(owner, conversation))
    elif body.input is None:
        raise missing("input")
    if (len(said) if previous is None else previous.size) > LARGE:
        request.scope["state"]["large_body"] = True
    # Looked up here, because what follows may be done in a thread.
    found = await store.items(owner, references(body.input))

    def read() -> tuple[Sequence[Item], list[Item], list[Message]]:
        items = check_input(body.fields, found.get)
        if previous is not None:
            earlier = previous.conversation
            return earlier, items, as_messages(body.instructions, earlier, items, "previous_response_id")
        earlier = decode_items(said)
        if conversation is not None:
            check_new(items, {item["id"] for item in earlier}, "input")
        return earlier, items, as_messages(body.instructions, earlier, items, "conversation")

    earlier, items, messages = await process_body(request, read)
    if not messages:
        raise RequestError("input must not be empty", param="input", code="empty_array")
    return earlier, items, messages


@contextlib.contextmanager
def _about_conversation() -> Iterator[None]:
    """Have errors about a conversation name the field of the request."""
    try:
        yield
    except (NotFoundError, ConflictError) as error:
        name = "conversation"
        raise type(error)(f"{name}: {error.message}", param=name, code=error.code) from None


async def _find(request: Request, response_id: str) -> StoredResponse | Response:
    """Return a response that this front has, or the answer of the front that runs it.

    Raises:
        NotFoundError: there is none. StorageError: it cannot be read now. FrontGoneError: the front hangs that runs it.
    """
    store, owner = store_of(request), owner_of(request)
    found = await store.find(owner, response_id)
    if isinstance(found, RemoteResponse):
        try:
            return await forward(request, found.slot)
        except FrontGoneError:
            found = await store.find(owner, response_id)  # if that front is gone, the response has failed
            if isinstance(found, RemoteResponse):
                raise
    return found


async def _resource(stored: StoredResponse) -> Response:
    """Return a response as it is now. One that has ended may be larger than what is encoded on the event loop."""
    return await large_json_response(stored.size if stored.finished else 0, stored.resource)


async def _follow(stored: StoredResponse, start: int, obfuscated: bool) -> AsyncGenerator[bytes, None]:
    """Yield the stored events from number `start` on, till the end of the response."""
    assert stored.events is not None
    yield b""  # the head of the answer; there may be nothing else
    while True:
        new = stored.events[start : start + FOLLOWED_AT_ONCE]
        if new:
            start += len(new)
            await asyncio.sleep(0)
            yield b"".join(map(obfuscated_event, new) if obfuscated else new)
        elif stored.ended.is_set():
            break
        else:
            await stored.more()
    if not stored.events and stored.response["status"] == "failed":
        # The process that ran it is gone, and the events with it.
        event = {"type": "response.failed", "sequence_number": start, "response": stored.response}
        yield encode_event(event)


@router.get(PREFIX + "/{response_id}", openapi_extra=describe_query(RESPONSE_QUERY, "text/event-stream"))
async def get_response(request: Request, response_id: str) -> Response:
    """Return a response, or with `stream` the events of one that was made in the background."""
    query = read_query(request, RESPONSE_QUERY)
    check_include(query.get("include"))
    stream = query.get("stream", False)
    for name in ("starting_after", "include_obfuscation"):
        if name in query and not stream:
            raise RequestError(f"{name} needs stream to be true", param=name)
    stored = await _find(request, response_id)
    if isinstance(stored, Response):
        return stored
    if not stream:
        return await _resource(stored)
    if stored.events is None:
        raise RequestError(
            "stream: only the events of responses made with background and stream are kept", param="stream"
        )
    start = query.get("starting_after", -1) + 1
    return EventStream(_follow(stored, start, query.get("include_obfuscation", False)), lambda: None)


@router.delete(PREFIX + "/{response_id}")
async def delete_response(request: Request, response_id: str) -> Response:
    """Delete a stored response."""
    read_query(request, {})
    stored = await _find(request, response_id)
    if isinstance(stored, Response):
        return stored
    await store_of(request).delete(stored)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.post(PREFIX + "/{response_id}/cancel")
async def cancel_response(request: Request, response_id: str) -> Response:
    """Cancel a background response, and return it as far as it has come."""
    read_query(request, {})
    stored = await _find(request, response_id)
    if isinstance(stored, Response):
        return stored
    if not stored.response["background"]:
        raise RequestError("only responses made with background can be cancelled", param="response_id")
    if not stored.finished:
        stored.abort()
    await stored.ended.wait()
    return await _resource(stored)


@router.get(PREFIX + "/{response_id}/input_items", openapi_extra=describe_query(ITEMS_QUERY))
async def list_input_items(request: Request, response_id: str) -> Response:
    """List the items of a response's request."""
    return await list_items(request, RESPONSE, response_id)


async def list_items(request: Request, kind: str, name: str) -> Response:
    """Return a page of the items of a response's request, or of a conversation."""
    query = read_query(request, ITEMS_QUERY)
    check_include(query.get("include"))
    owner, limit, order, after = owner_of(request), query["limit"], query["order"], query.get("after")
    items, more = await store_of(request).run(
        lambda database: database.list_items(owner, kind, name, limit, order, after)
    )
    return item_list(items, has_more=more)


def item_list(items: Sequence[EncodedItem], *, has_more: bool) -> Response:
    """Return a page of items."""
    data = [msgspec.Raw(item) for _, item in items]
    first, last = (items[0][0], items[-1][0]) if items else ("", "")
    return json_response({"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more})


@router.post(PREFIX + "/input_tokens", openapi_extra=body_schema(InputTokensRequest))
async def count_input_tokens(request: Request) -> Response:
    """Count the tokens of the prompt that a response would have."""
    body = await parse_request(request, InputTokensRequest)
    _, _, messages = await _conversation(request, body)
    with NAMES.translating():
        chat_body = counted_request(body, messages)
        context = await model_context(request, body.model)
        chat = ChatCompletion(context, without_default_effort(chat_body, context.llm.front_model), "count")
        token_ids = await chat.render()
    return json_response({"object": "response.input_tokens", "input_tokens": len(token_ids)})


@router.post(PREFIX + "/compact", include_in_schema=False)
async def compact(request: Request) -> Response:
    """Refuse: only `truncation` shortens conversations."""
    raise UnsupportedError(
        "compaction is not supported by this server; truncation auto drops the first turns",
        code="unsupported_operation",
    )
