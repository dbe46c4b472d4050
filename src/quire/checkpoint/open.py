"""Opening the weights of a model folder: which reader serves its files, and in which numbers they are."""

from __future__ import annotations

import os
from pathlib import Path

from quire.checkpoint.gguf.source import GGUFSource, is_gguf
from quire.checkpoint.hf_config import ModelInfo
from quire.checkpoint.mapped import read_ahead
from quire.checkpoint.packed import PACKED_FILE
from quire.checkpoint.pickled import PickledCheckpoint
from quire.checkpoint.quantization.parts import QuantizedSource
from quire.checkpoint.safetensors import Checkpoint, TensorEntry
from quire.checkpoint.tensor import Tensor
from quire.checkpoint.weights import TensorSource
from quire.errors import ModelError


def open_weights(info: ModelInfo, load_format: str = "auto", strategy: str = "lazy") -> TensorSource:
    """Open the weight files of `info`, verify their headers, and read nothing else.

    Args:
        load_format: "auto" takes what the folder holds, but pickles, which only "pt" reads; "safetensors" and "gguf"
            take only that.
        strategy: "lazy" maps files, "prefetch" also has the system read them meanwhile, "eager" reads them now.

    Raises:
        ModelError: no weights, or files that are not what they should be.
    """
    source = _open(info, load_format, eager=strategy == "eager")
    if strategy == "prefetch":
        read_ahead(dict.fromkeys(source.path_of(name) for name in source.names))
    source = put_together(info, source)
    if info.pooling is None or not info.pooling.dense:
        return source
    folders = [dense.folder for dense in info.pooling.dense]
    return _WithDenseLayers(source, {folder: Checkpoint(info.path / folder) for folder in folders})


def _open(info: ModelInfo, load_format: str, *, eager: bool) -> TensorSource:
    if is_gguf(info.path):
        if load_format not in ("auto", "gguf"):
            raise ModelError(f"{info.path}: is a GGUF file (load_format is {load_format})")
        return GGUFSource(info.path, eager=eager)
    if load_format == "gguf":
        raise ModelError(f"{info.path}: is no GGUF file; name the file, or FOLDER:Q4_K_M")
    if load_format == "pt":
        return PickledCheckpoint(info.path)
    return Checkpoint(info.path, eager=eager)


def has_weights(info: ModelInfo, load_format: str = "auto") -> bool:
    """Whether there are any weights that could be read."""
    return load_format == "pt" or is_gguf(info.path) or any(info.path.glob("*.safetensors"))


def is_packed(info: ModelInfo) -> bool:
    """Whether the folder holds weights as `quire convert --format packed` writes them, which need no reading."""
    return not is_gguf(info.path) and os.path.lexists(info.path / PACKED_FILE)


def weight_files(info: ModelInfo, load_format: str = "auto") -> list[Path]:
    """Return every file that holds weights, sorted. Raises ModelError as `open_weights` does."""
    if load_format == "auto" and is_packed(info):
        return [info.path / PACKED_FILE]
    source = open_weights(info, load_format)
    return sorted({source.path_of(name) for name in source.names})


def put_together(info: ModelInfo, source: TensorSource) -> TensorSource:
    """Return the source with quantized weights in place of their parts, if config.json says that there are any."""
    stored = info.stored_format
    return source if stored is None else QuantizedSource(source, stored)


class _WithDenseLayers:
    """Tensors of a model, and of sentence-transformers' dense layers in folders beside it: "2_Dense.linear.weight"."""

    def __init__(self, source: TensorSource, folders: dict[str, Checkpoint]) -> None:
        self.folder, self._source, self._folders = source.folder, source, folders

    @property
    def names(self) -> list[str]:
        own = [f"{folder}.{name}" for folder, found in self._folders.items() for name in found.names]
        return [*self._source.names, *own]

    def _place(self, name: str) -> tuple[TensorSource, str]:
        folder, _, rest = name.partition(".")
        found = self._folders.get(folder)
        return (self._source, name) if found is None else (found, rest)

    def __contains__(self, name: str) -> bool:
        source, inner = self._place(name)
        return inner in source

    def entry(self, name: str) -> TensorEntry:
        source, inner = self._place(name)
        return source.entry(inner)

    def path_of(self, name: str) -> Path:
        source, inner = self._place(name)
        return source.path_of(inner)

    def read(self, name: str) -> Tensor:
        source, inner = self._place(name)
        return source.read(inner)
