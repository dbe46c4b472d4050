"""OpenAI's files and batches: their routes, how they show what is stored, and the lines of their output."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Literal

import httpx
import msgspec
from fastapi import APIRouter
from pydantic import SkipValidation
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from quire.checks import check_int, check_length, check_unicode, wrong_value
from quire.errors import NotFoundError, RequestError
from quire.server.batches.lines import URLS, response_of, result_id
from quire.server.batches.records import BATCH, COUNTS, DAY, OPENAI, OUTPUT, WINDOW, BatchRecord, FileRecord, new_id
from quire.server.batches.runner import BatchRunner
from quire.server.batches.store import IN_MEMORY, BatchStore
from quire.server.batches.upload import LEAST_SECONDS, MOST_SECONDS, check_form_origin, form_schema, receive_file
from quire.server.context import context_of
from quire.server.json_io import json_response
from quire.server.parsing import QuerySchema, describe_query, parse_request, read_query
from quire.server.protocol import RequestModel, body_schema, responds_with

router = APIRouter()

PURPOSES = (BATCH, OUTPUT)
BINARY = "application/octet-stream"
MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512
TIMES = (
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)
FILES_QUERY: QuerySchema = {
    "purpose": {"type": "string"},
    "limit": {"type": "integer", "minimum": 1, "maximum": 10_000, "default": 10_000},
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string"},
}
BATCHES_QUERY: QuerySchema = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
    "after": {"type": "string"},
}


class BatchesRequest(RequestModel):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: SkipValidation[dict[str, Any] | None] = None
    output_expires_after: SkipValidation[dict[str, Any] | None] = None


def store_of(request: Request) -> BatchStore:
    """Return the store of files and batches."""
    return context_of(request).batches


def runner_of(request: Request) -> BatchRunner:
    """Return what runs batches."""
    runner: BatchRunner = request.app.state.batch_runner
    return runner


def owner_of(request: Request) -> bytes:
    """Return the owner of the files and batches that a request may see: its API key."""
    return request.scope["state"].get("key_digest") or b""


def say_where(request: Request) -> None:
    """Say in a header of the response if what is stored does not outlive the server."""
    if store_of(request).in_memory:
        request.scope["state"].setdefault("warnings", {})["data_dir"] = IN_MEMORY


# ---- files ----


@router.post("/v1/files", openapi_extra=form_schema())
async def upload_file(request: Request) -> Response:
    """Store a file of requests for a batch."""
    check_form_origin(request, context_of(request).config.server)
    say_where(request)
    return json_response(_file_object(await receive_file(request, store_of(request), owner_of(request))))


@router.get("/v1/files", openapi_extra=describe_query(FILES_QUERY))
async def list_files(request: Request) -> Response:
    """List files."""
    query = read_query(request, FILES_QUERY)
    purposes = [purpose for purpose in PURPOSES if purpose == query.get("purpose", purpose)]
    owner, after, newest_first = owner_of(request), query.get("after"), query["order"] == "desc"
    found, has_more = await store_of(request).run(
        lambda database: database.list_files(
            owner, purposes, after=after, limit=query["limit"], newest_first=newest_first
        )
    )
    return json_response(_list([_file_object(file) for file in found], has_more))


@router.get("/v1/files/{file_id}")
async def get_file(request: Request, file_id: str) -> Response:
    """Return what is known of a file."""
    read_query(request, {})
    return json_response(_file_object(await _find_file(request, file_id)))


@router.delete("/v1/files/{file_id}")
async def delete_file(request: Request, file_id: str) -> Response:
    """Delete a file."""
    read_query(request, {})
    owner, store = owner_of(request), store_of(request)
    await store.run(lambda database: database.delete_file(owner, file_id, PURPOSES))
    await store.remove([file_id])
    return json_response({"id": file_id, "object": "file", "deleted": True})


@router.get("/v1/files/{file_id}/content", openapi_extra=responds_with(BINARY))
async def get_file_content(request: Request, file_id: str) -> Response:
    """Return the content of a file."""
    read_query(request, {})
    return await content_response(store_of(request), await _find_file(request, file_id), BINARY)


async def _find_file(request: Request, file_id: str) -> FileRecord:
    owner = owner_of(request)
    return await store_of(request).run(lambda database: database.find_file(owner, file_id, PURPOSES))


async def content_response(
    store: BatchStore, file: FileRecord, kind: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Return the response with the content of a file. Raises `StorageError` if it cannot be opened."""
    parts = store.read(file.file_id)
    await anext(parts)  # it is open now, or the response is an error
    length = {"Content-Length": str(file.num_bytes), "X-Content-Type-Options": "nosniff"}
    return _Content(parts, headers={**length, **(headers or {})}, media_type=kind)


class _Content(StreamingResponse):
    """A response that closes what it reads, however it ends."""

    def __init__(self, parts: AsyncGenerator[bytes, None], **options: Any) -> None:
        super().__init__(parts, **options)
        self._parts = parts

    async def __call__(self, *connection: Any) -> None:
        """Send it."""
        try:
            await super().__call__(*connection)
        finally:
            await self._parts.aclose()


