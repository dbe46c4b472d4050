"""The folder of `--data-dir`: what must outlive the process, and who of several server processes uses it.

    process-N.lock      held (flock) by the server process in slot N as long as it lives
    responses.sqlite3   stored responses and conversations (`responses/database.py`), with a lock of its own
    batches.sqlite3     files and batches (`batches/database.py`), with a lock of its own
    files/              contents of files
    server.lock         of a temporary folder only: held by the server that made it

The kernel lets go of a lock with the process that holds it, however that ends. So everybody can tell whether the
process that a record names is still there, without its cooperation and without a clock. The folder must be on a local
file system: neither these locks nor SQLite's log work over a network.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from quire.errors import ConfigError, QuireError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FOLDER_MODE = 0o700
FILE_MODE = 0o600
SLOT_SECONDS = 2.0  # for which a slot may still be held by a process that is being killed
POLL_SECONDS = 0.01
TEMPORARY_PREFIX = "quire-responses-"
TEMPORARY_LOCK = "server.lock"
MEMORY = Path("/dev/shm")  # where Linux has files in memory


class StorageError(QuireError):
    """Something could not be written to the data directory, or read from it; later it may go."""

    http_status = 503
    default_code = "storage_unavailable"


def prepare_data_dir(path: str) -> Path:
    """Create the folder unless it is there, and return its path. Raises `ConfigError` if it cannot be written."""
    folder = Path(path).expanduser()
    if fcntl is None:
        raise ConfigError("data_dir is not supported on this system, which has no flock", param="data_dir")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(FOLDER_MODE)
        probe = folder / f".probe-{os.getpid()}"
        os.close(os.open(probe, os.O_CREAT | os.O_WRONLY, FILE_MODE))
        probe.unlink()
    except OSError as error:
        reason = f"{path!r} cannot be created or written ({error.strerror or error})"
        raise ConfigError(f"data_dir: {reason}", param="data_dir") from None
    except ValueError as error:  # a zero byte
        raise ConfigError(f"data_dir: {path!r} is no path ({error})", param="data_dir") from None
    return folder


class FileLock:
    """A lock on a file, free or held by this process; shared by several holders, or exclusive.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, FILE_MODE)

    def acquire(self, *, shared: bool = False) -> bool:
        """Take it, or change what is held, if nobody is in the way. Returns whether it is held so now."""
        try:
            fcntl.flock(self._file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Let go of it. It may be called again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def poll(attempt: Callable[[], bool], seconds: float) -> bool:
    """Call `attempt` until it returns true, for so long. Returns whether it did."""
    end = time.monotonic() + seconds
    while not attempt():
        if time.monotonic() > end:
            return False
        time.sleep(POLL_SECONDS)
    return True


def take_slot(folder: Path, slot: int) -> FileLock:
    """Return the lock of a slot, held. Raises `ConfigError` if another process holds it."""
    try:
        lock = FileLock(_slot_path(folder, slot))
    except OSError as error:
        raise ConfigError(f"data_dir: {folder} cannot be used ({error.strerror or error})", param="data_dir") from None
    if not poll(lock.acquire, SLOT_SECONDS):
        lock.close()
        raise ConfigError(
            f"data_dir: {folder} is in use by another server; end it, or give this one another data_dir",
            param="data_dir",
        )
    return lock


def slot_lives(folder: Path, slot: int) -> bool:
    """Whether a process holds a slot."""
    path = _slot_path(folder, slot)
    if not path.exists():
        return False
    lock = FileLock(path)
    try:
        return not lock.acquire(shared=True)
    finally:
        lock.close()


def _slot_path(folder: Path, slot: int) -> Path:
    return folder / f"process-{slot}.lock"


@contextlib.contextmanager
def temporary_data_dir(num_bytes: int) -> Iterator[Path]:
    """Yield a new folder, which is removed afterwards; in memory if there is room for so many bytes.

    It has a name as long as it is used: fronts that are started later open its files, and SQLite makes new ones. So a
    server that is killed leaves it to the next one (`remove_stale_data_dirs`).
    """
    parent = MEMORY if _has_room(MEMORY, num_bytes) else None
    folder = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=parent))
    try:
        made = folder / f"{TEMPORARY_LOCK}.new"
        lock = FileLock(made)
        lock.acquire()
        made.rename(folder / TEMPORARY_LOCK)  # so nobody finds it free
        try:
            yield folder
        finally:
            lock.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def is_temporary(folder: Path) -> bool:
    """Whether a folder is one of `temporary_data_dir`."""
    return (folder / TEMPORARY_LOCK).exists()


def remove_stale_data_dirs() -> None:
    """Remove the temporary folders that killed servers of this user have left."""
    for parent in {MEMORY, Path(tempfile.gettempdir())}:
        for folder in parent.glob(f"{TEMPORARY_PREFIX}*"):
            with contextlib.suppress(OSError):
                _remove_if_stale(folder)


def _remove_if_stale(folder: Path) -> None:
    found = folder.lstat()
    path = folder / TEMPORARY_LOCK
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or not path.exists():
        return
    lock = FileLock(path)
    try:
        if lock.acquire():
            shutil.rmtree(folder)
    finally:
        lock.close()


def _has_room(folder: Path, num_bytes: int) -> bool:
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize >= num_bytes and os.access(folder, os.W_OK | os.X_OK)
