"""Uploads: multipart forms with one file and a few short fields, streamed to where the file is kept.

Nothing but the part that has just arrived is in memory. Parts, their headers and their fields are bounded; the file is
bounded by `BatchStore.max_file_bytes`, and by what its key may store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from python_multipart import MultipartParser
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import parse_options_header
from starlette.requests import Request

from quire.checks import missing, wrong_value
from quire.errors import QuireError, RequestError, echo
from quire.server.batches.records import BATCH, FileRecord
from quire.server.batches.store import WRITE_BYTES, BatchStore, FileWriter
from quire.server.errors import HTTPProblem, headers_of, release_body, status_of
from quire.server.parsing import BROWSER_HEADERS, body_parts
from quire.server_config import ServerConfig

MULTIPART = "multipart/form-data"
MAX_FORM_EXTRA = 2**16  # bytes of a form besides its file
MAX_FIELD = 1024  # bytes of a field that is no file
MAX_HEADER = 4096  # bytes of the name, or the value, of a part's header
MAX_FILENAME = 255
FILE, PURPOSE, ANCHOR, SECONDS = "file", "purpose", "expires_after[anchor]", "expires_after[seconds]"
FIELDS = (FILE, PURPOSE, ANCHOR, SECONDS)
LEAST_SECONDS, MOST_SECONDS = 3600, 2592000


class _Form:
    """The form as far as it was parsed.

    Attributes:
        fields: those that are no file. filename: of the file, once it has begun. data: of the file, not written yet.
    """

    def __init__(self, boundary: bytes) -> None:
        self.fields: dict[str, bytearray] = {}
        self.filename: str | None = None
        self.data = bytearray()
        self.ended = False
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._disposition: bytes | None = None
        self._into: bytearray | None = None  # what the part under way is added to
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_part_data": self._add_data,
                "on_header_field": lambda data, start, end: self._add_header(self._header_name, data[start:end]),
                "on_header_value": lambda data, start, end: self._add_header(self._header_value, data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_end": self._end,
            },
        )

    def feed(self, data: bytes) -> None:
        """Parse what has arrived. Raises `RequestError`."""
        try:
            self._parser.write(data)
        except MultipartParseError as error:
            raise _malformed(str(error)) from None

    def _begin_part(self) -> None:
        self._disposition, self._into = None, None

    def _add_header(self, into: bytearray, data: bytes) -> None:
        into += data
        if len(into) > MAX_HEADER:
            raise _malformed(f"a header of a part may have at most {MAX_HEADER} bytes")

    def _end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header_name.clear()
        self._header_value.clear()

    def _end_headers(self) -> None:
        kind, options = parse_options_header(self._disposition)
        if kind != b"form-data" or b"name" not in options:
            raise _malformed("a part has no Content-Disposition: form-data with a name")
        name = options[b"name"].decode("utf-8", "replace")
        if name not in FIELDS:
            raise RequestError(
                f"unknown parameter {echo(name)[1:-1]}", param=echo(name)[1:-1], code="unknown_parameter"
            )
        if name in self.fields or (name == FILE and self.filename is not None):
            raise RequestError(f"{name} must be given once", param=name)
        if name == FILE:
            self.filename = _printable(options.get(b"filename", b""))
            self._into = self.data
        else:
            self._into = self.fields[name] = bytearray()

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        assert self._into is not None
        self._into += data[start:end]
        if self._into is not self.data and len(self._into) > MAX_FIELD:
            raise RequestError(
                f"a field of the form may have at most {MAX_FIELD} bytes", code="string_above_max_length"
            )

    def _end(self) -> None:
        self.ended = True


def _printable(name: bytes) -> str:
    text = "".join([char if char.isprintable() else "_" for char in name.decode("utf-8", "replace")])
    return text[-MAX_FILENAME:] or "upload"


def _malformed(reason: str) -> RequestError:
    return RequestError(f"the body is not a valid form: {reason}", code="invalid_form")


def check_form_origin(request: Request, config: ServerConfig) -> None:
    """Raise `HTTPProblem` if a page of another site may have had a browser send a form, which needs no leave to do so.

    Where keys are needed a page would have to know one.
    """
    if request.scope["state"].get("key_digest") is not None or not BROWSER_HEADERS.intersection(request.headers):
        return
    origin = request.headers.get("origin")
    if request.headers.get("sec-fetch-site") == "same-origin":
        return
    if origin is None or not {origin, "*"} & set(config.allowed_origins):
        message = "a page of another site may upload only if --allowed-origins names it"
        raise HTTPProblem(403, message, code="origin_not_allowed", close=True)


async def receive_file(request: Request, store: BatchStore, owner: bytes) -> FileRecord:
    """Return the record of the file in a form, which is kept.

    Raises:
        RequestError: naming the field. HTTPProblem: as `read_body`, or there is no room. StorageError: the disk fails.
    """
    form, complete = _Form(_boundary(request)), False
    try:
        async with store.writing(owner) as writer:
            async for part in body_parts(request, store.max_file_bytes + MAX_FORM_EXTRA):
                release_body(request.scope)  # it is counted as long as it is in memory
                form.feed(part)
                await _write(store, owner, writer, form)
            complete = True
            if not form.ended:
                raise _malformed("its last boundary is missing")
            if form.filename is None:
                raise missing(FILE)
            file = store.record(writer, _purpose(form.fields), form.filename, _seconds(form.fields))
            await store.keep(owner, writer, file)
    except QuireError as error:
        if complete or (isinstance(error, HTTPProblem) and error.close):
            raise
        # The client still sends: what it sends is dropped, so that it reads the answer.
        problem = HTTPProblem(status_of(error), error.message, code=error.code, param=error.param, close=True)
        problem.headers = {name: value for name, value in headers_of(error).items() if name != "Connection"}
        raise problem from None
    return file


async def _write(store: BatchStore, owner: bytes, writer: FileWriter, form: _Form) -> None:
    """Write what has arrived of the file."""
    data = bytes(form.data)
    form.data.clear()
    before = writer.num_bytes
    if before + len(data) > store.max_file_bytes:
        raise HTTPProblem(
            413,
            f"the file is larger than {store.max_file_bytes} bytes",
            code="request_too_large",
            param=FILE,
            close=True,
        )
    await writer.write(data)
    if before // WRITE_BYTES != writer.num_bytes // WRITE_BYTES:
        await store.check_room(owner)


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != MULTIPART.encode():
        message = f"the body must be sent as Content-Type: {MULTIPART}"
        raise HTTPProblem(415, message, code="unsupported_content_type", close=True)
    boundary = options.get(b"boundary", b"")
    if not 0 < len(boundary) <= 70:  # RFC 2046, section 5.1.1
        raise _malformed("Content-Type must have a boundary of 1 to 70 characters")
    return boundary


def _purpose(fields: Mapping[str, bytearray]) -> str:
    if PURPOSE not in fields:
        raise missing(PURPOSE)
    purpose = _text(fields, PURPOSE)
    if purpose != BATCH:
        raise wrong_value(PURPOSE, f"{BATCH}, the only use of files on this server", purpose)
    return purpose


def _seconds(fields: Mapping[str, bytearray]) -> int | None:
    if ANCHOR not in fields and SECONDS not in fields:
        return None
    for name in (ANCHOR, SECONDS):
        if name not in fields:
            raise missing(name)
    if _text(fields, ANCHOR) != "created_at":
        raise wrong_value(ANCHOR, "created_at", _text(fields, ANCHOR))
    text = _text(fields, SECONDS)
    if not (text.isascii() and text.isdigit()) or len(text) > 9:
        _wrong_seconds(text)
    if not LEAST_SECONDS <= int(text) <= MOST_SECONDS:
        _wrong_seconds(text)
    return int(text)


def _wrong_seconds(value: str) -> NoReturn:
    raise wrong_value(SECONDS, f"an integer from {LEAST_SECONDS} to {MOST_SECONDS}", value)


def _text(fields: Mapping[str, bytearray], name: str) -> str:
    return fields[name].decode("utf-8", "replace")


def form_schema(properties: Sequence[str] = FIELDS) -> dict[str, object]:
    """Return the `openapi_extra` of the route that takes such forms."""
    described: dict[str, object] = {name: {"type": "string"} for name in properties}
    described[FILE] = {"type": "string", "format": "binary"}
    described[PURPOSE] = {"enum": [BATCH]}
    schema = {"type": "object", "properties": described, "required": [FILE, PURPOSE], "additionalProperties": False}
    return {"requestBody": {"required": True, "content": {MULTIPART: {"schema": schema}}}}
