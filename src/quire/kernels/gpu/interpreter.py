"""What Triton's interpreter, which stands in for a GPU in tests, needs to compute what a GPU would.

A scalar of a kernel is an array of one element there, and a loop's bounds are made integers of it, which NumPy 2.4
refuses. Floats of 16 and 8 bits that NumPy has no type for are kept as integers: Triton 3.6 multiplies, adds and
compares bfloat16 as those integers, makes integers no floats of these types, and cuts digits off where a GPU rounds to
the nearest. Most of its time went into patching the language in every launch and call, making types again for every
value, and sums of 32 bits done again in 64 to see whether they overflow; all of it is done otherwise, with the same
results. Nothing here is used where kernels are compiled.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
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
            # A BLAS may add a row's products in another order where the row stands elsewhere in the tile, which no GPU
            # does. In float64 that is lost in the rounding to the accumulator's type.
            wide = [x.view(np.float32).astype(np.float64) for x in wide]
        return interpreter.TensorHandle(np.matmul(*wide).astype(d.data.dtype) + d.data, d.dtype.scalar)

    interpreter._patch_lang_tensor = patch
    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = create_dot
    _compute_with_narrow_floats(interpreter, floats)
    _check_overflow_at_once(interpreter)
    _make_types_once(interpreter)
    _patch_once(interpreter)


def _compute_with_narrow_floats(interpreter: Any, floats: dict[Any, torch.dtype]) -> None:
    """Add, compare and so on what bfloat16 stands for, and make integers narrow floats."""
    import triton.language as tl

    builder = interpreter.InterpreterBuilder
    cast, combine = builder.cast_impl, builder.binary_op

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        kind = target.scalar
        if source.dtype.scalar.is_int() and kind in floats and kind not in (tl.float32, tl.float16):
            whole = source.data.astype(np.float32)
            return interpreter.TensorHandle(_convert(whole, torch.float32, floats[kind]), kind)
        return cast(self, source, target)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        kind = lhs.dtype.scalar
        if kind != tl.bfloat16:
            return combine(self, lhs, rhs, op)
        wide = [_convert(x.data, torch.bfloat16, torch.float32).view(np.float32) for x in (lhs, rhs)]
        made = op(*wide)
        made = made if made.dtype == bool else _convert(made, torch.float32, torch.bfloat16)
        return interpreter.TensorHandle(made, kind)

    builder.cast_impl, builder.binary_op = cast_impl, binary_op


def _patch_once(interpreter: Any) -> None:
    """Put the interpreter's functions into the language once and for all, not anew in each launch and call."""
    import triton.language as tl

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))  # what any kernel may refer to
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()


def _check_overflow_at_once(interpreter: Any) -> None:
    """See whether a sum, difference or product of less than 64 bits has overflowed, on NumPy's arrays."""
    from triton.language.semantic import TritonSemantic

    original = TritonSemantic.binary_op_sanitize_overflow_impl
    functions = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def check(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if not isinstance(self.builder, interpreter.InterpreterBuilder):
            return original(self, lhs, rhs, binary_op)
        kind = lhs.type.scalar
        if kind.int_bitwidth < 64 and self.builder.options.sanitize_overflow:
            made = functions[binary_op.__name__](lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
            fits = (kind.get_int_min_value() <= made.min()) & (made.max() <= kind.get_int_max_value())
            assert fits, f"int{kind.int_bitwidth} overflow detected for operation {binary_op.__name__}"
        return None

    TritonSemantic.binary_op_sanitize_overflow_impl = check


def _make_types_once(interpreter: Any) -> None:
    """Look up what each tensor of a type and shape has the same, rather than make it again for every one."""
    import triton.language as tl

    block_type, tensor = tl.core.block_type, tl.core.tensor
    make_block, find_dtype = block_type.__init__, interpreter._get_np_dtype
    known: dict[Any, dict[str, Any]] = {}
    dtypes: dict[str, np.dtype] = {}
    scalar = tl.core.constexpr(1), tl.core.tuple([])

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in known:
            make_block(self, element_ty, shape)
            self.tensor_shape = tl.core.constexpr(self.numel), tl.core.tuple([tl.core.constexpr(n) for n in self.shape])
            known[key] = self.__dict__
        self.__dict__ = known[key]  # types do not change

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.tensor_shape if type.is_block() else scalar

    def get_np_dtype(type: Any) -> np.dtype:
        name = type.scalar.name
        if name not in dtypes:
            dtypes[name] = find_dtype(type)
        return dtypes[name]

    block_type.__init__, tensor.__init__ = init_block, init_tensor
    interpreter._get_np_dtype = get_np_dtype


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
