"""Norms, rotation and activations on the GPU against the reference, on rows that lie inside wider ones."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.reference.backend import ACTIVATIONS, ReferenceBackend
from tests.kernels.gpu.common import ACTS, DEVICE, mostly_slow

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
REFERENCE = ReferenceBackend()


def backend_of(act: str) -> GPUBackend:
    return GPUBackend(act, act, DEVICE)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inside(x: torch.Tensor, dtype: torch.dtype, left: int = 3, right: int = 5) -> torch.Tensor:
    """Return x [T, N] on the device as a view of wider rows that are NaN elsewhere."""
    wide = torch.full((x.shape[0], left + x.shape[1] + right), math.nan, dtype=dtype)
    wide[:, left : left + x.shape[1]] = x
    return wide.to(DEVICE)[:, left : left + x.shape[1]]


def close(got: torch.Tensor, want: torch.Tensor, act: str) -> None:
    got = got.float().cpu()
    assert got.shape == want.shape and torch.isfinite(got).all()
    assert float((got - want).norm()) <= TOLERANCE[act] * float(want.norm())


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize(("tokens", "pieces", "width"), [(1, 1, 70), (5, 3, 16), (33, 2, 8), (3, 1, 1500), (2, 1, 1)])
def test_each_piece_of_a_row_is_normed(tokens: int, pieces: int, width: int, act: str) -> None:
    backend, weight = backend_of(act), normal(width, seed=1)
    for dtype in {backend.act, torch.float32}:
        x = inside(normal(tokens, pieces * width), dtype)
        got = backend.rms_norm(x, weight.to(DEVICE), 1e-5)
        assert got.dtype == backend.act
        close(got, REFERENCE.rms_norm(x.float().cpu(), weight, 1e-5), act)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (7, 70), (2, 1030)])
def test_sums_are_kept_and_normed_as_they_are_kept(tokens: int, width: int, act: str) -> None:
    backend, weight = backend_of(act), normal(width, seed=1)
    x, residual = inside(normal(tokens, width), backend.act), inside(normal(tokens, width, seed=2), backend.act)
    want = (residual.float() + x.float()).to(backend.act)
    got = backend.add_rms_norm(x, residual, weight.to(DEVICE), 1e-6)
    torch.testing.assert_close(residual, want, rtol=0, atol=0)
    close(got, REFERENCE.rms_norm(want.float().cpu(), weight, 1e-6), act)
    assert torch.isnan(x._base if x._base is not None else x).any(), "what is beside rows was not touched"


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (9, 70), (2, 1030)])
def test_rows_are_normed_around_their_mean(tokens: int, width: int, act: str) -> None:
    backend, weight, bias = backend_of(act), normal(width, seed=1), normal(width, seed=2)
    x = inside(normal(tokens, width) + 50, torch.float32)
    for shift in (None, bias):
        got = backend.layer_norm(x, weight.to(DEVICE), None if shift is None else shift.to(DEVICE), 1e-5)
        close(got, REFERENCE.layer_norm(x.cpu(), weight, shift, 1e-5), act)


def test_rows_do_not_know_of_each_other() -> None:
    backend, weight = backend_of("float32"), normal(24, seed=1).to(DEVICE)
    x = normal(37, 48).to(DEVICE)
    whole = backend.rms_norm(x, weight, 1e-5)
    x[5:20] = math.nan
    alone = torch.cat([backend.rms_norm(x[:5], weight, 1e-5), backend.rms_norm(x[20:], weight, 1e-5)])
    torch.testing.assert_close(alone, torch.cat([whole[:5], whole[20:]]), rtol=0, atol=0)
    together = backend.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(together[20:], whole[20:], rtol=0, atol=0)


ROTATED = [(1, 5, 1, 16, 16), (9, 3, 2, 20, 12), (40, 2, 1, 34, 34)]  # tokens, heads, KV heads, size, part of it
ROTATIONS = mostly_slow(
    product(ACTS, [False, True], ROTATED),
    *[("float32", False, ROTATED[0]), ("bfloat16", True, ROTATED[1]), ("float16", False, ROTATED[1])],
)


@pytest.mark.parametrize("case", ROTATIONS)
def test_queries_and_keys_are_rotated_where_they_are(case: tuple[str, bool, tuple[int, int, int, int, int]]) -> None:
    act, interleaved, (tokens, heads, kv_heads, size, rotated) = case
    backend = backend_of(act)
    angles = normal(50, rotated // 2) * 3
    table = torch.cat([angles.cos(), angles.sin()], dim=1).contiguous()
    positions = torch.randint(0, 50, (tokens,), generator=torch.Generator().manual_seed(1))
    q, k = inside(normal(tokens, heads * size), backend.act), inside(normal(tokens, kv_heads * size), backend.act)
    wanted = q.float().cpu(), k.float().cpu()
    REFERENCE.rotary_embedding(positions, *wanted, table, size, interleaved)
    backend.rotary_embedding(positions.to(DEVICE), q, k, table.to(DEVICE), size, interleaved)
    for got, want in zip((q, k), wanted):
        close(got, want, act)


@pytest.mark.filterwarnings("ignore:overflow")  # of numpy, in the interpreter; it ends in the right limit
@pytest.mark.parametrize("act", mostly_slow(ACTS, "bfloat16"))
@pytest.mark.parametrize("kind", sorted(ACTIVATIONS))
def test_activations_are_those_of_the_reference(kind: str, act: str) -> None:
    backend = backend_of(act)
    x = inside(torch.cat([normal(5, 70), torch.linspace(-30, 30, 5)[:, None]], dim=1), backend.act)
    got = backend.activation(x, kind)
    assert got.dtype == backend.act
    close(got, REFERENCE.activation(x.float().cpu(), kind), act)


def test_logits_are_bounded_softly_where_they_are() -> None:
    backend = backend_of("float16")
    values = torch.cat([normal(3, 40) * 60, torch.tensor([[1e-4], [500.0], [-500.0]])], dim=1)
    x = inside(values, torch.float32)
    backend.softcap(x, 30.0)
    torch.testing.assert_close(x.cpu(), 30 * torch.tanh(values.double() / 30).float(), rtol=2e-6, atol=0)


def test_rows_are_taken_and_no_rows_are_no_trouble() -> None:
    backend = backend_of("float32")
    x = inside(normal(6, 5), torch.float32)
    got = backend.take_rows(x, torch.tensor([4, 0, 4], device=DEVICE))
    torch.testing.assert_close(got, x[[4, 0, 4]])
    none, weight = x[:0], torch.ones(5, device=DEVICE)
    table = torch.ones(3, 4, device=DEVICE)
    backend.rotary_embedding(torch.zeros(0, dtype=torch.int64, device=DEVICE), none, none, table, 5, False)
    assert backend.rms_norm(none, weight, 1e-5).shape == backend.activation(none, "silu").shape == (0, 5)
    assert backend.layer_norm(none, weight, None, 1e-5).shape == (0, 5)
