"""Moving blocks between device, host and disk: whatever is batched, the result is that of one transfer at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.kernels.backend import Backend
from quire.kernels.cpu.backend import CPUBackend
from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.reference.backend import ReferenceBackend
from quire.step import BlockTransfer, SchedulerOutput, Tier, TransferOp
from quire.worker import disk_tier
from quire.worker.disk_store import DiskStore, StoreGeometry
from quire.worker.transfers import BlockTransfers, order_transfers
from tests.helpers.transfers import COPY, IN, KINDS, OUT, Move, disk_load, disk_store, transfers_of
from tests.kernels.gpu.common import DEVICE, mostly_slow

DEVICE_BLOCKS, HOST_BLOCKS, BLOCK_SIZE = 5, 3, 2
Transfers = list[Move]

transfer = st.one_of(
    st.tuples(st.just(COPY), st.integers(0, DEVICE_BLOCKS - 1), st.integers(0, DEVICE_BLOCKS - 1)),
    st.tuples(st.just(OUT), st.integers(0, DEVICE_BLOCKS - 1), st.integers(0, HOST_BLOCKS - 1)),
    st.tuples(st.just(IN), st.integers(0, HOST_BLOCKS - 1), st.integers(0, DEVICE_BLOCKS - 1)),
)


def step(
    transfers: Transfers | None = None,
    disk: list[BlockTransfer] | None = None,
    *,
    wait: bool = False,
) -> SchedulerOutput:
    """Return a step that moves blocks and does nothing else."""
    return SchedulerOutput(
        new_sequences=[],
        continuing=[],
        num_scheduled_tokens={},
        total_num_scheduled_tokens=0,
        finished_sequence_ids=[],
        preempted_sequence_ids=[],
        transfers=(disk or []) + transfers_of(transfers or []),
        wait_for_loads=wait,
    )


class Scene:
    """Two layers' caches, of different sizes, all of whose blocks differ."""

    def __init__(self, backend: Backend, store: DiskStore | None = None) -> None:
        self.backend = backend
        self.caches = [backend.new_kv_cache(DEVICE_BLOCKS, BLOCK_SIZE, heads, 4) for heads in (1, 3)]
        self.transfers = BlockTransfers(backend, self.caches, HOST_BLOCKS, store)
        for index, cache in enumerate(self.caches):
            rng = np.random.default_rng(index)
            data = rng.integers(0, 256, (DEVICE_BLOCKS, backend.block_nbytes(cache)), dtype=np.uint8)
            backend.write_blocks(cache, np.arange(DEVICE_BLOCKS), data)

    def content(self) -> list[bytes]:
        """Return each device block's bytes."""
        rows = [self.backend.read_blocks(cache, np.arange(DEVICE_BLOCKS)) for cache in self.caches]
        return [row.tobytes() for row in np.concatenate(rows, axis=1)]

    def fill(self, block_id: int, seed: int) -> None:
        """Fill a device block with random bytes."""
        for cache in self.caches:
            data = np.random.default_rng(seed).integers(0, 256, (1, self.backend.block_nbytes(cache)), dtype=np.uint8)
            self.backend.write_blocks(cache, np.array([block_id]), data)


def one_by_one(
    transfers: Transfers, device: list[bytes], host: list[bytes] | None = None
) -> tuple[list[bytes], list[bytes]]:
    """Return what device and host hold after the transfers, by the words of the contract."""
    device, host = list(device), list(host or [b"\0" * len(device[0])] * HOST_BLOCKS)
    for kind, source, destination in transfers:
        content = host[source] if kind == IN else device[source]
        if kind == OUT:
            host[destination] = content
        else:
            device[destination] = content
    return device, host


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(transfer, max_size=24))
def test_batches_do_what_single_transfers_would(transfers: Transfers) -> None:
    scene = Scene(CPUBackend(num_threads=1))
    device, host = one_by_one(transfers, scene.content())
    scene.transfers.apply(step(transfers))
    assert scene.content() == device
    scene.transfers.apply(step([(IN, block, block) for block in range(HOST_BLOCKS)]))
    assert scene.content() == host + device[HOST_BLOCKS:]


