"""Stored responses in a folder: restarts, several processes, deaths, damage, full and locked disks."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ConfigError, NotFoundError
from quire.server.data_dir import StorageError, prepare_data_dir
from quire.server.responses.database import FILE, RESTARTED, ResponseDatabase
from quire.server.responses.store import RemoteResponse, ResponseStore, StoredResponse
from tests.helpers.live_server import LiveServer, MakeServer
from tests.server.checks import check_error
from tests.server.process import Process
from tests.server.responses.asking import PATH, ask, check_story, read_events, text_of
from tests.server.responses.shelves import Shelves
from tests.server.responses.spec import check
from tests.server.responses.test_response_items import prompt_of

LLM = {"reply_text": "hello world"}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """The path of a data directory, which is not there yet."""
    return str(tmp_path / "data")


def serve(folder: str, **options: Any) -> LiveServer:
    return LiveServer(llm=LLM, data_dir=folder, **options)


def stream_in_background(server: LiveServer) -> str:
    """Begin a response that can be followed; return its id."""
    body = {"model": "fake", "input": "hi", "background": True, "stream": True}
    with server.http.stream("POST", PATH, json=body) as answer:
        line = next(line for line in answer.iter_lines() if line.startswith("data: "))
    found: str = json.loads(line.removeprefix("data: "))["response"]["id"]
    return found


def test_what_has_ended_outlives_the_server(folder: str) -> None:
    server = serve(folder)
    one = ask(server, input="one")
    two = ask(server, input="two", previous_response_id=one["id"])
    followed = stream_in_background(server)
    server.wait_until(lambda: server.context.num_open == 0)
    path, query = f"{PATH}/{followed}", {"stream": "true"}
    events = read_events(server.http.get(path, params=query).text)
    items = server.http.get(f"{PATH}/{two['id']}/input_items").json()
    server.close()
    server = serve(folder)
    assert [server.http.get(f"{PATH}/{made['id']}").json() for made in (one, two)] == [one, two]
    assert server.http.get(f"{PATH}/{two['id']}/input_items").json() == items
    assert read_events(server.http.get(path, params=query).text) == events
    assert read_events(server.http.get(path, params={**query, "starting_after": 3}).text) == events[4:]
    check_story(events)
    three = ask(server, input=[{"id": two["output"][0]["id"]}], previous_response_id=two["id"])
    assert text_of(three) == "hello world"
    prompt = prompt_of(server)
    assert [prompt.count(text) for text in ("one", "two", "hello world")] == [1, 1, 3]
    assert server.http.delete(f"{PATH}/{one['id']}").status_code == 200
    server.close()
    server = serve(folder)
    check_error(server.http.get(f"{PATH}/{one['id']}"), 404, "response_not_found", "response_id")
    assert server.http.get(f"{PATH}/{three['id']}").json() == three
    server.close()


def test_what_ran_when_the_process_died_has_failed(folder: str) -> None:
    shelves = Shelves(data_dir=folder)
    running = shelves.put(finished=False, events=True)
    running.events = [b"event: x\n\n"]
    shelves.close()
    server = serve(folder)
    path = f"{PATH}/{running.response_id}"
    found = server.http.get(path).json()
    assert (found["status"], found["error"]) == ("failed", {"code": "server_error", "message": RESTARTED})
    for start in (0, 7):
        answer = server.http.get(path, params={"stream": "true", "starting_after": start}).text
        [event] = [json.loads(line[6:]) for line in answer.split("\n") if line.startswith("data: ")]
        assert (event["type"], event["sequence_number"]) == ("response.failed", start + 1)
        assert event["response"] == found
    assert [item["id"] for item in server.http.get(f"{path}/input_items").json()["data"]] == ["msg_1"]
    server.close()


def test_a_response_of_a_dead_server_is_official(folder: str, make_server: MakeServer) -> None:
    server = serve(folder)
    server.do(server.fake_client.hold)
    made = ask(server, background=True)
    server.context.responses.close()  # as when it is killed: nothing can be noted any more
    again = serve(folder)
    found = again.http.get(f"{PATH}/{made['id']}").json()
    check("Response", found)
    assert (found["status"], found["error"]["code"], found["output"]) == ("failed", "server_error", [])
    answer = again.http.post(f"{PATH}/{made['id']}/cancel")
    assert answer.json() == found
    again.close()
    server.do(server.fake_client.resume)
    server.close()


def test_keys_see_nothing_of_each_other_after_a_restart(folder: str) -> None:
    server = serve(folder, api_key=["one", "two"])
    mine, other = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    made = ask(server, headers=mine)
    server.close()
    server = serve(folder, api_key=["two", "three", "one"])
    path = f"{PATH}/{made['id']}"
    assert server.http.get(path, headers=mine).json() == made
    check_error(server.http.get(path, headers=other), 404, "response_not_found", "response_id")
    body = {"model": "fake", "input": [{"id": made["output"][0]["id"]}]}
    check_error(server.http.post(PATH, json=body, headers=other), 400, "item_not_found", "input[0].id")
    assert server.http.post(PATH, json=body, headers=mine).status_code == 200
    server.close()


def test_time_goes_on_while_the_server_is_down(folder: str) -> None:
    options: dict[str, Any] = {"data_dir": folder, "stored_response_ttl": 10.0}
    with Shelves(**options) as shelves:
        old = shelves.put()
        shelves.now = 9.0
        new = shelves.put()
    with Shelves(now=10.0, **options) as shelves:
        assert [shelves.has(stored) for stored in (old, new)] == [False, True]
        assert shelves.num_stored == 1


def test_lower_bounds_hold_from_the_start(folder: str) -> None:
    with Shelves(data_dir=folder) as shelves:
        made = [shelves.put() for _ in range(5)]
    with Shelves(data_dir=folder, max_stored_responses=2) as shelves:
        assert shelves.num_stored == 2
        assert [shelves.has(stored) for stored in made] == [False, False, False, True, True]


def test_files_are_for_their_owner_only(folder: str) -> None:
    with Shelves(data_dir=f"{folder}/a/b") as shelves:
        shelves.put()
        assert stat.S_IMODE(Path(folder, "a", "b").stat().st_mode) == 0o700
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in Path(folder, "a", "b").iterdir()}
    assert {FILE, f"{FILE}-wal"} <= modes.keys()
    assert set(modes.values()) == {0o600}


def test_what_was_deleted_is_not_left_in_the_file(folder: str) -> None:
    secret = b"the password is swordfish"
    with Shelves(data_dir=folder) as shelves:
        kept = shelves.put()
        stored = shelves.put(metadata={"a": secret.decode()})
        assert any(secret in path.read_bytes() for path in Path(folder).iterdir())
        shelves.run(shelves.store.delete(stored))
        assert not any(secret in path.read_bytes() for path in Path(folder).iterdir())  # the log included
    data = Path(folder, FILE).read_bytes()
    assert secret not in data
    assert kept.response_id.encode() in data


class TestSeveralProcesses:
    """Stores in two slots, as two processes have them."""

    def test_they_see_what_has_ended(self, folder: str) -> None:
        with Shelves(0, data_dir=folder) as one, Shelves(1, data_dir=folder) as two:
            made = one.put(events=True)
            assert two.has(made)
            assert two.has_item("msg_1")
            [item] = two.run(two.store.previous(b"", made.response_id)).earlier
            assert item["id"] == "msg_earlier"
            two.run(two.store.delete(made))
            assert not one.has(made)
            with pytest.raises(NotFoundError):
                one.run(one.store.find(b"another", made.response_id))

    def test_they_know_where_others_run(self, folder: str) -> None:
        with Shelves(0, data_dir=folder) as one, Shelves(1, data_dir=folder) as two:
            made = two.put(finished=False, background=True)
            found = one.find(made)
            assert isinstance(found, RemoteResponse)
            assert (found.slot, found.resource()["status"]) == (1, "in_progress")
            assert [item["id"] for item in found.items] == ["msg_1_1"]
            two.end(made, {"id": "msg_out"}, last=())
            ended = one.find(made)
            assert isinstance(ended, StoredResponse)
            assert ended.conversation == [{"id": "msg_earlier"}, *made.items, {"id": "msg_out"}]

    def test_one_that_runs_in_a_process_that_does_not_react_is_an_error(self, folder: str) -> None:
        server = serve(folder)
        with Shelves(1, now=time.time(), data_dir=folder) as other:
            made = other.put(finished=False, events=True, background=True)
            path = f"{PATH}/{made.response_id}"
            assert server.http.get(f"{path}/input_items").status_code == 200
            for method, rest in (("GET", ""), ("POST", "/cancel"), ("GET", "?stream=true"), ("DELETE", "")):
                check_error(server.http.request(method, path + rest), 503, "engine_unavailable")
            body = {"model": "fake", "input": "a", "previous_response_id": made.response_id}
            check_error(server.http.post(PATH, json=body), 400, "invalid_value", "previous_response_id")
            other.end(made, last=(b"data: {}\n\n",))
            assert server.http.get(path, params={"stream": "true"}).text == "data: {}\n\n"
            assert server.http.delete(path).status_code == 200
        server.close()

    def test_what_a_process_leaves_behind_has_failed_for_all(self, folder: str) -> None:
        with Shelves(0, data_dir=folder) as one:
            with Shelves(1, data_dir=folder) as two:
                left = [two.put(finished=False) for _ in range(2)]
                assert all(isinstance(one.find(stored), RemoteResponse) for stored in left)
            assert one.find(left[0]).response["error"]["message"] == RESTARTED
            with Shelves(1, data_dir=folder) as again, Shelves(2, data_dir=folder) as three:
                for shelves in (again, three, one):
                    assert [shelves.find(stored).response["status"] for stored in left] == ["failed", "failed"]
            assert one.num_stored == 2
            assert one.size > 0

    def test_bounds_are_for_all(self, folder: str) -> None:
        options: dict[str, Any] = {"data_dir": folder, "max_stored_responses": 3}
        with Shelves(0, **options) as one, Shelves(1, **options) as two:
            quiet = one.put(b"quiet")
            made = [(one, two)[number % 2].put(b"loud") for number in range(6)]
            assert [one.has(stored) for stored in made] == [False] * 4 + [True] * 2
            assert two.has(quiet)
            assert one.num_stored == two.num_stored == 3

    def test_a_slot_is_for_one(self, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("quire.server.data_dir.SLOT_SECONDS", 0.05)
        with Shelves(data_dir=folder) as one:
            made = one.put(finished=False)
            with pytest.raises(ConfigError, match=r"data_dir: .* is in use by another server"):
                Shelves(data_dir=folder)
            one.end(made)
        with Shelves(data_dir=folder) as one:
            assert one.has(made)


class Model:
    """What the bounds mean, in a few lines: finished responses by age, all of one key together."""

    def __init__(self, most: int, most_bytes: int, seconds: float) -> None:
        self.most, self.most_bytes, self.seconds = most, most_bytes, seconds
        self.running: dict[str, bytes] = {}
        self.ended: OrderedDict[str, tuple[bytes, int, float]] = OrderedDict()
        self.keys: list[bytes] = []  # in the order in which they began to store something

    def weigh(self, key: bytes, *, size: bool) -> int:
        own = [item for item in self.ended.values() if item[0] == key]
        if size:
            return sum([item[1] for item in own])
        return len(own) + list(self.running.values()).count(key)

    def settle(self, now: float) -> None:
        for name in [name for name, item in self.ended.items() if item[2] <= now]:
            del self.ended[name]
        self.forget()
        while self.ended:
            many = len(self.ended) + len(self.running) > self.most
            if not many and sum([item[1] for item in self.ended.values()]) <= self.most_bytes:
                break
            keys = [key for key in self.keys if any(item[0] == key for item in self.ended.values())]
            heaviest = max(keys, key=lambda key: self.weigh(key, size=not many))
            del self.ended[next(name for name, item in self.ended.items() if item[0] == heaviest)]
            self.forget()

    def forget(self) -> None:
        self.keys = [key for key in self.keys if self.weigh(key, size=False)]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "end", "end", "end", "delete", "wait"]),
        st.integers(0, 2),
        st.integers(0, 900),
    ),
    max_size=40,
)


@settings(max_examples=40, deadline=None)
@given(steps=STEPS, most=st.integers(0, 5), most_bytes=st.sampled_from([0, 1500, 10**6]), places=st.integers(0, 2))
def test_bounds_are_those_of_a_simple_model(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, int, int]],
    most: int,
    most_bytes: int,
    places: int,
) -> None:
    options: dict[str, Any] = {
        "max_stored_responses": most,
        "max_stored_response_bytes": most_bytes,
        "stored_response_ttl": 20.0,
    }
    if places:
        options["data_dir"] = str(tmp_path_factory.mktemp("data"))
    shelves = [Shelves(slot, **options) for slot in range(max(places, 1))]
    model = Model(most, most_bytes, 20.0)
    made: list[tuple[Shelves, StoredResponse]] = []
    now = 0.0
    for number, (what, key, amount) in enumerate(steps):
        owner = b"key-%d" % key
        if what == "add":
            shelf = shelves[number % len(shelves)]
            stored = shelf.put(owner, amount, finished=False)
            made.append((shelf, stored))
            if owner not in model.keys:
                model.keys.append(owner)
            model.running[stored.response_id] = owner
        elif what == "end" and (left := [pair for pair in made if pair[1].response_id in model.running]):
            shelf, stored = left[amount % len(left)]
            shelf.end(stored, {"id": f"out_{number}", "text": "y" * (amount // 2)})
            model.settle(now)  # what has expired goes first
            model.ended[stored.response_id] = (model.running.pop(stored.response_id), stored.size, now + 20.0)
        elif what == "delete" and made:
            shelf, stored = made[amount % len(made)]
            shelf.run(shelf.store.delete(stored))
            model.running.pop(stored.response_id, None)
            model.ended.pop(stored.response_id, None)
            model.forget()
        elif what == "wait":
            now += amount / 60
            for shelf in shelves:
                shelf.now = now
        model.settle(now)
        for shelf in shelves:
            found = {stored.response_id for _, stored in made if exists(shelf, stored)}
            assert found == model.ended.keys() | model.running.keys()
            assert shelf.run(shelf.store.totals()) == (
                len(found),
                sum([size for _, size, _ in model.ended.values()]),
            )
    for shelf in shelves:
        shelf.close()


def exists(shelf: Shelves, stored: StoredResponse) -> bool:
    try:
        shelf.find(stored)
    except NotFoundError:
        return False
    return True


def test_kill_9_of_a_server_loses_nothing_that_was_answered(folder: str) -> None:
    body: dict[str, Any] = {"model": "fake", "input": "The king", "max_output_tokens": 5}
    with contextlib.closing(Process("paced", data_dir=folder)) as server:
        server.line()
        answered = [server.http.post(PATH, json=body).json() for _ in range(3)]
        running = {**body, "background": True, "max_output_tokens": 500, "ignore_eos": True}
        begun = server.http.post(PATH, json=running).json()
        server.signal(signal.SIGKILL)
        assert server.end() == -signal.SIGKILL
    with contextlib.closing(Process("ok", data_dir=folder)) as server:
        server.line()
        assert [server.http.get(f"{PATH}/{made['id']}").json() for made in answered] == answered
        found = server.http.get(f"{PATH}/{begun['id']}").json()
        assert (found["status"], found["error"]["message"]) == ("failed", RESTARTED)
        more = server.http.post(PATH, json={**body, "previous_response_id": answered[0]["id"]})
        assert more.status_code == 200
        server.signal(signal.SIGTERM)
        assert server.end() == 0
    assert not Path(folder, f"{FILE}-wal").exists()  # its log is folded into the file


WRITER = """
import asyncio, os, sys
from quire.server.responses.store import ResponseStore, StoredResponse
from quire.server_config import ServerConfig

