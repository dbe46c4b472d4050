"""Watches Triton's interpreter for what it forgives and a GPU does not: memory out of bounds, races, unwritten memory.

Under `kernel_checks()` every load and store of a launch is looked at before it happens. Findings are collected, as a
sanitizer does: a bad lane is masked off and the kernel goes on.

errors: an address that no element of a tensor of the launch has, or that is not aligned; two programs of a launch of
    which one writes what the other reads or writes, with another value, or two lanes of one store that do; a wrong
    `tl.multiple_of`; a grid that is too large. A table's addresses may be of any tensor whose `data_ptr` our code asked
    for, or `reachable` ones.
notes: what may be meant: reading memory that `torch.empty` gave and nobody wrote (rows of padding do; it is poisoned
    with NaN, so that results show it where it matters), reading what the same program wrote without a barrier in
    between, and programs that write the same values to the same place.

Programs run one after the other here, so that a race is found by who touches what, and not by what comes of it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

from tests.helpers.kernel_memory import MAX_SHADOWED, Findings, Memory

POISON = 0x7FFB  # every two bytes of fresh memory: NaN as any float, large as an integer
MAX_PROGRAMS = ((1 << 31) - 1, 65535, 65535)  # of each axis of a grid


def _poisoned(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function that makes new tensors as `original` does, and fills them."""

    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = original(*args, **kwargs)
        storage = made.untyped_storage()
        fresh = kwargs.get("out") is None and made.device.type == "cpu" and made.dtype is not torch.bool
        if fresh and 0 < storage.nbytes() <= MAX_SHADOWED:
            raw = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())  # nothing that is recorded
            even = len(raw) // 2 * 2
            np.frombuffer(raw, np.uint16, even // 2)[:] = POISON
            np.frombuffer(raw, np.uint8)[even:] = POISON & 0xFF
        return made

    return make


def _bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(f"u{values.itemsize}")


@contextmanager
def kernel_checks() -> Iterator[Findings]:
    """Check all launches of this process in Triton's interpreter, and yield what is found."""
    findings = Findings()
    checker = Memory(findings)
    findings.reachable = checker.reachable
    # Not `__call__`, which others may have kept to launch with later.
    begin, set_program, set_attr = GridExecutor._init_args_hst, InterpreterBuilder.set_grid_idx, TensorHandle.set_attr
    set_grid = InterpreterBuilder.set_grid_dim
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    rmw, cas, data_ptr = (
        InterpreterBuilder.create_atomic_rmw,
        InterpreterBuilder.create_atomic_cas,
        torch.Tensor.data_ptr,
    )

    def checked_begin(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        checker.begin(self.fn.__name__, {**dict(zip(self.arg_names, args, strict=False)), **kwargs})
        return begin(self, args, kwargs)

    def checked_grid(self: Any, *grid: int) -> None:
        if any(count > most for count, most in zip(grid, MAX_PROGRAMS, strict=True)):
            checker.found("too many programs", f"a grid of {grid}")
        set_grid(self, *grid)

    def checked_program(self: Any, x: int, y: int, z: int) -> None:
        checker.next_program((x, y, z))
        set_program(self, x, y, z)

    def checked_load(self: Any, ptrs: TensorHandle, mask: Any, *rest: Any) -> TensorHandle:
        mask = checker.admitted(ptrs, mask, "load", None)
        loaded = load(self, ptrs, mask, *rest)
        size = loaded.data.itemsize
        if size > 1:
            fresh = (_bits(loaded.data) == int(f"{POISON:04x}" * (size // 2), 16)) & mask.data
            if fresh.any():
                place = checker.name(int(np.broadcast_to(ptrs.data, fresh.shape)[fresh][0]))
                checker.found("memory nobody wrote", f"load of {place}", note=True)
        return loaded

    def checked_store(self: Any, ptrs: TensorHandle, value: TensorHandle, mask: TensorHandle, *rest: Any) -> Any:
        wanted = np.broadcast_to(mask.data, ptrs.data.shape).astype(bool)
        new = _bits(np.broadcast_to(value.data, ptrs.data.shape))[wanted]

        def same() -> np.ndarray:
            kind = np.zeros(ptrs.data.shape, value.data.dtype)
            return _bits(interpreter._interpreter.load(ptrs.data, wanted, kind, kind.dtype))[wanted] == new

        at = ptrs.data[wanted]
        order = np.argsort(at, kind="stable")
        twice = at[order][1:] == at[order][:-1]
        if (twice & (new[order][1:] != new[order][:-1])).any():
            place = checker.name(int(at[order][1:][twice][0]))
            checker.found("race", f"two lanes of one store write different values to {place}")
        return store(self, ptrs, value, checker.admitted(ptrs, mask, "store", same), *rest)

    def checked_rmw(self: Any, op: Any, ptr: TensorHandle, value: TensorHandle, mask: Any, *rest: Any) -> Any:
        return rmw(self, op, ptr, value, checker.admitted(ptr, mask, "atomic", None), *rest)

    def checked_cas(self: Any, ptr: TensorHandle, *rest: Any) -> Any:
        checker.admitted(ptr, np.ones(ptr.data.shape, bool), "atomic", None)
        return cas(self, ptr, *rest)

    def checked_attr(self: TensorHandle, key: str, values: list[int]) -> None:
        if key == "tt.divisibility" and self.data.size == 1 and int(self.data.item()) % values[0]:
            checker.found("wrong hint", f"{int(self.data.item())} is no multiple of {values[0]}")
        set_attr(self, key, values)

    def noted_data_ptr(self: torch.Tensor) -> int:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("quire."):
            checker.reachable(self)
        return data_ptr(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "_init_args_hst", checked_begin)
        patch.setattr(TensorHandle, "set_attr", checked_attr)
        patch.setattr(torch.Tensor, "data_ptr", noted_data_ptr)
        for name, checked in (
            ("set_grid_dim", checked_grid), ("set_grid_idx", checked_program),
            ("create_barrier", lambda self: checker.barrier()),
            ("create_masked_load", checked_load), ("create_masked_store", checked_store),
            ("create_atomic_rmw", checked_rmw), ("create_atomic_cas", checked_cas),
        ):  # fmt: skip
            patch.setattr(InterpreterBuilder, name, checked)
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            patch.setattr(owner, name, _poisoned(getattr(owner, name)))
        yield findings
