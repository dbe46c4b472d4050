"""Weights in floats of 8 and 4 bits with scales.

8 bits: checkpoints with `quant_method` fp8 (DeepSeek-V3's and others') and fbgemm_fp8, and compressed-tensors'.
`NAME.weight` is F8_E4M3 or F8_E5M2 [N, K]. `NAME.weight_scale_inv`, a factor for each block of `weight_block_size`, is
[ceil(N / rows), ceil(K / columns)]; `NAME.weight_scale` is one factor, or one for each row.

4 bits (E2M1), two codes a byte, the first in the low half: compressed-tensors' `weight_packed` uint8 [N, K/2]. NVFP4:
`weight_scale` [N, K/16] in E4M3, to be divided by `weight_global_scale`, float32 [1]. MXFP4 (OCP Microscaling Formats,
2023): `weight_scale` uint8 [N, K/32], codes of E8M0. GPT-OSS stores its experts as `NAME_blocks` uint8 [E, N, K/32, 16]
and `NAME_scales` uint8 [E, N, K/32]; models read `NAME`, [E, K, N], of which the transposed matrices are stored.

Scales of activations are not used: activations keep the numbers they have.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.checkpoint.files import ConfigFields
from quire.checkpoint.quantization.parts import SCALES, Parts, Reader, Recipe, Recipes
from quire.checkpoint.quantization.tensors import ByGroup, CodeTensor, StackedTensor, code_layout, unpack_nibbles
from quire.checkpoint.small_floats import E2M1, E8M0
from quire.checkpoint.tensor import Layout, QuantizedTensor, TransposedTensor

KINDS = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2"}
SCHEMES = ("dynamic", "static")
SCALE_TYPES = (*SCALES, "F8_E8M0")
NVFP4_GROUP, MXFP4_GROUP = 16, 32


@dataclass(frozen=True, slots=True)
class FP8:
    """The settings of an FP8 checkpoint: rows and columns of a block, None for scales of rows or of whole weights."""

    block: tuple[int, int] | None
    name: str = "fp8"

    def recipes(self, parts: Parts) -> Recipes:
        """Yield how each weight is made."""
        for module in parts.modules("weight", "weight_scale", "weight_scale_inv"):
            yield f"{module}.weight", float_recipe(module, parts, self.block)


def parse_fp8(fields: ConfigFields) -> FP8:
    """Read an fp8 config. Raises ModelError for settings that are not supported."""
    fields.choice("activation_scheme", SCHEMES, "dynamic")
    key = "weight_block_size"
    return FP8(None if fields.values.get(key) is None else fields.two_sizes(key))


def float_recipe(module: str, parts: Parts, block: tuple[int, int] | None, group: int | None = None) -> Recipe | None:
    """Return how an 8-bit float weight is made; None for a weight in another type, or without all of its parts.

    `block` is the shape of a block that shares a scale, `group` the size of a group in a row; without either there is
    one scale for each row or one for all.
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
    kind, columns = KINDS[parts.dtype(weight)], block[1] if block is not None else group or inputs
    layout = code_layout(kind, columns, inputs)

    def make(read: Reader) -> QuantizedTensor:
        codes, factors = read(weight).array, read(scale).to_float32()
        if block is None and factors.size == 1:
            by_row = np.broadcast_to(factors.reshape(1, 1), (outputs, 1))
        elif block is None:
            by_row = factors.reshape(outputs, -1)

        def scales(rows: slice) -> np.ndarray:
            return by_row[rows] if block is None else factors[np.arange(rows.start, rows.stop) // block[0]]

        return CodeTensor.whole(stored, columns, layout, lambda rows, across: codes[rows, across], scales, kind=kind)

    return Recipe(stored, layout, (weight, scale), make)


def fp4_recipe(module: str, parts: Parts, group: int) -> Recipe | None:
    """Return how a weight is made whose groups have 16 (NVFP4) or 32 (MXFP4) inputs; None if parts are missing."""
    packed, scale, whole = (f"{module}.{part}" for part in ("weight_packed", "weight_scale", "weight_global_scale"))
    beside = packed if packed in parts else scale
    stored = parts.matrix(packed, ("U8",), beside)
    if stored is None:
        return None
    outputs, inputs = stored[0], 2 * stored[1]
    if inputs % group:
        raise parts.error(packed, f"has {inputs} columns of codes (expected a multiple of {group})")
    nvidia = group == NVFP4_GROUP
    names = (packed, scale, whole) if nvidia else (packed, scale)
    good = parts.check(scale, [(outputs, inputs // group)], ("F8_E4M3",) if nvidia else ("U8", "F8_E8M0"), packed)
    if nvidia:
        good &= parts.check(whole, [(1,), ()], ("F32",), packed)
    if not good:
        return None
    layout = code_layout("table", group, inputs, scale_bytes=4 if nvidia else 2)

    def make(read: Reader) -> QuantizedTensor:
        codes, scales = read(packed).array, read(scale)
        divisor = read(whole).to_float32().reshape(1, 1) if nvidia else None

        def by_group(rows: slice) -> np.ndarray:
            if divisor is None:
                return E8M0[scales.array[rows]]
            return scales.rows(rows.start, rows.stop).to_float32() / divisor

        return _e2m1_tensor(codes, group, layout, by_group)

    return Recipe((outputs, inputs), layout, names, make)


def _e2m1_tensor(codes: np.ndarray, group: int, layout: Layout | None, scales: ByGroup) -> CodeTensor:
    """Return a matrix [N, K] of which `codes`, uint8 [N, K / 2], has two numbers a byte."""

    def unpack(rows: slice, across: slice) -> np.ndarray:
        return unpack_nibbles(codes[rows], across)

    return CodeTensor.whole((len(codes), 2 * codes.shape[1]), group, layout, unpack, scales, table=E2M1)


@dataclass(frozen=True, slots=True)
class MXFP4:
    """An MXFP4 checkpoint as GPT-OSS's; it has no settings."""

    name: str = "mxfp4"

    def recipes(self, parts: Parts) -> Recipes:
        """Yield how the stacked weights of all experts are made."""
        for name in parts.ending("_blocks", "_scales"):
            yield name, _mxfp4_recipe(name, parts)


def _mxfp4_recipe(name: str, parts: Parts) -> Recipe | None:
    names = blocks, scales = f"{name}_blocks", f"{name}_scales"
    beside = blocks if blocks in parts else scales
    if not parts.check(blocks, [parts.shape(blocks)] if blocks in parts else [], ("U8",), beside):
        return None
    shape = parts.shape(blocks)
    if len(shape) != 4 or shape[3] != MXFP4_GROUP // 2:
        raise parts.error(blocks, f"has the wrong shape (expected four sizes, the last 16, got {list(shape)})")
    if not parts.check(scales, [shape[:3]], ("U8", "F8_E8M0"), beside):
        return None
    experts, outputs, inputs = shape[0], shape[1], shape[2] * MXFP4_GROUP
    layout = code_layout("table", MXFP4_GROUP, inputs, scale_bytes=2)

    def make(read: Reader) -> QuantizedTensor:
        packed, powers = read(blocks).array, read(scales).array

        def expert(index: int) -> CodeTensor:
            codes = packed[index].reshape(outputs, -1)
            return _e2m1_tensor(codes, MXFP4_GROUP, layout, lambda rows: E8M0[powers[index, rows]])

        return StackedTensor(tuple(TransposedTensor(expert(index)) for index in range(experts)))

    return Recipe((experts, inputs, outputs), layout, names, make)
