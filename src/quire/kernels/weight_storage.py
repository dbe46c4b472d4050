"""The storage format of weights from quantized checkpoints: that of the checkpoint, or floats; and its bytes.

All backends and the memory plan use this. Weights become floats where the parts of one weight differ, where a caller
requests exact weights or another quantization, and with dtype float32 for integers: products with integers round their
inputs, which float32 promises not to do. Products with codes of small floats do not, so codes stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.checkpoint.tensor import Layout, QuantizedTensor, Tensor

COLUMNS = 32  # outputs of a weight are padded to a multiple of it
CODE_UNIT = 16  # inputs of codes, and of 8-bit integers, are padded to a multiple of it
NIBBLE_UNIT = 32  # inputs of 4-bit integers are padded to a multiple of it


class StoredSize(NamedTuple):
    """Sizes of one stored weight.

    depth: inputs, with padding. group: as in `Layout`, after padding; 0 where each row has one scale. data: bytes of
    integers or codes. rest: bytes of scales, zero points and the order of inputs.
    """

    depth: int
    group: int
    data: int
    rest: int


def stored_layout(parts: Sequence[Tensor], dtype: str, *, table: bool = False) -> Layout | None:
    """Return the layout in which a weight of these parts is stored; None for floats of `dtype`.

    `table`: whether it is an embedding table; codes do not support the lookup of rows.
    """
    first = parts[0]
    if not isinstance(first, QuantizedTensor) or first.layout is None or len(first.shape) != 2:
        return None
    layout = first.layout
    if not all(isinstance(part, QuantizedTensor) and part.layout == layout for part in parts):
        return None
    if layout.kind == "integers":
        return None if dtype == "float32" else layout
    return None if table else layout


def stored_group(layout: Layout, inputs: int) -> int:
    """Return how many inputs share a scale; 0 for 8-bit integers with one scale a row, for others the whole row."""
    if layout.group:
        return layout.group
    unit = NIBBLE_UNIT if layout.kind == "integers" and layout.bits == 4 else CODE_UNIT
    plain = layout.kind == "integers" and layout.bits == 8 and not layout.zeros
    return 0 if plain else -(-inputs // unit) * unit


def stored_size(layout: Layout, outputs: int, inputs: int) -> StoredSize:
    """Return the sizes of a weight, its bias left out."""
    group = stored_group(layout, inputs)
    padded = -(-outputs // COLUMNS) * COLUMNS
    if layout.kind != "integers":
        depth = -(-inputs // CODE_UNIT) * CODE_UNIT
        data = padded * depth * layout.bits // 8
        return StoredSize(depth, group, data, padded * -(-depth // group) * layout.scale_bytes + 64)
    unit = group or CODE_UNIT
    depth = -(-inputs // unit) * unit
    by_group = 0 if group == 0 else padded * (depth // group) * (4 if layout.zeros else 2)
    order = 8 * inputs if layout.ordered else 0
    return StoredSize(depth, group, padded * depth * layout.bits // 8, 4 * padded + by_group + order)
