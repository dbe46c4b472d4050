"""Batches outlive servers and engines: a line has one result, whatever dies, and wherever."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.server.batches.database import BatchDatabase, Bounds, StoredBatch
from quire.server.batches.records import BATCH, OPENAI, OUTPUT, BatchRecord, FileRecord, LineResult
from tests.helpers.live_server import LiveServer, MakeServer
from tests.server.batches.asking import FILES, begun, ended, found, line, lines_of, until, uploaded
from tests.server.process import Process

COUNT = 8


def lines(**longest: Any) -> list[dict[str, Any]]:
    """Return lines of which the fourth takes long."""
    made = [line(str(number), max_tokens=2, ignore_eos=True) for number in range(COUNT)]
    made[3]["body"] |= longest
    return made


def check_complete(http: Any, batch_id: str) -> list[dict[str, Any]]:
    """Check that each line has one result, in order; return them."""
    batch = ended(http, batch_id)
    assert (batch["status"], batch["error_file_id"]) == ("completed", None)
    assert batch["request_counts"] == {"total": COUNT, "completed": COUNT, "failed": 0}
    answers = lines_of(http, batch["output_file_id"])
    assert [answer["custom_id"] for answer in answers] == [str(number) for number in range(COUNT)]
    return answers


def test_kill_9_and_a_restart_in_the_middle(tmp_path: Path) -> None:
    """What has a result keeps it, what was being run is run again, and the rest follows."""
    options = {"data_dir": str(tmp_path / "data"), "max_batch_concurrency": 2}
    with contextlib.closing(Process("paced", **options)) as server:
        server.line()
        batch_id = begun(server.http, lines(max_tokens=200))
        batch = until(server.http, batch_id, lambda batch: batch["request_counts"]["completed"] >= 4)
        assert batch["status"] == "in_progress"
        server.signal(signal.SIGKILL)
        assert server.end() == -signal.SIGKILL
    database = sqlite3.connect(tmp_path / "data" / "batches.sqlite3")
    before = {number: msgspec.json.decode(data) for number, data in database.execute("SELECT line, data FROM results")}
    database.close()
    assert 4 <= len(before) < COUNT
    with contextlib.closing(Process("held", **options)) as server:  # it is told to stop, and does not wait for batches
        server.line()
        until(server.http, batch_id, lambda batch: batch["status"] == "in_progress")
        server.signal(signal.SIGTERM)
        assert server.end() == 0
    with contextlib.closing(Process("ok", **options)) as server:
        server.line()
        after = check_complete(server.http, batch_id)
        for number, result in before.items():
            assert after[number - 1] == result
        server.signal(signal.SIGTERM)
        assert server.end() == 0
    assert not (tmp_path / "data" / "batches.sqlite3-wal").exists()


def test_the_death_of_an_engine_is_no_result(make_server: MakeServer, tmp_path: Path) -> None:
    """The lines wait until there is an engine again, here that of the next server."""
    live = make_server(data_dir=str(tmp_path), max_batch_concurrency=2)
    live.do(live.fake_client.hold)
    batch_id = begun(live.http, lines())
    live.wait_until(lambda: len(live.engine.added) == 2)
    live.do(live.fake_client.die)
    while live.http.get("/health").status_code != 503:
        pass
    live.close()
    again = make_server(data_dir=str(tmp_path))
    check_complete(again.http, batch_id)
    assert len(again.engine.added) == COUNT


@pytest.mark.parametrize("step", ["write", "finish"])
def test_an_end_that_was_not_noted_is_made_again(
    make_server: MakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The server dies after the first file was written, or after both."""
    live = make_server(data_dir=str(tmp_path))
    if step == "finish":
        monkeypatch.setattr(BatchDatabase, "finish", _fail)
    else:
        monkeypatch.setattr(BatchDatabase, "results", _fail)
    monkeypatch.setattr("quire.server.batches.runner.RETRY_SECONDS", 0.0)
    batch_id = begun(live.http, lines())
    until(live.http, batch_id, lambda batch: batch["status"] == "finalizing")
    live.close()
    monkeypatch.undo()
    (tmp_path / "files" / "file-left.part").write_bytes(b"half")
    (tmp_path / "files" / "file-left").write_bytes(b"whole")
    again = make_server(data_dir=str(tmp_path))
    check_complete(again.http, batch_id)
    assert again.engine.added == []  # all had their results
    names = {file["id"] for file in again.http.get(FILES).json()["data"]}
    assert {path.name for path in (tmp_path / "files").iterdir()} == names and len(names) == 2


def _fail(*_: Any) -> Any:
    raise sqlite3.OperationalError("disk I/O error")


