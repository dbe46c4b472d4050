"""The three float storage formats as numpy dtypes, and turning checkpoint tensors into them and into packed weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from quire.checkpoint.tensor import HostTensor, Tensor
from quire.kernels.cpu.interleave import gated_columns, interleave_weights_16, interleave_weights_32
from quire.kernels.cpu.sizes import COLUMNS, LANES, can_gate
from quire.kernels.cpu.threads import Launcher, address_of

# Signed or unsigned says which 16-bit float the bits are: see simd.py.
STORAGE: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.int16),
}
STAGED_ELEMENTS = 1 << 20  # of a weight that are converted at a time
DIRECT_BYTES = 1 << 25  # of a weight that are packed at a time where nothing is to be converted


@dataclass(frozen=True, slots=True)
class CPULinear:
    """A packed weight.

    Attributes:
        data: flat [N/16][K][16] in a storage dtype, N padded to `padded` rows; if `paired` [N/16][K/2][16][2], K
            padded to `depth`.
        bias: float32 [padded] in the same order of rows, or None.
        gated: whether the blocks of sixteen rows alternate between the two halves of the weight, gate and up.
    """

    data: np.ndarray
    bias: np.ndarray | None
    outputs: int
    inputs: int
    paired: bool = False
    gated: bool = False

    @property
    def depth(self) -> int:
        """K as stored."""
        return self.inputs + self.inputs % 2 if self.paired else self.inputs

    @property
    def padded(self) -> int:
        """N as stored."""
        return self.data.shape[0] // self.depth


def to_storage(tensor: Tensor, dtype: str) -> np.ndarray:
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
    parts: Sequence[Tensor],
    biases: Sequence[Tensor] | None,
    dtype: str,
    launcher: Launcher,
    paired: bool = False,
    gated: bool = False,
) -> CPULinear:
    """Stack matrices [N_i, K] along N and pack them, see `CPULinear`; reads a part only when its turn comes.

    `paired` is for 16-bit formats: two neighbours of a row move together, as the four bytes of a float32 would.
    """
    assert not gated or can_gate(parts)
    outputs, inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
    padded = -(-outputs // COLUMNS) * COLUMNS
    depth = inputs + inputs % 2 if paired else inputs
    data = launcher.weights.empty(padded * depth, STORAGE[dtype])
    data[outputs // LANES * LANES * depth :] = 0
    words = depth // 2 if paired else depth
    interleave = interleave_weights_32 if paired or dtype == "float32" else interleave_weights_16
    block, spread, halfway = 0, 2 if gated else 1, outputs // LANES // 2
    for staged in _staged(parts, depth, dtype):
        count = staged.shape[0] // LANES
        place = 2 * block + 1 - 2 * halfway if gated and block >= halfway else spread * block
        args = (address_of(staged), staged.strides[0], data, words, spread, place)
        launcher.emit(interleave, *args, items=count, work=4 * staged.size)
        block += count
    return CPULinear(data, stack_biases(biases, outputs, padded, gated), outputs, inputs, paired, gated)


def stack_biases(biases: Sequence[Tensor] | None, outputs: int, padded: int, gated: bool) -> np.ndarray | None:
    """Return the biases of all parts in the order of a packed weight's columns, float32 [padded]; None for None."""
    if biases is None:
        return None
    ids, bias = np.arange(outputs), np.zeros(padded, np.float32)
    bias[gated_columns(ids, outputs) if gated else ids] = np.concatenate([b.to_float32().reshape(-1) for b in biases])
    return bias


def _staged(parts: Sequence[Tensor], depth: int, dtype: str) -> Iterator[np.ndarray]:
    """Yield the rows of all parts in groups of a multiple of 16, zero rows at the end; elements of a row side by side.

    Parts that are stored like that already are yielded as they are. Others go through one reused buffer, which
    takes all else that checkpoints hold: other formats, columns that are rows of the file, rows shorter than `depth`.
    """
    if all(_is_direct(part, depth, dtype) for part in parts):
        rows = max(LANES, DIRECT_BYTES // max(1, depth * STORAGE[dtype].itemsize) // LANES * LANES)
        for part in parts:
            for start in range(0, part.shape[0], rows):
                piece = part.rows(start, start + rows)
                yield piece.array
                if part.shape[0] > rows:  # a large one; what was packed of it need not stay in memory
                    piece.release()
        return
    group = max(LANES, STAGED_ELEMENTS // max(1, depth) // LANES * LANES)
    total = -(-sum(part.shape[0] for part in parts) // LANES) * LANES
    half = sum(part.shape[0] for part in parts) // 2 if len(parts) == 2 else 0
    stage = np.zeros((min(group, total), depth), STORAGE[dtype])
    inputs, filled, done = parts[0].shape[1], 0, 0
    for part in parts:
        start = 0
        while start < part.shape[0]:
            count = min(part.shape[0] - start, stage.shape[0] - filled)
            piece = part.rows(start, start + count)
            stage[filled : filled + count, :inputs] = to_storage(piece, dtype)
            if part.shape[0] > stage.shape[0]:
                piece.release()
            start, filled, done = start + count, filled + count, done + count
            if filled == stage.shape[0] or (done == half and filled % LANES == 0):  # gate and up stay apart
                yield stage[:filled]
                filled = 0
    if filled:
        stop = -(-filled // LANES) * LANES
        stage[filled:stop] = 0
        yield stage[:stop]


def _is_direct(part: Tensor, depth: int, dtype: str) -> bool:
    if not isinstance(part, HostTensor):
        return False
    array = part.array
    return (
        part.dtype == dtype
        and array.shape[0] % LANES == 0
        and array.shape[1] == depth
        and array.strides[1] == array.itemsize
        and array.strides[0] % 2 == 0
        and address_of(array) % 2 == 0
    )