async def main(folder, slot):
    store = ResponseStore(ServerConfig(data_dir=folder, max_stored_responses=100), slot=slot)
    for number in range(10**6):
        name = f"{os.getpid()}_{number}"
        response = {"id": f"resp_{name}", "status": "in_progress", "store": True, "output": []}
        stored = StoredResponse(b"%d" % slot, response, [], [{"id": f"msg_{name}", "text": "x" * 3000}], events=True)
        await store.add(stored)
        response.update(status="completed", output=[{"id": f"out_{name}", "text": "y" * 3000}])
        store.finish(stored, [b"data: {}\\n\\n"])
        await stored.ended.wait()
        assert response["store"]
        print(name, flush=True)

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def write(folder: str, slot: int) -> subprocess.Popen[str]:
    """Start a process that stores one response after the other, and names each once it has been stored."""
    command = [sys.executable, "-c", WRITER, folder, str(slot)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))


def test_kill_9_in_the_middle_of_writing_loses_nothing_that_was_stored(folder: str) -> None:
    drawn = random.Random(0)
    for _ in range(3):
        writers = [write(folder, slot) for slot in range(2)]
        names = []
        for writer in writers:
            assert writer.stdout is not None
            names.append([writer.stdout.readline().strip() for _ in range(drawn.randrange(5, 40))])
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
        for writer, own in zip(writers, names, strict=True):
            rest = writer.communicate()[0].splitlines(keepends=True)
            own += [line.strip() for line in rest if line.endswith("\n")]
        with Shelves(2, now=time.time(), data_dir=folder, max_stored_responses=100) as shelves:
            for slot, own in enumerate(names):
                for name in own[-3:]:
                    found = shelves.run(shelves.store.find(b"%d" % slot, f"resp_{name}"))
                    assert isinstance(found, StoredResponse)
                    assert (found.response["status"], found.events) == ("completed", [b"data: {}\n\n"])
                    assert [item["id"] for item in found.conversation] == [f"msg_{name}", f"out_{name}"]
            connection = sqlite3.connect(Path(folder, FILE))
            [[check_result]] = connection.execute("PRAGMA integrity_check").fetchall()
            statuses = connection.execute("SELECT response FROM responses WHERE ended IS NULL").fetchall()
            [counted] = connection.execute("SELECT COUNT(*), SUM(size) FROM responses").fetchall()
            connection.close()
            assert (check_result, statuses) == ("ok", [])
            assert shelves.run(shelves.store.totals()) == counted
        assert not list(Path(folder).glob("*.damaged*"))


