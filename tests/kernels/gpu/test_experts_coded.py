"""Quantized experts on the GPU: rounded while they are packed, or held as a checkpoint has them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.checkpoint.tensor import Tensor
from quire.errors import ModelError
from quire.kernels.experts import Expert
from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.reference.backend import ReferenceBackend
from tests.helpers import stored
from tests.kernels.gpu.common import DEVICE
from tests.kernels.gpu.test_experts import draw, some_experts

HIDDEN, INNER = 64, 32


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float().cpu() - want).norm() / want.norm())


def compute(gpu: GPUBackend, plain: list[Expert], tokens: int, kind: str = "silu") -> tuple[torch.Tensor, torch.Tensor]:
    """Return what these experts give here, and what the reference says."""
    reference = ReferenceBackend(gpu.dtype, quantization=None if gpu.quantization == "fp8" else gpu.quantization)
    x, ids, weights = draw(0, tokens, len(plain), 2, plain[0].gate.shape[1])
    x = x.to(gpu.act)
    got = gpu.experts(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE), gpu.pack_experts(plain), kind)
    assert got.dtype == gpu.act
    return got, reference.experts(x.float(), ids, weights, reference.pack_experts(plain), kind)


# What is halfway between two integers may go either way, once inputs of the second product differ in a last bit.
@pytest.mark.parametrize(
    ("form", "tolerance"),
    [("int8", 5e-3), ("int4", 5e-3), pytest.param("int8-weight-only", 1e-5, marks=pytest.mark.slow), ("fp8", 0.1)],
)
def test_experts_are_quantized_as_linear_layers_are(form: str, tolerance: float) -> None:
    gpu = GPUBackend("float32", "float32", DEVICE, form)
    got, want = compute(gpu, some_experts(2, 12, 8, bias=True), 3, "swiglu_oai")
    assert difference(got, want) <= tolerance


def some_stored(form: str) -> list[Expert]:
    rng = np.random.default_rng(5)

    def weight(rows: int, inputs: int) -> Tensor:
        scales = rng.uniform(0.01, 0.02, (rows, inputs // 32)).astype(np.float32)
        if form == "zeros":
            q = rng.integers(0, 16, (rows, inputs)).astype(np.uint8)
            return stored.integers(q, scales, rng.integers(5, 10, scales.shape).astype(np.float32), 32)
        if form == "bytes":
            return stored.integers(rng.integers(-127, 128, (rows, inputs)).astype(np.int8), scales[:, :1], None, inputs)
        if form == "table":
            table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
            q = rng.integers(0, 16, (rows, inputs)).astype(np.uint8)
            return stored.codes(q, np.exp2(rng.integers(-6, -4, scales.shape)).astype(np.float32), 32, "table", table)
        q = rng.integers(0, 0x70, (rows, inputs)).astype(np.uint8)
        return stored.codes(q | rng.integers(0, 2, q.shape).astype(np.uint8) << 7, scales / 8, 32, form)

    return [Expert(weight(INNER, HIDDEN), weight(INNER, HIDDEN), weight(HIDDEN, INNER)) for _ in range(2)]


@pytest.mark.parametrize("form", ["zeros", "bytes", "table", "e4m3", "e5m2"])
def test_experts_of_checkpoints_are_held_as_they_are(form: str) -> None:
    gpu = GPUBackend("float16", "float16", DEVICE)
    plain = some_stored(form)
    packed = gpu.pack_experts(plain)
    assert packed.first.kind == {"zeros": "int4", "bytes": "int8"}.get(form, form)
    got, want = compute(gpu, plain, 3)
    assert difference(got, want) <= 8e-3


def test_each_expert_may_have_its_columns_in_an_order_of_its_own() -> None:
    gpu = GPUBackend("float32", "float32", DEVICE, "int8-weight-only")
    packed = gpu.pack_experts(some_experts(2, 12, 8, bias=False))
    x, ids, weights = (array.to(DEVICE) for array in draw(1, 3, 2, 2, 12))
    want = gpu.experts(x, ids, weights, packed, "silu")
    orders = torch.stack([torch.randperm(12, generator=torch.Generator().manual_seed(e)) for e in range(2)])
    for expert, order in enumerate(orders.to(DEVICE)):
        packed.first.data[expert, :, :12] = packed.first.data[expert][:, order]
    packed.first.order = orders.to(DEVICE, torch.int32)
    torch.testing.assert_close(gpu.experts(x, ids, weights, packed, "silu"), want, rtol=1e-5, atol=1e-5)


def test_rows_are_by_themselves_and_unchosen_experts_are_not_read() -> None:
    gpu = GPUBackend("float32", "float32", DEVICE, "int8-weight-only", batch_invariant=True)
    packed = gpu.pack_experts(some_experts(3, 12, 8, bias=False))
    x, _, weights = (array.to(DEVICE) for array in draw(2, 4, 3, 2, 12))
    ids = torch.tensor([[0, 1], [1, 0], [1, 0], [0, 1]], device=DEVICE)
    before = gpu.experts(x, ids, weights, packed, "silu")
    packed.first.row_scales[2], packed.last.row_scales[2] = torch.nan, torch.nan  # type: ignore[index]
    x[1] = torch.nan
    after = gpu.experts(x, ids, weights, packed, "silu")
    torch.testing.assert_close(after[[0, 2, 3]], before[[0, 2, 3]], rtol=0, atol=0)
    assert after[1].isnan().all()
    alone = gpu.experts(x[2:3], ids[2:3], weights[2:3], packed, "silu")
    torch.testing.assert_close(alone[0], before[2], rtol=0, atol=0)


def test_experts_that_differ_in_format_are_refused() -> None:
    mixed = [some_stored("table")[0], some_stored("e4m3")[0]]
    with pytest.raises(ModelError, match="the same for all"):
        GPUBackend("float16", "float16", DEVICE).pack_experts(mixed)
