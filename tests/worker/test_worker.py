"""A worker's tiers: blocks in host memory, and blocks on disk that the next worker goes on with."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.checkpoint.hf_config import load_model_info
from quire.config import EngineConfig
from quire.engine_request import EngineRequest
from quire.errors import ConfigError
from quire.sampling_params import SamplingParams
from quire.step import ModelOutput, NewSequenceData, SchedulerOutput, StoredBlocks
from quire.worker import worker as module
from quire.worker.worker import Worker
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.transfers import IN, OUT, disk_load, disk_store, transfers_of

BLOCK_SIZE = 4
PROMPT = [5, 9, 77, 31, 8, 120, 64]
HEADER = b"the first block"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")


def started(folder: Path, disk: Path | None, *, num_host_blocks: int = 0, **options: Any) -> Worker:
    """Return a worker with eight blocks, and a disk tier if there is a folder for it."""
    if disk is not None:
        options = {"kv_disk_space": "1MiB", "kv_disk_dir": str(disk), **options}
    known = {"device": "cpu", "dtype": "float32", "kv_cache_dtype": "float32", "max_model_len": 32, "num_threads": 1}
    config = EngineConfig.from_kwargs(model=str(folder), block_size=BLOCK_SIZE, **{**known, **options})
    worker = Worker(config, load_model_info(folder))
    worker.allocate(8, 32, num_host_blocks)
    return worker


def run(
    worker: Worker, sequence_id: str = "", blocks: list[int] | None = None, done: int = 0, **rest: Any
) -> ModelOutput:
    """Run a step that computes what is left of PROMPT, or nothing without a sequence."""
    new = NewSequenceData(
        sequence_id,
        EngineRequest(sequence_id, PROMPT, SamplingParams(temperature=0.0, logprobs=3)),
        [blocks or []],
        done,
    )
    count = len(PROMPT) - done if sequence_id else 0
    plan = SchedulerOutput(
        new_sequences=[new] if sequence_id else [],
        continuing=[],
        num_scheduled_tokens={sequence_id: count} if sequence_id else {},
        total_num_scheduled_tokens=count,
        finished_sequence_ids=[],
        preempted_sequence_ids=[],
        **rest,
    )
    return worker.submit(plan).result()


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "int8"])
def test_after_a_restart_a_prompt_goes_on_from_blocks_on_disk(
    folder: Path, tmp_path: Path, kv_cache_dtype: str
) -> None:
    first = started(folder, tmp_path, kv_cache_dtype=kv_cache_dtype)
    computed = run(first, "a", [2, 3])
    run(first, transfers=[disk_store(2, 5, HEADER)])
    key = first.stored_blocks().hash_key
    first.close()

    second = started(folder, tmp_path, kv_cache_dtype=kv_cache_dtype)
    stored = second.stored_blocks()
    assert (stored.blocks, stored.hash_key) == ([(5, HEADER)], key) and key is not None
    assert run(second, transfers=[disk_load(6, 5, HEADER)], wait_for_loads=True).loaded == {6: True}
    again = run(second, "b", [6, 7], BLOCK_SIZE)
    assert again.logprobs["b"] == computed.logprobs["a"]
    assert run(second, "c", [1, 4], BLOCK_SIZE).logprobs["c"] != computed.logprobs["a"], "an empty block gives others"
    second.close()


def test_a_damaged_record_is_reported_and_not_used(folder: Path, tmp_path: Path) -> None:
    first = started(folder, tmp_path)
    run(first, "a", [2, 3])
    run(first, transfers=[disk_store(2, 0, HEADER)])
    first.close()
    (file,) = tmp_path.glob("*/blocks")
    data = bytearray(file.read_bytes())
    data[100] ^= 64
    file.write_bytes(data)
    second = started(folder, tmp_path)
    assert second.stored_blocks().blocks == [(0, HEADER)]
    assert run(second, transfers=[disk_load(6, 0, HEADER)], wait_for_loads=True).loaded == {6: False}
    second.close()


def test_another_model_does_not_see_the_blocks(folder: Path, tmp_path: Path) -> None:
    first = started(folder, tmp_path / "kv")
    run(first, transfers=[disk_store(2, 0, HEADER)])
    first.close()
    tuned = write_checkpoint(tmp_path / "tuned", "llama", seed=1)
    for model, options in ((tuned, {}), (folder, {"kv_cache_dtype": "bfloat16"}), (folder, {"dtype": "bfloat16"})):
        other = started(model, tmp_path / "kv", **options)
        assert other.stored_blocks().blocks == []
        other.close()
    same = started(folder, tmp_path / "kv")
    assert same.stored_blocks().blocks == [(0, HEADER)]
    same.close()


def test_blocks_come_back_from_the_host(folder: Path) -> None:
    worker = started(folder, None, num_host_blocks=2)
    assert worker.stored_blocks() == StoredBlocks(num_slots=0, hash_key=None, blocks=[])
    computed = run(worker, "a", [2, 3])
    run(worker, transfers=transfers_of([(OUT, 2, 1)]))
    again = run(worker, "b", [6, 7], BLOCK_SIZE, transfers=transfers_of([(IN, 1, 6)]))
    assert again.logprobs["b"] == computed.logprobs["a"]
    worker.close()


def test_slots_are_as_many_as_fit(folder: Path, tmp_path: Path) -> None:
    for space in (2**20, 2**21):
        worker = started(folder, tmp_path, kv_disk_space=f"{space}B")
        count = worker.stored_blocks().num_slots
        assert 0 < count < space / worker.kv_cache_spec().block_bytes(BLOCK_SIZE, 32)
        run(worker, transfers=[disk_store(2, count - 1, HEADER)])
        worker.close()
        assert sum(path.stat().st_size for path in tmp_path.glob("*/[bh]*")) <= space


def test_a_start_that_fails_leaves_the_store_to_the_next(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(runner: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "warm_up", interrupted)
    with pytest.raises(KeyboardInterrupt):
        started(folder, tmp_path)
    monkeypatch.undo()
    started(folder, tmp_path).close()


def failing(name: str, code: int) -> Callable[..., int]:
    real = getattr(os, name)

    def call(*args: Any) -> int:
        if isinstance(args[0], Path) and args[0].suffix == ".json":
            return real(*args)
        raise OSError(code, os.strerror(code))

    return call


def spoil(disk: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage the one store in a folder."""
    (store,) = (path for path in disk.iterdir() if path.is_dir())
    if how == "truncated":
        for path in store.iterdir():
            os.truncate(path, path.stat().st_size // 2)
    elif how == "noise":
        for path in [disk / "weights.json", *store.iterdir()]:
            path.write_bytes(np.random.default_rng(1).bytes(5000))
    elif how == "another version":
        meta = json.loads((store / "meta").read_text())
        (store / "meta").write_text(json.dumps({**meta, "format": 99}))
    elif how == "folders":
        for path in [disk / "weights.json", *store.iterdir()]:
            path.unlink()
            path.mkdir()
    elif how == "pipes":
        for path in [disk / "weights.json", *store.iterdir()]:
            path.unlink()
            os.mkfifo(path)
    elif how == "no space to begin":
        shutil.rmtree(store)
        monkeypatch.setattr(os, "mkdir", failing("mkdir", errno.ENOSPC))
    elif how == "no permission":
        monkeypatch.setattr("quire.worker.disk_store.os.open", failing("open", errno.EACCES))
    else:
        monkeypatch.setattr(os, "pwrite", failing("pwrite", errno.ENOSPC))


STORE_DAMAGE = (
    *("truncated", "noise", "another version", "folders", "pipes"),
    *("no space to begin", "no permission", "no space to write"),
)


@pytest.mark.parametrize("how", STORE_DAMAGE)
def test_no_damage_of_the_disk_tier_stops_a_start(
    folder: Path, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = tmp_path / "disk"
    worker = started(folder, disk)
    expected = run(worker, "a", [2, 3]).logprobs["a"]
    run(worker, transfers=[disk_store(2, 0, HEADER)])
    worker.close()
    spoil(disk, how, monkeypatch)
    caplog.clear()
    worker = started(folder, disk)
    monkeypatch.undo()
    assert run(worker, "a", [2, 3]).logprobs["a"] == expected
    worker.close()
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING and "disk" in record.name]
    about = [record.getMessage() for record in caplog.records if "kv_disk_dir" in record.getMessage()]
    assert len(warnings) + len(about) == 1, caplog.text
    assert not about or about[0].startswith(f"no prefixes are kept on disk: kv_disk_dir {disk} cannot be used (")


@pytest.mark.parametrize("where", ["file", "file/below", "closed"])
def test_a_disk_tier_in_the_wrong_place_is_refused(
    folder: Path, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "closed")  # root may do everything
    with pytest.raises(ConfigError, match=f"kv_disk_dir is '{tmp_path / where}' .expected a folder") as caught:
        started(folder, tmp_path / where)
    assert caught.value.param == "kv_disk_dir"


def test_the_folder_may_begin_with_the_home_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    started(folder, None, kv_disk_space="1MiB").close()
    started(folder, Path("~/mine")).close()
    assert sorted(path.parent.relative_to(tmp_path).parts[:-1] for path in tmp_path.rglob("meta")) == [
        (".cache", "quire", "kv"),
        ("mine",),
    ]


@pytest.mark.parametrize(("name", "value"), [("attention_backend", "torch"), ("max_cudagraph_capture_size", 8)])
def test_what_only_a_gpu_has_is_refused_elsewhere(folder: Path, name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name}: .* is not allowed; device 'cpu' has no") as caught:
        started(folder, None, **{name: value})
    assert caught.value.param == name


def test_no_graphs_are_left_out_on_a_cpu(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        started(folder, None, enforce_eager=True)
    assert "enforce_eager changes nothing: device cpu has no CUDA graphs" in caplog.text
