"""A checkpoint whose quantized weights have been put together: each `NAME.weight` in place of its stored parts."""

from __future__ import annotations

from pathlib import Path

from quire.checkpoint.quantization.parse import StoredFormat
from quire.checkpoint.quantization.parts import Parts
from quire.checkpoint.safetensors import TensorEntry
from quire.checkpoint.tensor import HostTensor, Tensor
from quire.checkpoint.weights import TensorSource

# What beside weights checkpoints may have scales of; those are not used.
OF_ACTIVATIONS = tuple(
    f".{name}_{part}" for name in ("input", "output", "activation", "q", "k", "v") for part in ("scale", "zero_point")
)


class QuantizedSource:
    """A `TensorSource` on another one. Only headers, and small tensors that describe others, are read at first."""

    def __init__(self, source: TensorSource, stored: StoredFormat) -> None:
        """Find all quantized weights. Raises ModelError if parts of one are missing or do not fit each other."""
        self.folder = source.folder
        self._source = source
        parts = Parts(source)
        self._recipes = stored.recipes(parts)
        parts.finish()
        hidden = {name for recipe in self._recipes.values() for name in recipe.parts}
        plain = (name for name in source.names if not name.endswith(OF_ACTIVATIONS))
        self._names = [name for name in plain if name not in hidden and name not in self._recipes]
        self._names += self._recipes
        self._known = set(self._names)

    @property
    def names(self) -> list[str]:
        """Names of all tensors, parts of quantized ones left out."""
        return list(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def entry(self, name: str) -> TensorEntry:
        """Return the header entry of a plain tensor; of a quantized one, its shape, layout and stored bytes."""
        recipe = self._recipes.get(name)
        if recipe is None:
            return self._source.entry(name)
        entries = [self._source.entry(part) for part in recipe.parts]
        return TensorEntry("F32", recipe.shape, 0, sum(e.end - e.begin for e in entries), recipe.layout)

    def path_of(self, name: str) -> Path:
        """Return the file that holds the tensor, or its first part."""
        recipe = self._recipes.get(name)
        return self._source.path_of(name if recipe is None else recipe.parts[0])

    def read(self, name: str) -> Tensor:
        """Return the tensor; a quantized one reads its parts when it is unpacked."""
        recipe = self._recipes.get(name)
        if recipe is None:
            return self._source.read(name)
        tensor = recipe.make(self._part)
        assert tensor.shape == recipe.shape
        return tensor

    def _part(self, name: str) -> HostTensor:
        tensor = self._source.read(name)
        assert isinstance(tensor, HostTensor)
        return tensor
