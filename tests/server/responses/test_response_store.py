"""Responses that are kept: looked up, gone on from, deleted, bounded, and seen by nobody else."""

from __future__ import annotations

from typing import Any

from tests.helpers.live_server import LiveServer, MakeServer
from tests.server.checks import check_error
from tests.server.responses.asking import LOOK, LOOK_CALL, PATH, THOUGHT, ask, says, text_of
from tests.server.responses.shelves import Shelves
from tests.server.responses.test_response_items import prompt_of


def test_a_response_is_kept_until_it_is_deleted(family: LiveServer) -> None:
    says(family, "hello")
    made = ask(family, metadata={"a": "b"})
    path = f"{PATH}/{made['id']}"
    assert family.http.get(path).json() == made
    deleted = family.http.delete(path)
    assert deleted.json() == {"id": made["id"], "object": "response", "deleted": True}
    for response in (family.http.get(path), family.http.delete(path), family.http.post(f"{path}/cancel")):
        check_error(response, 404, "response_not_found", "response_id")
    check_error(family.http.get(f"{path}/input_items"), 404, "response_not_found", "response_id")


def test_nothing_is_left_of_a_response_that_is_not_to_be_kept(family: LiveServer) -> None:
    says(family, "hello")
    before = family.call(family.context.responses.totals)
    made = ask(family, store=False)
    check_error(family.http.get(f"{PATH}/{made['id']}"), 404, "response_not_found", "response_id")
    assert family.call(family.context.responses.totals) == before
    answer = family.http.post(PATH, json={"model": "fake", "input": "a", "previous_response_id": made["id"]})
    check_error(answer, 404, "previous_response_not_found", "previous_response_id")


def test_a_conversation_goes_on_without_being_sent_again(family: LiveServer) -> None:
    says(family, THOUGHT + "first answer", "second answer", "third answer")
    one = ask(family, input="one", instructions="only for the first")
    two = ask(family, input="two", previous_response_id=one["id"])
    assert two["previous_response_id"] == one["id"]
    prompt = prompt_of(family)
    assert "only for the first" not in prompt  # instructions are not carried over
    assert prompt.index("user\none") < prompt.index("first answer") < prompt.index("user\ntwo")
    three = ask(family, input=[{"role": "user", "content": "three"}], previous_response_id=two["id"], instructions="x")
    assert text_of(three) == "third answer"
    prompt = prompt_of(family)
    places = [prompt.index(text) for text in ("x", "one", "first answer", "two", "second answer", "three")]
    assert places == sorted(places)
    family.http.delete(f"{PATH}/{one['id']}")
    ask(family, input="four", previous_response_id=two["id"])  # what it was made of is its own
    assert "user\none" in prompt_of(family)


def test_calls_are_answered_by_id(family: LiveServer) -> None:
    says(family, LOOK_CALL, "it is dark")
    first = ask(family, tools=[LOOK])
    [call] = first["output"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "dark"}
    second = ask(family, input=[output], previous_response_id=first["id"], tools=[LOOK])
    assert text_of(second) == "it is dark"
    assert prompt_of(family).endswith("<|im_start|>tool\ndark<|im_end|>\n<|im_start|>assistant\n")


def test_a_call_that_was_cut_off_is_no_part_of_what_follows(family: LiveServer) -> None:
    says(family, LOOK_CALL, "hello")
    first = ask(family, tools=[LOOK], max_output_tokens=50)
    assert first["output"][0]["status"] == "incomplete"
    ask(family, input="and?", previous_response_id=first["id"])
    assert "the ha" not in prompt_of(family)


