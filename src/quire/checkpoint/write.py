"""Writes weights as safetensors: in one float dtype, or quantized in the format of compressed-tensors.

compressed-tensors is the format of llm-compressor, which other engines read too; `quantization/compressed.py` reads it.
`pack-quantized`: 4 bits with a scale for each group of a row; `int-quantized`: 8 bits with a scale for each row.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from quire.checkpoint.files import replacing
from quire.checkpoint.safetensors import DTYPES, HEADER_DTYPES
from quire.checkpoint.tensor import Tensor
from quire.checkpoint.weights import FLOAT_DTYPES, Checkpoint, StoredTensor
from quire.errors import ModelError

GROUPS = (64, 32)  # of 4-bit weights, the first that divides the rows of all of them
ROWS = 1024  # that are quantized at a time
_LINEAR = re.compile(
    r"\.(?:\w+_proj|w[123])\.weight$"
)  # weights of linear layers; routers and heads keep their numbers


class Part(NamedTuple):
    """One tensor of the file: name, dtype of safetensors, shape, and a function that yields its arrays in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[np.ndarray]]


Store = Callable[[Tensor, str], np.ndarray]
"""Values of a tensor as the bits of a dtype."""


def plain_parts(checkpoint: Checkpoint, dtype: str, store: Store) -> Iterator[Part]:
    """Yield every tensor of `checkpoint` in `dtype`; integers stay what they are."""
    for name, entry in checkpoint.tensors.items():
        if entry.dtype in FLOAT_DTYPES:
            yield Part(name, HEADER_DTYPES[dtype], entry.shape, partial(_rows, entry, dtype, store))
        else:
            yield Part(name, entry.dtype, entry.shape, partial(_whole, entry))


def quantized_parts(checkpoint: Checkpoint, dtype: str, store: Store, bits: int) -> Iterator[Part]:
    """Yield every tensor of `checkpoint`, the weights of linear layers in 4 or 8 bits and all others in `dtype`.

    Raises:
        ModelError: no weight has the name of a linear layer's.
    """
    parts = list(plain_parts(checkpoint, dtype, store))
    inputs = {part.name: part.shape[1] for part in parts if is_linear(part.name, part.shape)}
    group = next((group for group in GROUPS if all(size % group == 0 for size in inputs.values())), GROUPS[-1])
    chosen = {name for name, size in inputs.items() if bits == 8 or size % group == 0}
    for part in parts:
        if part.name in chosen:
            yield from _quantized(checkpoint.tensors[part.name], part.name, bits, group if bits == 4 else part.shape[1])
        else:
            yield part
    if not chosen:
        raise ModelError(f"{checkpoint.folder}: no weights with names of linear layers (..._proj.weight) to quantize")


def is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is the weight of a linear layer inside the model."""
    return len(shape) == 2 and _LINEAR.search(name) is not None


def quantization_config(bits: int, *, inputs: bool, ignored: list[str], group: int | None) -> dict[str, Any]:
    """Return config.json's quantization_config; `inputs`: whether activations are rounded to 8 bits, too."""
    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False}
    weights |= {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": activations if inputs else None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if bits == 4 else "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ignored,
    }


def write_safetensors(path: Path, parts: list[Part]) -> None:
    """Write tensors one after the other; at most a piece of one is in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for part in parts:
        size = math.prod(part.shape) * np.dtype(DTYPES[part.dtype][0]).itemsize
        header[part.name] = {
            "dtype": part.dtype,
            "shape": list(part.shape),
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for part in parts:
            _write(file, part)


def _write(file: BinaryIO, part: Part) -> None:
    for piece in part.pieces():
        file.write(np.ascontiguousarray(piece).data)


def _whole(stored: StoredTensor) -> Iterator[np.ndarray]:
    yield stored.read().array


def _rows(stored: StoredTensor, dtype: str, store: Store) -> Iterator[np.ndarray]:
    tensor = stored.read()
    if len(tensor.shape) < 2:
        yield store(tensor, dtype)
        return
    for start in range(0, tensor.shape[0], ROWS):
        yield store(tensor.rows(start, min(start + ROWS, tensor.shape[0])), dtype)


def _quantized(stored: StoredTensor, name: str, bits: int, group: int) -> Iterator[Part]:
    shape = rows, inputs = stored.shape

    def each(which: int) -> Iterator[np.ndarray]:
        tensor = stored.read()
        for start in range(0, rows, ROWS):
            yield _round(tensor.rows(start, min(start + ROWS, rows)).to_float32(), bits, group)[which]

    module = name.removesuffix(".weight")
    if bits == 4:
        yield Part(f"{module}.weight_packed", "I32", (rows, inputs // 8), lambda: each(0))
        yield Part(f"{module}.weight_shape", "I64", (2,), lambda: iter([np.array(shape, np.int64)]))
    else:
        yield Part(name, "I8", shape, lambda: each(0))
    yield Part(f"{module}.weight_scale", "F32", (rows, inputs // group), lambda: each(1))


def _round(values: np.ndarray, bits: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows as integers, packed for 4 bits, and their scales.

    8 bits: the largest absolute value becomes 127. 4 bits: the value with the largest absolute value becomes -8.
    """
    groups = values.reshape(len(values), -1, group)
    if bits == 8:
        scales = np.abs(groups).max(axis=2) / np.float32(127)
    else:
        largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=2, keepdims=True), axis=2)[:, :, 0]
        scales = largest / np.float32(-8)
    scales[scales == 0] = 1
    low, high = (-8, 7) if bits == 4 else (-127, 127)
    rounded = np.clip(np.rint(groups / scales[:, :, None]), low, high).astype(np.int8).reshape(values.shape)
    if bits == 8:
        return rounded, scales
    nibbles = (rounded + np.int8(8)).view(np.uint8).reshape(len(values), -1, 2)
    return (nibbles[:, :, 0] | nibbles[:, :, 1] << 4).view(np.int32), scales
