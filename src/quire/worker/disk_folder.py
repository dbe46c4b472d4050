"""Keeping the folder of all disk stores small: stores of models, options or versions that nobody uses any more go.

What lies in one store is `disk_store.py`'s business.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
from pathlib import Path

logger = logging.getLogger(__name__)

STORE_NAME = re.compile(r"[0-9a-f]{32}")
STORE_FILES = ("meta", "headers", "blocks", "meta.new", "lock")  # in the order in which they are deleted


def remove_unused_stores(folder: Path, num_bytes: int) -> None:
    """Delete stores in `folder`, the longest unused first, until all of them take at most `num_bytes`.

    Those that an engine has open stay, and so does everything that is no store.
    """
    found = []
    for path in folder.iterdir():
        if STORE_NAME.fullmatch(path.name):
            with contextlib.suppress(OSError):  # gone meanwhile, or no store
                found.append(((path / "lock").stat().st_mtime_ns, _usage(path), path))
    total = sum(usage for _, usage, _ in found)
    for _, usage, path in sorted(found):
        if total <= num_bytes:
            return
        if _remove(path):
            logger.info("removed %s: the stores in %s took more than the space given", path.name, folder)
            total -= usage


def _usage(store: Path) -> int:
    """Return the bytes that a store takes on the disk."""
    return sum((store / name).stat().st_blocks * 512 for name in STORE_FILES if (store / name).exists())


def _remove(store: Path) -> bool:
    """Delete a store and say so, unless it is in use or the system forbids it."""
    try:
        lock = os.open(store / "lock", os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for name in STORE_FILES:
            (store / name).unlink(missing_ok=True)
        store.rmdir()
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning("%s cannot be removed (%s)", store, error)
        return False
    finally:
        os.close(lock)
    return True
