"""A worker process (`quire.frontend.worker_process`) whose jobs do what is not to be done."""

from __future__ import annotations

import mmap
import os
import threading
import time

from quire.frontend.worker_process import serve

RESERVED = 4 << 30  # bytes of address space, as libraries of numbers take them on a machine with many cores


def niceness() -> bytes:
    """Return this thread's."""
    return b"%d" % os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def work(job: bytes) -> bytes:
    """Take so many bytes, or do something odd."""
    if job.isdigit():
        return b"%d" % len(bytearray(int(job)))
    match job:
        case b"exit":
            os._exit(3)
        case b"oserror":
            raise OSError("no such thing")
        case b"abort":
            os.abort()
        case b"compute":
            while True:
                pass
        case b"sleep":
            time.sleep(600)
        case b"niceness":
            return niceness()
        case b"niceness after a while":
            deadline = time.monotonic() + 5.0
            normal = niceness()
            while (found := niceness()) == normal and time.monotonic() < deadline:
                pass
            return found
    return job


def main() -> None:
    """Do jobs until the connection is closed."""
    reserved = mmap.mmap(-1, RESERVED, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0))
    serve("odd", work)
    reserved.close()