@pytest.mark.parametrize("seed", mostly_slow(range(12), 0, 1, 2))
def test_batches_do_so_on_a_gpu_whose_steps_do_not_wait_for_them(seed: int) -> None:
    rng, scene = np.random.default_rng(seed), Scene(GPUBackend("float16", "int8", DEVICE))
    device, host = scene.content(), [b"\0" * len(scene.content()[0])] * HOST_BLOCKS
    for _ in range(3):  # several steps, between which nobody waits
        transfers: Transfers = []
        for kind in rng.choice((COPY, OUT, IN), 8).tolist():
            most = (HOST_BLOCKS if kind == IN else DEVICE_BLOCKS, HOST_BLOCKS if kind == OUT else DEVICE_BLOCKS)
            transfers.append((kind, int(rng.integers(most[0])), int(rng.integers(most[1]))))
        device, host = one_by_one(transfers, device, host)
        scene.transfers.apply(step(transfers))
    assert scene.content() == device
    scene.transfers.apply(step([(IN, block, block) for block in range(HOST_BLOCKS)]))
    assert scene.content() == host + device[HOST_BLOCKS:]
    scene.transfers.close()


@pytest.mark.parametrize(
    ("transfers", "kinds"),
    [
        ([(COPY, 0, 1), (OUT, 2, 0), (COPY, 3, 4), (OUT, 0, 1)], [OUT, COPY]),  # unrelated ones are gathered
        ([(OUT, 0, 0), (IN, 1, 0), (OUT, 2, 2), (COPY, 3, 2)], [OUT, COPY, IN]),  # room is made, then used
        ([(OUT, 0, 0), (IN, 0, 1)], [OUT, IN]),  # out and in again, in this order anyway
        ([(COPY, 0, 1), (COPY, 2, 0)], [COPY]),  # sources are read before anything is written
        ([(COPY, 0, 1), (COPY, 2, 1)], [COPY]),  # the later one wins
        ([(COPY, 0, 1), (COPY, 1, 2)], [COPY, COPY]),
        ([(COPY, 0, 1), (OUT, 1, 0)], [COPY, OUT]),
        ([(IN, 0, 1), (OUT, 1, 1)], [IN, OUT]),
        ([(IN, 0, 1), (OUT, 2, 0)], [IN, OUT]),
        ([(IN, 0, 1), (COPY, 1, 2)], [IN, COPY]),
        ([(IN, 0, 1), (COPY, 2, 1)], [IN, COPY]),
    ],
)
def test_a_batch_ends_only_where_the_next_transfer_must_come_after(transfers: Transfers, kinds: list[str]) -> None:
    assert [KINDS[kind] for kind, _ in order_transfers(transfers_of(transfers))] == kinds


@pytest.mark.parametrize("move", [(COPY, 1, 0), (IN, 1, 0)])
def test_a_block_that_is_dropped_ends_no_batch(move: Move) -> None:
    """It is in a slot of the disk, and on no device block, such as that of number 0."""
    drop = BlockTransfer(TransferOp.DROP, Tier.DISK, key=1)
    batches = list(order_transfers([*transfers_of([move]), drop, *transfers_of([(move[0], 2, 3)])]))
    assert [len(transfers) for _, transfers in batches] == [1, 2]


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("kind", [CPUBackend, ReferenceBackend])
def test_a_block_comes_back_from_the_host_as_it_was(
    kind: type[CPUBackend] | type[ReferenceBackend], kv_dtype: str
) -> None:
    scene = Scene(kind("float32", kv_dtype, num_threads=1))
    before = scene.content()
    scene.transfers.apply(step([(OUT, 3, 2), (OUT, 1, 0)]))
    scene.fill(3, 99)
    scene.transfers.apply(step([(IN, 2, 3), (IN, 0, 4)]))
    assert scene.content() == [*before[:4], before[1]]


def test_without_a_disk_saves_are_ignored_and_loads_fail() -> None:
    scene = Scene(CPUBackend(num_threads=1))
    before = scene.content()
    assert scene.transfers.apply(step(disk=[disk_store(0, 0, b"a")])) == {}
    assert scene.transfers.apply(step(disk=[disk_load(1, 0, b"a")], wait=True)) == {1: False}
    assert scene.content() == before
    scene.transfers.close()


def test_more_host_memory_than_there_can_be_is_a_clear_error() -> None:
    backend = CPUBackend(num_threads=1)
    with pytest.raises(ConfigError, match=f"swap_space: {2**50} blocks of 64 bytes could not be allocated") as caught:
        BlockTransfers(backend, [backend.new_kv_cache(1, BLOCK_SIZE, 1, 4)], 2**50)
    assert caught.value.param == "swap_space"


# With a disk


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """A scene with an empty store, which is closed at the end."""
    scene = open_scene(tmp_path)
    yield scene
    scene.transfers.close()


