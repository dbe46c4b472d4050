"""Streamed layers: whatever order streams run in, each step finds and leaves what it would in plain caches."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.kernels.backend import AttentionMetadata
from quire.kernels.create import create_backend
from quire.kernels.gpu import host_blocks
from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.gpu.cache import KVCache
from quire.kernels.gpu.host_blocks import PinnedPool
from quire.kernels.gpu.layerwise import MAX_COPIES, GPULayerwiseOffload, layerwise_blocks, runs
from quire.kernels.gpu.streams import Stream, Streams
from tests.helpers.streams import AnyOrder
from tests.kernels.gpu.common import DEVICE

WHOLE, LAYERWISE, BLOCK_SIZE = 3, 4, 2
BLOCKS = WHOLE + LAYERWISE


class Scene:
    """Streamed layers of one number in each place, with scales, and what they should hold: [layers, blocks, places]."""

    def __init__(self, streams: Streams, num_layers: int) -> None:
        room = num_layers * WHOLE + 2 * LAYERWISE
        arena = KVCache(
            torch.zeros((room, 1, 1, BLOCK_SIZE, 1), dtype=torch.int8), torch.zeros((room, 1, 1, BLOCK_SIZE))
        )
        self.streams, self.arena = streams, arena
        self.pools = [PinnedPool(num_layers * LAYERWISE, side.shape[1], None, None) for side in arena.sides()]
        self.host = [[piece.numpy() for piece in pool.pieces] for pool in self.pools]
        self.offload = GPULayerwiseOffload(arena, num_layers, WHOLE, LAYERWISE, self.copy, streams, self.pools)
        self.expected = np.zeros((num_layers, BLOCKS, BLOCK_SIZE), np.int64)
        self.reads: list[tuple[np.ndarray, np.ndarray]] = []
        self.count = 0

    @staticmethod
    def copy(cache: KVCache, pairs: np.ndarray) -> None:
        for side in cache.sides():
            side[pairs[:, 1]] = side[pairs[:, 0]].clone()

    def step(self, read: list[int], written: list[int], broken_after: int | None = None) -> None:
        """Have all layers write to blocks, a place of those that are read and all of others, and read them all.

        It may be broken off by the end of a layer; then it must not write.
        """
        blocks = np.array([*read, *(block for block in written if block not in read)], np.int64)
        self.count += 1
        slots = [
            block * BLOCK_SIZE + place
            for block in written
            for place in ([self.count % BLOCK_SIZE] if block in read else range(BLOCK_SIZE))
        ]
        layerwise = (np.array(sorted(block for block in part if block >= WHOLE), np.int64) for part in (read, written))
        self.offload.begin(*layerwise)
        for number, cache in enumerate(self.offload.caches):
            own = self.offload.wait_for_load(number, metadata(blocks, slots))
            value = self.count * 7 % 100 + number
            found = np.full((len(blocks), BLOCK_SIZE, 2), -1)
            self.streams.run(
                Stream.COMPUTE,
                lambda cache=cache, own=own, value=value, found=found: use(cache, own, value, found),
            )
            for slot in slots:
                self.expected[number, slot // BLOCK_SIZE, slot % BLOCK_SIZE] = value
            self.reads.append((found, self.expected[number, blocks]))
            if number == broken_after:
                return
            self.offload.save(number)

    def move(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks in all layers."""
        self.offload.copy_blocks(np.array(pairs, np.int64).reshape(-1, 2))
        sources, destinations = np.array(pairs, np.int64).reshape(-1, 2).T
        self.expected[:, destinations] = self.expected[:, sources].copy()

    def check(self) -> None:
        """Check what was read, and what is there in the end."""
        for found, expected in self.reads:
            assert (found == expected[..., None]).all()
        data, scales = (np.concatenate(pieces) for pieces in self.host)
        layers = len(self.expected)
        on_host = data.view(np.int8).reshape(layers, LAYERWISE, BLOCK_SIZE)
        np.testing.assert_array_equal(on_host, self.expected[:, WHOLE:])
        np.testing.assert_array_equal(scales.view(np.float32).reshape(layers, LAYERWISE, BLOCK_SIZE), on_host)
        whole = self.arena.data[: layers * WHOLE].view(layers, WHOLE, BLOCK_SIZE)
        np.testing.assert_array_equal(whole.numpy(), self.expected[:, :WHOLE])


