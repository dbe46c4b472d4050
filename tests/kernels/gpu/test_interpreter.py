"""Triton's interpreter, mended for tests: it notices what overflows, and computes with floats that NumPy lacks."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from quire.kernels.gpu.interpreter import repair_interpreter
from tests.kernels.gpu.common import DEVICE

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="kernels are compiled where there is a GPU")
LARGE = (1 << 31) - 1


@triton.jit
def _combine(x, y, kind: tl.constexpr):
    if kind == "add":
        return x + y
    if kind == "sub":
        return x - y
    return x * y


@triton.jit
def _kernel(x_ptr, y_ptr, out_ptr, kind: tl.constexpr, width: tl.constexpr):
    at = tl.arange(0, width)
    made = _combine(tl.load(x_ptr + at), tl.load(y_ptr + at), kind)
    tl.store(out_ptr, tl.sum(made.to(tl.int64)))


def combined(kind: str, x: list[int], y: list[int]) -> int:
    """Return the sum of what the kernel makes of numbers of 32 bits."""
    repair_interpreter()
    out = torch.zeros(1, dtype=torch.int64)
    _kernel[(1,)](*(torch.tensor(part, dtype=torch.int32) for part in (x, y)), out, kind, len(x))
    return int(out)


@pytest.mark.parametrize(
    ("kind", "x", "y", "expected"),
    [("add", LARGE, 0, LARGE), ("sub", -LARGE, 1, -LARGE - 1), ("mul", LARGE, -1, -LARGE)],
)
def test_the_limits_of_32_bits_are_within(kind: str, x: int, y: int, expected: int) -> None:
    assert combined(kind, [1, x], [1, y]) == expected + {"add": 2, "sub": 0, "mul": 1}[kind]


@pytest.mark.parametrize(("kind", "x", "y"), [("add", LARGE, 1), ("sub", -LARGE, 2), ("mul", 1 << 16, 1 << 15)])
def test_what_does_not_fit_is_noticed_and_the_next_launch_is_well(kind: str, x: int, y: int) -> None:
    with pytest.raises(Exception, match=f"int32 overflow detected for operation {kind}"):
        combined(kind, [1, x], [1, y])
    assert combined(kind, [3, 3], [2, 2]) == {"add": 10, "sub": 2, "mul": 12}[kind]


@triton.jit
def _narrow_kernel(x_ptr, y_ptr, codes_ptr, out_ptr, width: tl.constexpr):
    at = tl.arange(0, width)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    codes = tl.load(codes_ptr + at).to(x.dtype)
    tl.store(out_ptr + at, x + y)
    tl.store(out_ptr + width + at, x * y)
    tl.store(out_ptr + 2 * width + at, tl.where(x < y, x, y))
    tl.store(out_ptr + 3 * width + at, codes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_floats_are_added_multiplied_compared_and_made_of_integers(dtype: torch.dtype) -> None:
    repair_interpreter()
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(16, generator=generator).to(dtype) for _ in range(2))
    codes = torch.randint(-128, 128, (16,), generator=generator, dtype=torch.int8)
    out = torch.full((4, 16), torch.nan, dtype=dtype)
    _narrow_kernel[(1,)](x, y, codes, out, 16)
    torch.testing.assert_close(out, torch.stack([x + y, x * y, torch.minimum(x, y), codes.to(dtype)]), rtol=0, atol=0)
