"""GPTQ (Frantar et al. 2022), as AutoGPTQ and GPTQModel store it: 4- or 8-bit weights in groups, with zero points.

`qweight` int32 [K/p, N] holds p = 32/bits neighbouring inputs in a word, the first in the lowest bits; `qzeros` int32
[G, N/p] neighbouring outputs; `scales` [G, N]; `g_idx` int32 [K] is the group of each input, which with "act-order"
(desc_act) is not k // group_size. weight[n, k] = (q - zero) * scale. The first version of the format stores zero - 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from quire.checkpoint.fields import Fields
from quire.checkpoint.quantization.parts import SCALES, Parts, Reader, Recipe
from quire.checkpoint.quantization.tensors import IntegerTensor, from_words, integer_layout
from quire.checkpoint.tensor import QuantizedTensor

BITS = (4, 8)
PARTS = ("qweight", "qzeros", "scales")
FORMATS = ("gptq", "gptq_v2")


@dataclass(frozen=True, slots=True)
class GPTQ:
    """The settings of a GPTQ checkpoint.

    Attributes:
        group: inputs of a group, -1 for all. zero_shift: what is added to stored zero points.
        dynamic: settings of modules whose names match a pattern; None for those that are not quantized.
    """

    bits: int
    group: int
    zero_shift: int
    dynamic: Mapping[str, GPTQ | None] = field(default_factory=dict)
    name: str = "gptq"

    def recipes(self, parts: Parts) -> dict[str, Recipe]:
        """Return how each weight is made."""
        found = {}
        for module in parts.modules(*PARTS):
            recipe = self._of(module)._recipe(module, parts)
            if recipe is not None:
                found[f"{module}.weight"] = recipe
        return found

    def _of(self, module: str) -> GPTQ:
        """Return the settings of a module."""
        for pattern, settings in self.dynamic.items():
            if settings is not None and re.match(pattern, module):
                return settings
        return self

    def _recipe(self, module: str, parts: Parts) -> Recipe | None:
        names = tuple(f"{module}.{part}" for part in PARTS)
        qweight, qzeros, scales = names
        beside, in_word = next(name for name in names if name in parts), 32 // self.bits
        stored = parts.matrix(qweight, ("I32",), beside)
        if stored is None:
            return None
        inputs, outputs = stored[0] * in_word, stored[1]
        group = inputs if self.group == -1 else self.group
        groups = -(-inputs // group)
        good = parts.check(scales, [(groups, outputs)], SCALES, beside)
        good &= parts.check(qzeros, [(groups, -(-outputs // in_word))], ("I32",), beside)
        if not good:
            return None
        group_of = _group_of(f"{module}.g_idx", parts, inputs, group, groups)
        if f"{module}.g_idx" in parts:
            names = (*names, f"{module}.g_idx")
        return _recipe(self, names, (outputs, inputs), group, group_of)


def parse_gptq(fields: Fields) -> GPTQ:
    """Read a GPTQ config. Raises ModelError for settings that are not supported."""
    key = "format" if fields.values.get("checkpoint_format") is None else "checkpoint_format"
    stored = fields.text(key, "gptq").lower()
    if stored not in FORMATS:
        raise fields.error(key, f"one of {', '.join(FORMATS)}")
    if fields.flag("is_marlin_format", False):
        raise fields.error("is_marlin_format", "false, as weights in the order of Marlin's GPU kernels cannot be read")
    settings = GPTQ(_bits(fields), _group(fields), 0 if stored == "gptq_v2" else 1)
    dynamic = fields.inner("dynamic")
    if dynamic is None:
        return settings
    return replace(
        settings, dynamic={_pattern(key, dynamic): _override(settings, key, dynamic) for key in dynamic.values}
    )


def _pattern(key: str, dynamic: Fields) -> str:
    pattern = key[2:] if key[:2] in ("-:", "+:") else key
    try:
        re.compile(pattern)
    except re.error:
        raise dynamic.error(key, "a regular expression as its name") from None
    return pattern


def _override(settings: GPTQ, key: str, dynamic: Fields) -> GPTQ | None:
    if key.startswith("-:"):
        return None
    changes: dict[str, Any] = {}
    inner = dynamic.inner(key)
    if inner is not None:
        changes = {"bits": _bits(inner, settings.bits), "group": _group(inner, settings.group)}
    return replace(settings, **changes)


def _bits(fields: Fields, default: int | None = None) -> int:
    bits = fields.integer("bits") if default is None else fields.integer("bits", default)
    if bits not in BITS:
        raise fields.error("bits", f"{' or '.join(map(str, BITS))}, the only ones supported of GPTQ")
    return bits


def _group(fields: Fields, default: int = 128) -> int:
    group = fields.integer("group_size", default, low=-1)
    if group == 0 or (group > 0 and group % 8):
        raise fields.error("group_size", "-1 or a multiple of 8")
    return group


def _group_of(name: str, parts: Parts, inputs: int, group: int, groups: int) -> np.ndarray | None:
    """Return the group of each input where it is not k // group."""
    if name not in parts:
        return None
    parts.check(name, [(inputs,)], ("I32", "I64"), name)
    found = parts.read(name).array.astype(np.int64)
    if found.size and not 0 <= found.min() <= found.max() < groups:
        raise parts.error(name, f"names group {found.max() if found.max() >= groups else found.min()} of {groups}")
    return None if np.array_equal(found, np.arange(inputs) // group) else found


def _recipe(
    settings: GPTQ, names: tuple[str, ...], shape: tuple[int, int], group: int, group_of: np.ndarray | None
) -> Recipe:
    outputs, inputs = shape
    bits, in_word = settings.bits, 32 // settings.bits
    layout = integer_layout(bits, group, inputs, zeros=True, ordered=group_of is not None)
    if group_of is not None and (inputs % group or not np.all(np.bincount(group_of) == group)):
        layout = None  # groups of different sizes

    def make(read: Reader) -> QuantizedTensor:
        qweight, qzeros = (read(name).array.view(np.uint32) for name in names[:2])
        scales = read(names[2])

        def unpack(rows: slice, columns: slice) -> np.ndarray:
            first = columns.start // in_word
            stored = from_words(qweight[first : -(-columns.stop // in_word), rows].T, bits)
            values = stored[:, columns.start - in_word * first : columns.stop - in_word * first]
            return values if bits == 4 else (values ^ np.uint8(128)).view(np.int8)

        def zeros(rows: slice) -> np.ndarray:
            first = rows.start // in_word
            stored = from_words(qzeros[:, first : -(-rows.stop // in_word)], bits)
            values = stored[:, rows.start - in_word * first : rows.stop - in_word * first].T.astype(np.float32)
            return values + np.float32(settings.zero_shift - (0 if bits == 4 else 128))

        return IntegerTensor(
            unpack,
            lambda rows: scales.columns(rows.start, rows.stop).to_float32().T,
            group,
            layout,
            range(outputs),
            range(inputs),
            inputs,
            zeros=zeros,
            group_of=group_of,
        )

    return Recipe(shape, layout, names, make)