def metadata(blocks: np.ndarray, slots: list[int]) -> AttentionMetadata:
    """One sequence in these blocks; where the model would write -1 is among the slots."""
    tables = torch.from_numpy(blocks).int()[None]
    return AttentionMetadata(torch.tensor([0, 1]).int(), torch.tensor([1]).int(), tables, torch.tensor([*slots, -1]))


def use(cache: KVCache, own: AttentionMetadata, value: int, found: np.ndarray) -> None:
    """Do what a layer does: write, then read."""
    assert own.slot_mapping[-1] == -1
    assert cache.scales is not None
    for side, into in ((cache.data, found[..., 0]), (cache.scales, found[..., 1])):
        side.view(-1)[own.slot_mapping[:-1]] = value
        into[:] = side.view(-1, BLOCK_SIZE)[own.block_tables[0].long()].numpy()


some = st.lists(st.integers(0, BLOCKS - 1), unique=True, max_size=5)
action = st.one_of(
    st.tuples(st.just("step"), st.tuples(some, some)),
    st.tuples(st.just("step"), st.tuples(some, some)),
    st.tuples(st.just("broken"), st.tuples(some, st.integers(0, 2))),
    st.tuples(
        st.just("copy"),
        st.lists(st.tuples(*[st.integers(0, BLOCKS - 1)] * 2), unique_by=lambda pair: pair[1], max_size=3),
    ),
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(action, max_size=7), st.integers(1, 5), st.randoms(use_true_random=False))
def test_streams_may_run_in_any_order(actions: list[tuple[str, Any]], num_layers: int, chance: Any) -> None:
    run_in_any_order(actions, num_layers, chance)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, derandomize=True)
@given(st.lists(action, max_size=10), st.integers(1, 5), st.randoms(use_true_random=False))
def test_streams_may_run_in_any_order_many_times(actions: list[tuple[str, Any]], num_layers: int, chance: Any) -> None:
    run_in_any_order(actions, num_layers, chance)


def run_in_any_order(actions: list[tuple[str, Any]], num_layers: int, chance: Any) -> None:
    """Do these actions, in an order of streams that `chance` chooses, and compare with one after the other."""
    streams = AnyOrder(chance.randrange)
    scene = Scene(streams, num_layers)
    for kind, what in actions:
        if kind == "step":
            scene.step(*what)
        elif kind == "broken":
            scene.step(what[0], [], broken_after=what[1])
        else:
            scene.move(what)
    streams.drain()
    scene.check()
    scene.offload.close()
    scene.offload.close()


def test_a_step_that_was_broken_off_does_not_spoil_the_next_one() -> None:
    """In many orders: what it has begun to load, and to read, is done before others use the window."""
    first, second = WHOLE, WHOLE + 1
    for seed, layer, again in itertools.product(range(20), range(3), (False, True)):
        streams = AnyOrder(random.Random(seed).randrange)
        scene = Scene(streams, 3)
        scene.step([], [first, second])
        scene.step([first, second], [], broken_after=layer)
        scene.step([second] if again else [], [first])
        streams.drain()
        scene.check()


def test_what_is_planned_for_the_tables_of_one_layer_is_not_taken_for_anothers() -> None:
    scene = Scene(Streams(torch.device("cpu")), 3)
    step = metadata(np.array([WHOLE, 0]), [])
    step.plans["of all"] = 1
    scene.offload.begin(np.array([WHOLE]), np.array([WHOLE]))
    tables = []
    for layer in range(3):
        own = scene.offload.wait_for_load(layer, step)
        assert own.plans == {"of all": 1}
        own.plans["of these tables"] = own.block_tables
        tables.append(own.block_tables.tolist())
        scene.offload.save(layer)
    assert tables == [[[9, 0]], [[10, 0]], [[3, 0]]]
    assert scene.offload.wait_for_load(0, step) is step, "between steps with layerwise blocks nothing is changed"


