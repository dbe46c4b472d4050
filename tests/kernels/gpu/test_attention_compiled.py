"""Attention on a GPU, compiled for real ones at real shapes: kernels fit, do not spill, and use the matrix units."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.pretend_gpu import MOST_SHARED

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import json, sys
from tests.helpers.pretend_gpu import pretend_gpu
from tests.kernels.gpu import compile_attention
with pretend_gpu(int(sys.argv[1])) as compiled:
    getattr(compile_attention, sys.argv[2])()
print(json.dumps([(one.name, one.local, one.shared, one.num_warps, one.matrix_unit) for one in compiled]))
"""
Compiled = tuple[str, int, int, int, str]


def compiled(capability: int, function: str) -> list[Compiled]:
    """Return name, bytes of local and of shared memory, warps and matrix unit of all kernels that it launches."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    command = [sys.executable, "-c", PROGRAM, str(capability), function]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    return [tuple(one) for one in json.loads(done.stdout.splitlines()[-1])]


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "function"), [(90, "launch"), (80, "launch_ampere")])
def test_kernels_fit_and_do_not_spill(capability: int, function: str) -> None:
    made = compiled(capability, function)
    assert {name for name, *_ in made} == {"attention_kernel", "join_kernel", "write_kernel", "rotary_write_kernel"}
    attention = [one for one in made if one[0] == "attention_kernel"]
    assert all(unit for *_, unit in attention)
    assert all(shared <= MOST_SHARED[capability] for _, _, shared, _, _ in made)
    assert not [one for one in made if one[1]]
    if capability == 90:  # tiles of prompts have 8 warps there
        assert {unit for *_, warps, unit in attention if warps == 8} == {"wgmma"}


@pytest.mark.slow
def test_benchmark_cases_run() -> None:
    assert len(compiled(90, "launch_benchmarks")) >= 4
