"""Blocks in files: they are found again after a restart, and whatever happened to them is never taken for content."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quire.errors import ConfigError
from quire.kvcache.tiers import BlockHeader
from quire.worker import disk_store
from quire.worker.disk_store import HEAD, DiskStore, StoreGeometry

GEOMETRY = StoreGeometry("a model", block_nbytes=5000, block_size=4, header_nbytes=24)
SLOTS = 4
SPACE = SLOTS * (GEOMETRY.stride + GEOMETRY.head_nbytes)


def block(number: int) -> np.ndarray:
    """Return a block's bytes."""
    return np.random.default_rng(number).integers(0, 256, GEOMETRY.block_nbytes, dtype=np.uint8)


def header(number: int) -> bytes:
    """Return a header, of a length that differs."""
    return bytes(range(10 + number))


def opened(folder: Path, geometry: StoreGeometry = GEOMETRY, space: int = SPACE) -> DiskStore:
    return DiskStore(folder, geometry, space)


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """The folder of a closed store with something in slots 0, 1 and 3."""
    store = opened(tmp_path)
    for slot in (0, 1, 3):
        store.save(slot, header(slot), block(slot))
    store.close()
    return tmp_path


def place_of(folder: Path, name: str, geometry: StoreGeometry = GEOMETRY) -> Path:
    return folder / geometry.folder_name() / name


