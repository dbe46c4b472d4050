"""The checker of kernels finds each kind of bug that is planted, and nothing where there is none."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.helpers import kernel_checks as kernel_checks_module
from tests.helpers.kernel_checks import Findings, kernel_checks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="checks what Triton's interpreter runs")
COUNT = 20  # elements; programs have 16


@triton.jit
def copy_kernel(x, y, count, step):
    at = tl.program_id(0) * 16 + tl.arange(0, 16)
    tl.store(y + at * step, tl.load(x + at * step, at < count, other=0.0), at < count)


@triton.jit
def table_kernel(table, out):
    values = tl.load(tl.load(table).to(tl.pointer_type(tl.float32)) + tl.arange(0, 4))
    tl.store(out + tl.arange(0, 4), values)


@triton.jit
def sum_kernel(x, out, ATOMIC: tl.constexpr, SAME: tl.constexpr):
    value = tl.load(x + tl.program_id(0))
    if ATOMIC:
        tl.atomic_add(out, value)
    else:
        tl.store(out, 1.0 if SAME else value)


@triton.jit
def shift_kernel(x):
    at = tl.program_id(0) * 4 + tl.arange(0, 4)
    tl.store(x + at + 1, tl.load(x + at))


@triton.jit
def neighbour_kernel(x, out):
    at = tl.program_id(0) * 4 + tl.arange(0, 4)
    tl.store(out + at, tl.load(x + at))
    tl.store(x + at, tl.load(out + (at + 4) % 8) + 1)


@triton.jit
def scatter_kernel(x, out):
    at = tl.arange(0, 4)
    tl.store(out + at // 2, tl.load(x + at))


@triton.jit
def again_kernel(x, out, BARRIER: tl.constexpr):
    at = tl.arange(0, 4)
    tl.store(out + at, tl.load(x + at))
    if BARRIER:
        tl.debug_barrier()
    tl.store(x + at, tl.load(out + (3 - at)))


@triton.jit
def hint_kernel(x, count):
    at = tl.multiple_of(count, 4)
    tl.store(x + at, 1.0)


@triton.jit
def word_kernel(x):
    tl.store((x + 1).to(tl.pointer_type(tl.float32)), 1.0)


def kinds(findings: Findings) -> list[str]:
    return sorted({key[0] for key in findings.errors})


def noted(findings: Findings) -> list[str]:
    return sorted({key[0] for key in findings.notes})


def values(count: int = COUNT) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32)


def test_a_good_kernel_is_found_to_be_good_and_does_what_it_did() -> None:
    with kernel_checks() as findings:
        x, y = values(), torch.empty(COUNT)
        copy_kernel[(2,)](x, y, COUNT, 1)
    assert torch.equal(x, y) and not findings.errors and not findings.notes


@pytest.mark.parametrize("array", ["load", "store"])
def test_what_lies_beyond_a_tensor_is_neither_read_nor_written(array: str) -> None:
    with kernel_checks() as findings:
        short, long = values(COUNT - 1), values(COUNT + 9)
        x, y = (short, long) if array == "load" else (long, short)
        copy_kernel[(2,)](x, y, COUNT, 1)
    assert kinds(findings) == ["out of bounds"]
    said = str(findings)
    assert f"{array} of byte 76 of 76 of {'x' if array == 'load' else 'y'}, program (1, 0, 0), 1 lanes" in said
    assert "copy_kernel at test_kernel_checks.py:" in said
    if array == "load":
        assert float(y[COUNT - 1]) == 0.0, "what is not read is as if masked"
    else:
        assert torch.equal(y, x[: COUNT - 1])


def test_what_lies_between_the_rows_of_a_view_is_out_of_bounds() -> None:
    with kernel_checks() as findings:
        x, y = values(40), torch.zeros(40)
        copy_kernel[(2,)](x[::2], y[::2], COUNT, 2)
        assert not findings.errors
        copy_kernel[(2,)](x[::2], y, COUNT, 1)
    assert kinds(findings) == ["out of bounds"]


def test_tables_lead_to_what_they_may_lead_to() -> None:
    with kernel_checks() as findings:
        x, out = values(4), torch.zeros(4)
        table = torch.tensor([x.data_ptr()])
        findings.reachable(x)
        table_kernel[(1,)](table, out)
        assert not findings.errors and torch.equal(out, x)
        table_kernel[(1,)](table + 4, out)
        assert kinds(findings) == ["out of bounds"] and "an address in a table" in str(findings)


def test_tables_lead_to_nothing_that_has_gone_or_that_nobody_named() -> None:
    with kernel_checks() as findings:
        x, named, out = values(4), values(4), torch.zeros(4)
        tables = [torch.tensor([x.data_ptr()]), torch.tensor([named.data_ptr()])]
        findings.reachable(named)
        del named  # and no tensor after it, which could take its place
        for table in tables:
            table_kernel[(1,)](table, out)
    assert kinds(findings) == ["out of bounds"] and not out.any()


@pytest.mark.parametrize(
    ("atomic", "same", "errors", "notes"),
    [(True, False, [], []), (False, True, [], ["same value written"]), (False, False, ["race"], [])],
    ids=["atomic", "same", "different"],
)
def test_programs_may_not_write_different_values_to_one_place(
    atomic: bool, same: bool, errors: list[str], notes: list[str]
) -> None:
    with kernel_checks() as findings:
        sum_kernel[(3,)](values(3), torch.zeros(1), atomic, same)
    assert kinds(findings) == errors and noted(findings) == notes


def test_no_program_may_read_what_another_writes_before_or_after() -> None:
    with kernel_checks() as findings:
        shift_kernel[(2,)](values(9))
    assert kinds(findings) == ["race"] and "load of byte 16 of 36 of x, program (1, 0, 0), which" in str(findings)
    with kernel_checks() as findings:
        neighbour_kernel[(2,)](values(8), torch.zeros(8))
    assert "store to byte 16 of 32 of out, program (1, 0, 0), which another program reads" in str(findings)


def test_lanes_of_a_store_may_not_write_different_values_to_one_place() -> None:
    with kernel_checks() as findings:
        scatter_kernel[(1,)](torch.zeros(4), torch.zeros(2))
        assert not findings.errors
        scatter_kernel[(1,)](values(4), torch.zeros(2))
    assert kinds(findings) == ["race"] and "two lanes" in str(findings)


@pytest.mark.parametrize("barrier", [False, True])
def test_a_program_that_reads_what_it_wrote_needs_a_barrier(barrier: bool) -> None:
    with kernel_checks() as findings:
        again_kernel[(1,)](values(4), torch.zeros(4), barrier)
    assert not findings.errors and noted(findings) == ([] if barrier else ["no barrier"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64], ids=str)
def test_memory_that_nobody_wrote_is_noted_and_poisoned(dtype: torch.dtype) -> None:
    with kernel_checks() as findings:
        x, y = torch.empty(COUNT, dtype=dtype), torch.zeros(COUNT, dtype=dtype)
        x[3:] = 0
        copy_kernel[(2,)](x, y, COUNT, 1)
        assert noted(findings) == ["memory nobody wrote"] and not findings.errors
    assert y[:3].isnan().all() if dtype.is_floating_point else (y[:3] > 1 << 60).all()


def test_hints_that_are_wrong_and_addresses_that_do_not_fit_a_type_are_found() -> None:
    with kernel_checks() as findings:
        hint_kernel[(1,)](values(9), 8)
        assert not findings.errors
        hint_kernel[(1,)](values(9), 6)
        assert kinds(findings) == ["wrong hint"]
        word_kernel[(1,)](torch.zeros(8, dtype=torch.float16))
    assert kinds(findings) == ["misaligned access", "wrong hint"]


def test_grids_that_no_gpu_takes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_checks_module, "MAX_PROGRAMS", (1 << 20, 3, 3))
    with kernel_checks() as findings:
        x, y = values(), torch.zeros(COUNT)
        copy_kernel[(1, 3)](x, y, COUNT, 1)
        assert not findings.errors
        copy_kernel[(1, 4)](x, y, COUNT, 1)
    assert kinds(findings) == ["too many programs"]


def test_all_is_as_it_was_afterwards() -> None:
    before = torch.empty, torch.Tensor.data_ptr, triton.runtime.interpreter.GridExecutor._init_args_hst
    with kernel_checks():
        assert torch.empty is not before[0]
    assert (torch.empty, torch.Tensor.data_ptr, triton.runtime.interpreter.GridExecutor._init_args_hst) == before
