"""What a response in the background holds until it ends: its key's place. For processes that stop, see `test_run`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.live_server import LiveServer, MakeServer
from tests.server.responses.asking import PATH

KEYS = "keys:\n  - key: one\n    max_concurrency: 1\n  - key: two\n    max_concurrency: 2\n"
LONG = {"max_model_len": 100_000}


@pytest.fixture
def server(make_server: MakeServer, tmp_path: Path) -> Iterator[LiveServer]:
    """A server whose keys may have one request at a time, or two; its engine makes no step until it is told to."""
    path = tmp_path / "keys"
    path.write_text(KEYS)
    path.chmod(0o600)
    live = make_server(llm={"reply_text": "hello", **LONG}, api_key_file=str(path))
    live.do(live.fake_client.hold)
    yield live
    live.do(live.fake_client.resume)


def post(server: LiveServer, key: str, **body: Any) -> httpx.Response:
    sent = {"model": "fake", "input": "hi", **body}
    return server.http.post(PATH, json=sent, headers={"authorization": f"Bearer {key}"})


def check_full(answer: httpx.Response) -> None:
    """Check that the key has no place for it."""
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (429, "rate_limit_error", "rate_limit_exceeded")
    assert "at a time" in error["message"]


def get(server: LiveServer, key: str, response_id: str) -> dict[str, Any]:
    answer = server.http.get(f"{PATH}/{response_id}", headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


def test_it_holds_the_place_of_its_key_until_it_ends(server: LiveServer) -> None:
    made = post(server, "one", background=True).json()["id"]
    for body in ({}, {"background": True}, {"stream": True}):
        check_full(post(server, "one", **body))
    assert get(server, "one", made)["status"] == "queued"  # to look costs no place
    server.do(server.fake_client.resume)
    server.wait_until(lambda: server.context.num_open == 0)
    assert get(server, "one", made)["status"] == "completed"
    for _ in range(3):
        assert post(server, "one").status_code == 200


def test_each_holds_one_place_only(server: LiveServer) -> None:
    made = [post(server, "two", background=True).json()["id"] for _ in range(2)]
    check_full(post(server, "two", background=True))
    server.do(server.fake_client.resume)
    server.wait_until(lambda: server.context.num_open == 0)
    assert {get(server, "two", response_id)["status"] for response_id in made} == {"completed"}
    again = post(server, "two", background=True)
    assert (again.status_code, post(server, "two").status_code) == (200, 200)


@pytest.mark.parametrize("method", ["cancel", "delete"])
def test_ending_it_takes_no_place_and_frees_its_own(server: LiveServer, method: str) -> None:
    made = post(server, "one", background=True).json()["id"]
    check_full(post(server, "one"))
    headers = {"authorization": "Bearer one"}
    if method == "cancel":
        ended = server.http.post(f"{PATH}/{made}/cancel", headers=headers)
    else:
        ended = server.http.delete(f"{PATH}/{made}", headers=headers)
    assert ended.status_code == 200, ended.text
    server.wait_until(lambda: server.context.num_open == 0)
    assert post(server, "one", background=True).status_code == 200


@pytest.mark.parametrize("body", [{"background": True, "temperature": -1}, {"background": True, "input": []}, {}])
def test_what_is_refused_or_done_holds_no_place(server: LiveServer, body: dict[str, Any]) -> None:
    server.do(server.fake_client.resume)
    for _ in range(3):
        assert post(server, "one", **body).status_code in (200, 400)
    assert post(server, "one").status_code == 200


def test_a_follower_that_leaves_gives_no_place_back(server: LiveServer) -> None:
    body = {"model": "fake", "input": "hi", "background": True, "stream": True}
    headers = {"authorization": "Bearer one"}
    with server.http.stream("POST", PATH, json=body, headers=headers) as answer:
        next(answer.iter_text())
    server.wait_until(lambda: server.context.num_open == 1)
    check_full(post(server, "one"))
    server.do(server.fake_client.resume)
    server.wait_until(lambda: server.context.num_open == 0)
    assert post(server, "one").status_code == 200
