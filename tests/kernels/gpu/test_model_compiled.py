"""Decode steps of real models as they would be launched on an H200: how many launches, and what kernels take."""

from __future__ import annotations

import json

import pytest

from tests.helpers.pretend_gpu import run_compiling

PROGRAM = """
import json, sys
from tests.helpers.pretend_gpu import pretend_gpu
from tests.kernels.gpu.compile_model import launch
with pretend_gpu() as compiled:
    launches = launch(pdl=sys.argv[1] == "True")
made = [(one.name, one.local, "griddepcontrol.wait" in one.ptx, "prefetch.L2" in one.ptx) for one in compiled]
print(json.dumps((launches, made)))
"""
DECODE = {"norm_kernel", "gemv_kernel", "rotary_write_kernel", "attention_kernel", "join_kernel", "gate_kernel"}
EXPERTS = {"_route_row", "gated_rows", "mixed_rows", "_sort_pairs", "grouped_gemm_kernel", "_mix"}
LAUNCHES = {  # kernels that a layer launches at one token and at 64
    "llama-3.1-8b 1": 9,
    "llama-3.1-8b 64": 10,
    "qwen3-0.6b 1": 9,
    "qwen3-0.6b 64": 10,
    "qwen3-30b-a3b 1": 11,
    "qwen3-30b-a3b 64": 13,
}


@pytest.mark.slow
@pytest.mark.parametrize("pdl", [False, True])
def test_a_layer_is_few_launches_that_do_not_spill(pdl: bool) -> None:
    launches, made = json.loads(run_compiling(PROGRAM, str(pdl))[-1])
    assert launches.keys() == LAUNCHES.keys()
    for name, names in launches.items():
        # Copies to float32 stand for products into it, which only cuBLAS has; 2: the last norm and the logits.
        counted = [one for one in names if one not in ("torch._to_copy", "torch.embedding")]
        assert (len(counted) - 2) / 2 == LAUNCHES[name], names
        assert {one for one in names if one.startswith("torch.")} <= {"torch._to_copy", "torch.embedding", "torch.mm"}
    assert {name for name, *_ in made} == DECODE | EXPERTS
    assert not [name for name, local, *_ in made if local and name in DECODE]
    assert {name for name, _, waits, _ in made if waits} == (DECODE if pdl else set())
    assert {name for name, _, _, ahead in made if ahead} == ({"gemv_kernel"} if pdl else set())
