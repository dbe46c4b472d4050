"""API keys: who may use the server, and the tenants they stand for.

Without a valid key every route is refused but those of `paths.is_open`. Only SHA-256 digests of keys are stored, and
a client's key is looked up by its digest, so the time of the lookup reveals nothing about stored keys: a client cannot
choose how much of its digest matches. What limits mean is in `limits`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Iterable, Sequence

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.server.errors import HTTPProblem
from quire.server.fronts import Fronts
from quire.server.key_file import ApiKey, all_keys, digest_of, read_keys
from quire.server.limits import Quota
from quire.server.paths import is_open

logger = logging.getLogger(__name__)

KEYS, WEIGHTS = "api_keys", "api_key_weights"  # what fronts publish


class ApiKeys:
    """The configured keys; without keys, every request is accepted.

    Args:
        keys: without limits. file: with more keys, which may have limits.
        fronts: with the owner of quotas, and the keys as they were, for a front that starts when the file is broken.

    Raises:
        ConfigError: an unusable key, or file.
    """

    def __init__(self, keys: Iterable[str], file: str | None = None, fronts: Fronts | None = None) -> None:
        self._fronts = fronts or Fronts()
        self._from_options = list(keys)
        self._file = file
        self._keys: dict[bytes, ApiKey] = {}
        self._quotas: dict[bytes, Quota] = {}
        try:
            found = all_keys(self._from_options, file)
        except ConfigError as error:
            if file is None or KEYS not in self._fronts.published:
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
            keys = all_keys(self._from_options, self._file)
        except ConfigError as error:
            logger.error("%s; the keys stay as they were", error.message)
        else:
            self._replace(keys)
            logger.info("there are %d API keys now", len(keys))

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

    def check_line(self, owner: bytes) -> bytes | None:
        """Return the digest of the key of a batch, as `check`. Raises `HTTPProblem`: 401, it is not valid any more."""
        if self._keys and owner not in self._keys:
            raise _refusal("the API key of this batch is not valid any more")
        return owner or None

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
