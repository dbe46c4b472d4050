"""Every kernel at real shapes: its time against the roofline, and against what torch has for the same."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import torch
from case import Case
from measure import Limits, on_gpu, seconds
from report import Table

from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.gpu.compile_ahead import CompileAhead

SMALL_SCALES = {"experts": 256, "lora": 128}  # what sizes are divided by without a GPU
SMALL_SCALE = 4096  # of all others
SMALL_CASES = 10  # of a topic, from all over it


def topics() -> list[str]:
    """Return the topics that have cases, by the files beside this one."""
    return sorted(file.stem.removeprefix("kernels_") for file in Path(__file__).parent.glob("kernels_*.py"))


def cases(topic: str, backend: GPUBackend, *, small: bool = False) -> Iterator[Case]:
    """Yield the cases of a topic; `small`: a few toys of them."""
    every = importlib.import_module(f"kernels_{topic}").cases
    if not small:
        yield from every(backend)
        return
    scale = SMALL_SCALES.get(topic, SMALL_SCALE)
    count = sum(1 for _ in every(backend, scale))
    yield from islice(every(backend, scale), 0, None, -(-count // SMALL_CASES))


def new_backend() -> GPUBackend:
    """Return the backend that is measured: bfloat16 on a GPU."""
    return GPUBackend("bfloat16", "bfloat16", "cuda") if on_gpu() else GPUBackend("float32", "float32", "cpu")


def compile_cases(topic: str, backend: GPUBackend) -> None:
    """Have the kernels of a topic compiled side by side, before they are measured one after the other."""
    with CompileAhead():
        for case in cases(topic, backend):
            for run in (case.run, *case.against.values()):
                with suppress(Exception):  # boundary: who measures it is told again
                    run(0)


def measure_kernels(
    limits: Limits, only: str = "", *, small: bool = False, keep: Callable[[list[Table]], None]
) -> list[Table]:
    """Return a table for each topic whose name has `only` in it; `keep` is called whenever there is more."""
    tables = []
    for topic in topics():
        if only not in topic:
            continue
        table = Table(f"Kernels: {topic}", ("case", "us", "roofline us", "of the roofline", "torch's best"))
        tables.append(table)
        if on_gpu():
            compile_cases(topic, new_backend())
        for case in cases(topic, new_backend(), small=small):
            try:
                _measure(case, limits, table)
            except Exception as error:  # boundary: one kernel that fails must not hide the others
                table.add(case.name, f"failed: {type(error).__name__}: {str(error)[:120]}", "", "", "")
                if on_gpu():
                    torch.cuda.synchronize()
            keep(tables)
    return tables


def _measure(case: Case, limits: Limits, table: Table) -> None:
    ours = seconds(case.run, recorded=case.recorded)
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
