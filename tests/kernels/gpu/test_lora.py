"""LoRA ops on the GPU against the reference: a row gets what its adapter makes of it, and nothing of any other's."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.lora import LoRAChange, LoRARows
from quire.kernels.reference.backend import ReferenceBackend
from tests.kernels.gpu.common import ACTS, DEVICE, mostly_slow
from tests.kernels.scenes import normal

SLOTS, DEPTH, SIZES = 3, 37, [70, 8, 19]
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
Parts = list[LoRAChange | None]


def rows_of(slots: np.ndarray, device: str, num_slots: int = SLOTS) -> LoRARows:
    """Return the rows of these slots, int64 [T]; what nobody should read in the order is out of range."""
    order = np.argsort(slots, kind="stable")
    order = order[slots[order] >= 0]
    starts = np.searchsorted(slots[order], np.arange(num_slots + 1)).astype(np.int64)
    order = np.concatenate([order, np.full(len(slots) - len(order), 1 << 40)])
    return LoRARows(*(torch.from_numpy(array).to(device) for array in (slots, order, starts)))


def adapters(seed: int, ranks: tuple[int, int, int, int] = (16, 3, 1, 5)) -> list[Parts]:
    """Return what is in each slot: all parts, some, and none."""
    rng = np.random.default_rng(seed)

    def change(size: int, rank: int) -> LoRAChange:
        return LoRAChange(normal(rng, rank, DEPTH) * 0.2, normal(rng, size, rank))

    first, second, third, fourth = ranks
    return [[change(70, first), change(8, second), change(19, third)], [None, change(8, fourth), None], [None] * 3]


def gpu(dtype: str = "float32", invariant: bool = False) -> GPUBackend:
    made = GPUBackend(dtype, dtype, DEVICE)
    made.batch_invariant = invariant
    return made


def close(got: torch.Tensor, want: torch.Tensor, dtype: str = "float32") -> None:
    assert float((got.float().cpu() - want).norm()) <= TOLERANCE[dtype] * float(want.norm())


def check(dtype: str, tokens: int, max_rank: int, held: list[Parts], wide: bool = False) -> None:
    """Compare `lora` with the reference's, y being a view of a wider array, float32 if `wide`."""
    mine, reference, rng = gpu(dtype), ReferenceBackend(dtype), np.random.default_rng(tokens)
    own = rng.integers(-1, SLOTS, tokens)
    x, y = (torch.from_numpy(normal(rng, tokens, width)).to(mine.act) for width in (DEPTH, 103))
    got, expected = (y.float() if wide else y.clone()).to(DEVICE), y.float()[:, 3:100]
    for backend, out, given in ((mine, got[:, 3:100], x.to(DEVICE)), (reference, expected, x.float())):
        slots = backend.new_lora_slots(SLOTS, max_rank, SIZES)
        for slot, parts in enumerate(held):
            backend.set_lora(slots, slot, [None if part is None else backend.pack_lora(part) for part in parts])
        backend.lora(out, given, slots, rows_of(own, DEVICE if backend is mine else "cpu"))
    close(got[:, 3:100], expected, dtype)
    untouched = torch.from_numpy(own) < 0
    torch.testing.assert_close(got[:, :3].cpu().float(), y[:, :3].float(), rtol=0, atol=0)
    torch.testing.assert_close(got.cpu().float()[untouched], y.float()[untouched], rtol=0, atol=0)


@pytest.mark.parametrize(
    "case",
    mostly_slow(product(ACTS, (0, 1, 5, 20, 33)), ("float32", 0), ("float16", 1), ("float32", 5), ("bfloat16", 20)),
)
def test_rows_get_what_their_adapters_make_of_them(case: tuple[str, int]) -> None:
    dtype, tokens = case
    check(dtype, tokens, 16, adapters(0), wide=tokens in (5, 33))


@pytest.mark.parametrize(
    ("dtype", "ranks"),
    [("float16", (100, 33, 64, 17)), pytest.param("float32", (256, 1, 2, 70), marks=pytest.mark.slow)],
)
def test_ranks_of_all_sizes(dtype: str, ranks: tuple[int, int, int, int]) -> None:
    check(dtype, 4, max(ranks), adapters(1, ranks))


@pytest.mark.slow
def test_steps_of_many_rows() -> None:
    check("float16", 260, 16, adapters(3))


def put(backend: GPUBackend, held: list[Parts], **options: int) -> object:
    slots = backend.new_lora_slots(len(held), 16, SIZES, **options)
    for slot, parts in enumerate(held):
        backend.set_lora(slots, slot, [None if part is None else backend.pack_lora(part) for part in parts])
    return slots


def test_an_adapter_that_is_exchanged_is_seen_through_the_same_memory() -> None:
    mine, held = gpu(), adapters(4)
    slots = put(mine, held)
    place = slots.table.data_ptr()  # type: ignore[attr-defined]
    x, own = torch.from_numpy(normal(np.random.default_rng(0), 2, DEPTH)).to(DEVICE), np.array([0, 0])

    def result() -> torch.Tensor:
        y = torch.zeros(2, sum(SIZES), device=DEVICE)
        mine.lora(y, x, slots, rows_of(own, DEVICE))
        return y

    before, packed = result(), [None if part is None else mine.pack_lora(part) for part in adapters(5)[0]]
    mine.set_lora(slots, 0, packed)
    assert not torch.equal(result(), before)
    mine.set_lora(slots, 0, [None] * 3)
    assert not result().any()
    mine.set_lora(slots, 0, [mine.pack_lora(part) for part in held[0] if part is not None])
    torch.testing.assert_close(result(), before, rtol=0, atol=0)
    assert slots.table.data_ptr() == place  # type: ignore[attr-defined]


