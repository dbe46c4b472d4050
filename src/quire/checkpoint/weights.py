"""Where a model reads its tensors by name and shape: a checkpoint, a dry run of one, or dummy weights.

A model's constructor reads each tensor it needs. Run on `DryRunWeights` first, it costs nothing and finds every missing
or misshapen tensor at once; then it runs on `CheckpointWeights`. Slicing and packing belong to the layers and the
backend.
"""

from __future__ import annotations

import logging
import math
import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from quire.checkpoint.tensor import (
    HostTensor,
    Layout,
    MetaTensor,
    QuantizedTensor,
    Tensor,
    count_nonfinite,
    meta_tensor,
)
from quire.errors import ModelError, echo, listed

logger = logging.getLogger(__name__)

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint, known by the header of its file.

    Attributes:
        path: the file that holds it, or its first part.
        dtype: as safetensors names it; "F32" for quantized weights.
        num_bytes: bytes that it takes in its files.
        read: returns the tensor, usually as a view of mapped memory.
        layout: of quantized weights.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    read: Callable[[], Tensor]
    layout: Layout | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Weights of a model folder under transformers' names, whatever the names and formats in its files.

    `safetensors.py`, `pickled.py` and `gguf/source.py` open one; `quantization/parts.py` replaces the parts of
    quantized weights by the weights.
    """

    folder: Path
    tensors: dict[str, StoredTensor] = field(default_factory=dict)

    def add(self, name: str, tensor: StoredTensor) -> None:
        """Add a tensor. Raises ModelError for a second one of the same name."""
        if name in self.tensors:
            raise ModelError(
                f"{tensor.path}: tensor {echo(name)} is already in {self.tensors[name].path.name} (expected it once)"
            )
        self.tensors[name] = tensor


class WeightSource(Protocol):
    """Tensors by full name."""

    def __contains__(self, name: str) -> bool:
        """Whether the tensor exists."""

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor, which must have this shape."""


class CheckpointWeights:
    """Reads real tensors; refuses NaN and infinity unless `allow_nonfinite`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        allow_nonfinite: bool = False,
        on_read: Callable[[int], None] | None = None,
    ) -> None:
        """Read from `checkpoint`; `on_read` is called with the stored bytes of each tensor before it is read."""
        self._tensors, self._on_read = checkpoint.tensors, on_read
        self._allow_nonfinite = allow_nonfinite

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a view of the mapped file. Raises ModelError for values that are not finite."""
        stored = self._tensors[name]
        if self._on_read is not None:
            self._on_read(stored.num_bytes)
        tensor = stored.read()
        assert tensor.shape == shape, "the dry run comes first"
        bad = count_nonfinite(tensor)
        if bad:
            message = f"{stored.path}: tensor {echo(name)} holds {bad} NaN or infinite values of {math.prod(shape)}"
            if not self._allow_nonfinite:
                raise ModelError(f"{message} (expected finite weights; allow_nonfinite loads them anyway)")
            logger.warning("%s", message)
        return tensor