def _file_object(file: FileRecord) -> dict[str, Any]:
    return {
        "id": file.file_id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


def _list(objects: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    first, last = (objects[0]["id"], objects[-1]["id"]) if objects else ("", "")
    return {"object": "list", "data": objects, "first_id": first, "last_id": last, "has_more": has_more}


# ---- batches ----


@router.post("/v1/batches", openapi_extra=body_schema(BatchesRequest))
async def create_batch(request: Request) -> Response:
    """Run the requests of a file, behind all others."""
    body = await parse_request(request, BatchesRequest)
    if body.endpoint not in URLS:
        raise wrong_value("endpoint", f"one of {', '.join(URLS)}", body.endpoint)
    store, owner = store_of(request), owner_of(request)
    now = int(store.clock())
    batch = BatchRecord(
        batch_id=new_id("batch_"),
        api=OPENAI,
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        created_at=now,
        expires_at=now + DAY,
        output_seconds=_output_seconds(body),
        metadata=_metadata(body),
    )
    try:
        found = await store.run(lambda database: database.find_file(owner, batch.input_file_id, PURPOSES))
        if found.purpose != BATCH:
            raise wrong_value("input_file_id", f"a file of the purpose {BATCH}", found.purpose, "invalid_purpose")
        await store.run(lambda database: database.insert_batch(owner, batch, [BATCH]))
    except NotFoundError as error:
        raise NotFoundError(f"input_file_id: {error.message}", param="input_file_id", code=error.code) from None
    await runner_of(request).tell()
    say_where(request)
    return json_response(_batch_object(batch))


def _output_seconds(body: BatchesRequest) -> int | None:
    if body.output_expires_after is None:
        return None
    fields = body.fields.object("output_expires_after", ("anchor", "seconds"))
    fields.choice("anchor", ("created_at",), expected="created_at")
    return check_int(fields.place("seconds"), fields.required("seconds"), LEAST_SECONDS, MOST_SECONDS)


def _metadata(body: BatchesRequest) -> dict[str, str] | None:
    if body.metadata is None:
        return None
    metadata = body.fields.object("metadata")
    if len(metadata.given) > MAX_METADATA:
        raise RequestError(f"metadata may have at most {MAX_METADATA} keys", param="metadata")
    for name in metadata.given:
        check_unicode(name, "metadata")
        check_length(name, "metadata", MAX_KEY)
        where = metadata.place(name)
        check_unicode(check_length(metadata.string(name), where, MAX_VALUE), where)
    return dict(metadata.given)


@router.get("/v1/batches", openapi_extra=describe_query(BATCHES_QUERY))
async def list_batches(request: Request) -> Response:
    """List batches, the newest first."""
    query = read_query(request, BATCHES_QUERY)
    owner, after, limit = owner_of(request), query.get("after"), query["limit"]
    found, has_more = await store_of(request).run(
        lambda database: database.list_batches(owner, OPENAI, after=after, limit=limit)
    )
    return json_response(_list([_batch_object(batch) for batch in found], has_more))


@router.get("/v1/batches/{batch_id}")
async def get_batch(request: Request, batch_id: str) -> Response:
    """Return how far a batch has come."""
    read_query(request, {})
    owner = owner_of(request)
    batch = await store_of(request).run(lambda database: database.find_batch(owner, OPENAI, batch_id))
    return json_response(_batch_object(batch))


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """Cancel a batch; what its lines have yielded so far is kept."""
    read_query(request, {})
    owner = owner_of(request)
    batch = await store_of(request).run(lambda database: database.cancel(owner, OPENAI, batch_id))
    if batch.finished:
        raise RequestError(f"this batch has ended ({batch.status})", param="batch_id", code="batch_ended")
    await runner_of(request).tell()
    return json_response(_batch_object(batch))


def _batch_object(batch: BatchRecord) -> dict[str, Any]:
    """Return the resource."""
    num_failed = batch.num_failed + batch.num_unrun
    counts = {"total": batch.num_lines, "completed": batch.num_completed, "failed": num_failed}
    shown: dict[str, Any] = {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": WINDOW,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **{name: getattr(batch, name) for name in TIMES},
        "request_counts": counts,
        "metadata": batch.metadata,
    }
    if batch.usage:
        usage = {name: batch.usage.get(name, 0) for name in COUNTS}
        shown["usage"] = {
            "input_tokens": usage["input_tokens"],
            "input_tokens_details": {"cached_tokens": usage["cached_tokens"]},
            "output_tokens": usage["output_tokens"],
            "output_tokens_details": {"reasoning_tokens": usage["reasoning_tokens"]},
            "total_tokens": usage["total_tokens"],
        }
    return shown


class _Answer(msgspec.Struct):
    """What is read of an answer."""

    usage: dict[str, Any] | None = None


_read_answer = msgspec.json.Decoder(_Answer).decode


def _counted(usage: Mapping[str, Any], names: tuple[str, ...], detail: str) -> tuple[int, int]:
    """Return a count that has one of these names, and its detail."""
    for name in names:
        if name in usage:
            return int(usage[name]), int((usage.get(f"{name}_details") or {}).get(detail) or 0)
    return 0, 0


class OpenAIFormat:
    """The lines of OpenAI's output; see `runner.Format`."""

    def result(self, custom_id: str, reply: httpx.Response) -> bytes:
        line = {"id": result_id(), "custom_id": custom_id, "response": response_of(reply), "error": None}
        return msgspec.json.encode(line)

    def error(self, custom_id: str | None, code: str, message: str, number: int) -> bytes:
        error = {"code": code, "message": message, "param": None, "line": number}
        return msgspec.json.encode({"id": result_id(), "custom_id": custom_id, "response": None, "error": error})

    def usage(self, content: bytes) -> dict[str, int]:
        usage = _read_answer(content).usage or {}
        num_input, num_cached = _counted(usage, ("input_tokens", "prompt_tokens"), "cached_tokens")
        num_output, num_reasoning = _counted(usage, ("output_tokens", "completion_tokens"), "reasoning_tokens")
        counts = (num_input, num_cached, num_output, num_reasoning, num_input + num_output)
        return dict(zip(COUNTS, counts, strict=True))

    def files(self, batch: BatchRecord) -> tuple[tuple[str, str], tuple[str, str]]:
        return (OUTPUT, f"{batch.batch_id}_output.jsonl"), (OUTPUT, f"{batch.batch_id}_error.jsonl")