def test_what_is_loaded_is_what_has_tokens_and_what_is_stored_what_gets_some() -> None:
    tables = np.array([[1, 7, 9, 8], [7, 2, 0, 9], [5, 9, 9, 9]], np.int32)
    # 6 computed and 2 come, which end a block; 4 computed and 3 come; all of a first block.
    loads, stores = layerwise_blocks(tables, np.array([2, 3, 4]), np.array([8, 7, 4]), 4, 5)
    assert (loads.tolist(), stores.tolist()) == ([7], [5, 7])
    loads, stores = layerwise_blocks(tables[:1], np.array([9]), np.array([14]), 4, 8)
    assert (loads.tolist(), stores.tolist()) == ([], [8, 9])
    loads, stores = layerwise_blocks(tables[:2], np.array([1, 1]), np.array([14, 8]), 4, 10)
    assert (loads.dtype, len(loads), len(stores)) == (np.int64, 0, 0)


def test_runs_take_in_the_smallest_gaps_if_there_are_too_many() -> None:
    numbers = np.array([0, 1, 4, 9, 10, 12])
    assert runs(numbers) == [(0, 2), (4, 5), (9, 11), (12, 13)]
    assert runs(numbers, 4) == runs(numbers)
    assert runs(numbers, 3) == [(0, 2), (4, 5), (9, 13)]
    assert runs(numbers, 1) == [(0, 13)]
    assert runs(numbers[:0], 3) == []


def test_copies_are_few_and_end_with_a_piece_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = GPUBackend("float16", "float16", DEVICE)
    monkeypatch.setattr(host_blocks, "PIECE_BYTES", 10 * 32)
    layerwise = 3 * MAX_COPIES
    offload = backend.layerwise_offload(3, 1 + layerwise, layerwise, 2, 1, 4)
    assert isinstance(offload, GPULayerwiseOffload)
    assert [len(piece) for piece in offload.pools[0].pieces] == [10] * (9 * MAX_COPIES // 10) + [6]
    for first, most in ((0, -(-layerwise // 10) + MAX_COPIES), (1, layerwise)):
        wanted = 1 + np.arange(first, layerwise, 2)
        offload.begin(wanted, wanted[:0])
        assert len(offload._places(0, offload._loads)) <= most
        covered = {number for start, stop in offload._loads for number in range(start, stop)}
        assert covered >= set((wanted - 1).tolist())
    offload.close()


@pytest.mark.parametrize("kv_dtype", ["float16", "int8", "fp8"])
def test_the_backend_makes_one_that_keeps_all_bytes_of_a_block(kv_dtype: str) -> None:
    backend = GPUBackend("float16", kv_dtype, DEVICE)
    offload = backend.layerwise_offload(4, 5, 3, 2, 2, 8)
    cache = offload.caches[0]
    data = np.random.default_rng(0).integers(0, 256, (2, backend.block_nbytes(cache)), dtype=np.uint8)
    for cache in offload.caches:
        backend.write_blocks(cache, np.arange(2), data)
    offload.copy_blocks(np.array([[1, 3], [0, 4]]))  # to the host
    offload.copy_blocks(np.array([[4, 1], [3, 0], [3, 2]]))  # and back
    offload.copy_blocks(np.array([[2, 0]]))
    for cache in offload.caches:
        np.testing.assert_array_equal(backend.read_blocks(cache, np.array([0, 1])), data[[1, 0]])
    offload.close()


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_where_the_host_is_the_device_there_are_none(device: str) -> None:
    backend = create_backend(device, "float32", "float32")
    with pytest.raises(ConfigError, match="kv_resident_layers: ") as caught:
        backend.layerwise_offload(4, 5, 3, 2, 2, 8)
    assert caught.value.param == "kv_resident_layers"