def test_keys_see_nothing_of_each_other(make_server: MakeServer) -> None:
    server = make_server(api_key=["one", "two"], llm={"reply_text": "hello"})
    mine, other = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    made = ask(server, headers=mine, background=True)["id"]
    item = ask(server, headers=mine)["output"][0]["id"]
    paths = [("GET", ""), ("GET", "?stream=true"), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")]
    for method, path in paths:
        answer = server.http.request(method, f"{PATH}/{made}{path}", headers=other)
        unknown = server.http.request(method, f"{PATH}/resp_{'0' * 48}{path}", headers=other)
        check_error(answer, 404, "response_not_found", "response_id")
        assert answer.text.replace(made, "") == unknown.text.replace("resp_" + "0" * 48, "")
    body: dict[str, Any] = {"model": "fake", "input": "a", "previous_response_id": made}
    check_error(
        server.http.post(PATH, json=body, headers=other), 404, "previous_response_not_found", "previous_response_id"
    )
    body = {"model": "fake", "input": [{"id": item}]}
    check_error(server.http.post(PATH, json=body, headers=other), 400, "item_not_found", "input[0].id")
    assert server.http.get(f"{PATH}/{made}", headers=mine).status_code == 200
    assert server.http.get(f"{PATH}/{made}").status_code == 401


def test_a_server_may_keep_nothing(make_server: MakeServer) -> None:
    server = make_server(max_stored_responses=0, llm={"reply_text": "hello"})
    made = ask(server)
    check_error(server.http.get(f"{PATH}/{made['id']}"), 404, "response_not_found", "response_id")
    answer = server.http.post(PATH, json={"model": "fake", "input": "a", "background": True})
    check_error(answer, 400, "unsupported_parameter", "background")


def test_the_oldest_go_when_there_are_too_many() -> None:
    with Shelves(max_stored_responses=3) as shelves:
        made = [shelves.put() for _ in range(5)]
        assert [shelves.has(stored) for stored in made] == [False, False, True, True, True]
        assert not shelves.has_item("msg_1")
        assert shelves.has_item("msg_5")


def test_the_oldest_go_when_they_are_too_large() -> None:
    with Shelves(max_stored_response_bytes=5000) as shelves:
        made = [shelves.put(size=2000) for _ in range(4)]
        assert [shelves.has(stored) for stored in made] == [False, False, True, True]
        assert 4000 < shelves.size < 5000
        large = shelves.put(size=6000)
        assert not shelves.has(large)
        assert (shelves.size, shelves.num_stored) == (0, 0)


def test_they_go_after_their_time() -> None:
    with Shelves(stored_response_ttl=10.0) as shelves:
        old = shelves.put()
        waiting = shelves.put(finished=False)
        shelves.now = 9.0
        new = shelves.put()
        assert shelves.has(old)
        shelves.now = 10.0
        assert [shelves.has(stored) for stored in (old, waiting, new)] == [False, True, True]
        shelves.now = 100.0
        assert not shelves.has_item("msg_3")
        assert [shelves.has(stored) for stored in (waiting, new)] == [True, False]
        shelves.end(waiting)
        assert shelves.has(waiting)
        shelves.now = 110.0
        assert not shelves.has(waiting)
        assert shelves.size == 0


def test_nobody_pushes_out_what_others_keep() -> None:
    with Shelves(max_stored_responses=4) as shelves:
        quiet = shelves.put(b"quiet")
        for _ in range(20):
            shelves.put(b"loud")
        assert shelves.has(quiet)
        assert shelves.num_stored == 4


def test_unfinished_ones_stay() -> None:
    with Shelves(max_stored_responses=2) as shelves:
        running = [shelves.put(finished=False) for _ in range(3)]
        assert all(map(shelves.has, running))
        for stored in running:
            shelves.end(stored)
        assert [shelves.has(stored) for stored in running] == [False, True, True]
        assert shelves.num_stored == 2


def test_deleting_one_that_runs_ends_it_and_frees_its_place() -> None:
    with Shelves() as shelves:
        ended = []
        stored = shelves.put(finished=False)
        stored.abort = lambda: ended.append(True)
        shelves.run(shelves.store.delete(stored))
        shelves.end(stored)
        assert ended == [True]
        assert (shelves.num_stored, shelves.size) == (0, 0)
