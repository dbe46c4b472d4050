"""Blocks between a GPU and the host: whatever order streams run in, the result is that of one copy after the other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.kernels.gpu import host_blocks
from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.gpu.host_blocks import CHUNK_BYTES, BlockMover, GPUHostBlocks, PinnedPool
from quire.kernels.gpu.streams import Stream, Streams
from tests.helpers.streams import AnyOrder
from tests.kernels.gpu.common import DEVICE

BLOCKS, SLOTS, NBYTES = 5, 7, 3


class PlainMover:
    """Blocks of one tensor, moved without a kernel."""

    def __init__(self, blocks: torch.Tensor) -> None:
        self._blocks, self.row_bytes = blocks, blocks.shape[1]

    def gather(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        rows[: len(ids)] = self._blocks[ids]

    def scatter(self, rows: torch.Tensor, ids: torch.Tensor) -> None:
        self._blocks[ids] = rows[: len(ids)]


blocks_and_slots = st.integers(1, BLOCKS).flatmap(
    lambda n: st.tuples(
        st.permutations(range(BLOCKS)).map(lambda ids: ids[:n]), st.permutations(range(SLOTS)).map(lambda ids: ids[:n])
    )
)
action = st.one_of(
    st.tuples(st.sampled_from(["out", "in", "read", "write"]), blocks_and_slots),
    st.tuples(st.just("step"), st.integers(0, BLOCKS - 1)),
)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(action, max_size=14), st.integers(1, 2), st.randoms(use_true_random=False))
def test_streams_may_run_in_any_order(actions: list[tuple[str, Any]], rows: int, random: Any) -> None:
    move_in_any_order(actions, rows, random)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None, derandomize=True)
@given(st.lists(action, max_size=14), st.integers(1, 2), st.randoms(use_true_random=False))
def test_streams_may_run_in_any_order_many_times(actions: list[tuple[str, Any]], rows: int, random: Any) -> None:
    move_in_any_order(actions, rows, random)


def move_in_any_order(actions: list[tuple[str, Any]], rows: int, random: Any) -> None:
    """Do these actions, in an order of streams that `random` chooses, and compare with one after the other."""
    streams = AnyOrder(lambda number: random.randrange(number))
    device = torch.arange(BLOCKS * NBYTES, dtype=torch.uint8).view(BLOCKS, NBYTES)
    expected, slots_expected = device.numpy().copy(), np.zeros((SLOTS, NBYTES), np.uint8)
    pool = PinnedPool(SLOTS, NBYTES, None, None)
    pool_bytes = pool.pieces[0].numpy()
    host = GPUHostBlocks(
        PlainMover(device), torch.from_numpy, streams, pool, SLOTS, torch.device("cpu"), 2 * rows * NBYTES
    )
    reads: list[tuple[Callable[[], np.ndarray], np.ndarray]] = []
    for number, (kind, what) in enumerate(actions, start=100):
        if kind == "step":  # the model writes a block, in its own time
            streams.run(Stream.COMPUTE, lambda block=what, value=number: device[block].fill_(value))
            expected[what] = number
            continue
        ids, slots = (np.array(part, np.int64) for part in what)
        if kind == "out":
            host.copy_out(ids, slots)
            slots_expected[slots] = expected[ids]
        elif kind == "in":
            host.copy_in(slots, ids)
            expected[ids] = slots_expected[slots]
        elif kind == "write":
            data = np.full((len(ids), NBYTES), number, np.uint8)
            host.write(ids, data)
            data[:] = 0  # free on return
            expected[ids] = number
        else:
            reads.append((host.read(ids), expected[ids]))
        ids[:], slots[:] = 0, 0  # these, too
    for wait, wanted in reads:
        np.testing.assert_array_equal(wait(), wanted)
    streams.drain()
    np.testing.assert_array_equal(device.numpy(), expected)
    np.testing.assert_array_equal(pool_bytes, slots_expected)
    host.close()
    host.close()


def test_neighbouring_slots_go_in_one_copy_which_ends_with_its_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_blocks, "PIECE_BYTES", 4 * NBYTES)
    copies: list[int] = []

    class Counting(Streams):
        def run(self, stream: Stream, work: Callable[[], object]) -> None:
            if stream is Stream.D2H:
                copies.append(len(work()))  # type: ignore[arg-type]
            else:
                work()

    device = torch.arange(6 * NBYTES, dtype=torch.uint8).view(6, NBYTES)
    pool = PinnedPool(10, NBYTES, None, None)
    assert [len(piece) for piece in pool.pieces] == [4, 4, 2]
    host = GPUHostBlocks(PlainMover(device), torch.from_numpy, Counting(device.device), pool, 10, device.device)
    host.copy_out(np.arange(6), np.array([2, 3, 4, 5, 9, 0]))
    assert copies == [2, 2, 1, 1]
    assert torch.equal(torch.cat(pool.pieces)[[2, 3, 4, 5, 9, 0]], device)


# Pinned memory


def test_memory_is_pinned_in_pieces_by_a_thread_and_let_go_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_blocks, "PIECE_BYTES", 100)
    seen: list[tuple[int, str]] = []

    def register(address: int, nbytes: int) -> int:
        seen.append((nbytes, threading.current_thread().name))
        return 0

    released: list[int] = []
    pool = PinnedPool(25, 10, register, lambda address: released.append(address) or 0)
    pool.wait()
    assert seen == [(100, "quire-pinning")] * 2 + [(50, "quire-pinning")]
    pool.close()
    pool.close()
    assert len(set(released)) == 3


def test_what_cannot_be_pinned_is_used_as_it_is_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_blocks, "PIECE_BYTES", 100)
    errors = iter([0, 2])
    released: list[int] = []
    pool = PinnedPool(30, 10, lambda address, nbytes: next(errors), lambda address: released.append(address) or 0)
    pool.wait()
    assert len(pool.pieces) == 3
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "CUDA error 2, after 1 of 3 pieces" in record.message
    pool.close()
    assert len(released) == 1


def test_more_memory_than_there_can_be_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="swap_space: "):
        PinnedPool(2, 2**60, None, None)


# The kernel


@pytest.mark.parametrize(
    "sizes",
    [(64, 48), (6, 10), (7,), (CHUNK_BYTES + 16, 32), (12, CHUNK_BYTES // 4 + 4)],
    ids=lambda sizes: "-".join(map(str, sizes)),
)
def test_blocks_of_all_layers_lie_side_by_side_in_rows(sizes: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    sides = [torch.randint(0, 256, (4, size), dtype=torch.uint8, generator=generator).to(DEVICE) for size in sizes]
    mover = BlockMover(sides)
    assert mover.row_bytes == sum(sizes)
    ids = torch.tensor([3, 0, 2], device=DEVICE)
    rows = torch.zeros((5, mover.row_bytes), dtype=torch.uint8, device=DEVICE)
    mover.gather(ids, rows)
    assert torch.equal(rows[:3], torch.cat([side[ids] for side in sides], dim=1))
    assert not rows[3:].any()
    before = [side.clone() for side in sides]
    mover.scatter(rows, ids.flip(0))
    for side, old in zip(sides, before, strict=True):
        assert torch.equal(side[[2, 0, 3]], old[[3, 0, 2]])
        assert torch.equal(side[1], old[1])


@pytest.mark.parametrize("kv_dtype", ["float16", "int8"])
def test_the_backends_pool_has_the_bytes_of_read_blocks(kv_dtype: str) -> None:
    backend = GPUBackend("float16", kv_dtype, DEVICE)
    caches = [backend.new_kv_cache(4, 2, heads, 8) for heads in (1, 3)]
    for seed, cache in enumerate(caches):
        data = np.random.default_rng(seed).integers(0, 256, (4, backend.block_nbytes(cache)), dtype=np.uint8)
        backend.write_blocks(cache, np.arange(4), data)

    def content() -> np.ndarray:
        return np.concatenate([backend.read_blocks(cache, np.arange(4)) for cache in caches], axis=1)

    before = content()
    host = backend.host_blocks(caches, 3)
    assert host.block_nbytes == sum(backend.block_nbytes(cache) for cache in caches)
    np.testing.assert_array_equal(host.read(np.array([2, 1]))(), before[[2, 1]])
    host.copy_out(np.array([0, 3]), np.array([2, 0]))
    host.write(np.array([0, 3]), before[[1, 1]])
    host.copy_in(np.array([0, 2]), np.array([1, 2]))
    np.testing.assert_array_equal(content(), before[[1, 3, 0, 1]])
    host.close()
