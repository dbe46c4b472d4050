"""JSON of requests and responses of any size, without blocking the event loop.

CPython's C decoder holds the GIL: a body of some megabytes of brackets would block the whole server for seconds. A body
with many delimiters is therefore decoded by a slower decoder in Python, in a thread, and only up to a bound on its
number of values. Everything else, long strings included, is decoded at once. Large responses are likewise encoded in
pieces, in a thread. It is one thread for all: several would be no faster, since they share the GIL, but the event loop
would wait for a time slice of each of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import json
import json.decoder
import json.scanner
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response

JSON = "application/json"
THREAD_CHARS = 65536  # characters of a response from which on a thread encodes it
FEW_DELIMITERS = 8192
MAX_VALUES = 2**17  # in one body; numbers in lists of numbers are not counted
PIECE = 65536  # characters of a list of numbers that are read at once: a millisecond
MAX_KNOWN = 2**17  # different integers of a list of which one object each is kept
DELIMITERS = (b",", b"[", b"{")
WRITTEN_AT_ONCE = 64  # items of a list
MIN_DEPTH = 1  # up to which there are few items, but large ones, such as choices
NUMBERS = re.compile(r"[-+0-9.eE, \t\r\n]{0,65536}")

M_MMAP_THRESHOLD = -3  # of malloc.h
LARGE_BYTES = 2**20

T = TypeVar("T")
ScanOnce = Callable[[str, int], tuple[Any, int]]  # reads the value of a text that begins at a place; its end


class TooManyValuesError(Exception):
    """There are more than `MAX_VALUES`."""


_json_thread = ThreadPoolExecutor(1, "quire-json")


def return_large_blocks() -> None:
    """Have the memory of large bodies go back to the system when it is freed.

    glibc takes larger and larger blocks from its heap once such ones were freed, and they keep it from shrinking.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


async def run_in_thread_if(large: Any, work: Callable[[], T]) -> T:
    """Return `work()`, which is Python code; if it is large it runs in the thread for such work."""
    if not large:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_json_thread, contextvars.copy_context().run, work)


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return the response with a value as JSON."""
    return Response(msgspec.json.encode(value), status, headers, JSON)


async def large_json_response(size: int, build: Callable[[], Any]) -> Response:
    """Return the response with the value that `build` returns; `size` is about its number of characters as JSON."""
    large = size > THREAD_CHARS

    def encode() -> bytes:
        value = build()
        return encode_in_pieces(value) if large else msgspec.json.encode(value)

    return Response(await run_in_thread_if(large, encode), media_type=JSON)


def is_simple(body: bytes) -> bool:
    """Whether a body has so few delimiters that decoding it at once does not block the event loop for long."""
    return len(body) <= FEW_DELIMITERS or sum([body.count(mark) for mark in DELIMITERS]) <= FEW_DELIMITERS


def decode_in_pieces(text: str, **hooks: Any) -> Any:
    """Return the same as `json.loads`, or raise the same; to be called in a thread.

    Args:
        hooks: `parse_constant` and `parse_int` of `json.loads`.

    Raises:
        TooManyValuesError: there are too many values.
    """
    return _Decoder(**hooks).decode(text)


def encode_in_pieces(value: Any) -> bytes:
    """Return JSON as `msgspec.json.encode` does; for a thread. Keys of objects must be texts."""
    parts: list[bytes] = []
    _write(value, parts, 0)
    return b"".join(parts)


def _write(value: Any, parts: list[bytes], depth: int) -> None:
    if isinstance(value, dict) and all(type(name) is str for name in value):
        mark = b"{"
        for name, item in value.items():
            parts += [mark, msgspec.json.encode(name), b":"]
            _write(item, parts, depth + 1)
            mark = b","
        parts.append(b"}" if value else b"{}")
    elif isinstance(value, list) and len(value) > WRITTEN_AT_ONCE and depth > MIN_DEPTH:
        mark = b"["
        for start in range(0, len(value), WRITTEN_AT_ONCE):
            parts += [mark, msgspec.json.encode(value[start : start + WRITTEN_AT_ONCE])[1:-1]]
            mark = b","
        parts.append(b"]")
    elif isinstance(value, list) and value and depth <= MIN_DEPTH:
        mark = b"["
        for item in value:
            parts.append(mark)
            _write(item, parts, depth + 1)
            mark = b","
        parts.append(b"]")
    else:
        parts.append(msgspec.json.encode(value))


class _Decoder(json.JSONDecoder):
    """`json.JSONDecoder` in pure Python: other threads can run meanwhile, and values are counted."""

    def __init__(self, **hooks: Any) -> None:
        super().__init__(**hooks)
        self._hooks = hooks
        self._num_values = 0
        self.parse_array = self._array
        self.parse_object = self._object
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]

    def _counted(self, scan_once: ScanOnce) -> ScanOnce:
        """Return the function that reads a value and counts it, before the object or list around it has been read."""

        def scan(text: str, start: int) -> tuple[Any, int]:
            self._num_values += 1
            if self._num_values > MAX_VALUES:
                raise TooManyValuesError
            return scan_once(text, start)

        return scan

    def _object(self, place: tuple[str, int], strict: bool, scan_once: ScanOnce, *hooks: Any) -> tuple[Any, int]:
        read = json.decoder.JSONObject  # type: ignore[attr-defined]
        return read(place, strict, self._counted(scan_once), *hooks)  # type: ignore[no-any-return]

    def _array(self, place: tuple[str, int], scan_once: ScanOnce) -> tuple[list[Any], int]:
        text, start = place
        end = start
        while (hit := NUMBERS.match(text, end)) is not None and hit.end() > end:
            end = hit.end()
        if end > start and text[end : end + 1] == "]":
            numbers = self._numbers(text, start, end)
            if numbers is not None:
                return numbers, end + 1
        return json.decoder.JSONArray(place, self._counted(scan_once))  # type: ignore[attr-defined, no-any-return]

    def _numbers(self, text: str, start: int, end: int) -> list[Any] | None:
        """Return the numbers of a list, piece by piece; None if they are none after all.

        Equal integers become one object: token ids are many, and few of them differ.
        """
        numbers: list[Any] = []
        known: dict[int, int] = {}
        try:
            while end - start > PIECE:
                cut = text.rfind(",", start, start + PIECE)
                if cut < 0:
                    return None
                piece = json.loads(f"[{text[start:cut]}]", **self._hooks)
                if not piece:
                    return None  # two commas in a row
                if len(known) < MAX_KNOWN and set(map(type, piece)) == {int}:
                    piece = [known.setdefault(number, number) for number in piece]
                numbers += piece
                start = cut + 1
            rest = json.loads(f"[{text[start:end]}]", **self._hooks)
        except ValueError:
            return None
        return None if numbers and not rest else numbers + rest
