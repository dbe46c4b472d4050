"""API keys: who may use the server. Deny by default; the gate in `app` asks here before anything else happens.

Keys and what clients send are hashed before they are compared, so that neither length nor first difference shows in
the time it takes, and any bytes can be compared.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence

from quire.server.errors import HTTPProblem

OPEN_PATHS = frozenset({"/health"})
OPEN_METHODS = frozenset({"GET", "HEAD"})


class ApiKeys:
    """The configured keys; without any, everybody is let in."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def check(self, method: str, path: str, headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:
        """Return the digest of the caller's key, or None where no key is needed.

        Args:
            path: as the router will see it, never as rebuilt from a Host header.

        Raises:
            HTTPProblem: 401, no key or a wrong one.
        """
        if not self._digests or (path in OPEN_PATHS and method in OPEN_METHODS):
            return None
        given = [value for name, value in headers if name == b"authorization"]
        if not given:
            raise _refusal("no API key was sent; send it as 'Authorization: Bearer KEY'")
        if len(given) > 1:
            raise _refusal("more than one Authorization header was sent")
        scheme, _, token = given[0].strip().partition(b" ")
        digest = _digest(token.strip())
        found = False
        for known in self._digests:  # all of them: the time must not tell which one matched
            found |= hmac.compare_digest(known, digest)
        if scheme.lower() != b"bearer" or not found:
            raise _refusal("the API key is not valid")
        return digest

    def salt(self, digest: bytes | None, salt: str | None) -> str | None:
        """Return the cache salt of a request: with several keys, no two of them share cached prefixes."""
        if digest is None or len(self._digests) < 2:
            return salt
        return hashlib.sha256(digest + b"\x00" + (salt or "").encode()).hexdigest()

    def tenant(self, digest: bytes | None, user: str | None) -> str:
        """Return on whose account a request runs: its key's, by number, or without keys that of the `user` it names."""
        return (user or "") if digest is None else f"key-{self._digests.index(digest)}"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _refusal(message: str) -> HTTPProblem:
    return HTTPProblem(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}, close=True)
