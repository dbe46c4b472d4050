"""Kernels of experts and adapters, compiled for GPUs at real shapes: they fit, and the hot ones do not spill."""

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
capability, topic, function = int(sys.argv[1]), sys.argv[2], sys.argv[3]
module = importlib.import_module("tests.kernels.gpu.compile_" + topic)
with pretend_gpu(capability) as compiled:
    getattr(module, function)((capability // 10, capability % 10))
print(json.dumps([(one.name, one.local, one.shared, one.matrix_unit) for one in compiled]))
"""
BENCHMARKS = """
from benchmarks.gpu.kernels_experts import cases as experts
from benchmarks.gpu.kernels_lora import cases as lora
from quire.kernels.gpu.backend import GPUBackend
from tests.helpers.pretend_gpu import pretend_gpu
with pretend_gpu():
    for cases in (experts, lora):
        for case in cases(GPUBackend("bfloat16", "bfloat16", "cpu"), 16):
            case.run(0)
            assert case.num_bytes > 0
            print(case.name)
"""
# Bytes a thread that may lie in local memory: a frame at most on the chip that tiles were chosen for; before it had
# asynchronous products, wide tiles put some of their addresses aside.
MOST_LOCAL = {90: 8, 80: 160}
PRODUCTS = ("_gated_blocks", "_down_blocks", "coded_kernel")


def run(program: str, *arguments: str) -> list[str]:
    """Run a program in a process of its own, where Triton compiles; return the lines that it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 80])
@pytest.mark.parametrize("topic", ["experts:launch", "experts:launch_coded", "lora:launch"])
def test_kernels_fit_the_chip(capability: int, topic: str) -> None:
    compiled = json.loads(run(PROGRAM, str(capability), *topic.split(":"))[-1])
    assert compiled
    for name, local, shared, unit in compiled:
        assert local <= MOST_LOCAL[capability], name
        assert shared <= MOST_SHARED[capability], name
        assert unit or name not in PRODUCTS, name
    if capability == 90:
        assert any(unit == "wgmma" for _, _, _, unit in compiled)


@pytest.mark.slow
def test_benchmarks_launch_what_they_measure() -> None:
    assert len(run(BENCHMARKS)) > 20
