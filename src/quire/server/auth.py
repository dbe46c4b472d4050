"""API keys: who may use the server. Deny by default; the gate in `app` asks here before anything else happens.

Of keys only their SHA-256 digests are kept, and what clients send is looked up by its digest. So the time it takes
tells nothing of a key: nobody can choose how far the digest of a guess agrees with another one.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from quire.errors import ConfigError
from quire.server.errors import HTTPProblem
from quire.server.key_file import digest_of, read_keys
from quire.server.limits import KeyRules, Quota
from quire.server.playground_files import PATHS as PLAYGROUND_PATHS

logger = logging.getLogger(__name__)

PROBES = frozenset({"/health", "/healthz", "/livez", "/ping", "/ready", "/readyz"})
OPEN_PATHS = PROBES | PLAYGROUND_PATHS
OPEN_METHODS = frozenset({"GET", "HEAD"})
OPEN_POST = "/ping"


class ApiKeys:
    """The configured keys; without any, everybody is let in.

    Args:
        keys: as texts; they have no limits. file: of more keys, which may have some.
        clock: monotonic seconds, for limits.

    Raises:
        ConfigError: an unusable key, or file.
    """

    def __init__(
        self, keys: Iterable[str], file: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._file = file
        self._given: dict[bytes, KeyRules] = {}
        for number, key in enumerate(keys):
            if not key or key != key.strip():
                raise ConfigError("api_key: a key must have no blanks around it, and not be empty", param="api_key")
            self._given.setdefault(digest_of(key.encode()), KeyRules(name=f"key-{number}"))
        self._rules: dict[bytes, KeyRules] = {}
        self._quotas: dict[bytes, Quota] = {}
        self._adopt(self._read())

    @property
    def required(self) -> bool:
        """Whether a key is needed at all."""
        return bool(self._rules)

    @property
    def several(self) -> bool:
        """Whether there are, or may be at any time, keys of several holders."""
        return len(self._rules) > 1 or self._file is not None

    @property
    def weights(self) -> dict[str, float]:
        """The shares of tenants that the file gives."""
        return {rules.name: rules.weight for rules in self._rules.values() if rules.weight is not None}

    def reload(self) -> None:
        """Read the file again. If it is broken, the keys stay as they are, and the log says why."""
        try:
            keys = self._read()
        except ConfigError as error:
            logger.error("%s; the keys stay as they were", error.message)
        else:
            self._adopt(keys)
            logger.info("there are %d API keys now", len(keys))

    def _read(self) -> dict[bytes, KeyRules]:
        if self._file is None:
            return dict(self._given)
        found = read_keys(self._file)
        names = {rules.name for rules in self._given.values()}
        for digest, rules in found.items():
            if digest in self._given or rules.name in names:
                raise ConfigError(
                    f"api_key_file: {rules.name} is also given by api_key; leave out one of them", param="api_key_file"
                )
        return {**self._given, **found}

    def _adopt(self, rules: Mapping[bytes, KeyRules]) -> None:
        """Take over keys; what was used of a limit stays used."""
        quotas = {}
        for digest, rule in rules.items():
            quota = self._quotas.get(digest)
            if quota is not None:
                quota.change(rule)
            quotas[digest] = quota or Quota(rule, self._clock)
        self._rules, self._quotas = dict(rules), quotas

    def check(self, method: str, path: str, headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:
        """Return the digest of the caller's key, or None where no key is needed.

        Args:
            path: as the router will see it, never as rebuilt from a Host header.

        Raises:
            HTTPProblem: 401, no key or a wrong one.
        """
        if not self._rules or (path in OPEN_PATHS and method in OPEN_METHODS):
            return None
        if method == "POST" and path == OPEN_POST:
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
        if scheme.lower() != b"bearer" or digest not in self._rules:
            raise _refusal("the API key is not valid")
        return digest

    def quota(self, digest: bytes | None) -> Quota | None:
        """Return what the holder of a key has used, and may use; None where nobody counts."""
        quota = None if digest is None else self._quotas.get(digest)
        return quota if quota is not None and quota.rules.limited else None

    def rules(self, digest: bytes | None) -> KeyRules | None:
        """Return what a key is good for; None without one."""
        return None if digest is None else self._rules.get(digest)

    def salt(self, digest: bytes | None, salt: str | None) -> str | None:
        """Return the cache salt of a request: where there are several keys, no two of them share cached prefixes."""
        if digest is None or not self.several:
            return salt
        return hashlib.sha256(digest + b"\x00" + (salt or "").encode()).hexdigest()

    def tenant(self, digest: bytes | None, user: str | None) -> str:
        """Return on whose account a request runs: its key's, by name, or without keys that of the `user` it names."""
        rules = self.rules(digest)
        if digest is None:
            return user or ""
        return rules.name if rules is not None else ""  # the key was taken out of the file meanwhile


def _refusal(message: str) -> HTTPProblem:
    return HTTPProblem(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}, close=True)
