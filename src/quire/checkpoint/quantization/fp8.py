"""Weights in 8-bit floats with scales: checkpoints with `quant_method` fp8 (DeepSeek-V3's and others') and fbgemm_fp8.

`NAME.weight` is F8_E4M3 or F8_E5M2 [N, K]. `NAME.weight_scale_inv`, a factor for each block of `weight_block_size`, is
[ceil(N / rows), ceil(K / columns)]; `NAME.weight_scale` is one factor, or one for each row. Scales of activations
(`input_scale`) are not used: activations keep the numbers they have.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.checkpoint.fields import Fields
from quire.checkpoint.quantization.parts import SCALES, Parts, Reader, Recipe
from quire.checkpoint.quantization.tensors import CodeTensor, code_layout
from quire.checkpoint.tensor import QuantizedTensor

KINDS = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2"}
SCHEMES = ("dynamic", "static")
SCALE_TYPES = (*SCALES, "F8_E8M0")


@dataclass(frozen=True, slots=True)
class FP8:
    """The settings of an FP8 checkpoint: rows and columns of a block, None for scales of rows or of whole weights."""

    block: tuple[int, int] | None
    name: str = "fp8"

    def recipes(self, parts: Parts) -> dict[str, Recipe]:
        """Return how each weight is made."""
        found = {}
        for module in parts.modules("weight", "weight_scale", "weight_scale_inv"):
            recipe = float_recipe(module, parts, self.block)
            if recipe is not None:
                found[f"{module}.weight"] = recipe
        return found


def parse_fp8(fields: Fields) -> FP8:
    """Read an fp8 config. Raises ModelError for settings that are not supported."""
    scheme = fields.text("activation_scheme", "dynamic")
    if scheme not in SCHEMES:
        raise fields.error("activation_scheme", f"one of {', '.join(SCHEMES)}")
    block = fields.values.get("weight_block_size")
    if block is None:
        return FP8(None)
    good = isinstance(block, list) and len(block) == 2
    if not good or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in block):
        raise fields.error("weight_block_size", "two sizes")
    return FP8((block[0], block[1]))


def float_recipe(module: str, parts: Parts, block: tuple[int, int] | None, group: int | None = None) -> Recipe | None:
    """Return how an 8-bit float weight is made; None for a weight in another type, or without all of its parts.

    `block` is of scales by block, `group` of those by group of a row; a scale by row or for all needs neither.
    """
    weight = f"{module}.weight"
    names = [name for name in (f"{module}.weight_scale_inv", f"{module}.weight_scale") if name in parts]
    if weight not in parts:
        parts.matrix(weight, KINDS, names[0])
        return None
    if parts.dtype(weight) not in KINDS:
        return None
    stored = parts.matrix(weight, KINDS, weight)
    assert stored is not None
    outputs, inputs = stored
    scale = names[0] if names else f"{module}.weight_scale{'_inv' if block else ''}"
    if block is not None:
        shapes: list[tuple[int, ...]] = [(-(-outputs // block[0]), -(-inputs // block[1]))]
    elif group is not None:
        shapes = [(outputs, -(-inputs // group))]
    else:
        shapes = [(outputs, 1), (outputs,), (1,), (), (1, 1)]
    if not parts.check(scale, shapes, SCALE_TYPES, weight):
        return None
    return _recipe((weight, scale), (outputs, inputs), KINDS[parts.dtype(weight)], block, group)


def _recipe(
    names: tuple[str, str], shape: tuple[int, int], kind: str, block: tuple[int, int] | None, group: int | None
) -> Recipe:
    outputs, inputs = shape
    columns = block[1] if block is not None else group or inputs
    layout = code_layout(kind, columns, inputs)

    def make(read: Reader) -> QuantizedTensor:
        codes, stored = read(names[0]).array, read(names[1]).to_float32()
        if block is None and stored.size == 1:
            by_row = np.broadcast_to(stored.reshape(1, 1), (outputs, 1))
        elif block is None:
            by_row = stored.reshape(outputs, -1)

        def scales(rows: slice) -> np.ndarray:
            return by_row[rows] if block is None else stored[np.arange(rows.start, rows.stop) // block[0]]

        return CodeTensor(
            lambda rows, across: codes[rows, across],
            scales,
            columns,
            layout,
            range(outputs),
            range(inputs),
            inputs,
            kind=kind,
        )

    return Recipe(shape, layout, names, make)
