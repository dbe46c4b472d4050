"""Every kernel at real shapes: its time against the roofline, and against what torch has for the same."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import torch
from case import Case
from measure import Limits, on_gpu, seconds
from report import Table

from quire.kernels.gpu.backend import GPUBackend


def topics() -> list[str]:
    """Return the topics that have cases, by the files beside this one."""
    return sorted(file.stem.removeprefix("kernels_") for file in Path(__file__).parent.glob("kernels_*.py"))


def cases(topic: str, backend: GPUBackend) -> Iterator[Case]:
    """Yield the cases of a topic."""
    yield from importlib.import_module(f"kernels_{topic}").cases(backend)


def new_backend() -> GPUBackend:
    """Return the backend that is measured: bfloat16 on a GPU."""
    return GPUBackend("bfloat16", "bfloat16", "cuda") if on_gpu() else GPUBackend("float32", "float32", "cpu")


def measure_kernels(limits: Limits, only: str = "") -> list[Table]:
    """Return a table for each topic whose name has `only` in it."""
    tables = []
    for topic in topics():
        if only not in topic:
            continue
        table = Table(f"Kernels: {topic}", ("case", "us", "roofline us", "of the roofline", "torch's best"))
        tables.append(table)
        for case in cases(topic, new_backend()):
            try:
                _measure(case, limits, table)
            except Exception as error:  # boundary: one kernel that fails must not hide the others
                table.add(case.name, f"failed: {type(error).__name__}: {str(error)[:120]}", "", "", "")
                if on_gpu():
                    torch.cuda.synchronize()
    return tables


def _measure(case: Case, limits: Limits, table: Table) -> None:
    ours = seconds(case.run)
    least = limits.least_seconds(case.num_bytes, case.flops, case.unit)
    others = {name: seconds(run) for name, run in case.against.items()}
    best = min(others, key=lambda name: others[name], default=None)
    beside = "-" if best is None else f"{best} {others[best] * 1e6:.1f} us, {others[best] / ours:.2f}x"
    table.add(
        case.name,
        f"{ours * 1e6:.1f}",
        f"{least * 1e6:.1f}",
        f"{100 * least / ours:.0f} %",
        beside,
        case=case.name,
        seconds=ours,
        roofline_seconds=least,
        others=others,
    )
