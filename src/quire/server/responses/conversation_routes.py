"""The routes of the Conversations API: lists of items that outlive requests, which responses may be made in."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.checks import Fields
from quire.server.json_io import JSON, json_response
from quire.server.parsing import describe_query, parse_request, process_body, read_query
from quire.server.protocol import body_schema
from quire.server.responses.database import CONVERSATION, ID_PREFIXES
from quire.server.responses.items import Item, check_items, check_new, new_id, references
from quire.server.responses.protocol import (
    CreateConversationRequest,
    CreateItemsRequest,
    UpdateConversationRequest,
)
from quire.server.responses.routes import (
    INCLUDE,
    ITEMS_QUERY,
    check_keeps,
    item_list,
    list_items,
    owner_of,
    store_of,
)
from quire.server.responses.translate import check_include, check_metadata

router = APIRouter()

PREFIX = "/v1/conversations"
MAX_ITEMS = 20  # of one request, as in OpenAI's API


@router.post(PREFIX, openapi_extra=body_schema(CreateConversationRequest))
async def create_conversation(request: Request) -> Response:
    """Create a conversation."""
    body = await parse_request(request, CreateConversationRequest)
    check_keeps(request, "a conversation")
    check_metadata(body.metadata)
    items = await _new_items(request, body.fields)
    conversation: dict[str, Any] = {
        "id": new_id(ID_PREFIXES[CONVERSATION]),
        "object": "conversation",
        "created_at": int(time.time()),
        "metadata": body.metadata or {},
    }
    owner = owner_of(request)
    await store_of(request).run(lambda database: database.insert_conversation(owner, conversation, items))
    return json_response(conversation)


async def _new_items(request: Request, body: Fields) -> list[Item]:
    """Return the items of a body, each of them new."""
    found = await store_of(request).items(owner_of(request), references(body.get("items")))

    def check() -> list[Item]:
        items = check_items(body, "items", found.get, MAX_ITEMS)
        check_new(items, (), "items")
        return items

    return await process_body(request, check)


@router.get(PREFIX + "/{conversation_id}")
async def get_conversation(request: Request, conversation_id: str) -> Response:
    """Return a conversation, without its items."""
    read_query(request, {})
    owner = owner_of(request)
    return json_response(await store_of(request).run(lambda database: database.conversation(owner, conversation_id)))


@router.post(PREFIX + "/{conversation_id}", openapi_extra=body_schema(UpdateConversationRequest))
async def update_conversation(request: Request, conversation_id: str) -> Response:
    """Replace the metadata of a conversation."""
    body = await parse_request(request, UpdateConversationRequest)
    check_metadata(body.metadata)
    owner, metadata = owner_of(request), body.metadata or {}
    return json_response(
        await store_of(request).run(
            lambda database: database.update_conversation(owner, conversation_id, metadata=metadata)
        )
    )


@router.delete(PREFIX + "/{conversation_id}")
async def delete_conversation(request: Request, conversation_id: str) -> Response:
    """Delete a conversation and its items; a response that is being made in it goes on, and is not added to it."""
    read_query(request, {})
    await store_of(request).delete_conversation(owner_of(request), conversation_id)
    return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@router.post(PREFIX + "/{conversation_id}/items", openapi_extra=body_schema(CreateItemsRequest))
async def create_items(request: Request, conversation_id: str) -> Response:
    """Add items to a conversation."""
    body = await parse_request(request, CreateItemsRequest)
    check_include(read_query(request, INCLUDE).get("include"))
    items = await _new_items(request, body.fields)
    owner = owner_of(request)
    added = await store_of(request).change_items(
        owner, conversation_id, lambda database: database.add_items(owner, conversation_id, items)
    )
    return item_list(added, has_more=False)


@router.get(PREFIX + "/{conversation_id}/items", openapi_extra=describe_query(ITEMS_QUERY))
async def list_conversation_items(request: Request, conversation_id: str) -> Response:
    """List the items of a conversation."""
    return await list_items(request, CONVERSATION, conversation_id)


@router.get(PREFIX + "/{conversation_id}/items/{item_id}", openapi_extra=describe_query(INCLUDE))
async def get_item(request: Request, conversation_id: str, item_id: str) -> Response:
    """Return an item of a conversation."""
    check_include(read_query(request, INCLUDE).get("include"))
    owner = owner_of(request)
    item = await store_of(request).run(lambda database: database.conversation_item(owner, conversation_id, item_id))
    return Response(item, media_type=JSON)


@router.delete(PREFIX + "/{conversation_id}/items/{item_id}")
async def delete_item(request: Request, conversation_id: str, item_id: str) -> Response:
    """Delete an item of a conversation, which is returned."""
    read_query(request, {})
    owner = owner_of(request)
    return json_response(
        await store_of(request).change_items(
            owner, conversation_id, lambda database: database.delete_item(owner, conversation_id, item_id)
        )
    )
