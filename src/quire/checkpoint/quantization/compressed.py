"""compressed-tensors, the format of llm-compressor: integers or 8-bit floats, by groups, rows, blocks or whole weights.

`pack-quantized`: `weight_packed` int32 [N, ceil(K * bits / 32)], adjacent inputs from the lowest bits on, with half
the range added; `weight_zero_point` packed likewise, but along N. `int-quantized`, `float-quantized` and
`naive-quantized`: `weight` in int8 or an 8-bit float, `weight_zero_point` int8. `weight_scale` [N, G], [N, 1] or [1];
`weight_g_idx` [K], the groups of act-order. weight = (q - zero) * scale. Scales of activations are not used. Floats are
read in floats.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from quire.checkpoint.files import ConfigFields
from quire.checkpoint.quantization.floats import MXFP4_GROUP, NVFP4_GROUP, float_recipe, fp4_recipe
from quire.checkpoint.quantization.parts import SCALES, Parts, Reader, Recipe, Recipes
from quire.checkpoint.quantization.tensors import IntegerTensor, integer_layout, packed_integers
from quire.checkpoint.tensor import QuantizedTensor
from quire.errors import echo

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
FP4_FORMATS = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
STRATEGIES = ("tensor", "channel", "group", "block")
BITS = (4, 8)
PACKED = ("weight_packed", "weight_scale")


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """How the weights of one group of modules are stored: integers or floats, and what shares a scale."""

    kind: str
    bits: int
    symmetric: bool
    group: int | None
    block: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """The settings of a compressed-tensors checkpoint: schemes by target, a module's name or class or `re:` pattern."""

    targets: Mapping[str, WeightScheme]
    name: str = "compressed-tensors"

    def recipes(self, parts: Parts) -> Recipes:
        """Yield how each weight is made."""
        stored = ("I8", "F8_E4M3", "F8_E5M2")
        modules = parts.modules(*PACKED)
        modules += [module for module in parts.modules("weight") if parts.dtype(f"{module}.weight") in stored]
        for module in dict.fromkeys(modules):
            scheme = self._of(module)
            if scheme.kind == "float" and scheme.bits == 4:
                recipe = fp4_recipe(module, parts, scheme.group or MXFP4_GROUP)
            elif f"{module}.weight_packed" in parts:
                recipe = _packed(module, scheme, parts)
            elif scheme.kind == "float":
                recipe = float_recipe(module, parts, scheme.block, scheme.group)
            else:
                recipe = _plain(module, scheme, parts)
            yield f"{module}.weight", recipe

    def _of(self, module: str) -> WeightScheme:
        """Return the scheme of a module: by its name, then by a pattern, then by its class, which is some Linear."""
        if module in self.targets:
            return self.targets[module]
        for target, scheme in self.targets.items():
            if target.startswith("re:") and re.match(target[3:], module):
                return scheme
        by_class = [scheme for target, scheme in self.targets.items() if not _is_name(target)]
        return (by_class or list(self.targets.values()))[0]


def _is_name(target: str) -> bool:
    return target.startswith("re:") or "." in target


def parse_compressed(fields: ConfigFields) -> CompressedTensors:
    """Read a compressed-tensors config. Raises ModelError for settings that are not supported."""
    sparsity = fields.inner("sparsity_config")
    if sparsity is not None and sparsity.text("format", "dense") != "dense":
        raise sparsity.error("format", "dense, as sparse weights are not supported")
    if fields.values.get("transform_config"):
        raise fields.error("transform_config", "nothing, as rotations of activations are not supported")
    groups = fields.inner("config_groups")
    if groups is None or not groups.values:
        raise fields.error("config_groups", "an object of schemes")
    targets: dict[str, WeightScheme] = {}
    for key in groups.values:
        group = groups.inner(key)
        if group is None:
            raise groups.error(key, "an object")
        if group.values.get("output_activations"):
            raise group.error("output_activations", "null, as rounding of outputs is not supported")
        weights = group.inner("weights")
        if weights is None:
            continue  # only activations are rounded
        _check_format(group if group.values.get("format") else fields)
        scheme = _scheme(weights)
        targets.update(dict.fromkeys(_targets(group), scheme))
    if not targets:
        raise fields.error("config_groups", "a group with weights")
    return CompressedTensors(targets)


def _check_format(fields: ConfigFields) -> None:
    stored = fields.text("format", "pack-quantized")
    if stored not in (*FORMATS, *FP4_FORMATS, "mixed-precision"):
        raise fields.error("format", f"one of {', '.join((*FORMATS, *FP4_FORMATS))}")


def _targets(group: ConfigFields) -> list[str]:
    targets = group.values.get("targets", ["Linear"])
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise group.error("targets", "a list of names")
    for target in targets:
        try:
            re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
        except re.error:
            raise group.error("targets", f"regular expressions after re:, unlike {echo(target)}") from None
    return targets


