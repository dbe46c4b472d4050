"""Reading and writing JSON of any size, while others go on.

Python's fast reader cannot be interrupted: a body of some megabytes of brackets would keep the whole server waiting for
seconds. What has many delimiters is therefore read bit by bit, slower, for a thread beside the event loop, and no more
of it than a request can be made of. Everything else, long texts among it, takes no time and is read at once. Large
answers are likewise written piece by piece.
"""

from __future__ import annotations

import json
import json.decoder
import json.scanner
import re
from collections.abc import Callable
from typing import Any

import msgspec

FEW_DELIMITERS = 8192
MAX_VALUES = 2**19  # texts, objects and lists of one body; numbers in lists of numbers are not counted
PIECE = 65536  # characters of a list of numbers that are read at once: a millisecond
DELIMITERS = (b",", b"[", b"{")
WRITTEN_AT_ONCE = 64  # items of a list
LEAST_DEPTH = 1  # up to which there are few items, but large ones, such as choices
NUMBERS = re.compile(r"[-+0-9.eE, \t\r\n]{0,65536}")


class TooManyValuesError(Exception):
    """There are more than `MAX_VALUES`."""


def is_simple(body: bytes) -> bool:
    """Whether it has so few delimiters that it takes no time to read."""
    return len(body) <= FEW_DELIMITERS or sum([body.count(mark) for mark in DELIMITERS]) <= FEW_DELIMITERS


def check_strings(body: bytes) -> None:
    """Raise `TooManyValuesError` for what has too many texts, without reading it.

    A text begins and ends with a quote; quotes behind a backslash may or may not be within one.
    """
    if body.count(b'"') - body.count(b'\\"') > 4 * MAX_VALUES:
        raise TooManyValuesError


def read_patiently(text: str, **hooks: Any) -> Any:
    """Return the same as `json.loads`, or raise the same; to be called in a thread.

    Args:
        hooks: `parse_constant` and `parse_int` of `json.loads`.

    Raises:
        TooManyValuesError: there are too many values.
    """
    return _Decoder(**hooks).decode(text)


def write_patiently(value: Any) -> bytes:
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
    elif isinstance(value, list) and len(value) > WRITTEN_AT_ONCE and depth > LEAST_DEPTH:
        mark = b"["
        for start in range(0, len(value), WRITTEN_AT_ONCE):
            parts += [mark, msgspec.json.encode(value[start : start + WRITTEN_AT_ONCE])[1:-1]]
            mark = b","
        parts.append(b"]")
    elif isinstance(value, list) and value and depth <= LEAST_DEPTH:
        mark = b"["
        for item in value:
            parts.append(mark)
            _write(item, parts, depth + 1)
            mark = b","
        parts.append(b"]")
    else:
        parts.append(msgspec.json.encode(value))


class _Decoder(json.JSONDecoder):
    """As its base, but written in Python, so that other threads have their turn, and with a count of values."""

    def __init__(self, **hooks: Any) -> None:
        super().__init__(**hooks)
        self._hooks = hooks
        self._num_values = 0
        self.parse_array = self._array
        self.parse_object = self._object
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]

    def _count(self, more: int) -> None:
        self._num_values += 1 + more
        if self._num_values > MAX_VALUES:
            raise TooManyValuesError

    def _object(self, *arguments: Any) -> tuple[dict[str, Any], int]:
        found: tuple[dict[str, Any], int] = json.decoder.JSONObject(*arguments)  # type: ignore[attr-defined]
        self._count(len(found[0]))
        return found

    def _array(self, place: tuple[str, int], scan_once: Callable[[str, int], tuple[Any, int]]) -> tuple[list[Any], int]:
        text, start = place
        end = start
        while (hit := NUMBERS.match(text, end)) is not None and hit.end() > end:
            end = hit.end()
        if end > start and text[end : end + 1] == "]":
            numbers = self._numbers(text, start, end)
            if numbers is not None:
                return numbers, end + 1
        found: tuple[list[Any], int] = json.decoder.JSONArray(place, scan_once)  # type: ignore[attr-defined]
        self._count(len(found[0]))
        return found

    def _numbers(self, text: str, start: int, end: int) -> list[Any] | None:
        """Return the numbers of a list, piece by piece; None if they are none after all."""
        numbers: list[Any] = []
        try:
            while end - start > PIECE:
                cut = text.rfind(",", start, start + PIECE)
                if cut < 0:
                    return None
                piece = json.loads(f"[{text[start:cut]}]", **self._hooks)
                if not piece:
                    return None  # two commas in a row
                numbers += piece
                start = cut + 1
            rest = json.loads(f"[{text[start:end]}]", **self._hooks)
        except ValueError:
            return None
        return None if numbers and not rest else numbers + rest
