"""Weights of sentence-transformers' dense layers, which lie in folders of their own, beside those of the model."""

from __future__ import annotations

from pathlib import Path

from quire.checkpoint.hf_config import ModelInfo
from quire.checkpoint.safetensors import Checkpoint, TensorEntry
from quire.checkpoint.tensor import Tensor
from quire.checkpoint.weights import TensorSource


def with_dense_layers(info: ModelInfo, source: TensorSource) -> TensorSource:
    """Return `source`, and under "2_Dense.linear.weight" and the like what dense layers have.

    Raises:
        ModelError: a folder has no weights that are read.
    """
    if info.pooling is None or not info.pooling.dense:
        return source
    return _Joined(source, {dense.folder: Checkpoint(info.path / dense.folder) for dense in info.pooling.dense})


class _Joined:
    """Tensors of a model, and of folders beside it under the names of these."""

    def __init__(self, source: TensorSource, folders: dict[str, Checkpoint]) -> None:
        self.folder, self._source, self._folders = source.folder, source, folders

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
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
        """See `TensorSource`."""
        source, inner = self._place(name)
        return source.entry(inner)

    def path_of(self, name: str) -> Path:
        """See `TensorSource`."""
        source, inner = self._place(name)
        return source.path_of(inner)

    def read(self, name: str) -> Tensor:
        """See `TensorSource`."""
        source, inner = self._place(name)
        return source.read(inner)
