"""JSON of requests and responses of any size, without blocking the event loop.

CPython's C decoder holds the GIL: a body of some megabytes of brackets would block the whole server for seconds. A
large body, or one with many delimiters, is therefore decoded by a slower decoder in Python, in a thread, and only up to
a bound on its number of values. A string is still read at once: 8 MiB of the slowest escapes take 40 ms. A number is,
too, and because its time grows with the square of its length it has a bound on that. Everything else is decoded at
once. Large responses are likewise encoded in pieces, in a thread. It is one thread for all: several would be no faster,
since they share the GIL, but the event loop would wait for a time slice of each of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import gc
import json
import json.decoder
import json.scanner
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

import msgspec
from starlette.responses import Response

JSON = "application/json"
THREAD_CHARS = 65536  # characters of a response from which on a thread encodes it
FEW_DELIMITERS = 8192
FEW_BYTES = 2**20
MAX_NUMBER_CHARS = 400  # a double has at most 17 digits that count, and 309 in all without an exponent
MAX_VALUES = 2**17  # in one body; numbers in lists of numbers are not counted
PIECE = 65536  # characters of a list of numbers that are read at once: a millisecond
SHORT_NUMBER = MAX_NUMBER_CHARS // 2  # a longer one than the bound covers such a stretch, wherever it begins
MAX_KNOWN = 2**17  # different integers of a list of which one object each is kept
DELIMITERS = (b",", b"[", b"{")
WRITTEN_AT_ONCE = 64  # items of a list
MIN_DEPTH = 1  # up to which there are few items, but large ones, such as choices
OPENED_AFTER_COLON = re.compile(r":\s*[\[{]")
NUMBERS = re.compile(r"[-+0-9.eE, \t\r\n]{0,65536}")

M_MMAP_THRESHOLD = -3  # of malloc.h
LARGE_BYTES = 2**20

T = TypeVar("T")
ScanOnce = Callable[[str, int], tuple[Any, int]]  # reads the value of a text that begins at a place; its end


class TooManyValuesError(Exception):
    """There are more than `MAX_VALUES`."""


class BadNumberError(ValueError):
    """A number that is not read: NaN and Infinity, which are not JSON, and fractions that are too long.

    Attributes:
        place: of its first character in the text; None as long as it is unknown.
    """

    place: int | None = None

    def __str__(self) -> str:
        return f"{self.args[0]} at character {self.place}"


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
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_json_thread, contextvars.copy_context().run, _uncollected, work)


def _uncollected(work: Callable[[], T]) -> T:
    """Return `work()`, meanwhile without garbage collection.

    It would hold the GIL for up to 0.4 s to look through a million new objects; data like JSON has no cycles.
    """
    gc.disable()
    try:
        return work()
    finally:
        gc.enable()


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
    """Whether a body is so small, with so few delimiters, that decoding it does not block the event loop for long."""
    if len(body) <= FEW_DELIMITERS:
        return True
    return len(body) <= FEW_BYTES and sum([body.count(mark) for mark in DELIMITERS]) <= FEW_DELIMITERS


def decode(text: str, *, simple: bool, parse_int: Callable[[str], int]) -> Any:
    """Return the value of a JSON text; unless it is `simple`, to be called in a thread.

    Args:
        parse_int: reads an integer, of any number of digits.

    Raises:
        JSONDecodeError: it is not JSON. BadNumberError: it has a number that is not read. RecursionError: it is nested
            too deeply. TooManyValuesError: there are too many values and it is not simple.
    """
    if simple:
        with contextlib.suppress(BadNumberError):  # of which the C decoder does not know the place
            return json.loads(text, parse_int=parse_int, parse_float=_parse_float, parse_constant=_refuse_constant)
    return decode_in_pieces(text, parse_int)


def decode_in_pieces(text: str, parse_int: Callable[[str], int] = int) -> Any:
    """Return and raise what `decode` does, but let other threads run meanwhile."""
    _check_num_values(text)
    return _Decoder(parse_int).decode(text)


def _check_num_values(text: str) -> None:
    """Raise `TooManyValuesError` if some kinds of values are too many, long before the decoder would.

    The values of objects, and the lists and objects within lists, are counted by their delimiters outside of strings.
    """
    most, num_values, start, in_string = MAX_VALUES, 0, 0, False
    while start < len(text):
        piece = text[start : start + PIECE]
        if (len(piece) - len(piece.rstrip("\\"))) % 2:  # an escape would be cut in two
            piece = text[start : start + PIECE + 1]
        start += len(piece)
        parts = piece.replace("\\\\", "").replace('\\"', "").split('"')
        outside = '"'.join(parts[in_string::2])
        num_values += sum(map(outside.count, ":[{")) - len(OPENED_AFTER_COLON.findall(outside))
        if num_values > most:
            raise TooManyValuesError
        most += 1  # a colon and its bracket may be cut in two, and both are counted
        in_string ^= len(parts) % 2 == 0


def _parse_float(text: str) -> float:
    if len(text) > MAX_NUMBER_CHARS:
        raise BadNumberError(f"a number has {len(text)} characters (at most {MAX_NUMBER_CHARS} are read)")
    return float(text)


def _refuse_constant(name: str) -> NoReturn:
    raise BadNumberError(f"{name} is not JSON")


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

    def __init__(self, parse_int: Callable[[str], int]) -> None:
        super().__init__(parse_int=parse_int, parse_float=_parse_float, parse_constant=_refuse_constant)
        self._num_values = 0
        self.parse_array = self._array
        self.parse_object = self._object
        self.scan_once = self._watched(json.scanner.py_make_scanner(self))  # type: ignore[attr-defined]

    def _watched(self, scan_once: ScanOnce) -> ScanOnce:
        """Return the function that reads a value, counts it before it has been read, and says where a bad number is."""

        def scan(text: str, start: int) -> tuple[Any, int]:
            self._num_values += 1
            if self._num_values > MAX_VALUES:
                raise TooManyValuesError
            try:
                return scan_once(text, start)
            except BadNumberError as error:
                if error.place is None:
                    error.place = start
                raise

        return scan

    def _object(self, place: tuple[str, int], strict: bool, scan_once: ScanOnce, *hooks: Any) -> tuple[Any, int]:
        read = json.decoder.JSONObject  # type: ignore[attr-defined]
        return read(place, strict, self._watched(scan_once), *hooks)  # type: ignore[no-any-return]

    def _array(self, place: tuple[str, int], scan_once: ScanOnce) -> tuple[list[Any], int]:
        text, start = place
        end = start
        while (hit := NUMBERS.match(text, end)) is not None and hit.end() > end:
            end = hit.end()
        if end > start and text[end : end + 1] == "]":
            numbers = self._numbers(text, start, end)
            if numbers is not None:
                return numbers, end + 1
        return json.decoder.JSONArray(place, self._watched(scan_once))  # type: ignore[attr-defined, no-any-return]

    def _numbers(self, text: str, start: int, end: int) -> list[Any] | None:
        """Return the numbers of a list, piece by piece; None if they are none after all.

        Equal integers become one object: token ids are many, and few of them differ.
        """
        if any(text.find(",", at, at + SHORT_NUMBER) < 0 for at in range(start, end - SHORT_NUMBER, SHORT_NUMBER)):
            return None  # one is so long that it may be too long
        numbers: list[Any] = []
        known: dict[int, int] = {}
        try:
            while end - start > PIECE:
                cut = text.rfind(",", start, start + PIECE)
                if cut < 0:
                    return None
                piece = json.loads(f"[{text[start:cut]}]")
                if not piece:
                    return None  # two commas in a row
                if len(known) < MAX_KNOWN and set(map(type, piece)) == {int}:
                    piece = [known.setdefault(number, number) for number in piece]
                numbers += piece
                start = cut + 1
            rest = json.loads(f"[{text[start:end]}]")
        except ValueError:
            return None
        if numbers and not rest:
            return None
        numbers += rest
        return numbers