def change(path: Path, offset: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def holds(store: DiskStore, slot: int) -> bool:
    """Say whether the slot gives what `filled` put there; nothing else may come of it but None."""
    found = store.load(slot, header(slot))
    assert found is None or found.tobytes() == block(slot).tobytes()
    return found is not None


def test_reopening_finds_everything(filled: Path) -> None:
    store = opened(filled)
    assert store.num_slots == SLOTS
    assert store.scan() == [(slot, header(slot)) for slot in (0, 1, 3)]
    assert all(holds(store, slot) for slot in (0, 1, 3))
    assert store.load(2, header(2)) is None, "nothing was ever written there"
    store.close()


def test_headers_are_found_however_they_are_read(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_store, "SCAN_BYTES", 1)
    store = opened(filled)
    assert store.scan() == [(slot, header(slot)) for slot in (0, 1, 3)]
    store.close()


def test_the_key_of_the_hashes_stays_and_is_each_stores_own(
    filled: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    keys = []
    for folder in (filled, filled, tmp_path_factory.mktemp("other")):
        store = opened(folder)
        keys.append(store.hash_key)
        store.close()
    assert keys[0] == keys[1] != keys[2]
    assert len(keys[0]) == 32


def test_a_slot_is_used_again(filled: Path) -> None:
    store = opened(filled)
    store.save(1, header(7), block(7))
    assert store.load(1, header(1)) is None
    found = store.load(1, header(7))
    assert found is not None and found.tobytes() == block(7).tobytes()
    store.close()


def test_only_the_user_can_look_inside(filled: Path) -> None:
    folder = filled / GEOMETRY.folder_name()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


# Damage


@pytest.mark.parametrize("offset", [0, 17, GEOMETRY.block_nbytes - 1])
def test_a_damaged_block_is_refused(filled: Path, offset: int, caplog: pytest.LogCaptureFixture) -> None:
    change(place_of(filled, "blocks"), GEOMETRY.stride + offset)
    store = opened(filled)
    assert [slot for slot in (0, 1, 3) if holds(store, slot)] == [0, 3]
    assert "slot 1: the block is damaged" in caplog.text
    store.save(1, header(1), block(1))
    assert holds(store, 1), "it can be written again"
    store.close()


@pytest.mark.parametrize("offset", range(GEOMETRY.head_nbytes))
def test_a_damaged_header_is_refused(filled: Path, offset: int) -> None:
    change(place_of(filled, "headers"), GEOMETRY.head_nbytes + offset)
    store = opened(filled)
    assert [slot for slot, _ in store.scan()] == [0, 3]
    assert [slot for slot in (0, 1, 3) if holds(store, slot)] == [0, 3]
    store.close()


def test_damage_after_opening_is_noticed_too(filled: Path) -> None:
    store = opened(filled)
    assert len(store.scan()) == 3
    change(place_of(filled, "headers"), HEAD.size)
    change(place_of(filled, "blocks"), GEOMETRY.stride)
    assert [slot for slot in (0, 1, 3) if holds(store, slot)] == [3]
    store.close()


def test_a_record_that_lies_elsewhere_is_refused(filled: Path) -> None:
    path, size = place_of(filled, "headers"), GEOMETRY.head_nbytes
    data = bytearray(path.read_bytes())
    data[2 * size : 3 * size] = data[size : 2 * size]
    path.write_bytes(data)
    store = opened(filled)
    assert [slot for slot, _ in store.scan()] == [0, 1, 3]
    assert store.load(2, header(1)) is None
    store.close()


@pytest.mark.parametrize(("name", "size"), [("blocks", GEOMETRY.stride), ("headers", GEOMETRY.head_nbytes)])
def test_truncated_files_lose_only_what_is_gone(filled: Path, name: str, size: int) -> None:
    os.truncate(place_of(filled, name), size + size // 2)
    store = opened(filled)
    store.scan()
    assert [slot for slot in (0, 1, 3) if holds(store, slot)] == [0]
    store.save(3, header(3), block(3))
    assert [slot for slot in (0, 1, 3) if holds(store, slot)] == [0, 3]
    store.close()


@pytest.mark.parametrize("writes", [0, 1, 2, 3])
def test_a_save_that_was_torn_by_a_crash_leaves_no_wrong_block(
    filled: Path, writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(filled)
    torn_after(writes, monkeypatch)
    store.save(1, header(9), block(9))
    monkeypatch.undo()
    store.close()
    again = opened(filled)
    found = again.load(1, header(9))
    assert found is None or found.tobytes() == block(9).tobytes()
    assert holds(again, 1) == (writes == 0)
    assert holds(again, 0) and holds(again, 3)
    again.close()


def torn_after(writes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make writes come in pieces of at most 2500 bytes, of which the first `writes` succeed."""
    real, count = os.pwrite, [0]

    def pwrite(file: int, data: memoryview, offset: int) -> int:
        count[0] += 1
        if count[0] > writes:
            raise OSError(errno.EIO, "Input/output error")
        return real(file, data[:2500], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"hash_key": 5}',
        b'{"hash_key": "00"}',
        b"[" * 60_000,
        b'{"format": 99}',
        b"\0" * 99,
    ],
)
def test_a_store_whose_meta_is_damaged_begins_anew(filled: Path, damage: bytes) -> None:
    path = place_of(filled, "meta")
    old_key = bytes.fromhex(json.loads(path.read_bytes())["hash_key"])
    path.write_bytes(damage)
    store = opened(filled)
    assert store.hash_key != old_key and store.scan() == []
    store.save(0, header(0), block(0))
    store.close()
    store = opened(filled)
    assert store.scan() == [(0, header(0))]
    store.close()


def test_blocks_under_another_key_are_refused(filled: Path) -> None:
    path = place_of(filled, "meta")
    meta = json.loads(path.read_bytes())
    path.write_text(json.dumps({**meta, "hash_key": "00" * 32}))
    store = opened(filled)
    assert store.scan() == [] and not holds(store, 0)
    store.close()


# Whose blocks they are


@pytest.mark.parametrize(
    "other",
    [
        StoreGeometry("another model", 5000, 4, 24),
        StoreGeometry("a model", 5001, 4, 24),
        StoreGeometry("a model", 5000, 8, 24),
        StoreGeometry("a model", 5000, 4, 25),
    ],
)
def test_blocks_of_another_model_or_geometry_are_another_store(filled: Path, other: StoreGeometry) -> None:
    mine, others = opened(filled), opened(filled, other)
    assert others.scan() == [] and others.hash_key != mine.hash_key
    others.save(0, b"x", np.zeros(other.block_nbytes, np.uint8))
    assert holds(mine, 0)
    mine.close()
    others.close()


def test_a_store_serves_one_engine_at_a_time(filled: Path) -> None:
    first = opened(filled)
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}; .*another kv_disk_dir") as caught:
        opened(filled)
    assert caught.value.param == "kv_disk_dir"
    assert holds(first, 0)
    first.close()
    opened(filled).close()


@pytest.mark.parametrize("name", ["lock", "meta", "headers", "blocks"])
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: path.symlink_to(path)])
def test_what_is_no_store_cannot_be_opened_and_nothing_waits_for_it(
    filled: Path, name: str, make: Callable[[Path], object]
) -> None:
    path = place_of(filled, name)
    path.unlink()
    make(path)
    with pytest.raises(OSError, match=r"directory|pipe|symbolic"):
        opened(filled)
    path.rmdir() if path.is_dir() else path.unlink()
    opened(filled).close()


@pytest.mark.parametrize("name", ["headers", "blocks", "meta"])
def test_files_of_any_length_and_content_can_be_opened_or_are_refused_at_once(filled: Path, name: str) -> None:
    path = place_of(filled, name)
    for content in (b"", b"x", np.random.default_rng(0).bytes(100_000)):
        path.write_bytes(content)
        store = None
        try:
            store = opened(filled)
            assert not holds(store, 0) or name == "blocks"
        except OSError as error:
            assert name == "meta" and error.errno == errno.EFBIG
        finally:
            if store is not None:
                store.close()


# Space


def test_the_files_stay_within_the_space_given(tmp_path: Path) -> None:
    store = opened(tmp_path, space=SPACE - 1)
    assert store.num_slots == SLOTS - 1
    for slot in range(store.num_slots):
        store.save(slot, header(slot), block(slot))
    store.close()
    folder = tmp_path / GEOMETRY.folder_name()
    assert sum((folder / name).stat().st_size for name in ("headers", "blocks")) <= SPACE - 1


def test_less_space_than_before_cuts_off_the_rest(filled: Path) -> None:
    store = opened(filled, space=SPACE // 2)
    assert store.scan() == [(slot, header(slot)) for slot in (0, 1)]
    assert holds(store, 1)
    store.close()
    folder = filled / GEOMETRY.folder_name()
    assert sum((folder / name).stat().st_size for name in ("headers", "blocks")) <= SPACE // 2


def test_space_for_no_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_disk_space: 5000 bytes hold no block; one takes 8264") as caught:
        opened(tmp_path, space=5000)
    assert caught.value.param == "kv_disk_space"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_full_or_failing_disk_ends_saving_and_is_said_once(
    filled: Path, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(filled)
    caplog.clear()

    def pwrite(file: int, data: memoryview, offset: int) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", pwrite)
    assert not any(store.save(2, header(number), block(number)) for number in (5, 6))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no more blocks are saved" in caplog.text and os.strerror(code) in caplog.text
    monkeypatch.undo()
    store.save(2, header(7), block(7))
    assert [slot for slot, _ in store.scan()] == [0, 1, 3]
    assert all(holds(store, slot) for slot in (0, 1, 3)), "what is there still serves"
    store.close()


@pytest.mark.parametrize("erases_all", [False, True])
def test_blocks_that_could_not_be_erased_are_not_found_by_the_next_engine(
    filled: Path, erases_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(filled)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "truncate" if erases_all else "pwrite", fail)
    if erases_all:
        store.erase_all()
    else:
        assert not store.erase(1)
    monkeypatch.undo()
    assert holds(store, 0), "what is there still serves"
    store.close()
    again = opened(filled)
    assert again.scan() == [] and not holds(again, 1)
    again.close()


@pytest.mark.parametrize("call", ["pread", "preadv"])
def test_a_disk_that_cannot_be_read_means_a_failed_load(
    filled: Path, call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    store = opened(filled)

    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, fail)
    assert not holds(store, 0) and not holds(store, 1)
    assert store.scan() == ([] if call == "pread" else [(slot, header(slot)) for slot in (0, 1, 3)])
    assert [record.levelname for record in caplog.records][:2] == ["WARNING", "DEBUG"]
    monkeypatch.undo()
    assert holds(store, 0)
    store.close()


def test_a_store_larger_than_the_disk_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(tmp_path, space=2**60)
    assert f"kv_disk_space is {2**60} bytes" in caplog.text
    store.close()


@pytest.mark.parametrize("block_size", [1, 16, 1024])
def test_the_schedulers_headers_fit(block_size: int) -> None:
    longest = BlockHeader(b"n" * 17, b"p" * 17, list(range(block_size))).encode()
    assert len(longest) <= disk_store.header_nbytes(block_size)


# Several stores


def stores(folder: Path) -> list[str]:
    """Return the models whose stores are there."""
    return sorted(json.loads(path.read_bytes())["fingerprint"] for path in folder.glob("*/meta"))


def of_model(name: str) -> StoreGeometry:
    return dataclasses.replace(GEOMETRY, fingerprint=name)


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """A folder with full stores of models a, b and c, of which b is the longest unused, then c."""
    for age, name in enumerate("acb"):
        store = opened(tmp_path, of_model(name), 2**20)
        for slot in range(SLOTS):
            store.save(slot, header(slot), block(slot))
        store.close()
        os.utime(place_of(tmp_path, "lock", of_model(name)), (1000 - age, 1000 - age))
    return tmp_path


def test_stores_that_fit_together_stay(several: Path) -> None:
    opened(several, of_model("d"), 2**20).close()
    assert stores(several) == ["a", "b", "c", "d"]


def test_the_longest_unused_stores_make_room(several: Path) -> None:
    size = sum(path.stat().st_blocks * 512 for path in several.glob("*/*"))
    opened(several, of_model("a"), size - 1).close()
    assert stores(several) == ["a", "c"]
    store = opened(several, of_model("a"), size // 3)
    assert stores(several) == ["a"] and len(store.scan()) > 0
    store.close()
    assert [path.name for path in several.iterdir()] == [of_model("a").folder_name()]


def test_stores_in_use_and_what_is_no_store_stay(several: Path) -> None:
    kept = several / ("0" * 32)
    kept.mkdir()
    (kept / "blocks").write_bytes(b"no lock, so no store")
    (several / "notes.json").write_text("{}")
    foreign = place_of(several, "mine", of_model("c"))
    foreign.write_text("")
    in_use = opened(several, of_model("b"), 2**20)
    opened(several, of_model("d"), SPACE).close()
    assert stores(several) == ["b", "d"]
    assert (kept / "blocks").exists() and (several / "notes.json").exists() and foreign.exists()
    assert holds(in_use, 0)
    in_use.close()


def test_a_store_that_is_deleted_while_it_is_opened_counts_as_in_use(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def deleted_before(file: int, operation: int) -> None:
        place_of(filled, "lock").unlink()
        place_of(filled, "lock").touch()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", deleted_before)
    with pytest.raises(ConfigError, match="in use"):
        opened(filled)
