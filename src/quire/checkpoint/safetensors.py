"""Reads safetensors files, single or sharded with an index, mapped read-only and checked before use.

The header is untrusted input: lengths, offsets, shapes and types are verified with Python integers before any data is
read. `pickled.py` opens pickle weights (`.bin`, `.pt`).
The format: 8 bytes little-endian header length, a JSON header, then the data, without holes or overlaps.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quire.checkpoint.files import MAX_NAMES, parse_json_object, read_json_object
from quire.checkpoint.mapped import MappedFile
from quire.checkpoint.tensor import HostTensor
from quire.checkpoint.weights import Checkpoint, StoredTensor
from quire.errors import ModelError, echo

MAX_HEADER_BYTES = 100_000_000
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

# name in the header -> (numpy type of the stored bits, HostTensor.dtype or None where we cannot compute with it)
DTYPES: dict[str, tuple[str, str | None]] = {
    "F64": ("<f8", "float64"),
    "F32": ("<f4", "float32"),
    "F16": ("<f2", "float16"),
    "BF16": ("<u2", "bfloat16"),
    "I64": ("<i8", "int64"),
    "I32": ("<i4", "int32"),
    "I16": ("<i2", None),
    "I8": ("i1", "int8"),
    "U64": ("<u8", None),
    "U32": ("<u4", None),
    "U16": ("<u2", None),
    "U8": ("u1", "uint8"),
    "BOOL": ("?", "bool"),
    "C64": ("<c8", None),
    "F8_E4M3": ("u1", "float8_e4m3"),
    "F8_E5M2": ("u1", "float8_e5m2"),
    "F8_E8M0": ("u1", "float8_e8m0"),
}
HEADER_DTYPES = {dtype: name for name, (_, dtype) in DTYPES.items() if dtype is not None}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One verified header entry; `begin` and `end` count bytes from the start of the data part."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """One mapped file: `entries` by tensor name, and `read` to get a view of one."""

    def __init__(self, path: Path, *, eager: bool = False) -> None:
        """Map the file, or with `eager` read it, and verify its header; raises `ModelError`."""
        self.path = path
        self._file = MappedFile(path, 8, eager=eager)
        size = self._file.size
        self._data_start = 8 + _header_length(path, self._file.bytes, size)
        header = parse_json_object(
            self._file.bytes[8 : self._data_start].tobytes(), path, "safetensors header", MAX_NAMES
        )
        header.pop("__metadata__", None)
        self.entries = {name: _check_entry(path, name, entry) for name, entry in header.items()}
        _check_layout(path, self.entries, size - self._data_start, size)

    def read(self, name: str) -> HostTensor:
        """Return a read-only view of the tensor (a copy only if it lies unaligned in the file)."""
        entry = self.entries[name]
        storage, dtype = DTYPES[entry.dtype]
        if dtype is None:
            raise ModelError(f"{self.path}: tensor {echo(name)} has dtype {entry.dtype}, which is not supported here")
        stored = self._file.view(self._data_start + entry.begin, self._data_start + entry.end)
        array = stored.view(storage).reshape(entry.shape)
        return HostTensor(array if array.flags.aligned else array.copy(), dtype)


def _header_length(path: Path, data: np.ndarray, size: int) -> int:
    """Return the header's length in bytes, refusing what cannot be one."""
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > MAX_HEADER_BYTES:
        raise ModelError(
            f"{path}: safetensors header too large (expected at most {MAX_HEADER_BYTES} bytes, got {length})"
        )
    if length > size - 8:
        raise ModelError(f"{path}: file is truncated (expected {length + 8} bytes of header, got {size} bytes in all)")
    return length


