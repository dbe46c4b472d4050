"""Weights on the GPU and products with them, against the reference backend on the same tensors."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.checkpoint.small_floats import E2M1
from quire.checkpoint.tensor import Tensor
from quire.checkpoint.weights import DummyWeights
from quire.kernels.gpu.activations import ACTIVATIONS
from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.gpu.linear import gemv_key
from quire.kernels.gpu.linear_weights import GPULinear, pack_nibbles
from quire.kernels.gpu.quantize import quantize_rows
from quire.kernels.gpu.tuned_configs import TunedConfigs
from quire.kernels.reference import ReferenceBackend
from quire.kernels.reference.quantize import quantize_rows as plain_rows
from quire.kernels.reference.quantize import round_rows_fp8
from quire.kernels.weight_storage import stored_layout, stored_size
from tests.helpers import stored
from tests.helpers.pretend_gpu import run_compiling
from tests.helpers.quantizers import NF4
from tests.kernels.gpu.common import ACTS, DEVICE
from tests.kernels.scenes import host, normal, round_to

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
QUANTIZATIONS = (None, "int8", "int8-weight-only", "int4", "fp8")
USUAL = {
    (None, "float32"),
    ("int8", "bfloat16"),
    ("int4", "float32"),
    ("fp8", "bfloat16"),
    ("int8-weight-only", "float16"),
}
FORMS = [
    pytest.param(
        quantization, dtype, marks=() if (quantization, dtype) in USUAL or DEVICE == "cuda" else pytest.mark.slow
    )
    for quantization in QUANTIZATIONS
    for dtype in ACTS
]
SOMETIMES = () if DEVICE == "cuda" else pytest.mark.slow  # what the interpreter takes long for


class EveryRow(TunedConfigs):
    """TunedConfigs that send up to four rows of every weight through the kernel for a few rows."""

    def get(self, kernel: str, key: str, default: dict[str, int]) -> dict[str, int]:
        return {"rows": 4} if kernel == "gemv_rows" else default


def pair(
    dtype: str, quantization: str | None = None, *, invariant: bool = False
) -> tuple[GPUBackend, ReferenceBackend]:
    gpu = GPUBackend(dtype, dtype, DEVICE, quantization, batch_invariant=invariant)
    gpu.tuned_configs = EveryRow()
    return gpu, ReferenceBackend(dtype, dtype, quantization=quantization)


def inputs(gpu: GPUBackend, rows: int, width: int, seed: int = 1) -> torch.Tensor:
    return gpu.from_numpy(normal(np.random.default_rng(seed), rows, width)).to(gpu.act)


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the distance relative to the size of what is wanted."""
    assert got.shape == want.shape
    return float((got.float().cpu() - want).norm() / want.norm())


def agrees(
    gpu: GPUBackend, oracle: ReferenceBackend, parts: list[Tensor], rows: tuple[int, ...], biased: bool = False
) -> GPULinear:
    """Compare products with a weight of these parts, plain and gated."""
    width = parts[0].shape[1]
    biases = [host(normal(np.random.default_rng(9), part.shape[0])) for part in parts] if biased else None
    weight, plain = gpu.pack_linear(parts, biases), oracle.pack_linear(parts, biases)
    for count in rows:
        x = inputs(gpu, count, width, count)
        y = gpu.linear(x, weight)
        assert y.dtype == gpu.act
        assert distance(y, oracle.linear(x.float().cpu(), plain)) < TOLERANCE[gpu.dtype], count
    return weight


@pytest.mark.parametrize(("quantization", "dtype"), FORMS)
def test_products_agree_with_the_reference(quantization: str | None, dtype: str) -> None:
    rng = np.random.default_rng(0)
    gpu, oracle = pair(dtype, quantization)
    agrees(gpu, oracle, [host(normal(rng, 24, 72)), host(normal(rng, 7, 72))], (2, 5), biased=True)


