"""Compiles Triton kernels for a GPU that is not there, and says what they would take of it.

Under `pretend_gpu()` a launch compiles its kernel down to machine code, by the arguments that it really has, and then
does nothing. So any op can be called with tensors in host memory, and what the interpreter forgives (types that do not
match, shapes that are no power of two, too much shared memory) is an error. It must run in a process that has not set
TRITON_INTERPRET. `python -m tests.helpers.pretend_gpu MODULE:FUNCTION` calls a function so and prints a table.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

# Bytes of shared memory that a block may have, by compute capability.
MAX_SHARED = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}


ROOT = Path(__file__).resolve().parents[2]
CHILD = """
import importlib, inspect, json, sys
from dataclasses import astuple
from tests.helpers.pretend_gpu import pretend_gpu
function, capability = getattr(importlib.import_module(sys.argv[1]), sys.argv[2]), int(sys.argv[3])
with pretend_gpu(capability) as compiled:
    function(*[divmod(capability, 10)][: len(inspect.signature(function).parameters)])
print(json.dumps([astuple(one) for one in compiled]))
"""


@dataclass(frozen=True, slots=True)
class Resources:
    """What one compiled kernel takes: registers and bytes of local memory (spills, if any) of a thread, bytes of shared
    memory of a block; `ptx` is its code before the assembler.
    """

    name: str
    num_warps: int
    num_stages: int
    registers: int
    local: int
    shared: int
    ptx: str

    @property
    def matrix_unit(self) -> str:
        """What multiplies matrices: "wgmma" (Hopper's), "mma" (before), or "" for nothing."""
        return "wgmma" if "wgmma.mma_async" in self.ptx else "mma" if "mma.sync" in self.ptx else ""

    def __str__(self) -> str:
        return (
            f"{self.name:44s} warps {self.num_warps} stages {self.num_stages} registers {self.registers:3d} "
            f"local {self.local:5d} shared {self.shared:6d} {self.matrix_unit}"
        )


def _usage(name: str, cubin: bytes) -> tuple[int, int]:
    """Return registers and bytes of stack and local memory that cuobjdump, which comes with Triton, tells."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said.stdout)
    assert found is not None, said.stdout
    return int(found[1]), int(found[2]) + int(found[3])


class _PretendDriver:
    """What Triton asks of a driver, answered for a GPU of this compute capability."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.compiled: list[Resources] = []
        self.utils = self

    def get_current_device(self) -> int:
        return self.capability  # what is compiled is kept by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": MAX_SHARED[self.capability], "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        return 1, 1, 0, 0, 1024

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        return lambda *args: None

    def note(self, compiled: Any) -> None:
        registers, local = _usage(compiled.name, compiled.asm["cubin"])
        made = compiled.metadata
        self.compiled.append(
            Resources(
                compiled.name, made.num_warps, made.num_stages, registers, local, made.shared, compiled.asm["ptx"]
            )
        )


@contextmanager
def pretend_gpu(capability: int = 90) -> Iterator[list[Resources]]:
    """Compile what is launched for this compute capability, and yield what it takes, kernel by kernel."""
    pretended = _PretendDriver(capability)
    before = driver._active
    driver.set_active(pretended)
    seen: set[int] = set()
    original = triton.compiler.CompiledKernel._init_handles

    def init_handles(self: Any) -> None:
        original(self)
        if id(self) not in seen:
            seen.add(id(self))
            pretended.note(self)

    triton.compiler.CompiledKernel._init_handles = init_handles
    try:
        yield pretended.compiled
    finally:
        triton.compiler.CompiledKernel._init_handles = original
        driver._active = before


def run_compiling(program: str, *arguments: str) -> list[str]:
    """Run a program in a process in which Triton compiles, and return the lines that it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def compile_in_child(function: str, capability: int = 90) -> list[Resources]:
    """Call `MODULE:FUNCTION` under `pretend_gpu` in a process of its own; return what its kernels take.

    The function takes the compute capability as a pair, or nothing.
    """
    lines = run_compiling(CHILD, *function.split(":"), str(capability))
    return [Resources(*fields) for fields in json.loads(lines[-1])]


def main() -> None:
    """Print what the kernels take that the named functions, `MODULE:FUNCTION`, launch."""
    for name in sys.argv[1:]:
        module, _, function = name.partition(":")
        with pretend_gpu() as compiled:
            getattr(importlib.import_module(module), function)()
        for resources in sorted(compiled, key=lambda made: made.name):
            print(resources)


if __name__ == "__main__":
    main()
