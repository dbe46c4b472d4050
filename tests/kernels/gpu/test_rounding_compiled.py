"""Kernels that round to 8 bits, compiled for a GPU: products and sums are rounded one by one, as in the reference."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import torch
from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.gpu.quantize import quantize_rows
from tests.helpers.pretend_gpu import pretend_gpu

with pretend_gpu() as compiled:
    for e4m3 in (False, True):
        quantize_rows(torch.zeros(4, 256), e4m3=e4m3)
    for kv_dtype in ("int8", "fp8"):
        backend = GPUBackend("bfloat16", kv_dtype, "cpu")
        cache, positions = backend.new_kv_cache(4, 16, 8, 128), torch.zeros(4, dtype=torch.int64)
        k = torch.zeros(4, 1024, dtype=torch.bfloat16)
        backend.write_kv(k, k, cache, positions)
        backend.rotary_write_kv(positions, k, k, k, torch.zeros(9, 128), 128, False, cache, positions)
    backend.rotary_embedding(positions, k, k, torch.zeros(9, 128), 128, False)
for one in compiled:
    print(one.name, "fma." in one.ptx)
"""


@pytest.mark.slow
def test_no_rounding_is_left_out() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    names = ["quantize_rows_kernel"] * 2 + ["rotary_kernel"] + ["rotary_write_kernel"] * 2 + ["write_kernel"] * 2
    assert lines == [f"{name} False" for name in names]
