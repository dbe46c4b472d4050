"""AWQ (Lin et al. 2023): 4-bit weights in groups with zero points, as AutoAWQ's "gemm" layout stores them.

`qweight` int32 [K, N/8] holds eight neighbouring outputs in a word; nibble i belongs to output 0, 2, 4, 6, 1, 3, 5, 7.
`qzeros` int32 [G, N/8] likewise; `scales` [G, N]. weight[n, k] = (q - zero) * scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.checkpoint.fields import Fields
from quire.checkpoint.quantization.parts import SCALES, Parts, Reader, Recipe
from quire.checkpoint.quantization.tensors import IntegerTensor, from_words, integer_layout
from quire.checkpoint.tensor import QuantizedTensor

PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of outputs 0 .. 7 in a word
GROUPS = (32, 64, 128)
PARTS = ("qweight", "qzeros", "scales")


@dataclass(frozen=True, slots=True)
class AWQ:
    """The settings of an AWQ checkpoint; group is -1 where a row has one scale."""

    group: int
    name: str = "awq"

    def recipes(self, parts: Parts) -> dict[str, Recipe]:
        """Return how each weight is made."""
        found = {}
        for module in parts.modules(*PARTS):
            qweight, qzeros, scales = names = tuple(f"{module}.{part}" for part in PARTS)
            beside = next(name for name in names if name in parts)
            stored = parts.matrix(qweight, ("I32",), beside)
            if stored is None:
                continue
            inputs, words = stored
            group = inputs if self.group == -1 else self.group
            if inputs % group:
                raise parts.error(qweight, f"has {inputs} rows (expected a multiple of group_size, {group})")
            good = parts.check(qzeros, [(inputs // group, words)], ("I32",), beside)
            if parts.check(scales, [(inputs // group, 8 * words)], SCALES, beside) and good:
                found[f"{module}.weight"] = _recipe(names, 8 * words, inputs, group)
        return found


def parse_awq(fields: Fields) -> AWQ:
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
    if group not in (-1, *GROUPS):
        raise fields.error(group_key, f"one of -1, {', '.join(map(str, GROUPS))}")
    return AWQ(group)


def _recipe(names: tuple[str, ...], outputs: int, inputs: int, group: int) -> Recipe:
    layout = integer_layout(4, group, inputs, zeros=True)

    def make(read: Reader) -> QuantizedTensor:
        qweight, qzeros = (read(name).array.view(np.uint32) for name in names[:2])
        scales = read(names[2])

        def unpack(rows: slice, columns: slice) -> np.ndarray:
            return _nibbles(qweight[columns], rows).T

        return IntegerTensor(
            unpack,
            lambda rows: scales.columns(rows.start, rows.stop).to_float32().T,
            group,
            layout,
            range(outputs),
            range(inputs),
            inputs,
            zeros=lambda rows: _nibbles(qzeros, rows).T.astype(np.float32),
        )

    return Recipe((outputs, inputs), layout, names, make)


def _nibbles(packed: np.ndarray, outputs: slice) -> np.ndarray:
    """Return some outputs of uint32 [M, N/8] as uint8 [M, n]."""
    first = outputs.start // 8
    stored = from_words(packed[:, first : -(-outputs.stop // 8)], 4)
    ordered = stored.reshape(len(packed), -1, 8)[:, :, PLACES].reshape(len(packed), -1)
    return ordered[:, outputs.start - 8 * first : outputs.stop - 8 * first]
