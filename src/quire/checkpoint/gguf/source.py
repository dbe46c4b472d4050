"""All weights of a GGUF file, or of the several that a model is split into, under transformers' names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from quire.checkpoint.gguf.blocks import FORMATS
from quire.checkpoint.gguf.config import architecture_of, read_config
from quire.checkpoint.gguf.names import Origin, origins
from quire.checkpoint.gguf.reader import GGUFEntry, GGUFFile, open_shards
from quire.checkpoint.gguf.tensors import GGUFTensor, layout_of, make_tensor, reorder
from quire.checkpoint.safetensors import TensorEntry
from quire.checkpoint.tensor import HostTensor, Tensor, TransposedTensor
from quire.errors import ModelError, echo

SUFFIX = ".gguf"
_PLAIN = {"F32": "F32", "F16": "F16", "BF16": "BF16"}  # format -> dtype of a `TensorEntry`


def is_gguf(path: Path) -> bool:
    """Whether a model's path is that of a GGUF file, and not of a folder."""
    return path.suffix.lower() == SUFFIX and not path.is_dir()


class GGUFSource:
    """A `TensorSource`. Nothing but headers is read at first."""

    def __init__(self, path: Path, *, eager: bool = False) -> None:
        """Open the file at `path`, and all others of its model; raises `ModelError`."""
        self.folder = path
        files = open_shards(path, eager=eager)
        self._home: dict[str, GGUFFile] = {}
        for file in files:
            for name in file.entries:
                if name in self._home:
                    raise ModelError(f"{file.path}: tensor {echo(name)} is already in {self._home[name].path.name}")
                self._home[name] = file
        shapes = {name: file.entries[name].shape for name, file in self._home.items()}
        metadata = files[0].metadata
        self._origins = dict(origins(architecture_of(path, metadata, shapes), shapes))
        prefix = metadata["general.architecture"]
        self._heads = _number(metadata.get(f"{prefix}.attention.head_count"))
        self._kv_heads = _number(metadata.get(f"{prefix}.attention.head_count_kv")) or self._heads

    @property
    def names(self) -> list[str]:
        return list(self._origins)

    def __contains__(self, name: str) -> bool:
        return name in self._origins

    def entry(self, name: str) -> TensorEntry:
        """Return shape, layout and stored bytes of a tensor."""
        origin = self._origins[name]
        entry, begin, end = self._span(origin)
        shape = entry.shape if origin.expert is None else entry.shape[1:]
        if origin.change == "transposed":
            shape = shape[::-1]
        dtype = _PLAIN.get(entry.format)
        return TensorEntry(dtype or "F32", shape, begin, end, None if dtype else layout_of(FORMATS[entry.format]))

    def path_of(self, name: str) -> Path:
        return self._home[self._origins[name].stored].path

    def read(self, name: str) -> Tensor:
        """Return the tensor as transformers would have it; plain numbers that were changed are copies."""
        origin = self._origins[name]
        entry, begin, end = self._span(origin)
        shape = entry.shape if origin.expert is None else entry.shape[1:]
        form = FORMATS[entry.format]
        if form.decode is not None and len(shape) != 2:
            raise ModelError(f"{self.path_of(name)}: tensor {echo(origin.stored)} of type {form.name} is no matrix")
        stored = self._home[origin.stored].view(begin, end)
        return self._changed(make_tensor(form, stored, shape), origin)

    def _span(self, origin: Origin) -> tuple[GGUFEntry, int, int]:
        """Return the stored tensor, and the span of its origin in the file."""
        entry = self._home[origin.stored].entries[origin.stored]
        if origin.expert is None:
            return entry, entry.begin, entry.end
        size = (entry.end - entry.begin) // entry.shape[0]
        return entry, entry.begin + origin.expert * size, entry.begin + (origin.expert + 1) * size

    def _changed(self, tensor: Tensor, origin: Origin) -> Tensor:
        """Undo what llama.cpp's converter did."""
        rows = tensor.shape[0]
        match origin.change:
            case "unrotate_q" | "unrotate_k":
                # The converter puts what rotates together side by side: of each head's rows 0, D/2, 1, D/2 + 1, ...
                heads = self._heads if origin.change == "unrotate_q" else self._kv_heads
                if heads == 0 or rows % (2 * heads):
                    raise self._misfit(origin, f"{rows} rows (expected pairs for each of {heads} heads)")
                return reorder(tensor, np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1))
            case "by_head":
                # Stored: all queries, all keys, all values. Result: those of each head together.
                if self._heads == 0 or rows % (3 * self._heads):
                    raise self._misfit(origin, f"{rows} rows (expected three parts for each of {self._heads} heads)")
                return reorder(tensor, np.arange(rows).reshape(3, self._heads, -1).swapaxes(0, 1).reshape(-1))
            case "minus_one":
                return HostTensor(tensor.to_float32() - np.float32(1), "float32")
            case "transposed":
                return TransposedTensor(tensor) if isinstance(tensor, GGUFTensor) else tensor.transposed()
        return tensor

    def _misfit(self, origin: Origin, problem: str) -> ModelError:
        return ModelError(f"{self._home[origin.stored].path}: tensor {echo(origin.stored)} has {problem}")


def gguf_config(path: Path) -> dict[str, Any]:
    """Return what config.json would say of the model in a GGUF file; raises `ModelError`."""
    return read_config(open_shards(path))


def _number(value: Any) -> int:
    """Return a count that may be given for each layer; 0 for nonsense, which the config has refused before."""
    value = value[0].item() if isinstance(value, np.ndarray) and value.size else value
    return value if type(value) is int and value > 0 else 0