def _scheme(weights: ConfigFields) -> WeightScheme:
    kind, bits = weights.choice("type", ("int", "float"), "int"), weights.integer("num_bits", 8)
    if bits not in BITS:
        raise weights.error("num_bits", "4 or 8, the only ones supported")
    group = weights.integer("group_size", None, low=-1)
    if kind == "float" and bits == 4:
        if group not in (NVFP4_GROUP, MXFP4_GROUP):
            raise weights.error("group_size", f"{NVFP4_GROUP} (NVFP4) or {MXFP4_GROUP} (MXFP4), for floats of 4 bits")
        return WeightScheme(kind, bits, True, group, None)
    strategy = weights.text("strategy", "group" if group is not None and group > 0 else "channel")
    if strategy not in STRATEGIES or (strategy == "block" and kind == "int"):
        raise weights.error("strategy", f"one of {', '.join(STRATEGIES)}, block for float only")
    block = None
    if strategy == "group" and (group is None or group < 1):
        raise weights.error("group_size", "a size, for strategy group")
    if strategy == "block":
        sizes = weights.values.get("block_structure")
        if isinstance(sizes, str):  # "128x128", of earlier versions
            sizes = [int(size) for size in sizes.split("x") if size.isdecimal()]
        block = replace(weights, values={**weights.values, "block_structure": sizes}).two_sizes("block_structure")
    symmetric = weights.flag("symmetric", True)
    if kind == "float" and not symmetric:
        raise weights.error("symmetric", "true, for float")
    return WeightScheme(kind, bits, symmetric, group if strategy == "group" else None, block)


def _packed(module: str, scheme: WeightScheme, parts: Parts) -> Recipe | None:
    packed, scale = (f"{module}.{part}" for part in PACKED)
    stored = parts.matrix(packed, ("I32",), packed)
    assert stored is not None
    if scheme.kind != "int":
        raise parts.error(packed, "holds integers (expected weights of type float, as config_groups says)")
    outputs, in_word = stored[0], 32 // scheme.bits
    inputs = stored[1] * in_word
    names: tuple[str, ...] = (packed, scale)
    shape_name = f"{module}.weight_shape"
    if shape_name in parts:
        parts.check(shape_name, [(2,)], ("I64", "I32"), packed)
        sizes = parts.read(shape_name).array.tolist()
        if sizes[0] != outputs or -(-sizes[1] // in_word) != stored[1]:
            raise parts.error(shape_name, f"is {sizes} (expected one that fits weight_packed, {list(stored)})")
        inputs, names = sizes[1], (*names, shape_name)
    return _integers(module, scheme, parts, names, (outputs, inputs))


def _plain(module: str, scheme: WeightScheme, parts: Parts) -> Recipe | None:
    weight, scale = f"{module}.weight", f"{module}.weight_scale"
    beside = weight if weight in parts else scale
    stored = parts.matrix(weight, ("I8",), beside)
    return None if stored is None else _integers(module, scheme, parts, (weight, scale), stored)


def _integers(
    module: str, scheme: WeightScheme, parts: Parts, names: tuple[str, ...], shape: tuple[int, int]
) -> Recipe | None:
    (outputs, inputs), in_word = shape, 32 // scheme.bits
    packed = names[0].endswith("_packed")
    group = scheme.group or inputs
    groups = -(-inputs // group)
    shapes: list[tuple[int, ...]] = [(outputs, groups)]
    if groups == 1:
        shapes += [(outputs,), (1,), (), (1, 1)]
    good = parts.check(names[1], shapes, SCALES, names[0])
    if not scheme.symmetric:
        names = (*names, f"{module}.weight_zero_point")
        zero_shapes = [(-(-outputs // in_word), groups)] if packed else shapes
        good &= parts.check(names[-1], zero_shapes, ("I32",) if packed else ("I8",), names[0])
    if not good:
        return None
    order = f"{module}.weight_g_idx"
    group_of = parts.group_index(order, inputs, group, groups, beside=names[0], may_be_unused=True)
    zero_name = None if scheme.symmetric else names[-1]
    if order in parts:
        names = (*names, order)
    bits = scheme.bits
    # Four bits that lie in bytes stay in bytes: their signs are stored otherwise.
    layout = integer_layout(bits if packed else 8, group, inputs, zeros=not scheme.symmetric, group_of=group_of)

    def make(read: Reader) -> QuantizedTensor:
        stored, by_row = read(names[0]).array, read(names[1]).to_float32()
        by_row = by_row.reshape(1, 1) if by_row.size == 1 else by_row.reshape(outputs, -1)
        by_row = np.broadcast_to(by_row, (outputs, groups))
        points = None if zero_name is None else read(zero_name).array
        if packed:
            words = None if points is None else points.T
            return packed_integers(shape, group, layout, bits, stored, lambda rows: by_row[rows], words, group_of)
        return IntegerTensor.whole(
            shape,
            group,
            layout,
            lambda rows, across: stored[rows, across],
            lambda rows: by_row[rows],
            zeros=None if points is None else lambda rows: np.broadcast_to(points, by_row.shape)[rows].astype("f4"),
            group_of=group_of,
        )

    return Recipe(shape, layout, names, make)
