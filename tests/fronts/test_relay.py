"""What one front has is had from every front: running responses, files and batches, with real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.helpers.certificates import certify
from tests.helpers.fronts import client_of, fronts_of, wait_for_fronts
from tests.helpers.server import Server, serve

PATH = "/v1/responses"
KEYS = """
- {key: alice-key, name: alice, requests_per_minute: 1000}
- {key: bob-key, name: bob}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two fronts, and no --data-dir."""
    folder = tmp_path_factory.mktemp("relay")
    (folder / "keys").write_text(KEYS)
    options = ("--api-server-count", "2", "--api-key-file", str(folder / "keys"), "--front-stall-timeout", "2")
    with serve(folder / "log", *options) as server:
        server.key = "alice-key"
        wait_for_fronts(server, 2)
        yield server


def begin(client: httpx.Client, max_tokens: int = 700, **fields: Any) -> str:
    """Begin a response in the background; return its id."""
    body = {"model": "quire-demo", "input": "The king", "max_output_tokens": max_tokens, "ignore_eos": True, **fields}
    answer = client.post(PATH, json={**body, "background": True})
    assert answer.status_code == 200, answer.text
    if fields.get("stream"):
        return str(next(events(answer.text))["response"]["id"])
    return str(answer.json()["id"])


def begin_stream(client: httpx.Client, max_tokens: int) -> str:
    """Begin a streamed response in the background, read its first event, and go away; return its id."""
    body = {"model": "quire-demo", "input": "The king", "max_output_tokens": max_tokens, "ignore_eos": True}
    with client.stream("POST", PATH, json={**body, "background": True, "stream": True}) as answer:
        first = next(line for line in answer.iter_lines() if line.startswith("data: "))
    return str(json.loads(first[6:])["response"]["id"])


def events(text: str) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream."""
    return (json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: "))


def logged(server: Server, text: str) -> str:
    """Return the log once it has a text."""
    deadline = time.monotonic() + 10
    while text not in (found := server.log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_a_running_response_is_seen_and_cancelled_from_any_front(clients: tuple[httpx.Client, httpx.Client]) -> None:
    one, two = clients
    found = begin(one)
    deadline = time.monotonic() + 10
    while not two.get(f"{PATH}/{found}").json()["output"]:
        assert time.monotonic() < deadline
    answer = two.post(f"{PATH}/{found}/cancel")
    assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")
    assert one.get(f"{PATH}/{found}").json() == two.get(f"{PATH}/{found}").json() == answer.json()


def test_a_stream_is_followed_from_any_front(clients: tuple[httpx.Client, httpx.Client]) -> None:
    one, two = clients
    found = begin_stream(one, 300)
    times = []
    with two.stream("GET", f"{PATH}/{found}", params={"stream": "true", "starting_after": 1}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        made = []
        for line in answer.iter_lines():
            if line.startswith("data: "):
                made.append(json.loads(line[6:]))
                times.append(time.monotonic())
    assert [event["sequence_number"] for event in made] == list(range(2, 2 + len(made)))
    assert made[-1]["type"] == "response.incomplete"
    assert times[-1] - times[0] > 0.05  # as they came, not all at the end
    again = one.get(f"{PATH}/{found}", params={"stream": "true", "starting_after": 1})
    assert list(events(again.text)) == made


def test_deleting_aborts_what_another_front_runs(clients: tuple[httpx.Client, httpx.Client]) -> None:
    one, two = clients
    found = begin(one)
    assert two.delete(f"{PATH}/{found}").json()["deleted"] is True
    assert one.get(f"{PATH}/{found}").status_code == two.get(f"{PATH}/{found}").status_code == 404


def test_what_one_front_has_made_is_continued_at_another(clients: tuple[httpx.Client, httpx.Client]) -> None:
    one, two = clients
    body = {"model": "quire-demo", "input": "The king", "max_output_tokens": 8}
    made = one.post(PATH, json=body).json()
    more = two.post(PATH, json={**body, "previous_response_id": made["id"]})
    assert more.status_code == 200
    assert more.json()["usage"]["input_tokens"] > made["usage"]["input_tokens"]


def test_a_conversation_is_the_same_at_every_front(clients: tuple[httpx.Client, httpx.Client]) -> None:
    one, two = clients
    conversation = one.post("/v1/conversations", json={}).json()["id"]
    running = begin(one, conversation=conversation)
    body = {"model": "quire-demo", "input": "More", "max_output_tokens": 8, "conversation": conversation}
    answer = two.post(PATH, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conversation_locked")
    assert two.post(f"{PATH}/{running}/cancel").status_code == 200
    assert two.post(PATH, json=body).status_code == 200
    items = one.get(f"/v1/conversations/{conversation}/items", params={"order": "asc"}).json()["data"]
    assert [item["role"] for item in items] == ["user", "assistant"]


def test_other_keys_see_nothing(clients: tuple[httpx.Client, httpx.Client]) -> None:
    one, two = clients
    found = begin(one)
    for method, rest in (("GET", ""), ("GET", "?stream=true"), ("DELETE", ""), ("POST", "/cancel")):
        answer = two.request(method, f"{PATH}/{found}{rest}", headers={"Authorization": "Bearer bob-key"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
    assert two.post(f"{PATH}/{found}/cancel").status_code == 200


def test_a_forwarded_request_is_counted_and_logged_once(
    server: Server, clients: tuple[httpx.Client, httpx.Client]
) -> None:
    one, two = clients
    found = begin(one)
    answer = two.get(f"{PATH}/{found}", headers={"X-Request-Id": "only-once"})
    assert answer.headers["x-request-id"] == "only-once"
    assert int(answer.headers["x-ratelimit-limit-requests"]) == 1000
    for name in ("date", "content-length", "x-request-id", "x-ratelimit-limit-requests"):
        assert len(answer.headers.get_list(name)) == 1
    two.post(f"{PATH}/{found}/cancel")
    one.get("/v1/models", headers={"X-Request-Id": "last-one"})
    assert logged(server, "last-one").count("only-once") == 1


def test_clients_cannot_pass_for_fronts(server: Server, clients: tuple[httpx.Client, httpx.Client]) -> None:
    one, _ = clients
    for name in ("relayed", "x-relayed", "x-quire-relayed"):
        answer = one.get("/v1/models", headers={name: "1", "X-Request-Id": f"not-{name}"})
        assert "x-ratelimit-limit-requests" in answer.headers
        logged(server, f"not-{name}")


def begin_batch(client: httpx.Client, count: int, max_tokens: int) -> str:
    """Begin a batch of so many lines; return its id."""
    body = {"model": "quire-demo", "prompt": "The king", "max_tokens": max_tokens, "ignore_eos": True}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    content = "\n".join(json.dumps({"custom_id": str(number), **line}) for number in range(count))
    file = client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content.encode())})
    assert file.status_code == 200 and "kept in memory only" in file.headers["x-quire-warning"]
    made = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    answer = client.post("/v1/batches", json=made)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def ended_batch(client: httpx.Client, found: str) -> dict[str, Any]:
    """Return a batch once it has ended."""
    deadline = time.monotonic() + 30
    while (batch := client.get(f"/v1/batches/{found}").json())["status"] in ("validating", "in_progress", "finalizing"):
        assert time.monotonic() < deadline
    return batch


def check_output(client: httpx.Client, batch: dict[str, Any], count: int) -> None:
    """Check that each line has one result."""
    assert batch["request_counts"] == {"total": count, "completed": count, "failed": 0}
    output = client.get(f"/v1/files/{batch['output_file_id']}/content").text
    assert [json.loads(line)["custom_id"] for line in output.splitlines()] == [str(number) for number in range(count)]


def test_a_batch_is_run_once_and_seen_from_every_front(clients: tuple[httpx.Client, httpx.Client]) -> None:
    one, two = clients
    for maker, reader in ((one, two), (two, one)):
        batch = ended_batch(reader, begin_batch(maker, 20, 4))
        check_output(reader, batch, 20)
        check_output(maker, batch, 20)
    found = begin_batch(one, 200, 500)
    assert two.post(f"/v1/batches/{found}/cancel").json()["status"] == "cancelling"
    assert one.get(f"/v1/batches/{found}", headers={"Authorization": "Bearer bob-key"}).status_code == 404


def test_a_batch_goes_on_when_the_front_that_runs_it_dies(server: Server) -> None:
    one, two = wait_for_fronts(server, 2)
    with client_of(server, one) as first, client_of(server, two) as second:
        found = begin_batch(second, 40, 40)
        while not first.get(f"/v1/batches/{found}").json()["request_counts"]["completed"]:
            pass
        os.kill(one, signal.SIGKILL)  # the leader
        check_output(second, ended_batch(second, found), 40)
    wait_for_fronts(server, 2)


def test_a_front_that_dies_ends_what_is_followed_from_another(server: Server) -> None:
    one, two = wait_for_fronts(server, 2)
    with client_of(server, one) as first, client_of(server, two) as second:
        found = begin_stream(first, 700)
        with second.stream("GET", f"{PATH}/{found}", params={"stream": "true"}) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(one, signal.SIGKILL)
            began = time.monotonic()
            last = [json.loads(line[6:]) for line in lines if line.startswith("data: ")][-1]
        assert last["error"]["code"] == "engine_unavailable"
        assert time.monotonic() - began < 1.0
        answered = second.get(f"{PATH}/{found}").json()
        assert (answered["status"], answered["error"]["code"]) == ("failed", "server_error")
    wait_for_fronts(server, 2)


def test_a_frozen_front_is_an_error_in_time_and_then_a_failed_response(server: Server) -> None:
    one, two = wait_for_fronts(server, 2)
    with client_of(server, one) as first, client_of(server, two) as second:
        found = begin(first)
        os.kill(one, signal.SIGSTOP)
        began = time.monotonic()
        while (answer := second.get(f"{PATH}/{found}")).status_code == 503:
            assert answer.elapsed.total_seconds() < 1.5
            assert answer.json()["error"]["code"] == "engine_unavailable"
            assert "retry-after" in answer.headers
            assert time.monotonic() - began < 10
        assert answer.json()["status"] == "failed"
    wait_for_fronts(server, 2)


@pytest.mark.parametrize("most", ["64MiB", pytest.param("900TiB", marks=pytest.mark.slow)])
def test_stored_responses_outlive_fronts_but_not_the_server(
    tmp_path: Path, most: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    options = ("--api-server-count", "2", "--max-stored-response-bytes", most)
    with serve(tmp_path / "log", *options) as server:
        before = wait_for_fronts(server, 2)
        body = {"model": "quire-demo", "input": "The king", "max_output_tokens": 4}
        made = server.post(PATH, body)[1]
        folder = folder_of(server)
        assert folder.parent in (tmp_path, Path("/dev/shm"))
        if most == "900TiB":
            assert folder.parent == tmp_path, "there is no such memory"
        assert folder.stat().st_mode & 0o777 == 0o700
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        while set(fronts_of(server)) & set(before):
            time.sleep(0.01)
        wait_for_fronts(server, 2)
        assert json.loads(server.get(f"{PATH}/{made['id']}")[1])["output"] == made["output"]
    assert not folder.exists()


@pytest.mark.slow
def test_the_next_server_removes_stored_responses_of_a_killed_one_and_no_others(tmp_path: Path) -> None:
    options = ("--api-server-count", "2")
    with serve(tmp_path / "log", *options) as killed, serve(tmp_path / "log-2", *options) as lives:
        folders = []
        for server in (killed, lives):
            wait_for_fronts(server, 2)
            folders.append(folder_of(server))
        killed.process.kill()
        killed.process.wait()
        assert folders[0].exists(), "if it can be had without that, this test can go"
        with serve(tmp_path / "log-3"):
            assert [folder.exists() for folder in folders] == [False, True]


def folder_of(server: Server) -> Path:
    """Return the folder with the stored responses of a server that has no `--data-dir`."""
    paths = [Path(file.path) for pid in fronts_of(server) for file in psutil.Process(pid).open_files()]
    [folder] = {path.parent for path in paths if path.parent.name.startswith("quire-responses-")}
    return folder


@pytest.mark.slow
def test_with_tls_and_a_prefix_and_until_the_server_stops(tmp_path: Path) -> None:
    cert, key = certify(tmp_path / "tls", "localhost")
    options = ("--ssl-certfile", str(cert), "--ssl-keyfile", str(key), "--root-path", "/llm")
    with serve(tmp_path / "log", "--api-server-count", "3", *options) as server:
        pids = wait_for_fronts(server, 3)
        with client_of(server, pids[0]) as one, client_of(server, pids[2]) as three:
            found = begin_stream(one, 500)
            with three.stream("GET", f"/llm{PATH}/{found}", params={"stream": "true"}) as answer:
                lines = answer.iter_lines()
                next(lines)
                server.process.send_signal(signal.SIGTERM)
                last = [json.loads(line[6:]) for line in lines if line.startswith("data: ")][-1]
            assert last["type"] == "response.incomplete"
            assert last["response"]["usage"]["output_tokens"] == 500
        ended = time.monotonic()
        assert server.process.wait(10) == 0
        assert time.monotonic() - ended < 2.0


def test_clients_that_go_away_leave_nothing_behind(server: Server) -> None:
    one, two = wait_for_fronts(server, 2)
    before = sockets_of(one) + sockets_of(two)
    with client_of(server, one) as first:
        found = begin_stream(first, 700)
        for _ in range(20):
            with client_of(server, two) as second, second.stream("GET", f"{PATH}/{found}?stream=true") as answer:
                lines = answer.iter_lines()
                next(lines)
        first.post(f"{PATH}/{found}/cancel")
    deadline = time.monotonic() + 10
    while sockets_of(one) + sockets_of(two) > before:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def sockets_of(pid: int) -> int:
    """Return how many sockets a process has."""
    folder = f"/proc/{pid}/fd"
    found = 0
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):  # closed meanwhile
            found += os.readlink(f"{folder}/{name}").startswith("socket:")
    return found
