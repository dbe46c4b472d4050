"""Quantized weights of a checkpoint, put together from their stored parts.

`Parts` finds parts by name and checks their shapes and types by headers alone. A format turns them into `Recipe`s, and
`QuantizedSource` presents each `NAME.weight` in place of its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from quire.checkpoint.safetensors import TensorEntry
from quire.checkpoint.tensor import HostTensor, Layout, QuantizedTensor, Tensor
from quire.checkpoint.weights import TensorSource
from quire.errors import ModelError, echo

SCALES = ("F16", "BF16", "F32")
MAX_LISTED = 20
# Scales of activations, which some checkpoints have beside weights, are not used.
OF_ACTIVATIONS = tuple(
    f".{name}_{part}" for name in ("input", "output", "activation", "q", "k", "v") for part in ("scale", "zero_point")
)

Reader = Callable[[str], HostTensor]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make one weight: its shape and layout, the names of its parts, and what puts them together."""

    shape: tuple[int, ...]
    layout: Layout | None
    parts: tuple[str, ...]
    make: Callable[[Reader], QuantizedTensor]


class Parts:
    """Tensors of a checkpoint by header; notes what is missing, and refuses what has the wrong shape or type."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._missing: dict[str, str] = {}

    def ending(self, *endings: str) -> list[str]:
        """Return what stands before one of these endings in the names of tensors, each once."""
        found: dict[str, None] = {}
        for name in self._source.names:
            for ending in endings:
                if name.endswith(ending):
                    found[name[: -len(ending)]] = None
        return list(found)

    def modules(self, *suffixes: str) -> list[str]:
        """Return the names of all modules with a part of one of these suffixes, each once, in the order of the file."""
        return self.ending(*(f".{suffix}" for suffix in suffixes))

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def path_of(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._source.path_of(name)

    def dtype(self, name: str) -> str:
        """Return the header's type of a tensor."""
        return self._source.entry(name).dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._source.entry(name).shape

    def matrix(self, name: str, dtypes: Iterable[str], beside: str) -> tuple[int, int] | None:
        """Return the shape of a matrix of one of these types; None, noted, if it is missing though `beside` exists."""
        if not self._present(name, beside):
            return None
        self._check_dtype(name, dtypes)
        shape = self.shape(name)
        if len(shape) != 2:
            raise self.error(name, f"has the wrong shape (expected two sizes, got {list(shape)})")
        return shape[0], shape[1]

    def check(self, name: str, shapes: Iterable[tuple[int, ...]], dtypes: Iterable[str], beside: str) -> bool:
        """Check that a part has one of these shapes and types; False, noted, if it is missing though `beside` exists.

        Raises:
            ModelError: another shape or type.
        """
        if not self._present(name, beside):
            return False
        self._check_dtype(name, dtypes)
        allowed = list(dict.fromkeys(shapes))
        if self.shape(name) not in allowed:
            expected = " or ".join(str(list(shape)) for shape in allowed)
            raise self.error(name, f"has the wrong shape (expected {expected}, got {list(self.shape(name))})")
        return True

    def read(self, name: str) -> HostTensor:
        """Read a stored part."""
        tensor = self._source.read(name)
        assert isinstance(tensor, HostTensor)
        return tensor

    def error(self, name: str, text: str) -> ModelError:
        """Return the error that a part `text`."""
        return ModelError(f"{self._source.path_of(name)}: tensor {echo(name)} {text}")

    def group_index(
        self, name: str, inputs: int, group: int, groups: int, *, beside: str, may_be_unused: bool = False
    ) -> np.ndarray | None:
        """Return the group of each input, int64 [inputs], where it is not k // group ("act-order").

        None for a regular order, for a missing tensor, and if `may_be_unused` for one with negative entries.
        """
        if name not in self:
            return None
        self.check(name, [(inputs,)], ("I32", "I64"), beside)
        found = self.read(name).array.astype(np.int64)
        if may_be_unused and found.size and found.min() < 0:
            return None
        if found.size and not 0 <= found.min() <= found.max() < groups:
            raise self.error(name, f"names group {found.max() if found.max() >= groups else found.min()} of {groups}")
        return None if np.array_equal(found, np.arange(inputs) // group) else found

    def finish(self) -> None:
        """Raise ModelError if any part was missing."""
        if not self._missing:
            return
        some = list(self._missing.items())[:MAX_LISTED]
        text = ", ".join(f"{echo(name)} (beside {echo(beside)})" for name, beside in some)
        rest = f" and {len(self._missing) - MAX_LISTED} more" if len(self._missing) > MAX_LISTED else ""
        count = f"{len(self._missing)} part{'s' if len(self._missing) > 1 else ''} of quantized weights"
        verb = "are" if len(self._missing) > 1 else "is"
        raise ModelError(f"{self._source.folder}: {count} {verb} missing: {text}{rest}")

    def _present(self, name: str, beside: str) -> bool:
        if name in self._source:
            return True
        self._missing.setdefault(name, beside)
        return False

    def _check_dtype(self, name: str, dtypes: Iterable[str]) -> None:
        allowed = tuple(dtypes)
        if self.dtype(name) not in allowed:
            raise self.error(name, f"has the wrong dtype (expected {', '.join(allowed)}, got {self.dtype(name)})")


class StoredFormat(Protocol):
    """A quantization method with its settings: `name` is what `--quantization` calls it."""

    @property
    def name(self) -> str:
        """The method."""

    def recipes(self, parts: Parts) -> dict[str, Recipe]:
        """Return how each quantized weight is made, by its name; notes missing parts, raises for misshapen ones."""


class QuantizedSource:
    """A `TensorSource` on another one. Only headers, and small tensors that describe others, are read at first."""

    def __init__(self, source: TensorSource, stored: StoredFormat) -> None:
        """Find all quantized weights. Raises ModelError if parts of one are missing or do not fit each other."""
        self.folder = source.folder
        self._source = source
        self._parts = Parts(source)
        self._recipes = stored.recipes(self._parts)
        self._parts.finish()
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
        tensor = recipe.make(self._parts.read)
        assert tensor.shape == recipe.shape
        return tensor
