"""What systemd is told: see sd_notify(3)."""

from __future__ import annotations

import contextlib
import os
import socket

VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


def environment_of_children() -> dict[str, str]:
    """Return the environment without what systemd means for this process alone."""
    return {name: value for name, value in os.environ.items() if name not in VARIABLES}


def notify(state: str) -> None:
    """Send "READY=1", "STOPPING=1" or "WATCHDOG=1" to systemd; without systemd do nothing."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.setblocking(False)
        channel.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)


def watchdog_seconds() -> float | None:
    """Return the longest time between two "WATCHDOG=1" [s]; None if systemd expects none."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    meant = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(microseconds) / 1e6 if meant and microseconds.isdecimal() and int(microseconds) else None
