"""Addresses as typed pointers, for ops: `f32_ptr(args[0])[i]` reads and writes like an array that knows no length.

The element type says what `simd.load` and `simd.get` make of it; see STORAGE in formats.py.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic


def _pointer(numba_type, llvm_type):
    @intrinsic
    def pointer(ty, address):
        result = types.CPointer(numba_type)
        return result(types.int64), lambda ctx, b, sig, a: b.inttoptr(a[0], llvm_type.as_pointer())

    return pointer


f32_ptr = _pointer(types.float32, ir.FloatType())  # float32
bf16_ptr = _pointer(types.uint16, ir.IntType(16))  # the bits of bfloat16
f16_ptr = _pointer(types.int16, ir.IntType(16))  # the bits of float16
u8_ptr = _pointer(types.uint8, ir.IntType(8))
i8_ptr = _pointer(types.int8, ir.IntType(8))
u32_ptr = _pointer(types.uint32, ir.IntType(32))
i32_ptr = _pointer(types.int32, ir.IntType(32))
i64_ptr = _pointer(types.int64, ir.IntType(64))
f64_ptr = _pointer(types.float64, ir.DoubleType())

# Storage formats: the numpy dtype of their arrays, and pointers to elements of them
FORMATS = {
    "float32": (np.float32, f32_ptr),
    "bfloat16": (np.uint16, bf16_ptr),
    "float16": (np.int16, f16_ptr),
    "int8": (np.int8, i8_ptr),
}
FLOAT_FORMATS = ("float32", "bfloat16", "float16")


@intrinsic
def float64_from_bits(ty, bits):
    """Return the float64 whose bits are this int64."""
    return types.float64(types.int64), lambda ctx, b, sig, a: b.bitcast(a[0], ir.DoubleType())
