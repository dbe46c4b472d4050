"""Kernels of rows, states and latent attention, compiled for GPUs at real shapes: they fit, and do not spill."""

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
import importlib, json, sys
from tests.helpers.pretend_gpu import pretend_gpu
topic = importlib.import_module("tests.kernels.gpu.compile_" + sys.argv[2])
with pretend_gpu(int(sys.argv[1])) as compiled:
    topic.launch((int(sys.argv[1]) // 10, 0))
print(json.dumps([(one.name, one.local, one.shared, one.matrix_unit) for one in compiled]))
"""
BENCHMARKS = """
from benchmarks.gpu.kernels_rows import cases as rows
from benchmarks.gpu.kernels_latent import cases as latent
from quire.kernels.gpu.backend import GPUBackend
from tests.helpers.pretend_gpu import pretend_gpu
with pretend_gpu():
    for cases in (rows, latent):
        names = set()
        for case in cases(GPUBackend("bfloat16", "bfloat16", "cpu"), 256):
            for number in range(2):
                case.run(number)
            assert case.num_bytes > 0 and case.name not in names
            names.add(case.name)
"""


def run(program: str, *arguments: str) -> str:
    """Run a program in a process of its own, where Triton compiles; return the last line that it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    return (done.stdout.splitlines() or [""])[-1]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 80])
@pytest.mark.parametrize("topic", ["rows", "states", "latent"])
def test_kernels_fit_and_do_not_spill(topic: str, capability: int) -> None:
    made = json.loads(run(PROGRAM, str(capability), topic))
    assert all(shared <= MOST_SHARED[capability] for _, _, shared, _ in made)
    units = {name: unit for name, _, _, unit in made if unit}
    wanted = {"rows": set(), "states": {"prepare_kernel", "advance_kernel"}, "latent": {"latent_attention_kernel"}}
    assert set(units) == wanted[topic]
    if capability == 90:  # tiles were chosen for it; before, kernels need only fit
        assert not [one for one in made if one[1]]
        assert all("wgmma" in [unit for name, _, _, unit in made if name == one] for one in wanted[topic])


@pytest.mark.slow
def test_benchmark_cases_run() -> None:
    run(BENCHMARKS)