@pytest.mark.parametrize("rows", [3, pytest.param(4, marks=SOMETIMES)])
def test_products_of_three_and_four_rows(rows: int) -> None:
    rng = np.random.default_rng(0)
    for quantization in (None, "int4"):
        gpu, oracle = pair("float16", quantization)
        agrees(gpu, oracle, [host(normal(rng, 5, 96))], (rows,))


@pytest.mark.parametrize(
    ("rows", "quantization"),
    [(1, None), (4, None), (6, None), (2, "int4"), pytest.param(4, "int4", marks=SOMETIMES), (6, "int8")],
)
def test_gated_products(rows: int, quantization: str | None) -> None:
    rng = np.random.default_rng(0)
    gpu, oracle = pair("float16", quantization)
    parts, biases = [host(normal(rng, 12, 72)) for _ in range(2)], [host(normal(rng, 12)) for _ in range(2)]
    x = inputs(gpu, rows, 72)
    got = gpu.gated_linear(x, gpu.pack_linear(parts, biases, gated=True), "swiglu_oai")
    want = oracle.gated_linear(x.float().cpu(), oracle.pack_linear(parts, biases, gated=True), "swiglu_oai")
    assert distance(got, want) < 3e-3


@pytest.mark.parametrize("kind", [kind for kind in ACTIVATIONS if kind != "none"])
def test_gated_activations(kind: str) -> None:
    gpu, oracle = pair("float32")
    x = 3 * inputs(gpu, 5, 2 * 37)
    x[0, :4] = torch.tensor([-90.0, 90.0, -20.0, 0.0])
    want = oracle.gated_activation(x.cpu(), kind)
    torch.testing.assert_close(gpu.gated_activation(x, kind).cpu(), want, rtol=2e-5, atol=1e-6)


