"""AWQ (Lin et al. 2023) and GPTQ (Frantar et al. 2022): integers in groups with scales and zero points.

A weight is `qweight` and `qzeros` int32, `scales` [G, N]: weight[n, k] = (q - zero) * scale. A word holds p = 32/bits
adjacent numbers.

AWQ, as AutoAWQ's "gemm" layout stores it: 4 bits, `qweight` [K, N/8], `qzeros` [G, N/8], outputs side by side; nibble i
of a word belongs to output 0, 2, 4, 6, 1, 3, 5, 7.

GPTQ, as AutoGPTQ and GPTQModel store it: 4 or 8 bits, `qweight` [K/p, N] with inputs side by side, the first in the
lowest bits; `qzeros` [G, N/p] with outputs. `g_idx` int32 [K] is the group of each input, which with "act-order"
(desc_act) is not k // group_size. The first version of the format stores zero - 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quire.checkpoint.files import ConfigFields
from quire.checkpoint.quantization.parts import SCALES, Parts, Reader, Recipe, Recipes
from quire.checkpoint.quantization.tensors import integer_layout, packed_integers
from quire.checkpoint.tensor import QuantizedTensor

PARTS = ("qweight", "qzeros", "scales")
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # places of outputs 0 .. 7 in a word
AWQ_GROUPS = (32, 64, 128)
GPTQ_BITS = (4, 8)
GPTQ_FORMATS = ("gptq", "gptq_v2")


@dataclass(frozen=True, slots=True)
class GroupedIntegers:
    """The settings of an AWQ or a GPTQ checkpoint.

    Attributes:
        group: inputs of a group, -1 for all. zero_shift: is added to stored zero points.
        order: AWQ's places of outputs in a word; None where words hold inputs.
        dynamic: settings of modules whose names match a pattern; None for those that are not quantized.
    """

    name: str
    bits: int
    group: int
    zero_shift: int = 0
    order: list[int] | None = None
    dynamic: Mapping[str, GroupedIntegers | None] = field(default_factory=dict)

    def recipes(self, parts: Parts) -> Recipes:
        """Yield how each weight is made."""
        for module in parts.modules(*PARTS):
            yield f"{module}.weight", self._of(module)._recipe(module, parts)

    def _of(self, module: str) -> GroupedIntegers:
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
        inputs, outputs = (stored[0] * in_word, stored[1]) if self.order is None else (stored[0], stored[1] * in_word)
        group = inputs if self.group == -1 else self.group
        if self.order is not None and inputs % group:
            raise parts.error(qweight, f"has {inputs} rows (expected a multiple of group_size, {group})")
        groups = -(-inputs // group)
        good = parts.check(scales, [(groups, outputs)], SCALES, beside)
        good &= parts.check(qzeros, [(groups, -(-outputs // in_word))], ("I32",), beside)
        if not good:
            return None
        index = f"{module}.g_idx"
        group_of = parts.group_index(index, inputs, group, groups, beside=index)
        if index in parts:
            names = (*names, index)
        shape = (outputs, inputs)
        layout = integer_layout(self.bits, group, inputs, zeros=True, group_of=group_of)

        def make(read: Reader) -> QuantizedTensor:
            words, zeros, factors = read(qweight).array, read(qzeros).array, read(scales)
            return packed_integers(
                shape,
                group,
                layout,
                self.bits,
                words.T if self.order is None else words,
                lambda rows: factors.columns(rows.start, rows.stop).to_float32().T,
                zeros,
                group_of,
                zero_shift=self.zero_shift,
                order=self.order,
            )

        return Recipe(shape, layout, names, make)


def parse_awq(fields: ConfigFields) -> GroupedIntegers:
    """Read an AWQ config. Raises ModelError for settings that are not supported."""
    bits_key = "bits" if fields.values.get("bits") is not None else "w_bit"
    if fields.integer(bits_key, 4) != 4:
        raise fields.error(bits_key, "4, the only bits supported of AWQ")
    version = fields.text("version", "gemm")
    if version.lower() != "gemm":
        raise fields.error("version", "gemm, the only layout supported of AWQ")
    if not fields.flag("zero_point", True):
        raise fields.error("zero_point", "true, as AWQ without zero points is not supported")
    group_key = "group_size" if fields.values.get("group_size") is not None else "q_group_size"
    group = fields.integer(group_key, 128, low=-1)
    if group not in (-1, *AWQ_GROUPS):
        raise fields.error(group_key, f"one of -1, {', '.join(map(str, AWQ_GROUPS))}")
    return GroupedIntegers("awq", 4, group, order=AWQ_ORDER)


def parse_gptq(fields: ConfigFields) -> GroupedIntegers:
    """Read a GPTQ config. Raises ModelError for settings that are not supported."""
    key = "format" if fields.values.get("checkpoint_format") is None else "checkpoint_format"
    stored = fields.text(key, "gptq").lower()
    if stored not in GPTQ_FORMATS:
        raise fields.error(key, f"one of {', '.join(GPTQ_FORMATS)}")
    if fields.flag("is_marlin_format", False):
        raise fields.error("is_marlin_format", "false, as weights in the order of Marlin's GPU kernels cannot be read")
    settings = GroupedIntegers("gptq", _bits(fields), _group(fields), 0 if stored == "gptq_v2" else 1)
    dynamic = fields.inner("dynamic")
    if dynamic is None:
        return settings
    return replace(
        settings, dynamic={_pattern(key, dynamic): _override(settings, key, dynamic) for key in dynamic.values}
    )


def _pattern(key: str, dynamic: ConfigFields) -> str:
    pattern = key[2:] if key[:2] in ("-:", "+:") else key
    try:
        re.compile(pattern)
    except re.error:
        raise dynamic.error(key, "a regular expression as its name") from None
    return pattern


def _override(settings: GroupedIntegers, key: str, dynamic: ConfigFields) -> GroupedIntegers | None:
    if key.startswith("-:"):
        return None
    changes: dict[str, Any] = {}
    inner = dynamic.inner(key)
    if inner is not None:
        changes = {"bits": _bits(inner, settings.bits), "group": _group(inner, settings.group)}
    return replace(settings, **changes)


def _bits(fields: ConfigFields, default: int | None = None) -> int:
    bits = fields.integer("bits") if default is None else fields.integer("bits", default)
    if bits not in GPTQ_BITS:
        raise fields.error("bits", f"{' or '.join(map(str, GPTQ_BITS))}, the only ones supported of GPTQ")
    return bits


def _group(fields: ConfigFields, default: int = 128) -> int:
    group = fields.integer("group_size", default, low=-1)
    if group == 0 or (group > 0 and group % 8):
        raise fields.error("group_size", "-1 or a multiple of 8")
    return group
