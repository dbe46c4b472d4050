"""bitsandbytes: 8 bits with a scale for each row (Dettmers et al. 2022), 4 bits as codes of NF4 or FP4 (QLoRA, 2023).

8 bits: `NAME.weight` int8 [N, K] and `NAME.SCB` float32 [N], the largest sizes: weight = q * SCB / 127.

4 bits: `NAME.weight` uint8 [N * K / 2, 1], two codes a byte, the first in the high half; blocks of `blocksize` codes of
the flattened weight share a factor `NAME.weight.absmax`; `NAME.weight.quant_map` has the values of the codes. The JSON
in `NAME.weight.quant_state.bitsandbytes__nf4` has shape and sizes. With double quantization absmax is uint8: a code of
`nested_quant_map`, times `nested_absmax` of its block, plus `nested_offset`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from quire.checkpoint.files import ConfigFields, parse_json_object
from quire.checkpoint.quantization.parts import Parts, Reader, Recipe, Recipes
from quire.checkpoint.quantization.tensors import CodeTensor, IntegerTensor, code_layout, integer_layout, nibbles
from quire.checkpoint.tensor import QuantizedTensor

KINDS = ("nf4", "fp4")
PER_STEP = np.float32(7.874015718698502e-3)  # 1 / 127, in the digits that bitsandbytes has
MAX_STATE_BYTES = 1 << 16
MAX_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class BitsAndBytes:
    """The settings of a bitsandbytes checkpoint: 8 or 4 bits."""

    bits: int
    name: str = "bitsandbytes"

    def recipes(self, parts: Parts) -> Recipes:
        """Yield how each weight is made."""
        make, suffixes = (_octets, ("SCB",)) if self.bits == 8 else (_codes, ("weight.absmax", "weight.quant_map"))
        modules = parts.modules(*suffixes)
        other = "I8" if self.bits == 8 else "U8"
        modules += [m for m in parts.modules("weight") if parts.dtype(f"{m}.weight") == other]
        for module in dict.fromkeys(modules):
            yield f"{module}.weight", make(module, parts)


def parse_bitsandbytes(fields: ConfigFields) -> BitsAndBytes:
    """Read a bitsandbytes config. Raises ModelError for settings that are not supported."""
    eight, four = (fields.flag(key, False) or fields.flag(f"_{key}", False) for key in ("load_in_8bit", "load_in_4bit"))
    if eight == four:
        raise fields.error("load_in_8bit", "true, or load_in_4bit, and not both")
    if four:
        fields.choice("bnb_4bit_quant_type", KINDS, "fp4")
    return BitsAndBytes(8 if eight else 4)


def _octets(module: str, parts: Parts) -> Recipe | None:
    weight, scale = f"{module}.weight", f"{module}.SCB"
    names: tuple[str, ...] = (weight, scale)
    beside = weight if weight in parts else scale
    stored = parts.matrix(weight, ("I8",), beside)
    if stored is None or not parts.check(scale, [(stored[0],)], ("F32",), weight):
        return None
    outputs, inputs = stored
    if f"{module}.weight_format" in parts:
        order = f"{module}.weight_format"
        if parts.read(order).array.reshape(-1).tolist() != [0]:
            raise parts.error(order, "says that the weight is not stored row by row (expected 0)")
        names = (*names, order)
    layout = integer_layout(8, inputs, inputs)

    def make(read: Reader) -> QuantizedTensor:
        values, sizes = read(weight).array, read(scale).to_float32()
        return IntegerTensor.whole(
            stored,
            inputs,
            layout,
            lambda rows, across: values[rows, across],
            lambda rows: (sizes[rows] * PER_STEP)[:, None],
        )

    return Recipe((outputs, inputs), layout, names, make)


def _codes(module: str, parts: Parts) -> Recipe | None:
    weight = f"{module}.weight"
    states = [f"{weight}.quant_state.bitsandbytes__{kind}" for kind in KINDS]
    state_name = next((name for name in states if name in parts), states[0])
    beside = weight if weight in parts else f"{weight}.absmax"
    if not parts.check(state_name, [parts.shape(state_name)] if state_name in parts else [], ("U8",), beside):
        return None
    state = _state(state_name, parts)
    outputs, inputs = shape = state.two_sizes("shape")
    block = state.integer("blocksize", low=16, high=MAX_BLOCK)
    blocks = -(-outputs * inputs // block)
    size = -(-outputs * inputs // 2)
    names: tuple[str, ...] = (weight, f"{weight}.absmax", f"{weight}.quant_map", state_name)
    nested = state.integer("nested_blocksize", None, low=1, high=MAX_BLOCK)
    good = parts.check(weight, [(size, 1), (size,), (1, size)], ("U8",), beside)
    good &= parts.check(names[1], [(blocks,)], ("F32",) if nested is None else ("U8",), beside)
    good &= parts.check(names[2], [(16,)], ("F32",), beside)
    if nested is not None:
        names = (*names, f"{weight}.nested_absmax", f"{weight}.nested_quant_map")
        good &= parts.check(names[4], [(-(-blocks // nested),)], ("F32",), beside)
        good &= parts.check(names[5], [(256,)], ("F32",), beside)
    offset = 0.0 if nested is None else state.number("nested_offset", 0.0, above=-math.inf)
    return _code_recipe(names, shape, block, nested, offset) if good else None


def _state(name: str, parts: Parts) -> ConfigFields:
    stored = parts.read(name).array.reshape(-1)
    if stored.size > MAX_STATE_BYTES:
        raise parts.error(name, f"is too large (expected at most {MAX_STATE_BYTES} bytes, got {stored.size})")
    path = parts.path_of(name)
    return ConfigFields(parse_json_object(stored.tobytes(), path, name), path, name)


def _code_recipe(
    names: tuple[str, ...], shape: tuple[int, int], block: int, nested: int | None, offset: float
) -> Recipe:
    outputs, inputs = shape
    group = math.gcd(block, inputs)  # a block may end inside a row
    layout = code_layout("table", group, inputs)

    def make(read: Reader) -> QuantizedTensor:
        packed, absmax, table = (read(name).array for name in names[:3])
        flat = packed.reshape(-1)
        if nested is not None:
            sizes, worth = read(names[4]).array, read(names[5]).array
            spread = np.repeat(sizes, nested)[: absmax.size]
            absmax = worth[absmax] * spread + np.float32(offset)
        of_group = np.arange(outputs * inputs // group).reshape(outputs, -1) * group // block

        def unpack(rows: slice, across: slice) -> np.ndarray:
            first, last = rows.start * inputs, rows.stop * inputs
            codes = nibbles(flat[first // 2 : -(-last // 2)], high_first=True)
            return codes[first % 2 :][: last - first].reshape(-1, inputs)[:, across]

        return CodeTensor.whole(shape, group, layout, unpack, lambda rows: absmax[of_group[rows]], table=table)

    return Recipe(shape, layout, names, make)
