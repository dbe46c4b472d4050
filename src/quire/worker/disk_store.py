"""`DiskStore`: blocks of the KV cache in files, each with a header that says which tokens they hold.

A folder holds one sub-folder for each fingerprint of what computed the blocks (`fingerprint.py`) and geometry, so that
blocks of different models never mix. In it:

    lock     held (flock) by the one engine that uses the store
    meta     JSON: format, fingerprint, geometry, and the key of this store's hashes, drawn once
    headers  a fixed-size record for each slot: magic, slot, length, digest of the block, header, digest of all that
    blocks   the blocks themselves, slot after slot, each from a multiple of 4 KiB; sparse where nothing was written

Headers have a file of their own so that opening a store reads few bytes in one piece. A block is written before its
header, and its header holds its digest; a write that was torn by a crash, or damage of any later kind, is therefore
noticed, and the block counts as absent. Nothing is synced: what a crash of the machine takes is computed again.

Digests are keyed BLAKE2b (RFC 7693) of 128 bits. A damaged block that went unnoticed would silently give wrong text, so
the 2^-32 of a CRC is not enough where a digest about as fast as a good disk costs little beside computing the block;
and the key keeps a file copied in from another store from being taken for this one's. Which slot holds what, and what
is worth keeping, is decided in `kvcache/tiers.py`; threads are in `disk_tier.py`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import stat
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import ConfigError

logger = logging.getLogger(__name__)

FORMAT = 1
MAGIC = b"quireKV1"
HEAD = struct.Struct("<8sII16s")  # magic, slot, bytes of the header, digest of the block
DIGEST_BYTES = 16
KEY_BYTES = 32
ALIGNMENT = 4096
MAX_META_BYTES = 2**16
SCAN_BYTES = 2**20  # of headers read at once
STORE_NAME = re.compile(r"[0-9a-f]{32}")
STORE_FILES = ("meta", "headers", "blocks", "meta.new", "lock")  # in the order in which they are deleted


def header_nbytes(block_size: int) -> int:
    """Return the most bytes of a header of a block of `block_size` tokens: the tokens and two hashes."""
    return 128 + 4 * block_size


@dataclass(frozen=True, slots=True)
class StoreGeometry:
    """What two stores must agree on to share blocks.

    Attributes:
        fingerprint: see `fingerprint.py`. block_nbytes: of one block in all layers. block_size: tokens of one.
        header_nbytes: most bytes of a header.
    """

    fingerprint: str
    block_nbytes: int
    block_size: int
    header_nbytes: int

    @property
    def head_nbytes(self) -> int:
        """Bytes of a record in the file of headers."""
        return HEAD.size + self.header_nbytes + DIGEST_BYTES

    @property
    def stride(self) -> int:
        """Bytes from one block to the next."""
        return -(-self.block_nbytes // ALIGNMENT) * ALIGNMENT

    def num_slots(self, num_bytes: int) -> int:
        """Return how many blocks a store of at most `num_bytes` has room for. Raises `ConfigError` if it is none."""
        slot_nbytes = self.stride + self.head_nbytes
        if num_bytes < slot_nbytes:
            raise ConfigError(
                f"kv_disk_space: {num_bytes} bytes hold no block; one takes {slot_nbytes}", param="kv_disk_space"
            )
        return num_bytes // slot_nbytes

    def fields(self) -> dict[str, Any]:
        """Return what `meta` says of a store, its key aside."""
        return {"format": FORMAT, **asdict(self)}

    def folder_name(self) -> str:
        """Return the name of the sub-folder for such blocks."""
        text = json.dumps(self.fields(), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()


class DiskStore:
    """One open store. `save` and `load` may be called from several threads, for different slots.

    Args:
        folder: of all stores; it is created if need be, with access for the user only.
        num_bytes: most bytes of this store; a smaller number than before truncates it. Other stores in the folder, the
            least recently used first, are deleted until all together take no more.

    Raises:
        ConfigError: another engine has the store open, or not one block fits. OSError: the files cannot be used.
    """

    def __init__(self, folder: Path, geometry: StoreGeometry, num_bytes: int) -> None:
        self.geometry = geometry
        self.block_nbytes = geometry.block_nbytes
        self.num_slots = geometry.num_slots(num_bytes)
        self.folder = folder / geometry.folder_name()
        self._failed = False
        self._warned = False
        with contextlib.ExitStack() as opened:
            self._open(opened)
            remove_unused_stores(folder, num_bytes)
            free = shutil.disk_usage(self.folder).free + os.fstat(self._blocks).st_blocks * 512
            if free < self.num_slots * geometry.stride:
                logger.warning("kv_disk_space is %d bytes, but %s has room for %d", num_bytes, folder, free)
            self._opened = opened.pop_all()

    def scan(self) -> list[tuple[int, bytes]]:
        """Return (slot, header) of every valid header; blocks are verified when they are loaded."""
        size = self.geometry.head_nbytes
        at_once = max(1, SCAN_BYTES // size)
        found = []
        for first in range(0, self.num_slots, at_once):
            try:
                data = os.pread(self._headers, at_once * size, first * size)
            except OSError as error:
                logger.warning("%s: headers from slot %d on cannot be read (%s)", self.folder, first, error)
                break
            for index in range(min(len(data) // size, self.num_slots - first)):
                parsed = self._parse(first + index, data[index * size : (index + 1) * size])
                if parsed is not None:
                    found.append((first + index, parsed[0]))
            if len(data) < at_once * size:
                break
        return found

    def save(self, slot: int, header: bytes, payload: np.ndarray) -> bool:
        """Write a block, uint8 [block_nbytes], and its header into `slot`, in place of what is there.

        Returns False if it could not be written. After the first such one (the disk may be full) none is.
        """
        assert 0 <= slot < self.num_slots and len(header) <= self.geometry.header_nbytes
        if self._failed:
            return False
        try:
            _write(self._blocks, payload.data, slot * self.geometry.stride)
            _write(self._headers, memoryview(self._head(slot, header, payload)), slot * self.geometry.head_nbytes)
        except OSError as error:
            self.stop_saving(str(error))
        return not self._failed

    def erase(self, slot: int) -> bool:
        """Drop the block in `slot`; return False if that fails.

        Then nothing is saved any more, and no later engine finds anything that is in the files.
        """
        try:
            _write(self._headers, memoryview(bytes(self.geometry.head_nbytes)), slot * self.geometry.head_nbytes)
        except OSError as error:
            self.stop_saving(str(error))
            self._abandon()
            return False
        return True

    def erase_all(self) -> None:
        """Drop every block and free its disk space. No `save` or `load` may run meanwhile."""
        try:
            os.truncate(self._headers, 0)
            os.truncate(self._blocks, 0)
        except OSError as error:
            logger.warning("%s: the blocks could not be erased (%s)", self.folder, error)
            self._abandon()

    def _abandon(self) -> None:
        """Have the next engine begin this store anew, as one without `meta`."""
        try:
            (self.folder / "meta").unlink(missing_ok=True)
        except OSError as error:
            logger.error("%s holds bad blocks and cannot be removed (%s): delete it", self.folder, error)

    def stop_saving(self, reason: str) -> None:
        """Write nothing more; what is there can still be loaded."""
        if not self._failed:
            logger.warning("%s: no more blocks are saved: %s", self.folder, reason)
        self._failed = True

    def load(self, slot: int, header: bytes) -> np.ndarray | None:
        """Return the block in `slot`, uint8 [block_nbytes], or None if it is damaged or has another header."""
        size = self.geometry.head_nbytes
        try:
            parsed = self._parse(slot, os.pread(self._headers, size, slot * size))
            if parsed is None or parsed[0] != header:
                return None
            payload = np.empty(self.block_nbytes, np.uint8)
            whole = _read(self._blocks, payload.data, slot * self.geometry.stride)
        except OSError as error:
            self._warn(slot, str(error))
            return None
        if not whole or self._digest(payload.data) != parsed[1]:
            self._warn(slot, "the block is damaged")
            return None
        return payload

    def close(self) -> None:
        """Close the files and unlock the store."""
        self._opened.close()

    # Opening

    def _open(self, opened: contextlib.ExitStack) -> None:
        """Lock the folder, read or make `meta`, open the files."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock(self._open_file("lock", opened))
        key = self._read_key()
        fresh = key is None
        self.hash_key = self._write_meta() if key is None else key
        self._headers, self._blocks = (self._open_file(name, opened) for name in ("headers", "blocks"))
        for file, size in ((self._headers, self.geometry.head_nbytes), (self._blocks, self.geometry.stride)):
            most = 0 if fresh else self.num_slots * size
            if os.fstat(file).st_size > most:
                os.truncate(file, most)

    def _open_file(self, name: str, opened: contextlib.ExitStack) -> int:
        file = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600)
        opened.callback(os.close, file)
        _check_regular(file)
        return file

    def _lock(self, file: int) -> None:
        """Take the store for this process; closing the file, or the end of the process, gives it back."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(file), (self.folder / "lock").stat()):
                raise BlockingIOError  # it was being deleted
        except BlockingIOError:
            holder = os.pread(file, 32, 0).decode("ascii", "replace").strip()
            raise ConfigError(
                f"kv_disk_dir: {self.folder} is in use by process {holder or 'unknown'}; "
                "end it, or give this engine another kv_disk_dir",
                param="kv_disk_dir",
            ) from None
        os.truncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode(), 0)

    def _read_key(self) -> bytes | None:
        """Return the key that `meta` holds, or None if there is no sound one for such blocks. Raises `OSError`."""
        path = self.folder / "meta"
        try:
            meta = json.loads(read_small_file(path, MAX_META_BYTES))
            key = bytes.fromhex(meta.pop("hash_key"))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            meta, key = None, b""
        if meta != self.geometry.fields() or len(key) != KEY_BYTES:
            logger.warning("%s is damaged; the blocks of this store are forgotten", path)
            return None
        return key

    def _write_meta(self) -> bytes:
        """Draw a key, write `meta` so that it is there whole or not at all, and return the key."""
        key = secrets.token_bytes(KEY_BYTES)
        new = self.folder / "meta.new"
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({**self.geometry.fields(), "hash_key": key.hex()}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.folder / "meta")
        return key

    # Records

    def _digest(self, data: memoryview | bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=DIGEST_BYTES, key=self.hash_key).digest()

    def _head(self, slot: int, header: bytes, payload: np.ndarray) -> bytes:
        """Return the record of a header."""
        start = HEAD.pack(MAGIC, slot, len(header), self._digest(payload.data)) + header
        start = start.ljust(HEAD.size + self.geometry.header_nbytes, b"\0")
        return start + self._digest(start)

    def _parse(self, slot: int, record: bytes) -> tuple[bytes, bytes] | None:
        """Return header and digest of the block, or None if the record is not sound."""
        if len(record) < self.geometry.head_nbytes or not record.startswith(MAGIC):
            return None
        _, named, length, digest = HEAD.unpack_from(record)
        if self._digest(record[:-DIGEST_BYTES]) != record[-DIGEST_BYTES:] or named != slot:
            self._warn(slot, "the header is damaged")
            return None
        return record[HEAD.size : HEAD.size + length], digest

    def _warn(self, slot: int, reason: str) -> None:
        """Warn once, then log at debug level: a failing disk has many bad blocks."""
        logger.log(logging.DEBUG if self._warned else logging.WARNING, "%s: slot %d: %s", self.folder, slot, reason)
        self._warned = True


def read_small_file(path: Path, most: int) -> bytes:
    """Return the content of a file. Raises `OSError`, also for one larger than `most` and for what is no file."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # opening a pipe would wait for its other end
        _check_regular(file.fileno())
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return data


def _check_regular(file: int) -> None:
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise OSError(errno.EINVAL, "a pipe, socket or device lies in place of a file")


def _write(file: int, data: memoryview, offset: int) -> None:
    """Write all of `data`, however many calls that takes."""
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def _read(file: int, data: memoryview, offset: int) -> bool:
    """Fill `data`; return False if the file ends before."""
    while data:
        count = os.preadv(file, [data], offset)
        if count == 0:
            return False
        data, offset = data[count:], offset + count
    return True


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
