"""Opening the files of a model folder: what is no readable regular file, or no JSON object, becomes one clear line.

Every function raises `ModelError` with the path in front. What the files mean is decided elsewhere.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from quire.errors import ModelError

MAX_JSON_BYTES = 64 * 1024 * 1024


def regular_file_size(path: Path) -> int:
    """Return the size in bytes; refuse what is missing, unreadable, or no regular file (opening a FIFO would block)."""
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(path, error) from None
    if stat.S_ISDIR(status.st_mode):
        raise ModelError(f"{path}: is a directory (expected a file)")
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{path}: is not a regular file (expected a file, got a pipe, socket, or device)")
    return status.st_size


def unreadable(path: Path, error: OSError) -> ModelError:
    """Say in one line why the system would not give us `path`."""
    return ModelError(f"{path}: {error.strerror or error} (expected a readable file)")


def read_json_object(path: Path) -> dict[str, Any]:
    """Parse a JSON file whose top level is an object; errors name line and column."""
    size = regular_file_size(path)
    if size > MAX_JSON_BYTES:
        raise ModelError(f"{path}: file too large (expected at most {MAX_JSON_BYTES} bytes, got {size})")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None
    return parse_json_object(data, path, "file")


def parse_json_object(data: bytes, path: Path, part: str) -> dict[str, Any]:
    """Parse `data`, which is the `part` (for messages) of the file at `path`, as a JSON object without double keys."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            double = next(key for key in found if keys.count(key) > 1)
            raise ModelError(f"{path}: {part} names {double!r} twice (expected each name once)")
        return found

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
    if not isinstance(value, dict):
        raise ModelError(f"{path}: {part} holds a {type(value).__name__} (expected a JSON object)")
    return value
