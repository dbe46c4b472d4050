"""Reads the headers of GGUF files (ggml's specification, versions 2 and 3, little-endian): metadata and tensor offsets.

Files are untrusted input: every length and count is compared with the bytes that are left before it is used, so that
no file can make this allocate more than a small multiple of its own size.

    "GGUF", version u32, tensor count u64, metadata count u64
    metadata: key, type u32, value        tensors: name, dimensions u32, sizes u64, type u32, offset u64
    padding up to a multiple of general.alignment, then the data; a string is its length u64 and bytes of UTF-8
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.checkpoint.gguf.blocks import FORMATS, TYPE_NAMES
from quire.checkpoint.mapped import MappedFile
from quire.errors import ModelError, echo

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEY_BYTES = 65535
MAX_DIMENSIONS = 4
MAX_SIZE = 2**40  # of one dimension
MAX_SHARDS = 1000
MAX_UNUSED_BYTES = 2**20
STRING, ARRAY, BOOL = 8, 9, 7
# type in the file -> numpy type
SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GGUFEntry:
    """Where a tensor lies: `begin` and `end` count bytes from the start of the file; shape as numpy would have it."""

    type: int
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def format(self) -> str:
        """Name of the format, a key of `blocks.FORMATS`."""
        return TYPE_NAMES[self.type]


class _Cursor:
    """Reads values of a file in order; raises ModelError at its end."""

    def __init__(self, path: Path, data: np.ndarray) -> None:
        self.path, self._data, self.position = path, data, 0
        self.field = "header"

    def error(self, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {self.field}: {problem}")

    @property
    def left(self) -> int:
        return len(self._data) - self.position

    def take(self, count: int) -> np.ndarray:
        if count > self.left:
            raise self.error(f"file is truncated or a length is wrong (expected {count} more bytes, got {self.left})")
        self.position += count
        return self._data[self.position - count : self.position]

    def number(self, kind: str) -> Any:
        return self.take(np.dtype(kind).itemsize).view(kind)[0].item()

    def count(self, least: int) -> int:
        """Read the number of items that follow, u64; each has at least `least` bytes."""
        value = int(self.number("<u8"))
        if value > self.left // least:
            raise self.error(f"{value} entries do not fit in the file (expected at most {self.left // least})")
        return value

    def string(self, most: int | None = None) -> str:
        length = int(self.number("<u8"))
        if most is not None and length > most:
            raise self.error(f"a name of {length} bytes (expected at most {most})")
        try:
            return self.take(length).tobytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"not UTF-8 at byte {error.start} of a text") from None


class GGUFFile:
    """One mapped file: `metadata` by key, `entries` by tensor name, `view` to get bytes.

    Arrays of numbers are numpy arrays in `metadata`, arrays of texts are lists.
    """

    def __init__(self, path: Path, *, eager: bool = False) -> None:
        """Map the file and verify all of its header; raises `ModelError`."""
        self.path = path
        self._file = MappedFile(path, 24, eager=eager)
        cursor = _Cursor(path, self._file.bytes)
        self._check_magic(cursor)
        num_tensors, num_keys = int(cursor.number("<u8")), int(cursor.number("<u8"))
        for what, number, least in (("tensor", num_tensors, 24), ("metadata", num_keys, 13)):
            if number > cursor.left // least:
                raise cursor.error(f"{what} count {number} does not fit in a file of {self._file.size} bytes")
        self.metadata = _read_metadata(cursor, num_keys)
        self.entries = self._read_entries(cursor, num_tensors)
        self._check_layout()

    def view(self, begin: int, end: int) -> np.ndarray:
        """Return bytes of the file, as a view."""
        return self._file.view(begin, end)

    @staticmethod
    def _check_magic(cursor: _Cursor) -> None:
        magic = cursor.take(4).tobytes()
        if magic != MAGIC:
            raise cursor.error(f"no GGUF file: it begins with {echo(magic)} (expected {MAGIC!r})")
        version = int(cursor.number("<u4"))
        if version.to_bytes(4, "big")[::-1][:2] == b"\0\0":
            raise cursor.error("GGUF in big-endian order is not supported")
        if version not in VERSIONS:
            raise cursor.error(f"GGUF version {version} is not supported (supported: 2, 3)")

    def _read_entries(self, cursor: _Cursor, count: int) -> dict[str, GGUFEntry]:
        found: dict[str, tuple[int, tuple[int, ...], int, int]] = {}
        for index in range(count):
            cursor.field = f"tensor {index}"
            name = cursor.string(MAX_KEY_BYTES)
            cursor.field = f"tensor {echo(name)}"
            if name in found:
                raise cursor.error("is there twice")
            found[name] = _read_entry(cursor)
        cursor.field = "general.alignment"
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 2**20 or alignment & (alignment - 1):
            raise cursor.error(f"is {echo(alignment)} (expected a power of two up to 2^20)")
        self._alignment = alignment
        self._data_start = start = -(-cursor.position // alignment) * alignment
        entries = {}
        for name, (kind, shape, size, offset) in found.items():
            if offset % alignment:
                cursor.field = f"tensor {echo(name)}"
                raise cursor.error(f"offset {offset} is no multiple of general.alignment, {alignment}")
            entries[name] = GGUFEntry(kind, shape, start + offset, start + offset + size)
        return entries

    def _check_layout(self) -> None:
        """Verify that tensors lie within the file, do not overlap, and fill it but for padding."""
        position, previous, unused = self._data_start, "", 0
        for name, entry in sorted(self.entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            where = f"{self.path}: tensor {echo(name)}"
            if entry.end > self._file.size:
                raise ModelError(
                    f"{where}: file is truncated or an offset is wrong (expected {entry.end} bytes, got "
                    f"{self._file.size})"
                )
            if entry.begin < position:
                raise ModelError(f"{where}: overlaps tensor {echo(previous)}")
            unused += entry.begin - position
            position, previous = entry.end, name
        unused += self._file.size - position
        if unused > (len(self.entries) + 1) * self._alignment + MAX_UNUSED_BYTES:
            raise ModelError(
                f"{self.path}: file has {unused} bytes that belong to no tensor (expected at most {MAX_UNUSED_BYTES} "
                "besides padding)"
            )


def _read_entry(cursor: _Cursor) -> tuple[int, tuple[int, ...], int, int]:
    """Return type, shape, bytes and offset of a tensor."""
    dimensions = int(cursor.number("<u4"))
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.error(f"{dimensions} dimensions (expected 1 to {MAX_DIMENSIONS})")
    sizes = [int(cursor.number("<u8")) for _ in range(dimensions)]
    kind, offset = int(cursor.number("<u4")), int(cursor.number("<u8"))
    if any(not 1 <= size <= MAX_SIZE for size in sizes):
        raise cursor.error(f"sizes {sizes} (expected each from 1 to {MAX_SIZE})")
    form = FORMATS.get(TYPE_NAMES.get(kind, ""))
    if form is None:
        name = TYPE_NAMES.get(kind)
        shown = f"type {name}" if name else f"unknown type {kind}"
        raise cursor.error(f"{shown} is not supported (supported: {', '.join(FORMATS)})")
    if sizes[0] % form.size:
        raise cursor.error(f"rows of {sizes[0]} weights (expected a multiple of {form.size}, a block of {form.name})")
    return kind, tuple(reversed(sizes)), math.prod(sizes) // form.size * form.bytes, offset


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(count):
        cursor.field = f"metadata entry {index}"
        key = cursor.string(MAX_KEY_BYTES)
        cursor.field = f"metadata {echo(key)}"
        if key in metadata:
            raise cursor.error("is there twice")
        kind = int(cursor.number("<u4"))
        metadata[key] = _read_array(cursor) if kind == ARRAY else _read_value(cursor, kind)
    return metadata


def _read_value(cursor: _Cursor, kind: int) -> Any:
    if kind == STRING:
        return cursor.string()
    if kind not in SCALARS:
        raise cursor.error(f"unknown type {kind} (expected one of 0 to 12)")
    if kind == BOOL:
        return bool(cursor.number("<u1"))
    return cursor.number(SCALARS[kind])


def _read_array(cursor: _Cursor) -> np.ndarray | list[str]:
    kind = int(cursor.number("<u4"))
    if kind == STRING:
        return _read_strings(cursor, cursor.count(8))
    if kind not in SCALARS:
        raise cursor.error(f"an array of type {kind} (expected numbers or texts)")
    dtype = np.dtype(np.uint8 if kind == BOOL else SCALARS[kind])
    return cursor.take(cursor.count(dtype.itemsize) * dtype.itemsize).view(dtype)


def _read_strings(cursor: _Cursor, count: int) -> list[str]:
    """Read `count` strings, faster than `cursor.string`: vocabularies have hundreds of thousands."""
    unpack, position = struct.Struct("<Q").unpack_from, 0
    found: list[memoryview] = []
    data = cursor.take(cursor.left).data
    total = len(data)
    for _ in range(count):
        if position + 8 > total or position + 8 + (length := unpack(data, position)[0]) > total:
            raise cursor.error(f"text {len(found)}: file is truncated or a length is wrong")
        position += 8 + length
        found.append(data[position - length : position])
    cursor.position -= total - position
    try:
        return [str(text, "utf-8") for text in found]
    except UnicodeDecodeError:
        raise cursor.error("holds a text that is not UTF-8") from None


def open_shards(path: Path, *, eager: bool = False) -> list[GGUFFile]:
    """Open all files of a model in order; `path` is the only one, or the first of several.

    Raises:
        ModelError: `path` is not the first, or does not have the name of one.
    """
    first = GGUFFile(path, eager=eager)
    count = first.metadata.get("split.count", 1)
    if type(count) is not int or count <= 1:
        return [first]
    match = _SHARD.fullmatch(path.name)
    if match is None or int(match[3]) != count or count > MAX_SHARDS:
        raise ModelError(
            f"{path}: split.count is {echo(count)}, which the name does not say (NAME-00001-of-00002.gguf)"
        )
    if int(match[2]) != 1:
        raise ModelError(f"{path}: is not the first of {count} files (expected {match[1]}-00001-of-{match[3]}.gguf)")
    names = (f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in range(2, count + 1))
    return [first, *(GGUFFile(path.with_name(name), eager=eager) for name in names)]
