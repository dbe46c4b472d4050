"""All weights of a GGUF file, or of the several that a model is split into, under transformers' names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from quire.checkpoint.gguf.blocks import FORMATS
from quire.checkpoint.gguf.config import architecture_of, read_config
from quire.checkpoint.gguf.names import Origin, origins
from quire.checkpoint.gguf.reader import MAGIC, GGUFFile, open_shards
from quire.checkpoint.gguf.tensors import GGUFTensor, layout_of, make_tensor, reorder
from quire.checkpoint.tensor import HostTensor, Tensor, TransposedTensor
from quire.checkpoint.weights import Checkpoint, StoredTensor
from quire.errors import ModelError, echo

SUFFIX = ".gguf"
PLAIN_FORMATS = ("F32", "F16", "BF16")  # not quantized, and named as in safetensors


def is_gguf(path: Path) -> bool:
    """Whether a model's path is that of a GGUF file, and not of a folder."""
    return path.suffix.lower() == SUFFIX and not path.is_dir()


def begins_as_gguf(path: Path) -> bool:
    """Whether a file, whatever its name, begins as a GGUF file does."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def open_gguf(path: Path, *, eager: bool = False) -> Checkpoint:
    """Open the file at `path`, and all others of its model; only headers are read. Raises ModelError."""
    files = open_shards(path, eager=eager)
    home: dict[str, GGUFFile] = {}
    for file in files:
        for name in file.entries:
            if name in home:
                raise ModelError(f"{file.path}: tensor {echo(name)} is already in {home[name].path.name}")
            home[name] = file
    shapes = {name: file.entries[name].shape for name, file in home.items()}
    metadata = files[0].metadata
    prefix = metadata["general.architecture"]
    heads = _number(metadata.get(f"{prefix}.attention.head_count"))
    kv_heads = _number(metadata.get(f"{prefix}.attention.head_count_kv")) or heads
    checkpoint = Checkpoint(path)
    for name, origin in origins(architecture_of(path, metadata, shapes), shapes):
        checkpoint.tensors[name] = _stored_tensor(home[origin.stored], origin, heads, kv_heads)
    return checkpoint


def _stored_tensor(file: GGUFFile, origin: Origin, heads: int, kv_heads: int) -> StoredTensor:
    """Return a tensor as transformers stores it; unquantized tensors that must be changed are copied."""
    entry = file.entries[origin.stored]
    begin, end, shape, form = entry.begin, entry.end, entry.shape, FORMATS[entry.format]
    if origin.expert is not None:
        size, shape = (end - begin) // shape[0], shape[1:]
        begin, end = begin + origin.expert * size, begin + (origin.expert + 1) * size

    def read() -> Tensor:
        if form.decode is not None and len(shape) != 2:
            raise ModelError(f"{file.path}: tensor {echo(origin.stored)} of type {form.name} is no matrix")
        return _changed(make_tensor(form, file.view(begin, end), shape), file, origin, heads, kv_heads)

    changed = shape[::-1] if origin.change == "transposed" else shape
    dtype, layout = (form.name, None) if form.name in PLAIN_FORMATS else ("F32", layout_of(form))
    return StoredTensor(file.path, dtype, changed, end - begin, read, layout)


def _changed(tensor: Tensor, file: GGUFFile, origin: Origin, heads: int, kv_heads: int) -> Tensor:
    rows = tensor.shape[0]
    match origin.change:
        case "unrotate_q" | "unrotate_k":
            # The converter puts what rotates together side by side: of each head's rows 0, D/2, 1, D/2 + 1, ...
            heads = heads if origin.change == "unrotate_q" else kv_heads
            if heads == 0 or rows % (2 * heads):
                raise _misfit(file, origin, f"{rows} rows (expected pairs for each of {heads} heads)")
            return reorder(tensor, np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1))
        case "by_head":
            # Stored: all queries, all keys, all values. Result: those of each head together.
            if heads == 0 or rows % (3 * heads):
                raise _misfit(file, origin, f"{rows} rows (expected three parts for each of {heads} heads)")
            return reorder(tensor, np.arange(rows).reshape(3, heads, -1).swapaxes(0, 1).reshape(-1))
        case "minus_one":
            return HostTensor(tensor.to_float32() - np.float32(1), "float32")
        case "transposed":
            return TransposedTensor(tensor) if isinstance(tensor, GGUFTensor) else tensor.transposed()
    return tensor


def _misfit(file: GGUFFile, origin: Origin, problem: str) -> ModelError:
    return ModelError(f"{file.path}: tensor {echo(origin.stored)} has {problem}")


def gguf_config(path: Path) -> dict[str, Any]:
    """Return the config.json of the model in a GGUF file; raises `ModelError`."""
    return read_config(open_shards(path))


def _number(value: Any) -> int:
    """Return a number that may be a list by layer; 0 for invalid ones, which `read_config` refuses."""
    value = value[0].item() if isinstance(value, np.ndarray) and value.size else value
    return value if type(value) is int and value > 0 else 0
