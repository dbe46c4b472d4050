"""Tells systemd how the server is: `Type=notify` and `WatchdogSec=` of a unit. Without systemd nothing happens here.

The protocol (sd_notify(3)): a datagram for each piece of news, to the socket that `NOTIFY_SOCKET` names.
"""

from __future__ import annotations

import contextlib
import os
import socket


def notify(state: str) -> None:
    """Tell of "READY=1", "STOPPING=1" or "WATCHDOG=1"."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as messenger:
        messenger.setblocking(False)
        messenger.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)


def watchdog_seconds() -> float | None:
    """Return how often systemd wants a sign of life at least; None if it does not."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    meant = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(microseconds) / 1e6 if meant and microseconds.isdecimal() and int(microseconds) else None
