"""What kernels have beyond Numba: functions written as LLVM instructions, and addresses as typed pointers.

`f32_ptr(args[0])[i]` reads and writes like an array that knows no length. The element type says what `simd.load` and
`simd.get` make of it; see STORAGE in formats.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import extending, types

INT = types.int64
NOTHING = types.void
ANY, ARRAY = "any", "array"  # instead of types, see `intrinsic`


class Elements(NamedTuple):
    """What the emitting function is handed for an `ARRAY`: the storage format of its elements, and the pointer."""

    storage: str
    data: ir.Value


def intrinsic(result: Any, *params: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function that emits LLVM: emit(builder, *values) -> value; none where `result` is NOTHING.

    `result` and `params` are Numba types, which arguments are converted to. A parameter of ANY has the type that it is
    called with, a result of ANY that of the first argument. An ARRAY is a pointer whose element type counts.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        def typed(context: Any, *given: Any) -> Any:
            kinds = [kind if isinstance(kind, types.Type) else own for kind, own in zip(params, given, strict=True)]

            def code(lowering: Any, b: Any, signature: Any, values: Any) -> Any:
                found = [
                    Elements(STORAGE_NAMES[own.dtype], value) if kind is ARRAY else value
                    for kind, own, value in zip(params, signature.args, values, strict=True)
                ]
                value = emit(b, *found)
                return lowering.get_dummy_value() if value is None else value

            return (kinds[0] if result is ANY else result)(*kinds), code

        typed.__name__, typed.__doc__ = emit.__name__, emit.__doc__
        typed.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # Numba looks at it, and knows no *values
            [inspect.Parameter(f"value{i}", inspect.Parameter.POSITIONAL_OR_KEYWORD) for i in range(1 + len(params))]
        )
        return extending.intrinsic(typed)

    return decorate


STORAGE_NAMES = {
    types.float32: "f32",
    types.uint16: "bf16",
    types.int16: "f16",
    types.int8: "i8",
    types.uint8: "u8",
    types.int32: "i32",
    types.uint32: "u32",
}


def _pointer(numba_type, llvm_type):
    @intrinsic(types.CPointer(numba_type), INT)
    def pointer(b, address):
        return b.inttoptr(address, llvm_type.as_pointer())

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


@intrinsic(types.float64, INT)
def float64_from_bits(b, bits):
    """Return the float64 whose bits are this int64."""
    return b.bitcast(bits, ir.DoubleType())
