"""The three storage formats as numpy dtypes, and turning checkpoint tensors into them and into packed weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from quire.checkpoint.tensor import HostTensor
from quire.kernels.cpu.linear import COLUMNS, interleave_16, interleave_float32
from quire.kernels.cpu.threads import Launcher

# Signed or unsigned says which 16-bit float the bits are: see simd.py.
STORAGE: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.int16),
}
LANES = 16
STAGED_ELEMENTS = 1 << 20  # of a weight that are converted at a time


@dataclass(frozen=True, slots=True)
class CPULinear:
    """A packed weight.

    Attributes:
        data: flat [N/16][K][16] in a storage dtype, N padded to `padded` rows; if `paired` [N/16][K/2][16][2], K
            padded to `depth`.
        bias: float32 [padded], or empty.
    """

    data: np.ndarray
    bias: np.ndarray
    outputs: int
    inputs: int
    paired: bool = False

    @property
    def depth(self) -> int:
        """K as stored."""
        return self.inputs + self.inputs % 2 if self.paired else self.inputs

    @property
    def padded(self) -> int:
        """N as stored."""
        return self.data.shape[0] // self.depth

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Return rows `ids` of the weight as float32 [len(ids), K]."""
        step = 2 if self.paired else 1
        blocks = self.data.reshape(-1, self.depth // step, LANES, step)
        found = blocks[ids // LANES, :, ids % LANES].reshape(len(ids), self.depth)
        return widen(found[:, : self.inputs])


def widen(stored: np.ndarray) -> np.ndarray:
    """Return an array of a storage dtype as float32."""
    if stored.dtype == np.uint16:
        wide = stored.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return stored.view(np.float16).astype(np.float32) if stored.dtype == np.int16 else stored


def to_storage(tensor: HostTensor, dtype: str) -> np.ndarray:
    """Return the values in storage format `dtype`, rounded to nearest even; a view where they are in it already."""
    if tensor.dtype == dtype:
        return tensor.array.view(STORAGE[dtype]) if dtype == "float16" else tensor.array
    values = tensor.to_float32()
    if dtype == "float16":
        with np.errstate(over="ignore"):  # beyond 65504 is infinity, as everywhere
            return values.astype(np.float16).view(np.int16)
    if dtype == "float32":
        return values
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def pack(
    parts: Sequence[HostTensor],
    biases: Sequence[HostTensor] | None,
    dtype: str,
    launcher: Launcher,
    paired: bool = False,
) -> CPULinear:
    """Stack matrices [N_i, K] along N and pack them, see `CPULinear`; reads a part only when its turn comes.

    `paired` is for 16-bit formats: two neighbours of a row move together, as the four bytes of a float32 would.
    """
    outputs, inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
    padded = -(-outputs // COLUMNS) * COLUMNS
    depth = inputs + inputs % 2 if paired else inputs
    data = np.empty(padded * depth, STORAGE[dtype])
    element = np.float32 if paired or dtype == "float32" else np.uint16
    kernel = interleave_float32 if element is np.float32 else interleave_16
    raw = data.view(element)
    at = 0
    for staged in _staged(parts, padded, depth, dtype):
        flat = staged.view(element).reshape(-1)
        launcher.run(staged.size, kernel, flat, raw, LANES, flat.size // staged.shape[0], staged.shape[0] // LANES, at)
        at += flat.size
    bias = np.zeros(0 if biases is None else padded, np.float32)
    if biases is not None:
        bias[:outputs] = np.concatenate([part.to_float32().reshape(-1) for part in biases])
    return CPULinear(data, bias, outputs, inputs, paired)


def _staged(parts: Sequence[HostTensor], padded: int, depth: int, dtype: str) -> Iterator[np.ndarray]:
    """Yield the rows of all parts, then zero rows up to `padded`, in groups of a multiple of 16; one reused buffer.

    Rows shorter than `depth` end with zeros.

    The copy also settles what checkpoints may hold: rows that start anywhere, read-only or unaligned memory.
    """
    group = max(LANES, STAGED_ELEMENTS // max(1, depth) // LANES * LANES)
    stage = np.zeros((min(group, padded), depth), STORAGE[dtype])
    inputs = parts[0].shape[1]
    filled = 0
    for part in parts:
        start = 0
        while start < part.shape[0]:
            count = min(part.shape[0] - start, stage.shape[0] - filled)
            stage[filled : filled + count, :inputs] = to_storage(part.rows(start, start + count), dtype)
            start, filled = start + count, filled + count
            if filled == stage.shape[0]:
                yield stage
                filled = 0
    if filled:
        stop = -(-filled // LANES) * LANES
        stage[filled:stop] = 0
        yield stage[:stop]
    rest = padded - -(-sum(part.shape[0] for part in parts) // LANES) * LANES
    if rest:
        yield np.zeros((rest, depth), STORAGE[dtype])