class DryRunWeights:
    """Weights for a dry run: records which tensors a model reads, and returns tensors without values.

    `check` reports missing and misshapen ones.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._folder, self._tensors = checkpoint.folder, checkpoint.tensors
        self._requested: dict[str, tuple[int, ...]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Record the request, and return a tensor of this shape that takes no memory and has arbitrary values."""
        self._requested[name] = shape
        layout = self._tensors[name].layout if name in self._tensors else None
        return meta_tensor(shape) if layout is None else MetaTensor(shape, layout)

    @property
    def names(self) -> list[str]:
        """Names of the requested tensors."""
        return list(self._requested)

    @property
    def num_bytes(self) -> int:
        """Bytes of the requested tensors in their files."""
        return sum(self._tensors[name].num_bytes for name in self._requested if name in self._tensors)

    def check(self, ignored: Iterable[str]) -> None:
        """Raise ModelError if a tensor is missing or wrong; warn of tensors that were not requested.

        `ignored` are regular expressions for tensors that files may hold without a warning.
        """
        missing = [name for name in self._requested if name not in self._tensors]
        if missing:
            count = f"{len(missing)} tensor{'s are' if len(missing) > 1 else ' is'}"
            raise ModelError(f"{self._folder}: {count} missing from the weights: {listed(map(echo, missing))}")
        for name, shape in self._requested.items():
            entry = self._tensors[name]
            where = f"{entry.path}: tensor {echo(name)}"
            if entry.shape != shape:
                raise ModelError(f"{where} has the wrong shape (expected {list(shape)}, got {list(entry.shape)})")
            if entry.dtype not in FLOAT_DTYPES:
                raise ModelError(f"{where} has the wrong dtype (expected {', '.join(FLOAT_DTYPES)}, got {entry.dtype})")
        patterns = [re.compile(pattern) for pattern in ignored]
        extra = [
            name
            for name in self._tensors
            if name not in self._requested and not any(pattern.search(name) for pattern in patterns)
        ]
        if extra:
            logger.warning(
                "%s: ignored %d tensors that this architecture does not have: %s",
                self._folder,
                len(extra),
                listed(map(echo, extra)),
            )


@dataclass(frozen=True, slots=True)
class MetaWeights:
    """Tensors that have shapes and no values; `names` are those that exist, all if it is None."""

    names: frozenset[str] | None = None

    def __contains__(self, name: str) -> bool:
        return self.names is None or name in self.names

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of this shape that takes no memory."""
        return meta_tensor(shape)


class DummyWeights:
    """Small random weights, the same for the same seed and name; for trying a config without its weights."""

    def __init__(self, seed: int = 0) -> None:
        values = np.random.default_rng(seed).standard_normal(1 << 20, dtype=np.float32) * np.float32(0.02)
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)  # bfloat16, the dtype of most models
        self._twice = np.concatenate([bits, bits])
        self._twice.flags.writeable = False

    def __contains__(self, name: str) -> bool:
        return True

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return random values of standard deviation 0.02; ones for the weight vectors of norms."""
        if len(shape) == 1 and name.endswith("weight"):
            return HostTensor(np.ones(shape, np.float32), "float32")
        return _DummyTensor(self._twice, -zlib.crc32(name.encode()), shape)


class _DummyTensor(QuantizedTensor):
    """A short list of values, repeated from an offset on; `twice` holds the list twice in a row, in bfloat16.

    Backends take it in pieces, most of which are views of the list, so that it costs neither time nor memory.
    """

    dtype = "bfloat16"

    def __init__(self, twice: np.ndarray, first: int, shape: tuple[int, ...]) -> None:
        self._twice, self._first, self._shape = twice, first, shape

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def repeated(self) -> tuple[np.ndarray, int]:
        """The list twice in a row, bits of bfloat16, and the offset of this tensor, modulo the list's length.

        With the list on a device, the tensor can be made there.
        """
        return self._twice, self._first

    def matrix(self, index: int) -> _DummyTensor:
        inner = self._shape[1:]
        return _DummyTensor(self._twice, self._first + index * math.prod(inner), inner)

    def rows(self, start: int, stop: int) -> _DummyTensor:
        stop = min(stop, self._shape[0])
        inner = self._shape[1:]
        return _DummyTensor(self._twice, self._first + start * math.prod(inner), (stop - start, *inner))

    def columns(self, start: int, stop: int) -> Tensor:
        if (start, stop) == (0, self._shape[-1]):
            return self
        return HostTensor(self.array[..., start:stop], self.dtype)

    def to_float32(self) -> np.ndarray:
        return HostTensor(self.array, self.dtype).to_float32()

    @property
    def array(self) -> np.ndarray:
        """The bits."""
        size, count = self._twice.size // 2, math.prod(self._shape)
        begin = self._first % size
        if count <= size:
            return self._twice[begin : begin + count].reshape(self._shape)
        return np.resize(self._twice[begin : begin + size], self._shape)
