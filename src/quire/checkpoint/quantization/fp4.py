"""compressed-tensors' weights in 4-bit floats (E2M1): `nvfp4-pack-quantized` and `mxfp4-pack-quantized`.

`weight_packed` uint8 [N, K/2], two codes a byte, the first in the low half. NVFP4: `weight_scale` [N, K/16] in E4M3, to
be divided by `weight_global_scale`, float32 [1]. MXFP4: `weight_scale` uint8 [N, K/32], codes of E8M0. Activations that
a scheme rounds to 4 bits, too, are left as they are.
"""

from __future__ import annotations

import numpy as np

from quire.checkpoint.quantization.parts import Parts, Reader, Recipe
from quire.checkpoint.quantization.tensors import CodeTensor, code_layout, nibbles
from quire.checkpoint.small_floats import E2M1, E8M0
from quire.checkpoint.tensor import QuantizedTensor

NVFP4_GROUP, MXFP4_GROUP = 16, 32


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

        def unpack(rows: slice, across: slice) -> np.ndarray:
            first = across.start // 2
            found = nibbles(codes[rows, first : -(-across.stop // 2)])
            return found[:, across.start - 2 * first : across.stop - 2 * first]

        return CodeTensor(
            unpack, by_group, group, layout, range(outputs), range(inputs), inputs, kind="table", table=E2M1
        )

    return Recipe((outputs, inputs), layout, names, make)
