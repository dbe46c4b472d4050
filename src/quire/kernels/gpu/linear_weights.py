"""What weights are on the device, and how they get there; products with them are in `linear.py`.

Rows lie one after the other, K side by side, padded to 16 bytes where they are bytes or nibbles. Of 32 neighbours that
are nibbles, byte i holds input i below and input 16 + i above: so 16 bytes are decoded by shifts alone, and each half
meets 16 inputs that are neighbours, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from quire.checkpoint.small_floats import NONFINITE
from quire.checkpoint.tensor import Codes, Integers, Layout, QuantizedTensor, Tensor
from quire.kernels.gpu.linear_staging import Staging, pieces
from quire.kernels.gpu.quantize import quantize_rows
from quire.kernels.reference.quantize import quantize_groups

INT4_GROUP = 64  # of weights that are quantized here
DECODE_UNIT = 32  # inputs that rows of bytes and nibbles are padded to
TABLE_ENTRIES = 16


@dataclass(slots=True, eq=False)
class GPULinear:
    """A weight [N, K]: value(data[n, k]) less its zero, times row_scales[n] and group_scales[n, k // group].

    Attributes:
        kind: one of `linear_codes.KINDS`.
        data: floats [N, K], int8 or uint8 [N, depth], or nibbles uint8 [N, depth / 2].
        outputs, inputs, depth: N, K, and K as stored. gated: whether N are the rows of gate, then those of up.
        wide: whether products are float32, not of the backend's `act`.
        bias: float32 [N] or None; near_bias: the same in `act`, for cuBLAS.
        rounds: what inputs are rounded to, "int8", "e4m3" or None.
        row_scales: float32 [N] or None. group_scales: [N, groups] or None. zeros: int16, likewise; 8 where they are
            None for nibbles that are integers. group: inputs that share them, 0 for none.
        order: int32 [K], column k belongs to input order[k]; None for 0, 1, ... table: float32 [16] of codes.
        launches: what `linear.py` has worked out for a number of rows.
    """

    kind: str
    data: torch.Tensor
    outputs: int
    inputs: int
    depth: int
    gated: bool = False
    wide: bool = False
    bias: torch.Tensor | None = None
    near_bias: torch.Tensor | None = None
    rounds: str | None = None
    row_scales: torch.Tensor | None = None
    group_scales: torch.Tensor | None = None
    zeros: torch.Tensor | None = None
    group: int = 0
    order: torch.Tensor | None = None
    table: torch.Tensor | None = None
    launches: dict[Any, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        held = self.data, self.bias, self.near_bias, self.row_scales, self.group_scales, self.zeros, self.order
        return sum(tensor.nbytes for tensor in (*held, self.table) if tensor is not None)


def weave(nibbles: torch.Tensor) -> torch.Tensor:
    """Return uint8 [N, K], all below 16, K a multiple of 32, as bytes [N, K / 2] in the order of this module."""
    halves = nibbles.view(nibbles.shape[0], -1, 2, 16)
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).reshape(nibbles.shape[0], -1)


def _total(parts: Sequence[Tensor]) -> int:
    return sum(part.shape[0] for part in parts)


def pack_floats(parts: Sequence[Tensor], act: torch.dtype, staging: Staging) -> GPULinear:
    """Stack parts as floats."""
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
            data[rows] = weave(padded)
        first += part.shape[0]
    rounds = None if quantization == "int8-weight-only" else "e4m3" if quantization == "fp8" else "int8"
    group = INT4_GROUP if four else 0
    return GPULinear(
        kind, data, outputs, inputs, depth, rounds=rounds, row_scales=scales, group_scales=relative, group=group
    )


def pack_stored(parts: Sequence[Tensor], layout: Layout, staging: Staging) -> GPULinear | None:
    """Hold parts as they are stored, of which each has this layout; None if their columns are in different orders."""
    return _Stored(parts, layout, staging).pack()


class _Stored:
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
            rounds="int8" if integers else None,
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
        held = self.staging.upload(stored, made.data.dtype)
        if self.layout.bits == 8:
            made.data[rows, : made.inputs] = held
            made.data[rows, made.inputs :] = 0
        else:
            made.data[rows] = weave(torch.nn.functional.pad(held, (0, made.depth - made.inputs)))

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
        held = self.staging.upload(scales, torch.float32)
        if made.group_scales is None:
            assert made.row_scales is not None
            made.row_scales[rows] = held[:, 0]
        else:
            made.group_scales[rows, : held.shape[1]] = held.to(made.group_scales.dtype)


def _same(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))
