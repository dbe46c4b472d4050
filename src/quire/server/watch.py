"""`FileWatch`: files that are read again when they change, or when somebody says so, while the server runs."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable, Sequence

from quire.errors import ConfigError
from quire.server.auth import ApiKeys
from quire.server.listen import reload_certificate
from quire.server_config import ServerConfig

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0


class FileWatch:
    """Calls back whoever depends on files that have changed. A look costs microseconds for each file."""

    def __init__(self) -> None:
        self._watched: list[tuple[Sequence[str], Callable[[], None]]] = []
        self._seen: dict[str, tuple[int, ...] | None] = {}

    def add(self, paths: Sequence[str], reload: Callable[[], None]) -> None:
        """Have `reload` called when any of these files changes; it raises nothing but `ConfigError`."""
        self._watched.append((paths, reload))
        self._seen.update({path: _signature(path) for path in paths})

    def look(self, *, force: bool = False) -> None:
        """Read again what has changed; with `force` everything."""
        seen = {path: _signature(path) for path in self._seen}
        for paths, reload in self._watched:
            if force or any(seen[path] != self._seen[path] for path in paths):
                try:
                    reload()
                except ConfigError as error:
                    logger.error("%s; it stays as it was", error.message)
        self._seen = seen

    async def run(self) -> None:
        """Look from time to time, until cancelled."""
        while self._watched:
            await asyncio.sleep(LOOK_SECONDS)
            self.look()


def watch_files(server: ServerConfig, keys: ApiKeys, tls: ssl.SSLContext | None) -> FileWatch:
    """Return the watch over the files that a server's options name."""
    watch = FileWatch()
    if server.api_key_file is not None:
        watch.add([server.api_key_file], keys.reload)
    if tls is not None and server.ssl_certfile is not None and server.ssl_keyfile is not None:
        watch.add([server.ssl_certfile, server.ssl_keyfile], lambda: reload_certificate(tls, server))
    return watch


def _signature(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev)
