"""Formats of weights on the device, and loading them; products with them are in `linear.py`.

Tensors of a checkpoint are copied piece by piece through pinned memory, never a second copy. Rows are stored one after
the other, K contiguous, padded to 16 bytes where they are bytes or nibbles. Of 32 neighbours that are nibbles, byte i
holds input i in its low half and input 16 + i in its high half: so 16 bytes are decoded by shifts alone, and each half
meets 16 inputs that are neighbours, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from quire.checkpoint.small_floats import FLOAT8, NONFINITE
from quire.checkpoint.tensor import Codes, HostTensor, Integers, Layout, QuantizedTensor, Tensor
from quire.kernels.gpu.linear_codes import Weight
from quire.kernels.gpu.quantize import quantize_rows
from quire.kernels.reference.quantize import quantize_groups

PIECE_BYTES = 16 << 20  # of a weight that are on their way at a time; there are two buffers of it


class Staging:
    """Copies arrays to a device while the host reads the next ones.

    Files are mapped, and copying straight from pageable memory has the driver do the same with less; here the copy to
    pinned memory of one piece overlaps with the transfer of the one before.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: list[torch.Tensor] = []
        self._events: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        self._lists: dict[int, tuple[np.ndarray, torch.Tensor]] = {}

    def upload(self, array: np.ndarray, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return an array, at most PIECE_BYTES, on the device; its bits are of `dtype`, which numpy may not know.

        out: where to put it, of the same shape and any type; a new tensor if None.
        """
        if out is None:
            out = torch.empty(array.shape, dtype=dtype, device=self.device)
        if self.device.type != "cuda":
            out.copy_(torch.from_numpy(np.require(array, requirements=["C", "W"])).view(dtype))
            return out
        if not self._buffers:
            self._buffers = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        turn, self._turn = self._turn, 1 - self._turn
        event = self._events[turn]
        if event is not None:
            event.synchronize()
        assert array.nbytes <= PIECE_BYTES, "pieces are cut by rows"
        staged = self._buffers[turn][: array.nbytes]
        np.copyto(staged.numpy().view(array.dtype).reshape(array.shape), array)
        source = staged.view(dtype).view(array.shape)
        if out.dtype == dtype:
            out.copy_(source, non_blocking=True)
        else:
            out.copy_(source.to(self.device, non_blocking=True))
        event = self._events[turn] = torch.cuda.Event()
        event.record()
        return out

    def floats(self, part: Tensor, start: int, stop: int, out: torch.Tensor) -> None:
        """Write rows [start, stop) of a tensor, rounded to the type of `out`, into it."""
        repeated = getattr(part, "repeated", None)
        if repeated is not None:
            twice, first = repeated
            self._repeat(twice, first, start * math.prod(part.shape[1:]), out)
            return
        piece = part.rows(start, stop)
        if isinstance(piece, HostTensor) and piece.dtype not in FLOAT8:
            self.upload(piece.array, getattr(torch, piece.dtype), out)
        else:
            self.upload(piece.to_float32(), torch.float32, out)
        piece.release()

    def _repeat(self, twice: np.ndarray, first: int, skipped: int, out: torch.Tensor) -> None:
        """Write elements [skipped, ...) of a tensor that repeats a list (see `checkpoint/weights.py`) into `out`."""
        if id(twice) not in self._lists:
            bits = torch.from_numpy(np.array(twice)).view(torch.bfloat16)
            self._lists[id(twice)] = twice, bits.to(self.device)
        staged = self._lists[id(twice)][1]
        size, flat = len(twice) // 2, out.view(-1)
        place = (first + skipped) % size
        for start in range(0, flat.numel(), size):
            count = min(size, flat.numel() - start)
            flat[start : start + count].copy_(staged[place : place + count])


def pieces(part: Tensor) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) of the rows of a tensor, few enough at a time to fit a buffer in float32."""
    width = max(1, math.prod(part.shape[1:])) * 4
    step = max(1, PIECE_BYTES // width)
    for start in range(0, part.shape[0], step):
        yield start, min(start + step, part.shape[0])


INT4_GROUP = 64  # of weights that are quantized here
DECODE_UNIT = 32  # inputs that rows of bytes and nibbles are padded to


@dataclass(slots=True, eq=False)
class GPULinear:
    """A weight [N, K]: value(data[n, k]) less its zero, times row_scales[n] and group_scales[n, k // group].

    Attributes:
        kind: one of `linear_codes.KINDS`.
        data: floats [N, K], int8 or uint8 [N, depth], or nibbles uint8 [N, depth / 2].
        outputs, inputs, depth: N, K, and K as stored. gated: whether N are the rows of gate, then those of up.
        float32_output: whether products are float32, not of the backend's `act`.
        bias: float32 [N] or None; act_bias: the same in `act`, for cuBLAS.
        input_format: what inputs are quantized to, "int8" or "e4m3"; None for inputs in `act`.
        row_scales: float32 [N] or None. group_scales: [N, groups] or None. zeros: int16, likewise; 8 where they are
            None for nibbles that are integers. group: inputs that share them, 0 for none.
        order: int32 [K], column k belongs to input order[k]; None for 0, 1, ... table: float32 [16] of codes.
        launches: launch parameters that `linear.py` has chosen, by number of rows.
    """

    kind: str
    data: torch.Tensor
    outputs: int
    inputs: int
    depth: int
    gated: bool = False
    float32_output: bool = False
    bias: torch.Tensor | None = None
    act_bias: torch.Tensor | None = None
    input_format: str | None = None
    row_scales: torch.Tensor | None = None
    group_scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    group: int = 0
    order: torch.Tensor | None = None
    table: torch.Tensor | None = None
    launches: dict[Any, Any] = field(default_factory=dict)

    def tensors(self) -> Weight:
        """Return the weight as kernels take it."""
        groups = self.group_scales
        scales = self.row_scales, groups, self.zeros
        group_row = 0 if groups is None else groups.stride(-2)
        return Weight(self.data, *scales, self.table, self.bias, self.order, self.data.stride(-2), group_row)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        staged = self.data, self.bias, self.act_bias, self.row_scales, self.group_scales, self.zeros, self.order
        return sum(tensor.nbytes for tensor in (*staged, self.table) if tensor is not None)


def pack_nibbles(nibbles: torch.Tensor) -> torch.Tensor:
    """Return uint8 [N, K], all below 16, K a multiple of 32, as bytes [N, K / 2] in the order of this module."""
    halves = nibbles.view(nibbles.shape[0], -1, 2, 16)
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).reshape(nibbles.shape[0], -1)


def _total(parts: Sequence[Tensor]) -> int:
    return sum(part.shape[0] for part in parts)


def pack_floats(parts: Sequence[Tensor], act: torch.dtype, staging: Staging) -> GPULinear:
    """Stack parts as floats of `act`."""
    outputs, inputs = _total(parts), parts[0].shape[1]
    data = torch.empty((outputs, inputs), dtype=act, device=staging.device)
    first = 0
    for part in parts:
        for start, stop in pieces(part):
            staging.floats(part, start, stop, data[first + start : first + stop])
        first += part.shape[0]
    return GPULinear("float", data, outputs, inputs, inputs)


def pack_quantized(parts: Sequence[Tensor], quantization: str, staging: Staging, *, table: bool) -> GPULinear:
    """Quantize parts as `quantization` says, see docs/quantization.md; a `table` has 8 bits. Not for tables in fp8."""
    outputs, inputs = _total(parts), parts[0].shape[1]
    four, device = quantization == "int4" and not table, staging.device
    depth = -(-inputs // (INT4_GROUP if four else DECODE_UNIT)) * (INT4_GROUP if four else DECODE_UNIT)
    kind = "int4" if four else "e4m3" if quantization == "fp8" else "int8"
    byte = torch.int8 if kind == "int8" else torch.uint8
    data = torch.empty((outputs, depth // 2 if four else depth), dtype=byte, device=device)
    scales = torch.empty(outputs, dtype=torch.float32, device=device)
    relative = torch.empty((outputs, depth // INT4_GROUP), dtype=torch.float16, device=device) if four else None
    first = 0
    for part in parts:
        for start, stop in pieces(part):
            wide = torch.empty((stop - start, inputs), dtype=torch.float32, device=device)
            staging.floats(part, start, stop, wide)
            rows = slice(first + start, first + stop)
            if relative is None:
                quantize_rows(wide, e4m3=kind == "e4m3", depth=depth, out=data[rows], scales=scales[rows])
                continue
            made = quantize_groups(wide, INT4_GROUP)
            assert made.group_scales is not None
            scales[rows], relative[rows] = made.scales, made.group_scales
            padded = torch.nn.functional.pad(made.q + 8, (0, depth - inputs)).to(torch.uint8)
            data[rows] = pack_nibbles(padded)
        first += part.shape[0]
    input_format = None if quantization == "int8-weight-only" else "e4m3" if quantization == "fp8" else "int8"
    group = INT4_GROUP if four else 0
    return GPULinear(
        kind,
        data,
        outputs,
        inputs,
        depth,
        input_format=input_format,
        row_scales=scales,
        group_scales=relative,
        group=group,
    )


def pack_stored(parts: Sequence[Tensor], layout: Layout, staging: Staging) -> GPULinear | None:
    """Pack parts of this layout without requantizing them; None if their columns are in different orders."""
    return _CheckpointPacker(parts, layout, staging).pack()


class _CheckpointPacker:
    """Fills a `GPULinear` from stored integers or codes."""

    def __init__(self, parts: Sequence[Tensor], layout: Layout, staging: Staging) -> None:
        self.parts, self.layout, self.staging = parts, layout, staging
        outputs, inputs = _total(parts), parts[0].shape[1]
        integers = layout.kind == "integers"
        depth = -(-inputs // DECODE_UNIT) * DECODE_UNIT
        kind = layout.kind if not integers else "int4" if layout.bits == 4 else "int8"
        device = staging.device
        signed = torch.int8 if kind == "int8" else torch.uint8
        data = torch.empty((outputs, depth * layout.bits // 8), dtype=signed, device=device)
        self.group = layout.group or (depth if layout.zeros else 0)
        groups = -(-depth // self.group) if self.group else 0
        scaled = integers or not groups
        short = torch.float16 if integers else torch.bfloat16 if layout.scale_bytes == 2 else torch.float32
        self.made = GPULinear(
            kind,
            data,
            outputs,
            inputs,
            depth,
            input_format="int8" if integers else None,
            row_scales=torch.empty(outputs, dtype=torch.float32, device=device) if scaled else None,
            group_scales=torch.zeros((outputs, groups), dtype=short, device=device) if groups else None,
            zeros=torch.zeros((outputs, groups), dtype=torch.int16, device=device) if layout.zeros else None,
            group=self.group,
        )

    def pack(self) -> GPULinear | None:
        """Read everything, some rows at a time."""
        first, order = 0, None
        for number, part in enumerate(self.parts):
            assert isinstance(part, QuantizedTensor)
            for start, stop in pieces(part):
                piece = part.rows(start, stop)
                rows = slice(first + start, first + stop)
                if self.layout.kind == "integers":
                    found = piece.integers()
                    assert found is not None
                    if number == 0 and start == 0:
                        order = found.order
                    elif not _same(order, found.order):
                        return None
                    self._integers(rows, found)
                else:
                    codes = piece.codes()
                    assert codes is not None
                    if codes.table is not None and not self._same_table(codes.table):
                        return None
                    self._codes(rows, codes)
                piece.release()
            first += part.shape[0]
        if order is not None:
            self.made.order = self.staging.upload(order.astype(np.int32), torch.int32)
        return self.made

    def _same_table(self, table: np.ndarray) -> bool:
        values = torch.from_numpy(np.array(table, np.float32))
        if self.made.table is None:
            self.made.table = values.to(self.staging.device)
        return torch.equal(values, self.made.table.cpu())

    def _put(self, rows: slice, stored: np.ndarray) -> None:
        """Write bytes or nibbles [n, K]."""
        made = self.made
        staged = self.staging.upload(stored, made.data.dtype)
        if self.layout.bits == 8:
            made.data[rows, : made.inputs] = staged
            made.data[rows, made.inputs :] = 0
        else:
            made.data[rows] = pack_nibbles(torch.nn.functional.pad(staged, (0, made.depth - made.inputs)))

    def _integers(self, rows: slice, found: Integers) -> None:
        """Scales of groups become shares of a power of two, so that float16 holds them."""
        made = self.made
        assert made.row_scales is not None
        self._put(rows, found.values)
        scales = self.staging.upload(np.ascontiguousarray(found.scales, np.float32), torch.float32)
        if made.group_scales is None:
            made.row_scales[rows] = scales[:, 0]
            return
        exponents = torch.frexp(scales.abs().amax(dim=1)).exponent
        powers = torch.ldexp(torch.ones_like(scales[:, 0]), exponents)
        made.row_scales[rows] = powers
        made.group_scales[rows, : scales.shape[1]] = (scales / powers[:, None]).half()
        if made.zeros is not None:
            assert found.zeros is not None
            zeros = np.ascontiguousarray(found.zeros, np.float32)
            made.zeros[rows, : zeros.shape[1]] = self.staging.upload(zeros, torch.float32).to(torch.int16)

    def _codes(self, rows: slice, found: Codes) -> None:
        """A code that is NaN, which a shift cannot make, makes its group's scale NaN."""
        made = self.made
        self._put(rows, found.codes)
        scales = np.array(found.scales, np.float32)
        if found.kind == "e4m3":
            bad = np.isin(found.codes, NONFINITE["e4m3"])
            if bad.any():
                n, k = np.nonzero(bad)
                scales[n, k // found.group] = np.nan
        staged = self.staging.upload(scales, torch.float32)
        if made.group_scales is None:
            assert made.row_scales is not None
            made.row_scales[rows] = staged[:, 0]
        else:
            made.group_scales[rows, : staged.shape[1]] = staged.to(made.group_scales.dtype)


def _same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))