def test_rows_of_nobody_and_of_others_disturb_no_row() -> None:
    mine = gpu()
    slots, rng = put(mine, adapters(6)), np.random.default_rng(1)
    own = np.array([0, 1, 0, -1, 1, 0])
    x = torch.from_numpy(normal(rng, 6, DEPTH)).to(DEVICE)
    before = torch.zeros(6, sum(SIZES), device=DEVICE)
    mine.lora(before, x, slots, rows_of(own, DEVICE))
    x[2:4] = torch.nan
    after = torch.zeros(6, sum(SIZES), device=DEVICE)
    mine.lora(after, x, slots, rows_of(own, DEVICE))
    kept = [0, 1, 3, 4, 5]
    torch.testing.assert_close(after[kept], before[kept], rtol=0, atol=0)
    assert after[2].isnan().all()


def test_invariant_rows_have_the_same_bits_in_any_batch() -> None:
    mine = gpu(invariant=True)
    slots, rng = put(mine, adapters(7)), np.random.default_rng(2)
    x, own = torch.from_numpy(normal(rng, 40, DEPTH)).to(DEVICE), rng.integers(-1, SLOTS, 40)
    together = torch.zeros(40, sum(SIZES), device=DEVICE)
    mine.lora(together, x, slots, rows_of(own, DEVICE))
    for row in (0, 20, 39):
        alone = torch.zeros(1, sum(SIZES), device=DEVICE)
        mine.lora(alone, x[row : row + 1], slots, rows_of(own[row : row + 1], DEVICE))
        torch.testing.assert_close(alone[0], together[row], rtol=0, atol=0)


def test_depths_that_are_split_among_programs() -> None:
    mine, rng = gpu("float16"), np.random.default_rng(3)
    mine.num_sms = 132
    change = LoRAChange(normal(rng, 8, 700) * 0.1, normal(rng, 20, 8))
    slots = mine.new_lora_slots(2, 8, [20])
    mine.set_lora(slots, 1, [mine.pack_lora(change)])
    x = torch.from_numpy(normal(rng, 3, 700)).half()
    y = torch.zeros(3, 20, device=DEVICE)
    mine.lora(y, x.to(DEVICE), slots, rows_of(np.array([1, -1, 1]), DEVICE, 2))
    assert change.a is not None and change.b is not None
    want = x.double() @ torch.from_numpy(change.b @ change.a).double().T
    want[1] = 0
    close(y, want.float(), "float16")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_takes_the_place_of_a_layer(dtype: str) -> None:
    rng = np.random.default_rng(2)
    x, y, own = normal(rng, 9, 24), normal(rng, 9, 90), np.array([0, -1, 1, 1, 2, 0, 0, 1, -1])
    factors = LoRAChange(normal(rng, 4, 24), normal(rng, 87, 4))
    whole = LoRAChange(factors.a, factors.b, whole=normal(rng, 90, 24))
    results = []
    for backend in (gpu(dtype), ReferenceBackend(dtype)):
        slots = backend.new_lora_slots(SLOTS, 4, [90], widest=90)
        backend.set_lora(slots, 0, [backend.pack_lora(factors)])
        backend.set_lora(slots, 1, [backend.pack_lora(whole)])
        backend.set_lora(slots, 2, [None])
        out = backend.from_numpy(y.copy())
        backend.lora(out, backend.from_numpy(x), slots, rows_of(own, backend.device.type))
        results.append(out.cpu())
    close(results[0], results[1], dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_tables(dtype: str) -> None:
    rng = np.random.default_rng(3)
    ids, own = np.array([3, 0, 11, 3, 7, 9]), np.array([0, -1, 1, 1, 2, 3])
    y = normal(rng, 6, 70)
    factors = LoRAChange(normal(rng, 4, 10), normal(rng, 70, 4))
    whole = LoRAChange(whole=normal(rng, 12, 70))
    both = LoRAChange(factors.a, factors.b, whole.whole)
    results = []
    for backend in (gpu(dtype), ReferenceBackend(dtype)):
        slots = backend.new_lora_slots(4, 4, [70])
        for slot, change in enumerate((factors, whole, None, both)):
            packed = None if change is None else backend.pack_lora(change, lookup=True)
            backend.set_lora(slots, slot, [packed])
        out = backend.from_numpy(y.copy())
        backend.lora_embedding(out, backend.from_numpy(ids), slots, rows_of(own, backend.device.type, 4))
        results.append(out.cpu())
    close(results[0], results[1], dtype)
    torch.testing.assert_close(results[0][[1, 4]], torch.from_numpy(y)[[1, 4]], rtol=0, atol=0)


def test_columns_beyond_the_limit_can_never_be_chosen() -> None:
    mine = gpu()
    wide = torch.ones(3, 2100, device=DEVICE)
    mine.limit_columns(wide[:, :2050], torch.tensor([2050, 3, 1500], device=DEVICE))
    assert wide.isinf().sum(dim=1).tolist() == [0, 2047, 550]
    assert bool((wide[:, 2050:] == 1).all()) and bool((wide[1, :3] == 1).all()) and bool((wide[2, :1500] == 1).all())