def integer_weight(bits: int, shape: tuple[int, int], group: int, *, zeros: bool) -> Tensor:
    rng = np.random.default_rng(2)
    groups = -(-shape[1] // group)
    q = rng.integers(0, 16, shape).astype(np.uint8) if bits == 4 else rng.integers(-128, 128, shape).astype(np.int8)
    points = rng.integers(0, 16, (shape[0], groups)) if bits == 4 else rng.integers(-99, 99, (shape[0], groups))
    scales = round_to(rng.uniform(0.5, 2, (shape[0], groups)).astype(np.float32), "float16")
    return stored.integers(q, scales, points if zeros else None, group)


@pytest.mark.parametrize(
    ("bits", "group", "zeros"), [(4, 32, False), (4, 999, True), (8, 16, True), (8, 999, False), (4, 128, True)]
)
def test_stored_integers(bits: int, group: int, zeros: bool) -> None:
    gpu, oracle = pair("float16")
    tensor = integer_weight(bits, (9, 304), group, zeros=zeros)
    layout = stored_layout([tensor], "float16")
    assert layout is not None
    weight = agrees(gpu, oracle, [tensor], (1, 6))
    size = stored_size(layout, weight.outputs, 304)
    assert weight.kind == f"int{bits}"
    assert weight.nbytes <= size.data + size.rest + 9 * 4


def test_integers_in_another_order() -> None:
    rng = np.random.default_rng(3)
    tensor = integer_weight(4, (6, 128), 32, zeros=True)
    group_of = rng.permutation(np.arange(128) // 32)
    assert tensor.layout is not None
    ordered = replace(tensor, group_of=group_of, whole_layout=tensor.layout._replace(ordered=True))
    gpu, oracle = pair("float16")
    assert agrees(gpu, oracle, [ordered], (1, 6)).order is not None
    weight = gpu.pack_linear([ordered, replace(ordered, group_of=group_of[::-1])])
    assert weight.kind == "float", "columns that no order of inputs fits"
    assert torch.equal(weight.data[:6].float().cpu(), torch.from_numpy(ordered.to_float32()).half().float())


def code_weight(kind: str, shape: tuple[int, int], group: int, table: np.ndarray | None) -> Tensor:
    rng = np.random.default_rng(4)
    q = rng.integers(0, {"table": 16, "e4m3": 0x7F, "e5m2": 0x7C}[kind], shape).astype(np.uint8)
    if kind != "table":
        q |= rng.integers(0, 2, shape).astype(np.uint8) << 7
    scales = rng.uniform(0.5, 2, (shape[0], -(-shape[1] // group))).astype(np.float32)
    # Products must stay within what a float16 holds.
    return stored.codes(q, scales / (4096 if kind == "e5m2" else 64), group, kind, table)


@pytest.mark.parametrize(
    ("kind", "group"),
    [("e4m3", 999), ("e4m3", 128), ("e5m2", 48), ("table", 16), ("table", 32), ("table", 64)],
)
def test_stored_codes(kind: str, group: int) -> None:
    table = None if kind != "table" else np.array(E2M1 if group < 64 else NF4, np.float32)
    gpu, oracle = pair("float16")
    tensor = code_weight(kind, (9, 208), group, table)
    assert agrees(gpu, oracle, [tensor], (1, 6)).kind == kind
    wide = pair("float32")
    assert agrees(*wide, [tensor], (2,)).kind == kind


def test_small_floats_where_the_chip_has_no_instruction_for_them() -> None:
    gpu, oracle = pair("float16")
    gpu.capability = (8, 0)
    agrees(gpu, oracle, [code_weight("e4m3", (5, 64), 32, None)], (1, 5))
    gpu, oracle = pair("float16", "fp8")
    gpu.capability = (8, 0)
    agrees(gpu, oracle, [host(normal(np.random.default_rng(0), 5, 64))], (1, 5))


def test_a_code_that_is_no_number_makes_its_row_no_number() -> None:
    q = np.full((3, 64), 0x38, np.uint8)
    q[1, 40] = 0x7F
    gpu, _ = pair("float16")
    weight = gpu.pack_linear([stored.codes(q, np.ones((3, 2), np.float32), 32, "e4m3")])
    for rows in (1, 5):
        y = gpu.linear(torch.ones(rows, 64, dtype=gpu.act, device=DEVICE), weight)
        assert y.isnan().tolist() == [[False, True, False]] * rows


@pytest.mark.parametrize(
    "quantization",
    [None, "int8", "fp8", pytest.param("int4", marks=SOMETIMES), pytest.param("int8-weight-only", marks=SOMETIMES)],
    ids=str,
)
def test_tables(quantization: str | None) -> None:
    gpu, oracle = pair("float16", quantization)
    table = [host(normal(np.random.default_rng(0), 20, 72))]
    weight, plain = gpu.pack_linear(table, table=True), oracle.pack_linear(table, table=True)
    ids = torch.tensor([3, 19, 0, 3], dtype=torch.int32)
    assert distance(gpu.embedding(ids.to(DEVICE), weight), oracle.embedding(ids, plain)) < 1e-3
    for rows in (2, 5):
        x = inputs(gpu, rows, 72)
        y = gpu.linear(x, weight)
        assert y.dtype == torch.float32
        assert distance(y, oracle.linear(x.float().cpu(), plain)) < 2e-6


def test_a_table_of_stored_integers() -> None:
    gpu, oracle = pair("float16")
    tensor = integer_weight(4, (20, 96), 32, zeros=True)
    weight, ids = gpu.pack_linear([tensor], table=True), torch.tensor([7, 0])
    assert weight.kind == "int4"
    want = oracle.embedding(ids, oracle.pack_linear([tensor], table=True))
    assert distance(gpu.embedding(ids.to(DEVICE), weight), want) < 1e-3


def test_exact_weights_are_floats_and_their_products_float32() -> None:
    gpu, oracle = pair("float16", "int4")
    parts = [host(normal(np.random.default_rng(0), 8, 40))]
    weight = gpu.pack_linear(parts, exact=True)
    x = inputs(gpu, 6, 40)
    y = gpu.linear(x, weight)
    assert (weight.kind, y.dtype) == ("float", torch.float32)
    assert distance(y, oracle.linear(x.float().cpu(), oracle.pack_linear(parts, exact=True))) < 1e-6


@pytest.mark.parametrize("invariant", [False, True])
def test_heads(invariant: bool) -> None:
    gpu, oracle = pair("float16", invariant=invariant)
    matrices = [host(normal(np.random.default_rng(h), 24, 40)) for h in range(3)]
    for x in (inputs(gpu, 5 * 3, 40), inputs(gpu, 5 * 3, 52)[:, 8:48]):  # also of rows that are longer
        got = gpu.head_linear(x, gpu.pack_heads(matrices))
        assert distance(got, oracle.head_linear(x.float().cpu(), oracle.pack_heads(matrices))) < 2e-3


@pytest.mark.parametrize(
    "quantization", [None, pytest.param("int8", marks=SOMETIMES), pytest.param("int4", marks=SOMETIMES)], ids=str
)
def test_bits_of_a_row_where_batches_must_not_matter(quantization: str | None) -> None:
    gpu, oracle = pair("float16", quantization, invariant=True)
    rng = np.random.default_rng(0)
    weight = agrees(gpu, oracle, [host(normal(rng, 17, 80))], (1, 70))
    x = inputs(gpu, 70, 80)
    whole = gpu.linear(x, weight)
    for row in (0, 69):
        assert torch.equal(gpu.linear(x[row : row + 1], weight)[0], whole[row])


@pytest.mark.parametrize("quantization", [None, "int8", pytest.param("int4", marks=SOMETIMES), "fp8"], ids=str)
@pytest.mark.parametrize("rows", [pytest.param(4, marks=SOMETIMES), 6])
def test_rows_that_hold_anything_disturb_no_others(rows: int, quantization: str | None) -> None:
    gpu, _ = pair("float16", quantization)
    weight = gpu.pack_linear([host(normal(np.random.default_rng(0), 8, 64))])
    x = inputs(gpu, rows, 64)
    clean = gpu.linear(x, weight)
    x[-1] = math.nan
    x[-2, 3] = math.inf
    spoilt = gpu.linear(x, weight)
    assert torch.equal(spoilt[:-2], clean[:-2])
    assert not spoilt[-1].isfinite().any()


def test_no_rows() -> None:
    gpu, _ = pair("float16", "int8")
    weight = gpu.pack_linear([host(normal(np.random.default_rng(0), 8, 64))], table=True)
    assert gpu.linear(inputs(gpu, 0, 64), weight).shape == (0, 8)
    assert gpu.embedding(torch.zeros(0, dtype=torch.int64, device=DEVICE), weight).shape == (0, 64)
    assert gpu.gated_activation(inputs(gpu, 0, 8), "silu").shape == (0, 4)


def test_rounding_rows_is_what_the_specification_says() -> None:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(normal(rng, 6, 100) * np.float32(10.0) ** rng.integers(-9, 9, (6, 1)).astype(np.float32))
    x[0], x[1, 5], x[2, 7], x[3] = 0, math.nan, math.inf, 1e-38
    q, scales = quantize_rows(x.to(DEVICE), depth=112)
    want_q, want_scales = plain_rows(x)
    assert torch.equal(q[:, :100].cpu(), want_q)
    assert not q[:, 100:].any()
    torch.testing.assert_close(scales.cpu(), want_scales, rtol=0, atol=0, equal_nan=True)
    codes, scales = quantize_rows(x.to(DEVICE), e4m3=True)
    got = codes.view(torch.float8_e4m3fn).float() * scales[:, None]
    torch.testing.assert_close(got.cpu(), round_rows_fp8(x), rtol=0, atol=0, equal_nan=True)


def test_codes_of_all_sizes_round_as_torch_rounds() -> None:
    x = torch.cat([torch.linspace(-448, 448, 5001), torch.linspace(-0.04, 0.04, 5000), torch.tensor([448.0])])[None]
    codes, scales = quantize_rows(x.to(DEVICE), e4m3=True)
    assert scales.item() == 1
    assert torch.equal(codes.cpu().view(torch.float8_e4m3fn).float(), x.to(torch.float8_e4m3fn).float())


def test_long_rows_are_rounded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.kernels.gpu.quantize.WHOLE", 32)
    x = torch.from_numpy(normal(np.random.default_rng(0), 2, 75))
    order = torch.randperm(75, generator=torch.Generator().manual_seed(1))
    q, scales = quantize_rows(x.to(DEVICE), order=order.to(torch.int32).to(DEVICE), depth=96)
    want, want_scales = plain_rows(x[:, order])
    assert torch.equal(q[:, :75].cpu(), want)
    assert torch.equal(scales.cpu(), want_scales)


def test_nibbles_are_woven_by_sixteen() -> None:
    nibbles = torch.arange(32, dtype=torch.uint8)[None] % 16
    nibbles[0, 16:] = 15 - nibbles[0, 16:]
    assert pack_nibbles(nibbles).tolist() == [[i | (15 - i) << 4 for i in range(16)]]


@pytest.mark.parametrize("shape", [(3, 40), (1200, 1000)])
def test_invented_weights_are_those_of_the_host(shape: tuple[int, int]) -> None:
    tensor = DummyWeights(5).read("a.weight", shape)
    assert tensor.columns(0, shape[1]) is tensor
    gpu, _ = pair("bfloat16")
    weight = gpu.pack_linear([tensor, tensor])
    assert torch.equal(weight.data.float().cpu(), torch.from_numpy(np.concatenate([tensor.to_float32()] * 2)))
    stack = DummyWeights(5).read("b.weight", (2, 6, 8))
    np.testing.assert_array_equal(stack.matrix(1).to_float32(), stack.to_float32()[1])


def test_weights_pass_through_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.kernels.gpu.linear_weights.PIECE_BYTES", 1000)
    rng = np.random.default_rng(0)
    for quantization in (None, "int8", "int4"):
        gpu, oracle = pair("float16", quantization)
        agrees(gpu, oracle, [host(normal(rng, 13, 64), "bfloat16"), host(normal(rng, 64, 3)).transposed()], (5,))


@pytest.mark.slow
def test_benchmark_cases_run() -> None:
    code = """
from benchmarks.gpu.kernels_linear import FORMS, activation, cases, product, table
from tests.helpers.pretend_gpu import pretend_gpu
from tests.kernels.gpu.compile_linear import backend_for
backend = backend_for((9, 0))
assert len({case.name for case in cases(backend, 4096)}) > 100
with pretend_gpu() as compiled:
    for form in FORMS:
        for rows in (1, 8):
            case = product(backend, "some", form, (64, 128), rows, gated=rows == 1)
            case.run(0)
            assert case.num_bytes > 0
            assert (case.tuning is None) == (form[0] == "float" and rows > 4)
    table(backend, "some", (64, 128), 1).run(0)
    activation(backend, "some", 2, 64).run(0)
assert len(compiled) > 8
"""
    run_compiling(code)


def test_stored_choices_are_heeded() -> None:
    gpu, _ = pair("float16", "int8")
    weight = gpu.pack_linear([host(normal(np.random.default_rng(0), 8, 64))])
    x = inputs(gpu, 2, 64)
    before = gpu.linear(x, weight)
    asked: list[tuple[str, str]] = []

    class Noting(EveryRow):
        def get(self, kernel: str, key: str, default: dict[str, int]) -> dict[str, int]:
            asked.append((kernel, key))
            return {**default, "BN": 2} if kernel == "gemv" else super().get(kernel, key, default)

    gpu.tuned_configs = Noting()
    for _ in range(2):
        torch.testing.assert_close(gpu.linear(x, weight), before)
    asked = [one for one in asked if one[0] != "pdl"]  # of the whole chip, see `pdl.py`
    assert asked == [("gemv_rows", "int8:8x64"), ("gemv", gemv_key(weight, 2, gated=False))], "asked once"
