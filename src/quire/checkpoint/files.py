"""Reading files of a model folder, above all JSON objects such as config.json.

An unreadable file, invalid JSON, or a wrong value of a field raises a `ModelError` of one line that begins with the
path. The meaning of the fields is defined elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from quire.errors import ModelError, echo, kind_of

SPELLED_FLOAT = "__float__"  # {"__float__": "Infinity"}: how transformers writes what JSON has no number for
MAX_JSON_BYTES = 64 * 1024 * 1024
# Values of one file: as objects, four million of them would take a gigabyte.
MAX_VALUES = 2**18
MAX_NAMES = 2**20  # of tensors, eight for each of them, or of added tokens, seven for each: speech models have 65536
MAX_TOKENS = 2**22  # of vocabularies: several times those of the largest


def regular_file_size(path: Path) -> int:
    """Return the size in bytes; raise for missing and unreadable files, and for FIFOs, whose opening would block."""
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(path, error) from None
    if stat.S_ISDIR(status.st_mode):
        raise ModelError(f"{path}: is a directory (expected a file)")
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{path}: is not a regular file (expected a file, got a pipe, socket, or device)")
    return status.st_size


def check_size(path: Path, most: int) -> int:
    """Return the size in bytes; raise if it is more than `most`, and as `regular_file_size`."""
    size = regular_file_size(path)
    if size > most:
        raise ModelError(f"{path}: file too large (expected at most {most} bytes, got {size})")
    return size


def unreadable(path: Path, error: OSError) -> ModelError:
    """Return the error for a file that the system cannot open or read."""
    return ModelError(f"{path}: {error.strerror or error} (expected a readable file)")


def read_json_object(path: Path, *, optional: bool = False, most: int = MAX_VALUES) -> dict[str, Any]:
    """Parse a JSON file whose top level is an object of at most `most` values; errors name line and column.

    Returns {} for no file, if `optional`.
    """
    if optional and not os.path.lexists(path):
        return {}
    return parse_json_object(_read(path), path, "file", most)


def read_json_list(path: Path) -> list[Any]:
    """Parse a JSON file whose top level is a list."""
    return _parse(_read(path), path, "file", list, MAX_VALUES)


def read_text(path: Path, most: int) -> str:
    """Return the text of a UTF-8 file of `most` bytes or fewer, lines ending in "\\n"."""
    try:
        text = _read(path, most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: not UTF-8 at byte {error.start}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read(path: Path, most: int = MAX_JSON_BYTES) -> bytes:
    size = check_size(path, most)
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None
    except MemoryError:
        raise ModelError(f"{path}: not enough memory to read its {size} bytes") from None


def parse_json_object(data: bytes, path: Path, part: str, most: int = MAX_VALUES) -> dict[str, Any]:
    """Parse `data`, which is the `part` (for messages) of the file at `path`, as a JSON object without double keys.

    It may have `most` values.
    """
    return _parse(data, path, part, dict, most)


def _parse(data: bytes, path: Path, part: str, kind: type[Any], most: int) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any] | float:
        found = dict(pairs)
        if len(found) < len(pairs):
            double = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise ModelError(f"{path}: {part} names {echo(double)} twice (expected each name once)")
        if len(found) == 1 and SPELLED_FLOAT in found:
            name = found[SPELLED_FLOAT]
            if name not in ("Infinity", "-Infinity", "NaN"):
                raise ModelError(
                    f"{path}: {part}: {SPELLED_FLOAT} is {echo(name)} (expected Infinity, -Infinity or NaN)"
                )
            return float(name)
        return found

    if sum(data.count(mark) for mark in (b",", b"[", b"{")) > most:
        raise ModelError(f"{path}: {part} holds too many values (expected at most {most})")
    try:
        value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ModelError(f"{path}: {part} is not JSON: {error.msg} at {place}") from None
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: {part} is not UTF-8 at byte {error.start} (expected JSON text)") from None
    except ModelError:
        raise
    except ValueError:
        raise ModelError(f"{path}: {part} holds a number of too many digits") from None
    except RecursionError:
        raise ModelError(f"{path}: {part} is nested too deeply") from None
    except MemoryError:
        raise ModelError(f"{path}: not enough memory to parse the {len(data)} bytes of the {part}") from None
    if not isinstance(value, kind):
        expected = "a JSON object" if kind is dict else "a JSON list"
        raise ModelError(f"{path}: {part} holds {kind_of(value)} (expected {expected})")
    return value


_REQUIRED: Any = object()


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """The keys of one JSON object of a model folder.

    A key that is absent or null gives the default; without a default it is an error. `within` names the enclosing
    key in messages ("rope_parameters"), empty at the top level.
    """

    values: Mapping[str, Any]
    path: Path
    within: str = ""

    def error(self, key: str, expected: str) -> ModelError:
        """Return the error that the value of `key` is not `expected`."""
        name = self._name(key)
        if self.values.get(key) is None:
            return ModelError(f"{self.path}: {name} is missing (expected {expected})")
        return ModelError(f"{self.path}: {name} is {echo(self.values[key])} (expected {expected})")

    def integer(self, key: str, default: Any = _REQUIRED, *, low: int = 0, high: int = 2**31 - 1) -> int:
        """Return an integer within [low, high]."""
        expected = f"an integer from {low} to {high}"
        return self._value(key, default, expected, lambda value: type(value) is int and low <= value <= high)

    def number(self, key: str, default: Any = _REQUIRED, *, above: float = 0.0) -> float:
        """Return a finite number larger than `above`."""
        expected = f"a number above {above:g}" if above > -math.inf else "a number"
        found: Any = self._value(key, default, expected, lambda value: _is_finite(value) and value > above)
        if found is not None:
            found = float(found)
        return found

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """Return a list of `length` finite numbers above 0."""
        value = self.values.get(key)
        if not isinstance(value, list) or len(value) != length:
            raise self.error(key, f"a list of {length} numbers")
        items = ConfigFields({str(index): item for index, item in enumerate(value)}, self.path, self._name(key))
        return tuple(items.number(str(index)) for index in range(length))

    def flag(self, key: str, default: Any = _REQUIRED) -> bool:
        """Return true or false."""
        return self._value(key, default, "true or false", lambda value: isinstance(value, bool))

    def text(self, key: str, default: Any = _REQUIRED) -> str:
        """Return a string."""
        return self._value(key, default, "a string", lambda value: isinstance(value, str))

    def choice(self, key: str, choices: Iterable[str], default: Any = _REQUIRED) -> str:
        """Return one of some strings."""
        value = self.text(key, default)
        if value not in choices:
            raise self.error(key, f"one of {', '.join(choices)}")
        return value

    def two_sizes(self, key: str) -> tuple[int, int]:
        """Return a list of two integers above 0, such as the sizes of a matrix."""
        value = self.values.get(key)
        sizes = value if isinstance(value, list) else []
        if len(sizes) != 2 or not all(type(size) is int and 0 < size < 2**31 for size in sizes):
            raise self.error(key, "two sizes")
        return sizes[0], sizes[1]

    def names(self, key: str, length: int, known: Sequence[str]) -> list[str]:
        """Return a list of known names, one for each of `length` layers."""
        value = self.values.get(key)
        if not isinstance(value, list) or len(value) != length:
            raise self.error(key, f"a list of num_hidden_layers, {length}, names")
        if any(name not in known for name in value):
            raise self.error(key, f"names among {', '.join(known)}")
        return value

    def inner(self, key: str) -> ConfigFields | None:
        """Return the JSON object under `key`, or None if absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return ConfigFields(value, self.path, self._name(key))

    def _value(self, key: str, default: Any, expected: str, is_valid: Callable[[Any], bool]) -> Any:
        value = self.values.get(key)
        if value is None and default is not _REQUIRED:
            return default
        if not is_valid(value):
            raise self.error(key, expected)
        return value

    def _name(self, key: str) -> str:
        return f"{self.within}.{key}" if self.within else key


def _is_finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value.bit_length() <= 1000 if isinstance(value, int) else math.isfinite(value)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path` when it is complete; a process that has mapped the old file keeps it."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
