"""Experts on the GPU against the reference: floats and quantized, one token and many, and rows by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch

from quire.checkpoint.tensor import HostTensor, Tensor
from quire.errors import ModelError
from quire.kernels.experts import Expert
from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.gpu.experts import few_pairs
from quire.kernels.gpu.experts_kernels import sort_pairs
from quire.kernels.reference.backend import ReferenceBackend
from tests.helpers import stored
from tests.kernels.gpu.common import ACTS, DEVICE, mostly_slow
from tests.kernels.scenes import host

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
SIZES = {"three": (3, 2, 40, 24), "one": (1, 1, 16, 16), "many": (5, 3, 70, 35), "whole": (8, 1, 64, 64)}
HIDDEN, INNER = 64, 32  # of quantized experts
KINDS = ("relu", "relu2", "silu", "gelu", "gelu_tanh", "quick_gelu", "sigmoid", "softplus", "swiglu_oai")


def some_experts(number: int, hidden: int, inner: int, bias: bool, dtype: str = "float32") -> list[Expert]:
    rng = np.random.default_rng(number + hidden)
    shapes = [(inner, hidden), (inner, hidden), (hidden, inner)] + ([(inner,), (inner,), (hidden,)] if bias else [])
    return [Expert(*(host(rng.standard_normal(shape) * 0.3, dtype) for shape in shapes)) for _ in range(number)]


def draw(seed: int, tokens: int, number: int, top_k: int, hidden: int) -> tuple[torch.Tensor, ...]:
    """Return x [T, H], ids and weights [T, k], on the host."""
    rng = np.random.default_rng(seed + tokens)
    ids = np.stack([rng.permutation(number)[:top_k] for _ in range(tokens)]) if tokens else np.zeros((0, top_k))
    x, weights = rng.standard_normal((tokens, hidden)), rng.random((tokens, top_k))
    return tuple(map(torch.from_numpy, (x.astype(np.float32), ids.astype(np.int64), weights.astype(np.float32))))


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = TOLERANCE["float32"]) -> None:
    assert got.shape == want.shape
    assert float((got.float().cpu() - want).norm()) <= tolerance * float(want.norm())


def compute(
    gpu: GPUBackend, plain: list[Expert], tokens: int, kind: str = "silu", top_k: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what these experts give here, and what the reference says."""
    reference = ReferenceBackend(gpu.dtype, quantization=None if gpu.quantization == "fp8" else gpu.quantization)
    x, ids, weights = draw(0, tokens, len(plain), top_k, plain[0].gate.shape[1])
    x = x.to(gpu.act)
    got = gpu.experts(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE), gpu.pack_experts(plain), kind)
    assert got.dtype == gpu.act
    return got, reference.experts(x.float(), ids, weights, reference.pack_experts(plain), kind)


def check(dtype: str, sizes: tuple[int, int, int, int], tokens: int, kind: str, bias: bool = False) -> None:
    number, top_k, hidden, inner = sizes
    gpu = GPUBackend(dtype, dtype, DEVICE)
    got, want = compute(gpu, some_experts(number, hidden, inner, bias), tokens, kind, top_k)
    close(got, want, TOLERANCE[dtype])


@pytest.mark.parametrize(
    "case",
    mostly_slow(product(SIZES, ACTS), ("three", "float32"), ("one", "float16"), ("many", "bfloat16")),
)
def test_experts_are_those_of_the_reference(case: tuple[str, str]) -> None:
    sizes, dtype = case
    for tokens in (0, 1, 17) if sizes == "three" else (20,):
        check(dtype, SIZES[sizes], tokens, "silu")


@pytest.mark.parametrize("kind", mostly_slow(KINDS, "relu2", "swiglu_oai"))
@pytest.mark.parametrize("tokens", [1, 6])
def test_every_kind_and_biases(tokens: int, kind: str) -> None:
    check("float32", (3, 2, 20, 12), tokens, kind, bias=True)


