"""Anthropic's message batches: their routes, how they show what is stored, and the lines of their results.

The requests of a batch are stored as a file of lines, which `batches/runner.py` runs as any other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, ClassVar

import httpx
import msgspec
from fastapi import APIRouter
from pydantic import SkipValidation
from starlette.requests import Request
from starlette.responses import Response

from quire.checks import Fields, Refused, check_not_empty, check_unicode, list_items, wrong_value
from quire.errors import NotFoundError, QuireError, RequestError
from quire.server.anthropic.routes import request_id_header
from quire.server.batches.openai import content_response, owner_of, runner_of, say_where, store_of
from quire.server.batches.records import ANTHROPIC, DAY, MESSAGES, RESULTS, BatchRecord, new_id
from quire.server.batches.runner import CANCELLED, EXPIRED, MAX_LINES
from quire.server.errors import HTTPProblem, error_body
from quire.server.json_io import json_response
from quire.server.parsing import QuerySchema, describe_query, parse_request, process_body, read_query
from quire.server.protocol import RequestModel, body_schema, responds_with

router = APIRouter()

PREFIX = "/v1/messages/batches"
URL = "/v1/messages"
JSONL = "application/x-jsonl"
CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
UNRUN = {"cancelled": "canceled", "expired": "expired"}  # by status, the count of what was not run
WRITTEN_AT_ONCE = 256  # requests
BATCHES_QUERY: QuerySchema = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 1000, "default": 20},
    "after_id": {"type": "string"},
    "before_id": {"type": "string"},
}


class MessageBatchesRequest(RequestModel):
    """POST /v1/messages/batches."""

    refused: ClassVar[Refused] = {"user_profile_id": (), "workspace_id": ()}

    requests: SkipValidation[list[dict[str, Any]]]


@router.post(PREFIX, openapi_extra=body_schema(MessageBatchesRequest))
async def create_message_batch(request: Request) -> Response:
    """Answer conversations, behind all other requests."""
    body = await parse_request(request, MessageBatchesRequest)
    lines = await process_body(request, lambda: list(_lines(body.requests)))
    store, owner = store_of(request), owner_of(request)
    now = int(store.clock())
    async with store.writing(owner) as writer:
        for start in range(0, len(lines), WRITTEN_AT_ONCE):
            await writer.write(b"".join(lines[start : start + WRITTEN_AT_ONCE]))
        await store.keep(owner, writer, store.record(writer, MESSAGES, "requests.jsonl"))
    batch = BatchRecord(
        batch_id=new_id("msgbatch_"),
        api=ANTHROPIC,
        endpoint=URL,
        input_file_id=writer.file_id,
        created_at=now,
        in_progress_at=now,
        expires_at=now + DAY,
        status="in_progress",  # what is wrong with a request is its result
        num_lines=len(lines),
    )
    try:
        await store.run(lambda database: database.insert_batch(owner, batch, [MESSAGES]))
    except QuireError:
        await store.run(lambda database: database.delete_file(owner, writer.file_id, [MESSAGES]))
        await store.remove([writer.file_id])
        raise
    await runner_of(request).tell()
    say_where(request)
    return _response(request, batch)


def _lines(requests: Any) -> Iterator[bytes]:
    """Yield the requests as lines of a file. Raises `RequestError` for what is no request at all."""
    check_not_empty(requests, "requests")
    seen: set[str] = set()
    for where, item in list_items(requests, "requests", most=MAX_LINES):
        fields = Fields(item, where)
        fields.only(("custom_id", "params"))
        custom_id, place = fields.string("custom_id"), fields.place("custom_id")
        if not CUSTOM_ID.fullmatch(custom_id):
            raise wrong_value(place, "1 to 64 letters, digits, _ and -", custom_id)
        if custom_id in seen:
            raise RequestError(f"{place}: {custom_id} is there twice", param=place, code="duplicate_custom_id")
        seen.add(custom_id)
        params = fields.object("params").given
        check_unicode(params, fields.place("params"))
        line = {"custom_id": custom_id, "method": "POST", "url": URL, "body": params}
        yield msgspec.json.encode(line) + b"\n"


@router.get(PREFIX, openapi_extra=describe_query(BATCHES_QUERY))
async def list_message_batches(request: Request) -> Response:
    """List batches, the newest first."""
    query = read_query(request, BATCHES_QUERY)
    after, before, limit = query.get("after_id"), query.get("before_id"), query["limit"]
    if after is not None and before is not None:
        raise RequestError("after_id contradicts before_id; give one of them", param="before_id")
    owner = owner_of(request)
    found, has_more = await store_of(request).run(
        lambda database: database.list_batches(owner, ANTHROPIC, after=after, before=before, limit=limit)
    )
    data = [_batch_object(batch) for batch in found]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    answer = {"data": data, "first_id": first, "last_id": last, "has_more": has_more}
    return json_response(answer, headers=request_id_header(request))


@router.get(PREFIX + "/{batch_id}")
async def get_message_batch(request: Request, batch_id: str) -> Response:
    """Return how far a batch has come."""
    read_query(request, {})
    return _response(request, await _find(request, batch_id))


async def _find(request: Request, batch_id: str) -> BatchRecord:
    owner = owner_of(request)
    return await store_of(request).run(lambda database: database.find_batch(owner, ANTHROPIC, batch_id))


@router.post(PREFIX + "/{batch_id}/cancel")
async def cancel_message_batch(request: Request, batch_id: str) -> Response:
    """Cancel a batch; what its requests have yielded so far is kept."""
    read_query(request, {})
    owner = owner_of(request)
    batch = await store_of(request).run(lambda database: database.cancel(owner, ANTHROPIC, batch_id))
    await runner_of(request).tell()
    return _response(request, batch)


@router.delete(PREFIX + "/{batch_id}")
async def delete_message_batch(request: Request, batch_id: str) -> Response:
    """Delete a batch that has ended, and its results."""
    read_query(request, {})
    owner, store = owner_of(request), store_of(request)
    await store.remove(await store.run(lambda database: database.delete_batch(owner, ANTHROPIC, batch_id)))
    return json_response({"id": batch_id, "type": "message_batch_deleted"}, headers=request_id_header(request))


@router.get(PREFIX + "/{batch_id}/results", openapi_extra=responds_with(JSONL))
async def get_message_batch_results(request: Request, batch_id: str) -> Response:
    """Return the results of a batch that has ended, one JSON object per line."""
    read_query(request, {})
    batch = await _find(request, batch_id)
    if batch.output_file_id is None:
        message = "this batch has no results" if batch.finished else "this batch has not ended yet"
        raise NotFoundError(message, param="batch_id", code="results_not_found")
    owner, store, name = owner_of(request), store_of(request), batch.output_file_id
    file = await store.run(lambda database: database.find_file(owner, name, [RESULTS]))
    return await content_response(store, file, JSONL, request_id_header(request))


def _response(request: Request, batch: BatchRecord) -> Response:
    return json_response(_batch_object(batch), headers=request_id_header(request))


def _batch_object(batch: BatchRecord) -> dict[str, Any]:
    """Return the resource. Counts are those of the end, as of Anthropic: until then all requests are processing."""
    counts = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
    if batch.finished:
        counts |= {"succeeded": batch.num_completed, "errored": batch.num_failed}
        counts[UNRUN.get(batch.status, "errored")] += batch.num_unrun
    else:
        counts["processing"] = batch.num_lines
    status = "ended" if batch.finished else "canceling" if batch.status == "cancelling" else "in_progress"
    ended_at = next(filter(None, (batch.completed_at, batch.cancelled_at, batch.expired_at, batch.failed_at)), None)
    return {
        "id": batch.batch_id,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": counts,
        "created_at": _time(batch.created_at),
        "expires_at": _time(batch.expires_at),
        "ended_at": _time(ended_at),
        "cancel_initiated_at": _time(batch.cancelling_at),
        "archived_at": None,
        # Relative: how clients reach the server, only they know.
        "results_url": f"{PREFIX}/{batch.batch_id}/results" if batch.output_file_id else None,
    }


def _time(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class AnthropicFormat:
    """The lines of Anthropic's results; see `runner.Format`."""

    def result(self, custom_id: str, reply: httpx.Response) -> bytes:
        answer = msgspec.Raw(reply.content)
        if reply.status_code < 400:
            return _line(custom_id, {"type": "succeeded", "message": answer})
        return _line(custom_id, {"type": "errored", "error": answer})

    def error(self, custom_id: str | None, code: str, message: str, number: int) -> bytes:
        if code in (CANCELLED, EXPIRED):
            return _line(custom_id, {"type": "canceled" if code == CANCELLED else "expired"})
        error = error_body(HTTPProblem(400, message, code=code), URL)
        return _line(custom_id, {"type": "errored", "error": msgspec.Raw(error)})

    def usage(self, content: bytes) -> dict[str, int]:
        return {}

    def files(self, batch: BatchRecord) -> tuple[tuple[str, str], None]:
        return (RESULTS, f"{batch.batch_id}_results.jsonl"), None


def _line(custom_id: str | None, result: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"custom_id": custom_id, "result": result})
