"""API keys as options and files name them; a file has one key per line, or YAML with a name and limits for each.

Errors name the entry, never a key.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from quire.errors import ConfigError, echo
from quire.supervisor.quotas import Limits

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 2**20
HASHED = "sha256:"
KEY = re.compile(r"[!-~]{1,1024}")
NAME = re.compile(r"[A-Za-z0-9._:@-]{1,64}")
COUNTS = ("max_concurrency", "requests_per_minute", "tokens_per_minute")
FIELDS = ("key", "name", *COUNTS, "weight", "min_priority")
MAX_NUMBER = 10**9

Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """An API key's name and limits; None is no limit.

    Attributes:
        name: the tenant of its requests, and what logs call it.
        max_concurrency: requests at a time. requests_per_minute, tokens_per_minute: over all routes that do work.
        weight: its share with the fair scheduling policy. min_priority: the most urgent `priority` of its requests.
    """

    name: str
    max_concurrency: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    weight: float | None = None
    min_priority: int | None = None

    @property
    def limits(self) -> Limits:
        """What must be counted, in the order of `quotas.LIMITS`."""
        return (self.max_concurrency, self.requests_per_minute, self.tokens_per_minute)

    @property
    def limited(self) -> bool:
        """Whether anything must be counted."""
        return any(limit is not None for limit in self.limits)


def digest_of(key: bytes) -> bytes:
    """Return the SHA-256 digest of a key, which is stored and compared in its place."""
    return hashlib.sha256(key).digest()


def all_keys(keys: Iterable[str], file: str | None, *, warn: bool = True) -> dict[bytes, ApiKey]:
    """Return `keys`, which are those of the command line, and the keys of a file by their digests.

    Raises:
        ConfigError: a key is unusable, or there twice; or as `read_keys`.
    """
    found: dict[bytes, ApiKey] = {}
    for number, text in enumerate(keys):
        if not text or text != text.strip():
            raise ConfigError("api_key: a key must have no blanks around it, and not be empty", param="api_key")
        found.setdefault(digest_of(text.encode()), ApiKey(name=f"key-{number}"))
    if file is None:
        return found
    names = {key.name for key in found.values()}
    for digest, key in read_keys(file, warn=warn).items():
        if digest in found or key.name in names:
            raise _file_error(f"{key.name} is also given by api_key; leave out one of them")
        found[digest] = key
    return found


def read_keys(path: str, *, warn: bool = True) -> dict[bytes, ApiKey]:
    """Return the keys of a file by their digests.

    Args:
        warn: whether to log that every user of the machine may read the file.

    Raises:
        ConfigError: the file cannot be read, has no keys, or has an entry that is not understood.
    """
    entries = _entries(_read_text(path, warn))
    keys: dict[bytes, ApiKey] = {}
    names: set[str] = set()
    for number, entry in enumerate(entries, 1):
        digest, key = _parse_key(entry, f"key {number}")
        if digest in keys:
            raise _file_error(f"key {number} is there twice")
        if key.name in names:
            raise _file_error(f"the name {key.name} is there twice")
        keys[digest] = key
        names.add(key.name)
    if not keys:
        raise _file_error("it has no keys; without a key, no client could use the server")
    return keys


def _read_text(path: str, warn: bool) -> str:
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _file_error(f"{path!r} cannot be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise _file_error(f"{path!r} is larger than {MAX_FILE_BYTES} bytes")
    if warn and stat.S_ISREG(mode) and mode & stat.S_IROTH:
        logger.warning("api_key_file: every user of this machine may read %s", path)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise _file_error(f"{path!r} is not UTF-8") from None


def _entries(text: str) -> list[Any]:
    """Return the entries of a file, in the format that its first line indicates."""
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if not lines or not (lines[0] == "---" or lines[0].startswith(("- ", "keys:", "[", "{"))):
        return list(lines)
    try:
        value = yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that there is not
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" (line {mark.line + 1})"
        raise _file_error(f"it is not valid YAML{where}") from None
    except RecursionError:
        raise _file_error("it is nested too deeply") from None
    if isinstance(value, Mapping):
        unknown = [name for name in value if name != "keys"]
        if unknown:
            raise _file_error(f"it must have nothing but keys, got {echo(unknown[0])}")
        value = value.get("keys")
    if not isinstance(value, list):
        raise _file_error("keys must be a list")
    return value


def _parse_key(entry: Any, where: str) -> tuple[bytes, ApiKey]:
    """Return digest and key of an entry."""
    values = entry if isinstance(entry, Mapping) else {"key": entry}
    for name in values:
        if name not in FIELDS:
            raise _file_error(f"{where} has an unknown field {echo(name)}; known are {', '.join(FIELDS)}")
    digest = _parse_digest(values.get("key"), where)
    name = values.get("name", f"key-{hashlib.sha256(digest).hexdigest()[:8]}")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise _file_error(f"the name of {where} must have 1 to 64 characters of A-Za-z0-9._:@-, got {echo(name)}")
    counts = {field: values.get(field) for field in COUNTS}
    for field, value in counts.items():
        if value is not None and (type(value) is not int or not 1 <= value <= MAX_NUMBER):
            raise _file_error(f"{field} of {where} must be an integer from 1 to {MAX_NUMBER}, got {echo(value)}")
    weight, priority = values.get("weight"), values.get("min_priority")
    if weight is not None and (type(weight) not in (int, float) or not 0 < weight <= MAX_NUMBER):
        raise _file_error(f"weight of {where} must be a positive number, got {echo(weight)}")
    if priority is not None and (type(priority) is not int or abs(priority) > MAX_NUMBER):
        raise _file_error(f"min_priority of {where} must be an integer, got {echo(priority)}")
    return digest, ApiKey(name=name, weight=weight, min_priority=priority, **counts)


def _parse_digest(key: Any, where: str) -> bytes:
    if not isinstance(key, str) or not KEY.fullmatch(key):
        raise _file_error(
            f"{where} must be a text of 1 to 1024 visible ASCII characters; in YAML, put numbers in quotes"
        )
    if not key.startswith(HASHED):
        return digest_of(key.encode())
    try:
        digest = bytes.fromhex(key.removeprefix(HASHED))
    except ValueError:
        digest = b""
    if len(digest) != hashlib.sha256().digest_size:
        raise _file_error(f"{where}: behind {HASHED} there must be 64 hexadecimal digits")
    return digest


def _file_error(message: str) -> ConfigError:
    return ConfigError(f"api_key_file: {message}", param="api_key_file")
