"""Reading a file of API keys: one key per line, or YAML with a name and limits for each.

What the keys are good for stands in `auth`, what the limits mean in `limits`. Errors name the entry, never a key.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
from collections.abc import Mapping
from typing import Any

import yaml

from quire.errors import ConfigError, echo
from quire.server.limits import KeyRules

logger = logging.getLogger(__name__)

MAX_BYTES = 2**20
HASHED = "sha256:"
KEY = re.compile(r"[!-~]{1,1024}")
NAME = re.compile(r"[A-Za-z0-9._:@-]{1,64}")
COUNTS = ("max_concurrency", "requests_per_minute", "tokens_per_minute")
FIELDS = ("key", "name", *COUNTS, "weight", "min_priority")
MOST = 10**9

Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_keys(path: str, *, warn: bool = True) -> dict[bytes, KeyRules]:
    """Return the rules of each key, by the SHA-256 digest of the key.

    Args:
        warn: whether the log is told of a file that everybody may read.

    Raises:
        ConfigError: the file cannot be read, has no keys, or has an entry that is not understood.
    """
    entries = _entries(_text(path, warn))
    keys: dict[bytes, KeyRules] = {}
    names: set[str] = set()
    for number, entry in enumerate(entries, 1):
        digest, rules = _key(entry, f"key {number}")
        if digest in keys:
            raise _bad(f"key {number} is there twice")
        if rules.name in names:
            raise _bad(f"the name {rules.name} is there twice")
        keys[digest] = rules
        names.add(rules.name)
    if not keys:
        raise _bad("it has no keys; without any, nobody could use the server")
    return keys


def digest_of(key: bytes) -> bytes:
    """Return what is kept and compared in place of a key."""
    return hashlib.sha256(key).digest()


def _text(path: str, warn: bool) -> str:
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _bad(f"{path!r} cannot be read: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise _bad(f"{path!r} is larger than {MAX_BYTES} bytes")
    if warn and stat.S_ISREG(mode) and mode & stat.S_IROTH:
        logger.warning("api_key_file: every user of this machine may read %s", path)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise _bad(f"{path!r} is not UTF-8") from None


def _entries(text: str) -> list[Any]:
    """Return the entries of either form; the first line that says something tells which one it is."""
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if not lines or not (lines[0] == "---" or lines[0].startswith(("- ", "keys:", "[", "{"))):
        return list(lines)
    try:
        value = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" (line {mark.line + 1})"
        raise _bad(f"it is not valid YAML{where}") from None
    except RecursionError:
        raise _bad("it is nested too deeply") from None
    if isinstance(value, Mapping):
        unknown = [name for name in value if name != "keys"]
        if unknown:
            raise _bad(f"it must have nothing but keys, got {echo(unknown[0])}")
        value = value["keys"]
    if not isinstance(value, list):
        raise _bad("keys must be a list")
    return value


def _key(entry: Any, where: str) -> tuple[bytes, KeyRules]:
    values = entry if isinstance(entry, Mapping) else {"key": entry}
    for name in values:
        if name not in FIELDS:
            raise _bad(f"{where} has an unknown field {echo(name)}; known are {', '.join(FIELDS)}")
    digest = _digest(values.get("key"), where)
    name = values.get("name", f"key-{hashlib.sha256(digest).hexdigest()[:8]}")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise _bad(f"the name of {where} must have 1 to 64 characters of A-Za-z0-9._:@-, got {echo(name)}")
    for field in COUNTS:
        value = values.get(field)
        if value is not None and (type(value) is not int or not 1 <= value <= MOST):
            raise _bad(f"{field} of {where} must be an integer from 1 to {MOST}, got {echo(value)}")
    weight, priority = values.get("weight"), values.get("min_priority")
    if weight is not None and (type(weight) not in (int, float) or not 0 < weight <= MOST):
        raise _bad(f"weight of {where} must be a positive number, got {echo(weight)}")
    if priority is not None and (type(priority) is not int or abs(priority) > MOST):
        raise _bad(f"min_priority of {where} must be an integer, got {echo(priority)}")
    rules = {field: values.get(field) for field in COUNTS}
    return digest, KeyRules(name=name, weight=weight, min_priority=priority, **rules)


def _digest(key: Any, where: str) -> bytes:
    if not isinstance(key, str) or not KEY.fullmatch(key):
        raise _bad(f"{where} must be a text of 1 to 1024 visible ASCII characters; in YAML, put numbers in quotes")
    if not key.startswith(HASHED):
        return digest_of(key.encode())
    try:
        digest = bytes.fromhex(key.removeprefix(HASHED))
    except ValueError:
        digest = b""
    if len(digest) != hashlib.sha256().digest_size:
        raise _bad(f"{where}: behind {HASHED} there must be 64 hexadecimal digits")
    return digest


def _bad(message: str) -> ConfigError:
    return ConfigError(f"api_key_file: {message}", param="api_key_file")
