"""Contents of files: on disk, in the folder `files` of `--data-dir`, or in memory. All functions block.

A content is written under another name and gets its own when it is complete and synced: what has the name of a file is
whole, whenever the machine stops.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Collection
from pathlib import Path
from typing import IO, Protocol

from quire.server.data_dir import FILE_MODE, FOLDER_MODE

FOLDER = "files"
PART = ".part"


class Contents(Protocol):
    """The contents of all files, by id."""

    def create(self, file_id: str) -> IO[bytes]:
        """Return a new content, to be written, and then kept or dropped."""

    def keep(self, file_id: str, file: IO[bytes]) -> None:
        """Close a content that is complete."""

    def drop(self, file_id: str, file: IO[bytes]) -> None:
        """Close and forget a content that is not complete."""

    def open(self, file_id: str) -> IO[bytes]:
        """Return a content, to be read; it can be read to its end even if it is removed. Raises `OSError`."""

    def remove(self, file_id: str) -> None:
        """Forget a content, if there is one."""


class DiskContents:
    """Contents in a folder."""

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir / FOLDER

    def create(self, file_id: str) -> IO[bytes]:
        self._folder.mkdir(FOLDER_MODE, exist_ok=True)
        path = self._folder / (file_id + PART)
        return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE), "wb")

    def keep(self, file_id: str, file: IO[bytes]) -> None:
        with file:
            file.flush()
            os.fsync(file.fileno())
        (self._folder / (file_id + PART)).rename(self._folder / file_id)

    def drop(self, file_id: str, file: IO[bytes]) -> None:
        with contextlib.suppress(OSError):  # what was not written yet, on a full disk
            file.close()
        (self._folder / (file_id + PART)).unlink(missing_ok=True)

    def open(self, file_id: str) -> IO[bytes]:
        return open(self._folder / file_id, "rb")

    def remove(self, file_id: str) -> None:
        with contextlib.suppress(OSError):  # the next start tries again
            (self._folder / file_id).unlink(missing_ok=True)


class MemoryContents:
    """Contents in memory."""

    def __init__(self) -> None:
        self._contents: dict[str, bytes] = {}

    def create(self, file_id: str) -> IO[bytes]:
        return io.BytesIO()

    def keep(self, file_id: str, file: IO[bytes]) -> None:
        assert isinstance(file, io.BytesIO)
        self._contents[file_id] = file.getvalue()

    def drop(self, file_id: str, file: IO[bytes]) -> None:
        file.close()

    def open(self, file_id: str) -> IO[bytes]:
        if file_id not in self._contents:
            raise FileNotFoundError(file_id)
        return io.BytesIO(self._contents[file_id])

    def remove(self, file_id: str) -> None:
        self._contents.pop(file_id, None)


def remove_unknown(data_dir: Path, known: Collection[str]) -> None:
    """Remove all contents but these; nobody else may use the folder now."""
    folder = data_dir / FOLDER
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name not in known and path.is_file():
                path.unlink(missing_ok=True)