def open_scene(folder: Path, backend: Backend | None = None) -> Scene:
    """Return a scene with the store in `folder`."""
    backend = backend or CPUBackend(num_threads=1)
    size = sum(backend.block_nbytes(backend.new_kv_cache(1, BLOCK_SIZE, heads, 4)) for heads in (1, 3))
    return Scene(backend, DiskStore(folder, StoreGeometry("model", size, BLOCK_SIZE, 8), 2**20))


def load_all(scene: Scene, loads: list[BlockTransfer]) -> dict[int, bool]:
    """Load and wait for all of it."""
    done = scene.transfers.apply(step(disk=loads))
    while len(done) < len(loads):
        more = scene.transfers.apply(step(wait=True))
        assert not done.keys() & more.keys(), "each load ends once"
        done |= more
    return done


def test_what_is_overwritten_in_the_same_step_is_saved_as_it_was(scene: Scene) -> None:
    before = scene.content()
    saves = [disk_store(block, block + 3, bytes([block])) for block in (0, 1)]
    scene.transfers.apply(step([(COPY, 4, 0), (COPY, 0, 1)], saves))
    assert load_all(scene, [disk_load(2, 4, b"\1"), disk_load(3, 3, b"\0")]) == {2: True, 3: True}
    assert scene.content() == [before[4], before[4], before[1], before[0], before[4]]


@pytest.mark.parametrize("kind", ["cpu", "reference", "cuda"])
def test_blocks_outlive_the_engine(tmp_path: Path, kind: str) -> None:
    def backend() -> Backend:
        if kind == "cuda":
            return GPUBackend("float16", "int8", DEVICE)
        return (CPUBackend if kind == "cpu" else ReferenceBackend)(kv_dtype="int8", num_threads=1)

    first = open_scene(tmp_path, backend())
    before = first.content()
    first.transfers.apply(step(disk=[disk_store(block, block, bytes([block])) for block in range(DEVICE_BLOCKS)]))
    first.transfers.close()
    second = open_scene(tmp_path, backend())
    loads = [disk_load(block, 4 - block, bytes([4 - block])) for block in range(DEVICE_BLOCKS)]
    assert load_all(second, loads) == dict.fromkeys(range(DEVICE_BLOCKS), True)
    assert second.content() == before[::-1]
    second.transfers.close()


def test_a_load_that_fails_leaves_its_block_alone(scene: Scene) -> None:
    before = scene.content()
    scene.transfers.apply(step(disk=[disk_store(0, 0, b"a")]))
    assert load_all(scene, [disk_load(1, 0, b"b"), disk_load(2, 1, b"a"), disk_load(3, 0, b"a")]) == {
        1: False,
        2: False,
        3: True,
    }
    assert scene.content() == [*before[:3], before[0], before[4]]


def test_waiting_ends_with_the_first_load_and_at_once_if_there_is_none(scene: Scene) -> None:
    assert scene.transfers.apply(step(wait=True)) == {}
    scene.transfers.apply(step(disk=[disk_store(0, 0, b"a")]))
    assert scene.transfers.apply(step(disk=[disk_load(1, 0, b"a")], wait=True)) == {1: True}
    assert scene.transfers.apply(step(wait=True)) == {}


def test_loads_go_on_beside_steps_that_do_not_wait(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = BlockingDisk(monkeypatch)
    scene.transfers.apply(step(disk=[disk_store(0, 0, b"a")]))
    assert scene.transfers.apply(step(disk=[disk_load(1, 3, b"x")])) == {}
    assert disk.began.wait(60)
    assert scene.transfers.apply(step([(COPY, 2, 3)])) == {}
    disk.go_on.set()
    assert scene.transfers.apply(step(wait=True)) == {1: False}


def test_a_disk_that_hangs_does_not_hold_the_engine(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "LOAD_TIMEOUT_S", 0.01)
    disk = BlockingDisk(monkeypatch)
    assert scene.transfers.apply(step(disk=[disk_load(1, 3, b"x")], wait=True)) == {}
    disk.go_on.set()
    monkeypatch.setattr(disk_tier, "LOAD_TIMEOUT_S", 60)
    assert scene.transfers.apply(step(wait=True)) == {1: False}


def test_more_loads_and_saves_than_may_wait_still_all_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "PENDING_BYTES", 1)  # one block each way
    scene = open_scene(tmp_path)
    before = scene.content()
    scene.transfers.apply(step(disk=[disk_store(0, slot, b"a") for slot in range(40)]))
    assert load_all(scene, [disk_load(block, 30 + block, b"a") for block in range(1, DEVICE_BLOCKS)])
    assert scene.content() == [before[0]] * DEVICE_BLOCKS
    scene.transfers.close()


