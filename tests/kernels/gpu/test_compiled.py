"""Kernels compiled for real GPUs at the shapes of real models: they fit, do not spill, and use the matrix units."""

from __future__ import annotations

import pytest

from tests.helpers.pretend_gpu import MAX_SHARED, Resources, compile_in_child, run_compiling

pytestmark = pytest.mark.slow
BENCHMARKS = """
import importlib, sys
from tests.helpers.pretend_gpu import pretend_gpu
from tests.kernels.gpu.compile_attention import backend_of
cases = importlib.import_module(f"benchmarks.gpu.kernels_{sys.argv[1]}").cases
names = set()
with pretend_gpu():
    for case in cases(backend_of("bfloat16", "bfloat16", (9, 0)), int(sys.argv[2])):
        for number in range(2):
            case.run(number)
        assert case.num_bytes > 0 and case.name not in names
        names.add(case.name)
print(len(names))
"""
ROUNDING = """
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
# Bytes a thread that experts' and adapters' kernels may have in local memory: a frame at most on the chip that tiles
# were chosen for; before it had asynchronous products, wide tiles put some of their addresses aside.
MAX_LOCAL = {90: 8, 80: 160}
CAPABILITIES = pytest.mark.parametrize("capability", [90, 80])


def compiled(topic: str, capability: int, function: str = "launch") -> list[Resources]:
    """Return what the kernels of a topic take, which all fit into shared memory."""
    found = compile_in_child(f"tests.kernels.gpu.compile_{topic}:{function}", capability)
    assert found and all(one.shared <= MAX_SHARED[capability] for one in found)
    return found


@CAPABILITIES
def test_attention(capability: int) -> None:
    made = compiled("attention", capability)
    assert {one.name for one in made} == {"attention_kernel", "join_kernel", "write_kernel", "rotary_write_kernel"}
    assert not [one for one in made if one.local]
    attention = [one for one in made if one.name == "attention_kernel"]
    assert all(one.matrix_unit for one in attention)
    if capability == 90:  # tiles of prompts have 8 warps there
        assert {one.matrix_unit for one in attention if one.num_warps == 8} == {"wgmma"}


@CAPABILITIES
@pytest.mark.parametrize("function", ["few", "many", "rest"])
def test_linear(capability: int, function: str) -> None:
    made = compiled("linear", capability, function)
    assert all(one.local <= 16 and (one.name == "gemm_kernel") == bool(one.matrix_unit) for one in made)
    large = {one.matrix_unit for one in made if one.name == "gemm_kernel" and one.num_warps == 8}
    assert capability < 90 or large <= {"wgmma"}


@CAPABILITIES
@pytest.mark.parametrize("topic", ["experts:launch", "experts:launch_coded", "lora:launch"])
def test_experts_and_adapters(capability: int, topic: str) -> None:
    name, _, function = topic.partition(":")
    made = compiled(name, capability, function)
    assert all(one.local <= MAX_LOCAL[capability] for one in made)
    assert all(one.matrix_unit for one in made if one.name in ("grouped_gemm_kernel", "coded_kernel"))
    assert capability < 90 or any(one.matrix_unit == "wgmma" for one in made)


@CAPABILITIES
@pytest.mark.parametrize("topic", ["rows", "states", "latent"])
def test_rows_states_and_latent_attention(topic: str, capability: int) -> None:
    made = compiled(topic, capability)
    products = {"rows": set(), "states": {"prepare_kernel", "advance_kernel"}, "latent": {"latent_attention_kernel"}}
    assert {one.name for one in made if one.matrix_unit} == products[topic]
    if capability == 90:  # tiles were chosen for it; before, kernels need only fit
        assert not [one for one in made if one.local]
        assert {one.name for one in made if one.matrix_unit == "wgmma"} == products[topic]


@CAPABILITIES
def test_sampling(capability: int) -> None:
    made = compiled("sampling", capability)
    assert {"search_pieces_kernel", "sample_rows_kernel", "largest_parts", "sum_parts"} <= {one.name for one in made}
    assert all(one.local == 0 and one.shared <= 48 * 1024 for one in made)


def test_moving_blocks() -> None:
    made = [one for one in compiled("block_move", 90) if one.name == "move_blocks"]
    assert len(made) == 4 and not any(one.local for one in made)


def test_no_rounding_is_left_out() -> None:
    """Products and sums of kernels that round to 8 bits are rounded one by one, as in the reference."""
    names = ["quantize_rows_kernel"] * 2 + ["rotary_kernel"] + ["rotary_write_kernel"] * 2 + ["write_kernel"] * 2
    assert sorted(run_compiling(ROUNDING)) == [f"{name} False" for name in names]


@pytest.mark.parametrize("topic", ["attention 64", "rows 256", "latent 256", "experts 16", "lora 16"])
def test_benchmarks_launch_what_they_measure(topic: str) -> None:
    assert int(run_compiling(BENCHMARKS, *topic.split())[-1]) >= 4