def garbage(path: Path) -> None:
    path.write_bytes(b"this is no database " * 400)


def holes(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for start in range(4096, len(data), 8192):
        data[start : start + 2000] = bytes(2000)
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: 4096 * 3 + 100])


def foreign(path: Path) -> None:
    path.unlink()
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE notes (text)")
    other.execute("INSERT INTO notes VALUES ('keep me')")
    other.commit()
    other.close()


def newer(path: Path) -> None:
    other = sqlite3.connect(path)
    other.execute("PRAGMA user_version = 99")
    other.close()


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [garbage, holes, cut, foreign, newer, a_folder])
def test_a_damaged_file_is_kept_and_stops_nothing(
    folder: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = Path(folder, FILE)
    with Shelves(data_dir=folder) as shelves:
        old = [shelves.put(size=3000) for _ in range(20)]
    damage(path)
    before = path.read_bytes() if path.is_file() else None
    with caplog.at_level(logging.WARNING), Shelves(data_dir=folder) as shelves:
        assert not any(map(shelves.has, old))
        new = shelves.put(metadata={"new": "new"})
        assert shelves.has(new)
    [record] = caplog.records
    assert f"{FILE}.damaged-1" in record.message
    kept = Path(folder, f"{FILE}.damaged-1")
    assert (kept.read_bytes() if kept.is_file() else None) == before
    damage(path)
    with Shelves(data_dir=folder) as shelves:
        assert shelves.num_stored == 0
    assert Path(folder, f"{FILE}.damaged-2").exists()


def test_a_damaged_row_is_one_response_only(folder: str) -> None:
    with Shelves(data_dir=folder) as shelves:
        bad, good, running = shelves.put(), shelves.put(), shelves.put(finished=False)
    connection = sqlite3.connect(Path(folder, FILE))
    for stored in (bad, running):
        connection.execute("UPDATE responses SET response = 'x' WHERE id = ?", (stored.response_id,))
    connection.commit()
    connection.close()
    with Shelves(data_dir=folder) as shelves:
        assert shelves.has(good)
        assert not shelves.has(running)
        with pytest.raises(StorageError):
            shelves.find(bad)
        shelves.run(shelves.store.delete(bad))
        assert not shelves.has(bad)


def limit_pages(store: ResponseStore, more: int) -> None:
    """Let the database grow by so many pages only, as on a full disk."""
    database = store._thread._database
    assert database is not None
    [pages] = database.connection.execute("PRAGMA page_count").fetchone()
    database.connection.execute(f"PRAGMA max_page_count = {pages + more}")


def test_on_a_full_disk_answers_say_that_they_are_not_stored(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    server = serve(folder)
    first = ask(server)
    limit_pages(server.context.responses, 0)
    metadata = {str(number): "x" * 512 for number in range(16)}
    made = ask(server, metadata=metadata)
    assert (text_of(made), made["store"], first["store"]) == ("hello world", False, True)
    check_error(server.http.get(f"{PATH}/{made['id']}"), 404, "response_not_found", "response_id")
    body: dict[str, Any] = {"model": "fake", "input": "hi", "metadata": metadata}
    final = check_story(read_events(server.http.post(PATH, json={**body, "stream": True}).text))
    assert (text_of(final), final["store"]) == ("hello world", False)
    answer = server.http.post(PATH, json={**body, "background": True})
    check_error(answer, 503, "storage_unavailable", None)
    server.wait_until(lambda: server.context.num_open == 0 and not server.engine.live)
    assert server.http.get(f"{PATH}/{first['id']}").json() == first
    assert len([record for record in caplog.records if "stored responses cannot" in record.message]) == 1
    limit_pages(server.context.responses, 10_000)
    again = ask(server)
    assert server.http.get(f"{PATH}/{again['id']}").json() == again
    server.close()


def test_an_end_that_cannot_be_stored_is_a_failure(folder: str) -> None:
    with Shelves(data_dir=folder) as shelves:
        stored = shelves.put(finished=False)
        limit_pages(shelves.store, 0)
        shelves.end(stored, {"id": "msg_out", "text": "y" * 100_000})
        assert stored.response["store"] is False
        found = shelves.find(stored)
        assert (found.response["status"], found.response["error"]["code"]) == ("failed", "server_error")
        assert "could not be stored" in found.response["error"]["message"]


def test_a_locked_file_delays_nothing_but_stored_responses(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.server.database.ANSWER_SECONDS", 0.2)
    monkeypatch.setattr("quire.server.database.BUSY_SECONDS", 0.2)
    server = serve(folder)
    first = ask(server)
    other = sqlite3.connect(Path(folder, FILE), isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    made = ask(server)
    assert (text_of(made), made["store"]) == ("hello world", False)
    assert server.http.get(f"{PATH}/{first['id']}").json() == first  # readers are not in the way of writers
    assert server.http.get("/livez").status_code == 200
    other.execute("ROLLBACK")
    other.close()
    assert ask(server)["store"] is True
    server.close()


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that answers only while this event is set."""
    answers = threading.Event()
    for name in ("insert", "finish", "find", "find_items", "delete", "totals"):
        work = getattr(ResponseDatabase, name)

        def slow(*args: Any, work: Any = work, **options: Any) -> Any:
            answers.wait()
            return work(*args, **options)

        monkeypatch.setattr(ResponseDatabase, name, slow)
    answers.set()
    yield answers
    answers.set()


def test_on_a_disk_that_hangs_every_answer_ends(
    folder: str, hung: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(folder)
    first = ask(server)
    monkeypatch.setattr("quire.server.database.ANSWER_SECONDS", 0.3)
    hung.clear()
    made = ask(server)
    assert (text_of(made), made["store"]) == ("hello world", False)
    for path in (first["id"], f"{first['id']}/input_items"):
        answer = server.http.get(f"{PATH}/{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_unavailable")
    assert server.http.delete(f"{PATH}/{first['id']}").status_code == 503
    with server.http.stream("POST", PATH, json={"model": "fake", "input": "hi", "stream": True}) as stream:
        last = [line for line in stream.iter_lines() if line.startswith("data: ")][-1]
    response = json.loads(last.removeprefix("data: "))["response"]
    assert (response["status"], response["store"]) == ("completed", False)
    hung.set()
    monkeypatch.setattr("quire.server.database.ANSWER_SECONDS", 20.0)
    assert ask(server)["store"] is True
    for lost in (made, response):
        assert server.http.get(f"{PATH}/{lost['id']}").status_code == 404  # as they have said
    server.close()


def test_the_end_of_a_response_does_not_wait_for_a_disk_that_hangs(
    folder: str, hung: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Shelves(data_dir=folder) as shelves:
        stored = shelves.put(finished=False, events=True)
        monkeypatch.setattr("quire.server.database.ANSWER_SECONDS", 0.3)
        hung.clear()
        shelves.end(stored, last=(b"data: last\n\n",))
        assert stored.response["store"] is False
        assert stored.events == [b"data: last\n\n"]
        with pytest.raises(StorageError):
            shelves.find(stored)
        hung.set()


@pytest.mark.parametrize("name", ["file", "file/below", "closed/below", "\0"])
def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "closed").mkdir(mode=0o500)
    if name.startswith("closed") and os.access(tmp_path / "closed", os.W_OK):
        pytest.skip("the superuser may write everywhere")
    with pytest.raises(ConfigError, match=r"^data_dir: ") as caught:
        prepare_data_dir(str(tmp_path / name))
    assert (caught.value.param, caught.value.exit_code) == ("data_dir", 2)
