"""A relay before a server, which shows what a program does with its connections."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator


class Relay(socketserver.ThreadingTCPServer):
    """Passes bytes on. `first_bytes` has, for each connection, what the client sent first."""

    daemon_threads = True

    def __init__(self, server_port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.server_port = server_port
        self.first_bytes: list[bytes] = []


class _Handler(socketserver.BaseRequestHandler):
    server: Relay

    def handle(self) -> None:
        with socket.create_connection(("127.0.0.1", self.server.server_port)) as upstream:
            back = threading.Thread(target=_copy, args=(upstream, self.request), daemon=True)
            back.start()
            data = self.request.recv(65536)
            self.server.first_bytes.append(data)
            upstream.sendall(data)
            _copy(self.request, upstream)
            back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def relay(server_port: int) -> Iterator[tuple[Relay, str]]:
    """Relay until the block ends, which gets the address."""
    with Relay(server_port) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        try:
            yield running, f"http://127.0.0.1:{running.server_address[1]}"
        finally:
            running.shutdown()