def _check_entry(path: Path, name: str, entry: Any) -> TensorEntry:
    """Verify the fields of one header entry, each by itself."""

    def error(problem: str) -> ModelError:
        return ModelError(f"{path}: tensor {echo(name)}: {problem}")

    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise error(f"bad header entry {echo(entry)} (expected dtype, shape and data_offsets)")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise error(f"unknown dtype {echo(dtype)} (expected one of {', '.join(DTYPES)})")
    if not isinstance(shape, list) or not all(_is_count(size) for size in shape):
        raise error(f"bad shape {echo(shape)} (expected a list of sizes)")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(offset) for offset in offsets):
        raise error(f"bad data_offsets {echo(offsets)} (expected [begin, end] with 0 <= begin <= end)")
    begin, end = offsets
    expected = math.prod(shape) * np.dtype(DTYPES[dtype][0]).itemsize
    if end - begin != expected:
        raise error(
            f"data_offsets [{echo(begin)}, {echo(end)}] do not fit shape {echo(shape)} of {dtype} "
            f"(expected {echo(expected)} bytes, got {echo(end - begin)})"
        )
    return TensorEntry(dtype, tuple(shape), begin, end)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_layout(path: Path, entries: dict[str, TensorEntry], data_size: int, file_size: int) -> None:
    """Verify that the tensors lie one after the other and fill the data part exactly."""
    position, before = 0, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            kind = "overlaps" if entry.begin < position else "leaves a hole after"
            previous = f"tensor {echo(before)}" if before else "the header"
            raise ModelError(
                f"{path}: tensor {echo(name)}: data_offsets [{entry.begin}, {entry.end}] {kind} {previous} "
                f"(expected begin {position}, got {entry.begin})"
            )
        position, before = entry.end, name
    if position != data_size:
        what = "is truncated" if position > data_size else "has bytes that belong to no tensor"
        last = f"; tensor {echo(before)} ends there" if position > data_size else ""
        raise ModelError(
            f"{path}: file {what} (expected {file_size - data_size + position} bytes{last}, got {file_size})"
        )


def read_index(path: Path) -> dict[str, str]:
    """Return the file name of each tensor as an index of shards says; raises `ModelError`."""
    weight_map = read_json_object(path, most=MAX_NAMES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path}: weight_map is missing or empty (expected tensor names and their files)")
    for shard in weight_map.values():
        if not isinstance(shard, str) or shard in ("", ".", "..") or set(shard) & set("/\\\0"):
            raise ModelError(f"{path}: shard path {echo(shard)} escapes the model folder (expected a plain file name)")
    return weight_map


def open_safetensors(folder: Path, *, eager: bool = False) -> Checkpoint:
    """Open every weight file of `folder` and verify all headers; no tensor data is read yet, unless `eager`.

    Raises:
        ModelError: no safetensors files, or files that do not fit each other or the index.
    """
    checkpoint = Checkpoint(folder)
    weight_map: dict[str, str] = {}
    if os.path.lexists(folder / SINGLE_FILE):
        paths = [folder / SINGLE_FILE]
    elif os.path.lexists(folder / INDEX_FILE):
        weight_map = read_index(folder / INDEX_FILE)
        paths = [folder / shard for shard in dict.fromkeys(weight_map.values())]
    else:
        paths = _all_files(folder)
    for path in paths:
        if weight_map and not os.path.lexists(path):
            raise ModelError(f"{path}: no such shard (expected by {INDEX_FILE})")
        file = SafetensorsFile(path, eager=eager)
        for name, entry in file.entries.items():
            read = partial(file.read, name)
            checkpoint.add(name, StoredTensor(path, entry.dtype, entry.shape, entry.end - entry.begin, read))
    for name, shard in weight_map.items():
        if name not in checkpoint.tensors or checkpoint.tensors[name].path.name != shard:
            raise ModelError(f"{folder / shard}: tensor {echo(name)} is not in this file (expected by {INDEX_FILE})")
    return checkpoint


def _all_files(folder: Path) -> list[Path]:
    """Return every safetensors file, except consolidated*, a second copy of the weights in some folders."""
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if files:
        return files
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise ModelError(
            f"{folder / pickles[0]}: pickle weights are not supported without --load-format pt "
            f"(expected *.safetensors files)"
        )
    raise ModelError(f"{folder}: no safetensors weights (expected {SINGLE_FILE}, or {INDEX_FILE} and its shards)")
