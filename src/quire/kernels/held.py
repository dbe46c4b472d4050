"""What weights of quantized checkpoints are held as: as they are stored, or as floats; and how many bytes that takes.

Every backend and all that plans memory goes by this. Floats it is where the parts of one weight differ, where somebody
asks for exactness or for another quantization, and with dtype float32 for integers: products with those round their
inputs, which float32 promises not to do. Products with codes of small floats do not, so those are held as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.checkpoint.tensor import Layout, QuantizedTensor, Tensor

COLUMNS = 32  # rows of a weight are padded to a multiple
CODE_UNIT = 16  # the inputs of codes, and of bytes
NIBBLE_UNIT = 32  # and of nibbles that are integers


class HeldSize(NamedTuple):
    """Of one weight: inputs as stored, the group that is held (0 where each row has one scale), and bytes."""

    depth: int
    group: int
    data: int
    rest: int


def held_layout(parts: Sequence[Tensor], dtype: str, *, table: bool = False) -> Layout | None:
    """Return the layout in which a weight of these parts is held; None for floats of `dtype`.

    `table`: whether its rows are looked up, which codes are not made for.
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


def held_group(layout: Layout, inputs: int) -> int:
    """Return the inputs that share a scale as held: 0 for rows of bytes with one; whole rows of others are a group."""
    if layout.group:
        return layout.group
    unit = NIBBLE_UNIT if layout.kind == "integers" and layout.bits == 4 else CODE_UNIT
    plain = layout.kind == "integers" and layout.bits == 8 and not layout.zeros
    return 0 if plain else -(-inputs // unit) * unit


def held_size(layout: Layout, outputs: int, inputs: int) -> HeldSize:
    """Return the sizes of a weight, its bias left out."""
    group = held_group(layout, inputs)
    padded = -(-outputs // COLUMNS) * COLUMNS
    if layout.kind != "integers":
        depth = -(-inputs // CODE_UNIT) * CODE_UNIT
        data = padded * depth * layout.bits // 8
        return HeldSize(depth, group, data, padded * -(-depth // group) * layout.scale_bytes + 64)
    unit = group or CODE_UNIT
    depth = -(-inputs // unit) * unit
    by_group = 0 if group == 0 else padded * (depth // group) * (4 if layout.zeros else 2)
    order = 8 * inputs if layout.ordered else 0
    return HeldSize(depth, group, padded * depth * layout.bits // 8, 4 * padded + by_group + order)