def test_closing_gives_up_loads_and_finishes_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "PENDING_BYTES", 1)
    scene = open_scene(tmp_path)
    scene.transfers.apply(step(disk=[disk_store(0, slot, b"a") for slot in range(40)]))
    scene.transfers.apply(step(disk=[disk_load(block, block, b"a") for block in range(1, DEVICE_BLOCKS)]))
    scene.transfers.close()
    again = open_scene(tmp_path)
    assert load_all(again, [disk_load(1, 39, b"a")]) == {1: True}
    again.transfers.close()


def test_a_block_that_is_dropped_is_not_loaded_now_or_after_a_restart(tmp_path: Path) -> None:
    scene = open_scene(tmp_path)
    scene.transfers.apply(step(disk=[disk_store(0, slot, b"a") for slot in range(3)]))
    scene.transfers.apply(step(disk=[BlockTransfer(TransferOp.DROP, Tier.DISK, key=1)]))
    loads = [disk_load(1, 1, b"a"), disk_load(2, 2, b"a")]
    assert load_all(scene, loads) == {1: False, 2: True}
    scene.transfers.close()
    again = open_scene(tmp_path)
    assert load_all(again, loads) == {1: False, 2: True}
    again.transfers.apply(step(disk=[disk_store(2, 1, b"b"), BlockTransfer(TransferOp.DROP, Tier.DISK, key=2)]))
    again.transfers.apply(step(disk=[BlockTransfer(TransferOp.DROP, Tier.DISK, key=0), disk_store(2, 0, b"c")]))
    again.transfers.flush()
    assert load_all(again, [disk_load(1, 1, b"b"), disk_load(2, 2, b"a"), disk_load(3, 0, b"c")]) == {
        1: True,
        2: False,
        3: True,
    }
    again.transfers.close()


def test_an_unforeseen_error_of_a_thread_is_a_failed_load_or_the_end_of_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scene = open_scene(tmp_path)

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(DiskStore, "_head", fail)
    monkeypatch.setattr(DiskStore, "load", fail)
    scene.transfers.apply(step(disk=[disk_store(0, slot, b"a") for slot in range(9)]))
    scene.transfers.flush()
    assert load_all(scene, [disk_load(1, 3, b"a")]) == {1: False}
    assert scene.transfers.take_failed_stores() == {Tier.DISK: list(range(9))}
    assert scene.transfers.take_failed_stores() == {}
    scene.transfers.close()
    assert caplog.text.count("no more blocks are saved: MemoryError()") == 1
    assert caplog.text.count("Traceback") == 2


def test_loads_give_what_was_saved_under_their_header_however_they_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "PENDING_BYTES", 300)  # one or two blocks each way
    scene, rng = open_scene(tmp_path), np.random.default_rng(7)
    records: dict[int, tuple[bytes, bytes]] = {}  # slot -> header and content
    under_way: dict[int, tuple[int, bytes]] = {}  # device block -> slot that it is filled from, and content
    loaded = 0
    for number in range(1000):
        transfers = []
        free = [block for block in range(DEVICE_BLOCKS) if block not in under_way]
        if free:
            block, slot = int(rng.choice(free)), int(rng.integers(6))
            if number % 2:
                if slot not in {busy for busy, _ in under_way.values()}:
                    records[slot] = number.to_bytes(4), scene.content()[block]
                    transfers = [disk_store(block, slot, records[slot][0])]
            elif slot in records:
                header, under_way[block] = records[slot][0], (slot, records[slot][1])
                transfers = [disk_load(block, slot, header)]
                scene.fill(block, number)
        for block, sound in scene.transfers.apply(step(disk=transfers, wait=not free)).items():
            assert sound and scene.content()[block] == under_way.pop(block)[1]
            scene.fill(block, number)
            loaded += 1
    assert loaded > 100
    scene.transfers.close()


class BlockingDisk:
    """Makes every load wait for `go_on`; `began` is set when one does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        load = DiskStore.load

        def blocking(store: DiskStore, slot: int, header: bytes) -> np.ndarray | None:
            self.began.set()
            assert self.go_on.wait(60)
            return load(store, slot, header)

        monkeypatch.setattr(DiskStore, "load", blocking)
