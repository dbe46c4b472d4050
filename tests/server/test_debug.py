"""/debug/blocks and /debug/prefixes in front of a real engine without a model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.engine.core import EngineCore
from tests.helpers.live_server import LiveServer, MakeServer
from tests.server.steps import Ask, asking, make_core, step

PATHS = ("/debug/blocks", "/debug/prefixes")
PROMPT = list(range(20, 30))


@pytest.fixture
def core() -> EngineCore:
    """An engine whose model adds one to the last token."""
    return make_core()


@pytest.fixture
def held(core: EngineCore, make_server: MakeServer) -> LiveServer:
    """A server in front of it."""
    return make_server(llm={"engine": core}, enable_debug_endpoints=True)


@pytest.fixture
def ask(held: LiveServer) -> Iterator[Ask]:
    """Sends a completion request, of which only the test makes steps."""
    with asking(held) as post:
        yield post


@pytest.mark.parametrize("path", PATHS)
def test_they_are_not_there_unless_asked_for(server: LiveServer, path: str) -> None:
    answer = server.http.get(path)
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "unknown_url" and "--enable-debug-endpoints" in error["message"]
    assert path not in server.http.get("/openapi.json").json()["paths"]


@pytest.mark.parametrize("path", PATHS)
def test_they_ask_for_the_key(make_server: MakeServer, path: str) -> None:
    server = make_server(llm={"engine": make_core()}, enable_debug_endpoints=True, api_key=["secret"])
    assert server.http.get(path).status_code == 401
    headers = {"Authorization": "Bearer secret"}
    assert server.http.get(path, headers=headers).status_code == 200
    assert server.http.get(path, params={"tokens": "true"}, headers=headers).status_code == 200


def test_token_ids_are_not_shown_to_one_of_several_keys(make_server: MakeServer) -> None:
    server = make_server(llm={"engine": make_core()}, enable_debug_endpoints=True, api_key=["a", "b"])
    for path in PATHS:
        answer = server.http.get(path, params={"tokens": "true"}, headers={"Authorization": "Bearer a"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (403, "tokens")


def test_samples_of_one_prompt_share_its_blocks(held: LiveServer, core: EngineCore, ask: Ask) -> None:
    ask(prompt=PROMPT, n=3)
    step(held, core, 3, num_requests=1)
    picture = held.http.get("/debug/blocks").json()
    assert (picture["block_size"], picture["block_bytes"]) == (4, 256)
    assert picture["groups"] == [{"layers": [0], "sliding_window": None}]
    device = picture["device"]
    assert (device["used"], device["cached"], device["free"]) == (5, 0, 35)
    (request,) = picture["queues"]["running"]["requests"]
    names = [sequence["sequence_id"] for sequence in request["sequences"]]
    assert len(names) == 3 and request["blocks"] == 5
    assert all((s["tokens_done"], s["tokens_left"], s["blocks"]) == (12, 1, 3) for s in request["sequences"])
    used = [row for row in picture["blocks"] if row["state"] == "used"]
    assert [row["owners"] for row in used if row["refs"] == 3] == [names, names]
    assert sorted(row["owners"] for row in used if row["refs"] == 1) == sorted([name] for name in names)
    assert picture["waste"]["reserved_slots"] == 20 == picture["waste"]["filled_slots"]
    assert "token_ids" not in str(picture)


def test_what_is_asked_for_is_shown_and_no_more(held: LiveServer, core: EngineCore, ask: Ask) -> None:
    ask(prompt=PROMPT)
    step(held, core, 1, num_requests=1)
    get = held.http.get
    rows = get("/debug/blocks", params={"start": "1", "limit": "2", "tokens": "true"}).json()["blocks"]
    assert [row["id"] for row in rows] == [1, 2]
    assert rows[0]["token_ids"] == PROMPT[4:8]
    assert get("/debug/blocks", params={"limit": "0"}).json()["blocks"] == []
    assert get("/debug/blocks", params={"tier": "host"}).json()["blocks"] == []
    tree = get("/debug/prefixes", params={"tokens": "true"}).json()
    assert [node["token_ids"] for node in tree["nodes"]] == [PROMPT[:8]]
    assert "token_ids" not in get("/debug/prefixes").text


def test_both_can_be_drawn(held: LiveServer, core: EngineCore, ask: Ask) -> None:
    done = ask(prompt=PROMPT, max_tokens=4)
    held.wait_until(lambda: len(core.scheduler.requests) == 1)
    held.do(held.fake_client.resume)
    assert done.result(20).status_code == 200
    held.do(held.fake_client.hold)
    ask(prompt=PROMPT[:8] + [5] * 6, request_id="mine")
    step(held, core, 1, num_requests=1)
    answer = held.http.get("/debug/blocks", params={"format": "text", "limit": 12})
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    lines = answer.text.splitlines()
    assert lines[:2] == [
        "device: 40 blocks of 4 tokens: 4 used, 2 cached, 34 free, 0 loading, 0 shared, 0 saved by sharing",
        "waste: 2 of 16 slots of running sequences, at most 2 in a block table",
    ]
    assert sorted(lines[3][9:]) == sorted("###+cc......")
    assert lines[4] == "running: 1"
    assert "mine" in lines[5] and lines[5].endswith(": 4 blocks, 0 on the host, 0 preemptions; 14 done 1 left")
    assert held.http.get("/debug/prefixes", params={"format": "text"}).text == (
        "8 tokens in 2 blocks, 2 in use\n  5 tokens in 2 blocks, 0 in use\n  4 tokens in 1 blocks, 1 in use\n"
    )


@pytest.mark.parametrize(
    ("path", "query", "message"),
    [
        ("/debug/blocks", "limit=-1", "limit must be an integer from 0 to 16384, got '-1'"),
        ("/debug/blocks", "limit=16385", "limit must be an integer from 0 to 16384, got '16385'"),
        ("/debug/blocks", "start=" + "9" * 5000, "start must be an integer"),
        ("/debug/blocks", "tier=disk", "tier must be one of device, host, got 'disk'"),
        ("/debug/blocks", "tokens=1", "tokens must be true or false, got '1'"),
        ("/debug/blocks", "limits=1", "unknown parameter limits; did you mean limit?"),
        ("/debug/prefixes", "tier=host", "unknown parameter tier"),
        ("/debug/prefixes", "format=html", "format must be one of json, text, got 'html'"),
    ],
)
def test_bad_queries_are_refused_by_name(held: LiveServer, path: str, query: str, message: str) -> None:
    answer = held.http.get(f"{path}?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)


def test_they_are_described(held: LiveServer) -> None:
    paths = held.http.get("/openapi.json").json()["paths"]
    names = [item["name"] for item in paths["/debug/blocks"]["get"]["parameters"]]
    assert set(names) == {"limit", "start", "tier", "tokens", "format", "model"}
