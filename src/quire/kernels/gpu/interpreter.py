"""What Triton's interpreter, which stands in for a GPU in tests, needs to compute what a GPU would.

A scalar of a kernel is an array of one element there, and a loop's bounds are made integers of it, which NumPy 2.4
refuses. Floats of 16 and 8 bits that NumPy has no type for are kept as integers: Triton 3.6 multiplies matrices of
bfloat16 as those integers, and cuts digits off where a GPU rounds to the nearest. Nothing here is used where kernels
are compiled.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch


@cache
def repair_interpreter() -> None:
    """Mend all that, from now on in this process."""
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    floats = {
        tl.float32: torch.float32,
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
    }

    def convert(values: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
        return _convert(values, floats[source], floats[target])

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        wide = [x.data if x.dtype.is_int() else _convert(x.data, floats[x.dtype], torch.float32) for x in (a, b)]
        if a.dtype.is_int():
            wide = [x.astype(np.int32) for x in wide]
        else:
            wide = [x.view(np.float32) for x in wide]
        return interpreter.TensorHandle(np.matmul(*wide).astype(d.data.dtype) + d.data, d.dtype.scalar)

    interpreter._patch_lang_tensor = patch
    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = create_dot


def _convert(values: np.ndarray, source: torch.dtype, target: torch.dtype) -> np.ndarray:
    """Convert to the nearest float of `target`, in an array of unsigned integers of as many bits, of any shape.

    Numbers too large for 8 bits become the largest, as conversions of a GPU make them.
    """
    bits = np.ascontiguousarray(values)
    there = torch.from_numpy(bits.view(f"i{bits.itemsize}").reshape(bits.shape)).view(source)
    if target in (torch.float8_e4m3fn, torch.float8_e5m2):
        limit = torch.finfo(target).max
        there = there.float().clamp(-limit, limit)
    made = there.to(target)
    size = target.itemsize
    return made.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[size]).numpy().view(f"u{size}")