@pytest.mark.parametrize("size", mostly_slow([16, 32, 64, 128], 16, 128))
def test_pairs_are_sorted_by_expert_and_stay_in_order(size: int) -> None:
    for tokens, top_k, number in ((1, 1, 1), (5, 2, 3), (150, 4, 7)):
        _, ids, _ = draw(1, tokens, number, top_k, 1)
        ids[:, 0] = torch.where(ids[:, 0] == number - 1, 0, ids[:, 0]) if top_k == 1 else ids[:, 0]
        blocks = sort_pairs(ids.to(DEVICE), number, size)
        pairs, owners = [], []
        for expert in range(number):
            own = (ids.flatten() == expert).nonzero().flatten().tolist()
            count = -(-len(own) // size)
            pairs += own + [tokens * top_k] * (count * size - len(own))
            owners += [expert] * count
        assert blocks.pairs[: len(pairs)].tolist() == pairs
        assert blocks.experts.tolist() == owners + [-1] * (len(blocks.experts) - len(owners))


def test_many_pairs_are_sorted_in_several_turns() -> None:
    _, ids, _ = draw(2, 1100, 9, 4, 1)
    blocks = sort_pairs(ids.to(DEVICE), 9, 128)
    real = blocks.pairs[: int((blocks.experts >= 0).sum()) * 128].cpu()
    real = real[real < ids.numel()].long()
    assert real.tolist() == torch.argsort(ids.flatten(), stable=True).tolist()


def backend(invariant: bool = False) -> GPUBackend:
    made = GPUBackend("float32", "float32", DEVICE)
    made.batch_invariant = invariant
    return made


def test_few_tokens_and_many_give_the_same() -> None:
    gpu = backend()
    packed = gpu.pack_experts(some_experts(16, 40, 24, bias=True))
    x, ids, weights = (array.to(DEVICE) for array in draw(3, 2, 16, 2, 40))
    assert few_pairs(2, 2, 16) and not few_pairs(3, 2, 16)
    close(gpu.experts(x, ids, weights, packed, "silu"), gpu._experts_by_block(x, ids, weights, packed, 2).cpu())


@pytest.mark.parametrize("tokens", mostly_slow([2, 40, 70], 2, 40))
def test_invariant_rows_have_the_same_bits_in_any_batch(tokens: int) -> None:
    gpu = backend(invariant=True)
    packed = gpu.pack_experts(some_experts(4, 24, 16, bias=True))
    x, ids, weights = (array.to(DEVICE) for array in draw(4, tokens, 4, 2, 24))
    together = gpu.experts(x, ids, weights, packed, "silu")
    for row in (0, tokens // 2, tokens - 1):
        own = slice(row, row + 1)
        alone = gpu.experts(x[own], ids[own], weights[own], packed, "silu")
        torch.testing.assert_close(alone, together[own], rtol=0, atol=0)


@pytest.mark.parametrize("tokens", [2, 5])
def test_rows_of_nobody_disturb_no_other(tokens: int) -> None:
    gpu = backend()
    packed = gpu.pack_experts(some_experts(16, 24, 16, bias=False))
    x, ids, weights = (array.to(DEVICE) for array in draw(5, tokens, 16, 2, 24))
    before = gpu.experts(x, ids, weights, packed, "silu")
    x[-1], weights[-1], ids[-1] = torch.nan, torch.nan, ids[0].clone()
    after = gpu.experts(x, ids, weights, packed, "silu")
    torch.testing.assert_close(after[:-1], before[:-1], rtol=1e-6, atol=1e-6)
    assert after[-1].isnan().all()


@pytest.mark.parametrize("tokens", [1, 7])
def test_experts_that_nobody_chose_are_not_read(tokens: int) -> None:
    gpu = backend()
    packed = gpu.pack_experts(some_experts(6, 24, 16, bias=True))
    x, _, weights = (array.to(DEVICE) for array in draw(6, tokens, 6, 2, 24))
    ids = torch.tensor([[4, 1]] * tokens, device=DEVICE)
    before = gpu.experts(x, ids, weights, packed, "silu")
    for array in (packed.first.data, packed.last.data, packed.first.bias, packed.last.bias):
        assert array is not None
        array[[0, 2, 3, 5]] = torch.nan
    torch.testing.assert_close(gpu.experts(x, ids, weights, packed, "silu"), before, rtol=0, atol=0)


def test_inputs_may_be_wide_and_be_views() -> None:
    gpu = GPUBackend("float16", "float16", DEVICE)
    packed = gpu.pack_experts(some_experts(3, 24, 16, bias=False))
    x, ids, weights = (array.to(DEVICE) for array in draw(7, 5, 3, 2, 30))
    want = gpu.experts(x[:, 3:27].contiguous().half(), ids, weights, packed, "silu")
    for view in (x[:, 3:27], x.T.contiguous().T[:, 3:27]):
        torch.testing.assert_close(gpu.experts(view, ids, weights, packed, "silu"), want, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_experts_are_packed_one_by_one_from_any_float(dtype: str) -> None:
    plain = some_experts(3, 20, 12, bias=True, dtype=dtype)
    turned = [expert._replace(down=HostTensor(expert.down.array.T.copy(), dtype).transposed()) for expert in plain]
    gpu = backend()

    def each() -> Iterator[Expert]:
        yield from turned

    for given in (plain, turned, each()):
        packed = gpu.pack_experts(given)
        for number, expert in enumerate(plain):
            parts = [expert.gate, expert.up, expert.down, expert.gate_bias, expert.up_bias, expert.down_bias]
            own = [*packed.first.data[number].chunk(2), packed.last.data[number]]
            assert packed.first.bias is not None and packed.last.bias is not None
            own += [*packed.first.bias[number].chunk(2), packed.last.bias[number]]
            for part, made in zip(parts, own, strict=True):
                assert part is not None
                np.testing.assert_array_equal(made.cpu().numpy(), part.to_float32())


def test_experts_that_differ_in_size_are_refused() -> None:
    with pytest.raises(ModelError, match="the same for all"):
        backend().pack_experts(some_experts(1, 16, 16, bias=False) + some_experts(1, 16, 32, bias=False))


def test_ranks_beyond_the_first_have_no_bias_of_the_whole() -> None:
    plain = [expert._replace(down_bias=None) for expert in some_experts(3, 20, 12, bias=True)]
    gpu, reference = backend(), ReferenceBackend()
    x, ids, weights = draw(8, 4, 3, 2, 20)
    got = gpu.experts(x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE), gpu.pack_experts(plain), "silu")
    close(got, reference.experts(x, ids, weights, reference.pack_experts(plain), "silu"))


# Quantized experts: rounded while they are packed, or held as a checkpoint has them


# What is halfway between two integers may go either way, once inputs of the second product differ in a last bit.
@pytest.mark.parametrize(
    ("form", "tolerance"),
    [("int8", 5e-3), ("int4", 5e-3), pytest.param("int8-weight-only", 1e-5, marks=pytest.mark.slow), ("fp8", 0.1)],
)
def test_experts_are_quantized_as_linear_layers_are(form: str, tolerance: float) -> None:
    gpu = GPUBackend("float32", "float32", DEVICE, form)
    got, want = compute(gpu, some_experts(2, 12, 8, bias=True), 3, "swiglu_oai")
    close(got, want, tolerance)


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
    close(got, want, 8e-3)


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
