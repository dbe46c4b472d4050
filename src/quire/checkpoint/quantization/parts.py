"""Combines the stored parts of quantized weights.

`Parts` finds parts by name and checks their shapes and types by headers alone. A format turns them into `Recipe`s, and
`combine_parts` puts each `NAME.weight` in place of its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from quire.checkpoint.tensor import HostTensor, Layout, QuantizedTensor
from quire.checkpoint.weights import Checkpoint, StoredTensor
from quire.errors import ModelError, echo, listed

SCALES = ("F16", "BF16", "F32")
# Scales of activations, which some checkpoints have beside weights, are not used.
OF_ACTIVATIONS = tuple(
    f".{name}_{part}" for name in ("input", "output", "activation", "q", "k", "v") for part in ("scale", "zero_point")
)

Reader = Callable[[str], HostTensor]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make one weight: its shape and layout, the names of its parts, and the function that combines them."""

    shape: tuple[int, ...]
    layout: Layout | None
    parts: tuple[str, ...]
    make: Callable[[Reader], QuantizedTensor]


Recipes = Iterator[tuple[str, Recipe | None]]
"""Names of weights, and how they are made; None where parts are missing or nothing is quantized."""


class Parts:
    """Tensors of a checkpoint by header: collects missing ones, raises ModelError for a wrong shape or dtype."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._folder, self._tensors = checkpoint.folder, checkpoint.tensors
        self._missing: dict[str, str] = {}

    def ending(self, *endings: str) -> list[str]:
        """Return the names of tensors with one of these endings, without the ending, each once."""
        found: dict[str, None] = {}
        for name in self._tensors:
            for ending in endings:
                if name.endswith(ending):
                    found[name[: -len(ending)]] = None
        return list(found)

    def modules(self, *suffixes: str) -> list[str]:
        """Return the names of all modules with a part of one of these suffixes, each once, in the order of the file."""
        return self.ending(*(f".{suffix}" for suffix in suffixes))

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def path_of(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._tensors[name].path

    def dtype(self, name: str) -> str:
        """Return the header's type of a tensor."""
        return self._tensors[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._tensors[name].shape

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
        tensor = self._tensors[name].read()
        assert isinstance(tensor, HostTensor)
        return tensor

    def error(self, name: str, text: str) -> ModelError:
        """Return the error that a part `text`."""
        return ModelError(f"{self._tensors[name].path}: tensor {echo(name)} {text}")

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
        text = listed(f"{echo(name)} (beside {echo(beside)})" for name, beside in self._missing.items())
        several = len(self._missing) > 1
        count = f"{len(self._missing)} part{'s' if several else ''} of quantized weights {'are' if several else 'is'}"
        raise ModelError(f"{self._folder}: {count} missing: {text}")

    def _present(self, name: str, beside: str) -> bool:
        if name in self._tensors:
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

    def recipes(self, parts: Parts) -> Recipes:
        """Yield how each quantized weight is made; notes missing parts, raises ModelError for misshapen ones."""


def combine_parts(checkpoint: Checkpoint, stored: StoredFormat) -> Checkpoint:
    """Return the checkpoint with each quantized weight in place of its parts, which are read when the weight is.

    Only headers, and small tensors that describe others, are read at first.

    Raises:
        ModelError: parts of a weight are missing or do not fit each other.
    """
    parts = Parts(checkpoint)
    recipes = {name: recipe for name, recipe in stored.recipes(parts) if recipe is not None}
    parts.finish()
    hidden = {name for recipe in recipes.values() for name in recipe.parts}.union(recipes)
    tensors = {
        name: tensor
        for name, tensor in checkpoint.tensors.items()
        if name not in hidden and not name.endswith(OF_ACTIVATIONS)
    }
    for name, recipe in recipes.items():
        entries = [checkpoint.tensors[part] for part in recipe.parts]
        size = sum(entry.num_bytes for entry in entries)
        read = partial(recipe.make, parts.read)
        tensors[name] = StoredTensor(entries[0].path, "F32", recipe.shape, size, read, recipe.layout)
    return Checkpoint(checkpoint.folder, tensors)
