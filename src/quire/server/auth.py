"""API keys: who may use the server, the file that keys and their limits are read from, and the tenants they stand for.

Without a valid key every route is refused but those of `paths.is_open`. Only SHA-256 digests of keys are stored, and
a client's key is looked up by its digest, so the time of the lookup reveals nothing about stored keys: a client cannot
choose how much of its digest matches. What limits mean is in `limits`. Errors about the file name the
entry, never a key.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from quire.config import EngineConfig
from quire.errors import ConfigError, echo
from quire.server.errors import HTTPProblem
from quire.server.fronts import Fronts
from quire.server.limits import ApiKey, Quota
from quire.server.paths import is_open

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 2**20
HASHED = "sha256:"
KEY = re.compile(r"[!-~]{1,1024}")
NAME = re.compile(r"[A-Za-z0-9._:@-]{1,64}")
COUNTS = ("max_concurrency", "requests_per_minute", "tokens_per_minute")
FIELDS = ("key", "name", *COUNTS, "weight", "min_priority")
MAX_NUMBER = 10**9
KEYS, WEIGHTS = "api_keys", "api_key_weights"  # what fronts publish

Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class ApiKeys:
    """The configured keys; without keys, every request is accepted.

    Args:
        keys: without limits. file: with more keys, which may have limits.
        fronts: with the owner of quotas, and with the keys as they were, for a front that starts when the file is broken.

    Raises:
        ConfigError: an unusable key, or file.
    """

    def __init__(self, keys: Iterable[str], file: str | None = None, fronts: Fronts | None = None) -> None:
        self._fronts = fronts or Fronts()
        self._file = file
        self._from_options: dict[bytes, ApiKey] = {}
        for number, key in enumerate(keys):
            if not key or key != key.strip():
                raise ConfigError("api_key: a key must have no blanks around it, and not be empty", param="api_key")
            self._from_options.setdefault(digest_of(key.encode()), ApiKey(name=f"key-{number}"))
        self._keys: dict[bytes, ApiKey] = {}
        self._quotas: dict[bytes, Quota] = {}
        try:
            found = self._read()
        except ConfigError as error:
            if KEYS not in self._fronts.published:
                raise
            logger.error("%s; the keys stay as they were", error.message)
            published = self._fronts.published[KEYS]
            found = {bytes.fromhex(digest): ApiKey(**key) for digest, key in published.items()}
        self._replace(found)

    @property
    def required(self) -> bool:
        """Whether requests need a key."""
        return bool(self._keys)

    @property
    def several(self) -> bool:
        """Whether there are several keys, or may be once the file is read again."""
        return len(self._keys) > 1 or self._file is not None

    def reload(self) -> None:
        """Read the file again. If it is broken, the keys stay as they are, and the reason is logged."""
        try:
            keys = self._read()
        except ConfigError as error:
            logger.error("%s; the keys stay as they were", error.message)
        else:
            self._replace(keys)
            logger.info("there are %d API keys now", len(keys))

    def _read(self) -> dict[bytes, ApiKey]:
        if self._file is None:
            return dict(self._from_options)
        found = read_keys(self._file)
        names = {key.name for key in self._from_options.values()}
        for digest, key in found.items():
            if digest in self._from_options or key.name in names:
                raise ConfigError(
                    f"api_key_file: {key.name} is also given by api_key; leave out one of them", param="api_key_file"
                )
        return {**self._from_options, **found}

    def _replace(self, keys: dict[bytes, ApiKey]) -> None:
        """Replace the keys; requests that run already get the new limits, too."""
        quotas = {}
        for digest, key in keys.items():
            quota = self._quotas.get(digest) or Quota(digest.hex(), key, self._fronts.quotas)
            quota.key = key
            quotas[digest] = quota
        self._keys, self._quotas = keys, quotas
        if self._file is not None:
            self._fronts.publish(KEYS, {digest.hex(): dataclasses.asdict(key) for digest, key in keys.items()})

    def check(self, method: str, path: str, headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:
        """Return the digest of the caller's key, or None where no key is needed.

        Args:
            path: as the router will see it, never as rebuilt from a Host header.

        Raises:
            HTTPProblem: 401, no key or a wrong one.
        """
        if not self._keys or is_open(method, path):
            return None
        given = [value for name, value in headers if name == b"authorization"]
        # Anthropic's clients have a header of their own, and may send the same key in both.
        others = [b"Bearer " + value for name, value in headers if name == b"x-api-key"]
        given += [value for value in others if value not in given]
        if not given:
            raise _refusal("no API key was sent; send it as 'Authorization: Bearer KEY'")
        if len(given) > 1:
            raise _refusal("more than one API key was sent")
        scheme, _, token = given[0].strip().partition(b" ")
        digest = digest_of(token.strip())
        if scheme.lower() != b"bearer" or digest not in self._keys:
            raise _refusal("the API key is not valid")
        return digest

    def get(self, digest: bytes | None) -> ApiKey | None:
        """Return the key of this digest; None if there is none, or no longer."""
        return None if digest is None else self._keys.get(digest)

    def quota(self, digest: bytes | None) -> Quota | None:
        """Return the quota of a key; None if it has no limits."""
        quota = None if digest is None else self._quotas.get(digest)
        return quota if quota is not None and quota.key.limited else None

    def salt(self, digest: bytes | None, salt: str | None) -> str | None:
        """Return the cache salt of a request: where there are several keys, no two of them share cached prefixes."""
        if digest is None or not self.several:
            return salt
        return hashlib.sha256(digest + b"\x00" + (salt or "").encode()).hexdigest()

    def tenant(self, digest: bytes | None, user: str | None) -> str:
        """Return the tenant of a request: the name of its key, or without keys the `user` that it names."""
        if digest is None:
            return user or ""
        key = self.get(digest)
        return key.name if key is not None else ""


def _refusal(message: str) -> HTTPProblem:
    return HTTPProblem(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}, close=True)


def digest_of(key: bytes) -> bytes:
    """Return the SHA-256 digest of a key, which is stored and compared in its place."""
    return hashlib.sha256(key).digest()


def with_key_weights(config: EngineConfig, fronts: Fronts) -> EngineConfig:
    """Return the config with the weights of the key file among `tenant_weights`. They are read only at the start.

    Args:
        fronts: the first front has read them, for later ones, too.

    Raises:
        ConfigError: the file is unusable, or its weights contradict an option.
    """
    path = config.server.api_key_file
    if path is None:
        return config
    if WEIGHTS not in fronts.published:
        keys = read_keys(path).values()
        fronts.publish(WEIGHTS, {key.name: key.weight for key in keys if key.weight is not None})
    weights: dict[str, float] = fronts.published[WEIGHTS]
    if not weights:
        return config
    if config.scheduler.scheduling_policy != "fair":
        raise ConfigError("weights in api_key_file need scheduling_policy fair", param="api_key_file")
    for name in weights:
        if name in config.scheduler.tenant_weights:
            raise ConfigError(
                f"tenant_weights contradicts api_key_file, which has a weight for {name} too", param="tenant_weights"
            )
    return config.replace(tenant_weights={**config.scheduler.tenant_weights, **weights})


# ---- the file of keys: one key per line, or YAML with a name and limits for each ----


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
