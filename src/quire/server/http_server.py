"""The HTTP server: uvicorn with our protocol, for a listening socket or for connections accepted elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import ssl
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from quire.errors import ConfigError
from quire.server.http import HEAD_SECONDS, BoundedHttpProtocol, ReceivingLimit
from quire.server.starter import Starter
from quire.server_config import ServerConfig
from quire.supervisor.connections import Admission, counter_of
from quire.supervisor.listen import BACKLOG, CERT_REQS

logger = logging.getLogger(__name__)


class HttpServer(uvicorn.Server):
    """Uvicorn without signal handlers: what signals mean is decided in `run.py`.

    Args:
        options: from `uvicorn_config`.
    """

    def __init__(self, options: uvicorn.Config) -> None:
        super().__init__(options)
        self._handshakes: set[asyncio.Task[None]] = set()
        self.has_started = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve."""
        await super().startup(sockets)
        self.has_started.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    def adopt(self, fd: int, admission: Admission, on_close: Callable[[], None]) -> None:
        """Serve a connection that was accepted and counted elsewhere; `on_close` is called when it has ended."""
        connection = socket.socket(fileno=fd)
        task = asyncio.create_task(self._adopt(connection, admission, on_close), name="quire-adopt")
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _adopt(self, connection: socket.socket, admission: Admission, on_close: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        owned = counted = True  # by us

        def end() -> None:
            nonlocal counted
            if counted:
                counted = False
                on_close()

        def make_protocol() -> asyncio.Protocol:
            nonlocal owned
            owned = False  # the transport closes it from now on
            return self.config.http_protocol_class(  # type: ignore[call-arg]
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
                _loop=loop,
                admit=lambda peer: admission,
                release=lambda admission: end(),
            )

        tls = None if admission.relayed else self.config.ssl
        established = False
        try:
            await loop.connect_accepted_socket(
                make_protocol, connection, ssl=tls, ssl_handshake_timeout=None if tls is None else HEAD_SECONDS
            )
            established = True
        except (OSError, ValueError) as error:  # it is gone, or speaks no TLS
            logger.debug("a connection was not established: %s", error)
        finally:
            if not established:
                if owned:
                    connection.close()
                end()


def uvicorn_config(
    app: FastAPI,
    server: ServerConfig,
    *,
    farewell_seconds: float,
    share: Callable[[int], int] = lambda num_bytes: num_bytes,
    is_crowded: Callable[[], bool] | None = None,
) -> uvicorn.Config:
    """Return uvicorn's options. Raises `ConfigError` if certificate and key are unusable.

    Args:
        share: see `ReceivingLimit`. is_crowded: see `BoundedHttpProtocol`; by default only connections from a listener
            of this process count.
    """
    counter = counter_of(server)
    protocol = functools.partial(
        BoundedHttpProtocol,
        receiving=ReceivingLimit(server.max_receiving_bytes, share),
        starter=Starter(),
        admit=counter.add,
        release=counter.remove,
        is_crowded=is_crowded or (lambda: counter.is_crowded),
        root_path=server.path_prefix,
    )
    options = uvicorn.Config(
        app,
        http=protocol,  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=server.timeout_keep_alive,
        timeout_graceful_shutdown=int(farewell_seconds),
        backlog=BACKLOG,
        ssl_certfile=server.ssl_certfile,
        ssl_keyfile=server.ssl_keyfile,
        ssl_ca_certs=server.ssl_ca_certs,
        ssl_cert_reqs=CERT_REQS[server.ssl_cert_reqs],
    )
    try:
        options.load()
    except OSError as error:
        raise ConfigError(f"ssl_certfile: no usable certificate and key: {error}", param="ssl_certfile") from None
    if options.ssl is not None:
        options.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
    return options


def reload_certificate(context: ssl.SSLContext, server: ServerConfig) -> None:
    """Load the certificate file again, for new connections. Raises `ConfigError`, changing nothing."""
    assert server.ssl_certfile is not None
    try:
        # In a context of its own first: the one in use must not be left with half of a pair.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(server.ssl_certfile, server.ssl_keyfile)
        context.load_cert_chain(server.ssl_certfile, server.ssl_keyfile)
    except OSError as error:
        raise ConfigError(f"ssl_certfile: no usable certificate and key: {error}", param="ssl_certfile") from None
