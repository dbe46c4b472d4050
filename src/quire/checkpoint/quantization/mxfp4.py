"""MXFP4 (OCP Microscaling Formats, 2023) as GPT-OSS stores its experts: codes of E2M1, and powers of two for each 32.

`NAME_blocks` uint8 [E, N, K/32, 16], two codes a byte, the first in the low half; `NAME_scales` uint8 [E, N, K/32] of
E8M0. Models ask for `NAME`, [E, K, N]: for each expert the matrix that its inputs are multiplied by from the left, of
which the transposed one is stored.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.checkpoint.fields import Fields
from quire.checkpoint.quantization.parts import Parts, Reader, Recipe
from quire.checkpoint.quantization.tensors import CodeTensor, StackedTensor, TransposedTensor, code_layout, nibbles
from quire.checkpoint.small_floats import E2M1, E8M0
from quire.checkpoint.tensor import QuantizedTensor

GROUP = 32


@dataclass(frozen=True, slots=True)
class MXFP4:
    """An MXFP4 checkpoint, which has no settings."""

    name: str = "mxfp4"

    def recipes(self, parts: Parts) -> dict[str, Recipe]:
        """Return how the stacked weights of all experts are made."""
        found = {}
        for name in parts.ending("_blocks", "_scales"):
            recipe = _recipe_of(name, parts)
            if recipe is not None:
                found[name] = recipe
        return found


def parse_mxfp4(fields: Fields) -> MXFP4:
    """Read an mxfp4 config, which says nothing else that matters."""
    return MXFP4()


def _recipe_of(name: str, parts: Parts) -> Recipe | None:
    names = blocks, scales = f"{name}_blocks", f"{name}_scales"
    beside = blocks if blocks in parts else scales
    if not parts.check(blocks, [parts.shape(blocks)] if blocks in parts else [], ("U8",), beside):
        return None
    shape = parts.shape(blocks)
    if len(shape) != 4 or shape[3] != GROUP // 2:
        raise parts.error(blocks, f"has the wrong shape (expected four sizes, the last 16, got {list(shape)})")
    if not parts.check(scales, [shape[:3]], ("U8", "F8_E8M0"), beside):
        return None
    experts, outputs, inputs = shape[0], shape[1], shape[2] * GROUP
    layout = code_layout("table", GROUP, inputs, scale_bytes=2)

    def make(read: Reader) -> QuantizedTensor:
        packed, powers = read(blocks).array, read(scales).array

        def expert(index: int) -> CodeTensor:
            codes = packed[index].reshape(outputs, -1)
            return CodeTensor(
                lambda rows, across: nibbles(codes[rows, across.start // 2 : -(-across.stop // 2)])[
                    :, across.start % 2 :
                ][:, : across.stop - across.start],
                lambda rows: E8M0[powers[index, rows]],
                GROUP,
                layout,
                range(outputs),
                range(inputs),
                inputs,
                table=E2M1,
            )

        return StackedTensor(tuple(TransposedTensor(expert(index)) for index in range(experts)))

    return Recipe((experts, inputs, outputs), layout, names, make)
