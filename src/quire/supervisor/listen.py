"""The listening socket of a server, TCP or Unix, and what its connections inherit."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import stat
from collections.abc import Iterator

from quire.errors import AddressInUseError, ConfigError
from quire.server_config import LONGEST_SOCKET_PATH, ServerConfig

BACKLOG = 2048
CERT_REQS = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
SEND_BUFFER = 2**17
LONG_SILENCE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}


@contextlib.contextmanager
def listening(server: ServerConfig) -> Iterator[socket.socket]:
    """Listen while the block runs.

    Raises:
        AddressInUseError: the address is in use. ConfigError: it cannot be used.
    """
    if server.uds is None:
        with bind(server.host, server.port) as listener:
            yield listener
        return
    with bind_unix(server.uds) as listener:
        made = _identity(server.uds)
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if _identity(server.uds) == made:  # and not that of a server started meanwhile
                    os.unlink(server.uds)


def _identity(path: str) -> tuple[int, ...]:
    """Return the identity of a file, which differs from that of a later file with the same inode."""
    found = os.stat(path)
    return (found.st_dev, found.st_ino, found.st_mtime_ns)


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; connections queue until they are accepted."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"host: {host!r} is not an address: {error}", param="host") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tune_listener(listener)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(f"address already in use: {host}:{port}", param="port") from None
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}", param="host") from None
    return listener


def bind_unix(path: str) -> socket.socket:
    """Return a Unix socket that listens and that only its owner may connect to; a stale one is replaced."""
    if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
        raise ConfigError(f"uds: a path may have at most {LONGEST_SOCKET_PATH} bytes", param="uds")
    check_unix(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        tune_listener(listener)
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"uds: cannot listen on {path!r}: {error.strerror}", param="uds") from None
    finally:
        os.umask(mask)
    return listener


def check_unix(path: str) -> None:
    """Raise `ConfigError` unless `path` is free or a stale socket."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"uds: cannot listen on {path!r}: {error.strerror}", param="uds") from None
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"uds: {path!r} exists and is no socket", param="uds")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return
        except OSError:
            pass  # not ours to connect to, or so busy that it does not accept
    raise AddressInUseError(f"address already in use: {path}", param="uds")


def tune_listener(listener: socket.socket) -> None:
    """Set what all connections of a listening socket inherit: a bounded buffer, and probes of silent peers."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    if listener.family in (socket.AF_INET, socket.AF_INET6):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in LONG_SILENCE.items():
            if hasattr(socket, name):
                listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def url_of(listener: socket.socket, *, tls: bool) -> str:
    """Return the address of a listening socket as a URL, with the port it really has."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{shown}:{port}"
