"""The file of packed weights that `quire convert --format packed` writes: a list of records with arrays, mapped.

    "QUIREPK1", header length u64, header in JSON, padding; then the arrays, each at a multiple of 64 bytes

`kernels.cpu.packed_weights` defines the records. This module places their arrays in the file, and checks the places.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quire.checkpoint.files import MAX_NAMES, parse_json_object, replacing
from quire.checkpoint.hf_config import ModelInfo
from quire.checkpoint.mapped import MappedFile
from quire.errors import ModelError

PACKED_FILE = "model.quire"
CONFIG_KEY = "quire_packed"  # in config.json: what the engine has to know before the file is opened
MAGIC = b"QUIREPK1"
ALIGNMENT = 64
MAX_HEADER_BYTES = 2**28
DTYPES = ("float32", "float16", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


def packed_quantization(info: ModelInfo) -> str | None:
    """Return the quantization of packed weights, None for other folders. Raises ModelError for a wrong value."""
    inner = info.fields.inner(CONFIG_KEY)
    return None if inner is None else inner.text("quantization", None)


def write_packed(path: Path, header: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> None:
    """Write `header` and records; arrays among the "fields" of each go behind them."""
    arrays: list[np.ndarray] = []
    position = 0
    listed = []
    for record in records:
        fields = {}
        for name, value in record["fields"].items():
            if isinstance(value, np.ndarray):
                position = -(-position // ALIGNMENT) * ALIGNMENT
                fields[name] = {"at": position, "dtype": str(value.dtype), "shape": list(value.shape)}
                arrays.append(value)
                position += value.nbytes
            else:
                fields[name] = value
        listed.append({**record, "fields": fields})
    text = json.dumps({**header, "records": listed}).encode()
    with replacing(path) as file:
        file.write(MAGIC + len(text).to_bytes(8, "little") + text)
        for array in arrays:
            file.write(bytes(-file.tell() % ALIGNMENT))
            file.write(np.ascontiguousarray(array).data)


class PackedFile:
    """One file: `header`, and `records` with arrays in place. Arrays are views, which may be written to in memory."""

    def __init__(self, path: Path) -> None:
        """Map the file and check it; raises `ModelError`."""
        self.path = path
        self._file = MappedFile(path, 16, writable=True)
        data = self._file.bytes
        length = int.from_bytes(data[8:16].tobytes(), "little")
        if data[:8].tobytes() != MAGIC or length > min(MAX_HEADER_BYTES, self._file.size - 16):
            raise ModelError(f"{path}: is no file of packed weights, or is truncated")
        self.header = parse_json_object(data[16 : 16 + length].tobytes(), path, "header", MAX_NAMES)
        self._start = -(-(16 + length) // ALIGNMENT) * ALIGNMENT
        records = self.header.pop("records", None)
        if not isinstance(records, list):
            raise self._error("records are missing")
        self.records = [self._record(record) for record in records]

    def _record(self, record: Any) -> dict[str, Any]:
        good = isinstance(record, dict) and isinstance(record.get("fields"), dict)
        if not good or not {"op", "kind", "shapes"} <= record.keys():
            raise self._error("a record is malformed")
        fields = {
            name: self._array(value) if isinstance(value, dict) else value for name, value in record["fields"].items()
        }
        return {**record, "fields": fields}

    def _array(self, place: dict[str, Any]) -> np.ndarray:
        at, dtype, shape = place.get("at"), place.get("dtype"), place.get("shape")
        if type(at) is not int or at < 0 or at % ALIGNMENT or dtype not in DTYPES or not isinstance(shape, list):
            raise self._error("an array is malformed")
        if not all(type(size) is int and size >= 0 for size in shape):
            raise self._error("an array is malformed")
        begin = self._start + at
        end = begin + math.prod(shape) * np.dtype(dtype).itemsize
        if end > self._file.size:
            raise self._error(f"file is truncated (expected {end} bytes, got {self._file.size})")
        return self._file.bytes[begin:end].view(dtype).reshape(shape)

    def _error(self, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {problem}")
