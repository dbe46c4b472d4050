"""The stored parts of quantized weights: finding them by name, checking their shapes and types by headers alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from quire.checkpoint.tensor import HostTensor, Layout, QuantizedTensor
from quire.checkpoint.weights import TensorSource
from quire.errors import ModelError, echo

SCALES = ("F16", "BF16", "F32")
MAX_LISTED = 20

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
        """Read a small tensor that says what others mean."""
        tensor = self._source.read(name)
        assert isinstance(tensor, HostTensor)
        return tensor

    def error(self, name: str, text: str) -> ModelError:
        """Return the error that a part `text`."""
        return ModelError(f"{self._source.path_of(name)}: tensor {echo(name)} {text}")

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