@pytest.fixture
def database(tmp_path: Path) -> Any:
    with contextlib.closing(BatchDatabase(tmp_path, Bounds(10**9), lambda: 0.0, 100.0)) as made:
        yield made


def stored(database: BatchDatabase) -> StoredBatch:
    file = FileRecord(file_id="file-a", purpose=BATCH, filename="a", num_bytes=1, created_at=0, expires_at=10**9)
    database.insert_file(b"k", file)
    batch = BatchRecord(
        batch_id="batch_a", api=OPENAI, endpoint="/v1/completions", input_file_id="file-a", created_at=0, expires_at=9
    )
    database.insert_batch(b"k", batch, [BATCH])
    [made] = database.unfinished()
    return made


def test_a_second_result_of_a_line_is_dropped(database: BatchDatabase) -> None:
    batch = stored(database)
    first, second = (LineResult(number=7, failed=failed, data=b"%d" % failed) for failed in (False, True))
    assert database.add_result(batch.number, first, {"total_tokens": 3})
    assert database.add_result(batch.number, second, {"total_tokens": 3})
    assert database.results(batch.number, 1, 10) == {7: first}
    record = database.find_batch(b"k", OPENAI, "batch_a")
    assert (record.num_completed, record.num_failed, record.usage) == (1, 0, {"total_tokens": 3})


def test_an_end_is_noted_once(database: BatchDatabase) -> None:
    batch = stored(database)
    file = FileRecord(file_id="file-b", purpose=OUTPUT, filename="b", num_bytes=1, created_at=0, expires_at=10**9)
    ended = msgspec.structs.replace(batch.record, status="completed", output_file_id="file-b")
    assert database.finish(batch.number, ended, [file])
    other = msgspec.structs.replace(file, file_id="file-c")
    assert not database.finish(batch.number, ended, [other])
    files, _ = database.list_files(b"k", [BATCH, OUTPUT], after=None, limit=9, newest_first=False)
    assert [file.file_id for file in files] == ["file-a", "file-b"]
    assert database.cancel(b"k", OPENAI, "batch_a").status == "completed"
    database.add_result(batch.number, LineResult(number=1, failed=False, data=b""), {})
    assert database.results(batch.number, 1, 1) == {}
    record = database.change(batch.number, status="finalizing")
    assert record is not None and record.status == "completed"


def test_a_key_that_is_gone_runs_nothing_more(make_server: MakeServer, tmp_path: Path) -> None:
    live = make_server(data_dir=str(tmp_path), api_key=["one"])
    live.do(live.fake_client.hold)
    batch_id = begun(live.http, lines(), key="one")
    live.close()
    again: LiveServer = make_server(data_dir=str(tmp_path), api_key=["two"])
    while again.call(again.context.batches.unfinished):
        pass
    assert again.engine.added == []
    assert again.http.get(f"/v1/batches/{batch_id}", headers={"authorization": "Bearer two"}).status_code == 404


def test_files_outlive_the_server(make_server: MakeServer, tmp_path: Path) -> None:
    live = make_server(data_dir=str(tmp_path))
    file_id = uploaded(live.http, [line("a")])
    listed = live.http.get(FILES).json()
    live.close()
    again = make_server(data_dir=str(tmp_path))
    assert again.http.get(FILES).json() == listed
    assert [item["custom_id"] for item in lines_of(again.http, file_id)] == ["a"]
    assert found(again.http, begun(again.http, [line("a")]))["object"] == "batch"


def test_a_batch_whose_input_is_lost_fails(make_server: MakeServer, tmp_path: Path) -> None:
    live = make_server(data_dir=str(tmp_path))
    live.do(live.fake_client.hold)
    batch_id = begun(live.http, lines())
    until(live.http, batch_id, lambda batch: batch["status"] == "in_progress")
    live.close()
    for path in (tmp_path / "files").iterdir():
        path.unlink()
    again = make_server(data_dir=str(tmp_path))
    batch = ended(again.http, batch_id)
    assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "file_not_found")
    assert again.http.get(f"{FILES}/{batch['input_file_id']}/content").status_code == 404


def test_what_was_complete_at_its_expiry_is_completed(make_server: MakeServer, tmp_path: Path) -> None:
    live = make_server(data_dir=str(tmp_path))
    store = live.context.batches
    later = store.clock() + 90_000
    batch_id = begun(live.http, lines())
    until(live.http, batch_id, lambda batch: batch["request_counts"]["completed"] == COUNT)
    store.clock.now = lambda: later
    assert ended(live.http, batch_id)["status"] == "completed"
