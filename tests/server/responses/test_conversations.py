"""Conversations, with the official OpenAI client: their items, the responses that are made in them, their bounds."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.conversations import Conversation
from openai.types.responses import Response, ResponseFunctionToolCall

from quire.errors import ConflictError, NotFoundError, RequestError
from quire.server.responses import store as store_module
from quire.server.responses.store import StoredResponse
from tests.helpers.live_server import LiveServer, MakeServer
from tests.server.checks import check_error, prompt_of
from tests.server.responses.asking import (
    LOOK,
    LOOK_CALL,
    THOUGHT,
    ask,
    check_story,
    family_server,
    read_events,
    refused,
    says,
    text_of,
)
from tests.server.responses.shelves import Shelves
from tests.server.responses.spec import check
from tests.server.responses.test_response_database import limit_pages

PATH = "/v1/conversations"
HELD = "SELECT COUNT(*) FROM responses WHERE slot IS NOT NULL"
HELLO: Any = {"role": "user", "content": "hello"}
# One item of each type that this server knows.
ITEMS: list[Any] = [
    HELLO,
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "be brief"}]},
    {"type": "message", "role": "assistant", "content": "hm", "phase": "commentary"},
    {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "let me see"}]},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "dark"},
    {"type": "custom_tool_call", "call_id": "c2", "name": "note", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "done"}]},
]


def client_of(server: LiveServer, key: str = "one") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def served() -> Iterator[LiveServer]:
    live = family_server(api_key=["one", "two"])
    live.http.headers["authorization"] = "Bearer one"
    yield live
    live.close()


@pytest.fixture
def client(served: LiveServer) -> Iterator[openai.OpenAI]:
    with client_of(served) as made:
        yield made


def texts(client: openai.OpenAI, conversation_id: str) -> list[str]:
    """Return what is said in a conversation, in order: texts of messages, types of other items."""
    items = client.conversations.items.list(conversation_id, order="asc", limit=100)
    for item in items.data:
        check("ConversationItem", item.to_dict())
    return [getattr(item.content[0], "text", "").strip() if item.type == "message" else item.type for item in items]


def gone(error: openai.APIStatusError, name: str, param: str, kind: str = "conversation") -> None:
    """Check an error about something that is not there."""
    assert (error.status_code, error.code, error.param) == (404, f"{kind}_not_found", param)
    assert name in error.message


def test_a_conversation_is_created_changed_and_deleted(client: openai.OpenAI) -> None:
    made = client.conversations.create(metadata={"topic": "demo"}, items=[HELLO])
    check("ConversationResource", made.to_dict())
    assert made.id.startswith("conv_") and made.metadata == {"topic": "demo"}
    assert client.conversations.retrieve(made.id).to_dict() == made.to_dict()
    changed = client.conversations.update(made.id, metadata={"a": "b"})
    assert changed.to_dict() == {**made.to_dict(), "metadata": {"a": "b"}}
    assert client.conversations.update(made.id, metadata=None).metadata == {}
    assert texts(client, made.id) == ["hello"]
    deleted = client.conversations.delete(made.id)
    check("DeletedConversationResource", deleted.to_dict())
    assert (deleted.id, deleted.deleted) == (made.id, True)
    assert client.conversations.create().metadata == {}


def test_items_are_added_listed_and_deleted(client: openai.OpenAI, served: LiveServer) -> None:
    made = client.conversations.create(items=ITEMS[:2]).id
    added = client.conversations.items.create(made, items=ITEMS[2:])
    check("ConversationItemList", added.to_dict())
    assert [item.type for item in added.data] == [item["type"] for item in ITEMS[2:]]
    assert (added.first_id, added.last_id, added.has_more) == (added.data[0].id, added.data[-1].id, False)
    everything = [
        item.id or "" for item in client.conversations.items.list(made, limit=4)
    ]  # the client turns the pages
    assert len(everything) == len(ITEMS)
    pages = served.http.get(f"{PATH}/{made}/items", params={"limit": 4, "order": "asc"}).json()
    check("ConversationItemList", pages)
    assert ([item["id"] for item in pages["data"]], pages["has_more"]) == (everything[::-1][:4], True)
    for item_id in everything:
        item = client.conversations.items.retrieve(item_id, conversation_id=made)
        check("ConversationItem", item.to_dict())
        assert item.id == item_id
    left = client.conversations.items.delete(everything[0], conversation_id=made)
    assert isinstance(left, Conversation) and left.id == made
    with pytest.raises(openai.NotFoundError) as missing:
        client.conversations.items.retrieve(everything[0], conversation_id=made)
    gone(missing.value, everything[0], "item_id", "item")
    check_error(
        served.http.get(f"{PATH}/{made}/items", params={"after": everything[0]}), 404, "item_not_found", "after"
    )
    assert [item.id for item in client.conversations.items.list(made)] == everything[1:]
    empty = client.conversations.create().id
    assert served.http.get(f"{PATH}/{empty}/items").json()["data"] == []


def test_a_response_is_added_and_the_next_goes_on_from_it(client: openai.OpenAI, served: LiveServer) -> None:
    says(served, THOUGHT + "first answer", "second answer", "third answer")
    made = client.conversations.create(items=[{"role": "system", "content": "be brief"}])
    one = client.responses.create(model="fake", input="one", conversation=made.id, instructions="now only")
    check("Response", one.to_dict())
    assert one.conversation is not None and one.conversation.id == made.id
    two = client.responses.create(model="fake", input="two", conversation={"id": made.id})
    prompt = prompt_of(served)
    places = [prompt.index(text) for text in ("be brief", "user\none", "first answer", "user\ntwo")]
    assert places == sorted(places)
    assert "now only" not in prompt  # instructions are not carried over
    said = ["be brief", "one", "reasoning", "first answer", "two", "second answer"]
    assert texts(client, made.id) == said
    items = client.conversations.items.list(made.id, order="asc").data
    assert [item.to_dict() for item in items[2:4]] == [item.to_dict() for item in one.output]
    assert client.responses.retrieve(two.id).to_dict() == two.to_dict()
    three = client.responses.create(model="fake", conversation=made.id)  # nothing new
    assert three.output_text == "third answer"
    assert texts(client, made.id) == [*said, "third answer"]


def test_streams_and_responses_in_the_background_are_added(client: openai.OpenAI, served: LiveServer) -> None:
    says(served, "in a stream", "whole", "in the background")
    made = client.conversations.create().id
    with client.responses.stream(model="fake", input="one", conversation=made) as streamed:
        final = streamed.get_final_response()
    assert final.conversation is not None and final.conversation.id == made
    assert texts(client, made) == ["one", "in a stream"]
    unstored = client.responses.create(model="fake", input="two", conversation=made, store=False)
    assert unstored.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)
    events = list(client.responses.create(model="fake", input="3", conversation=made, background=True, stream=True))
    assert events[-1].type == "response.completed"
    assert texts(client, made) == ["one", "in a stream", "two", "whole", "3", "in the background"]
    polled: Response = client.responses.create(model="fake", input="4", conversation=made, background=True)
    while polled.status in ("queued", "in_progress"):
        polled = client.responses.retrieve(polled.id)
    assert texts(client, made)[-2:] == ["4", "in the background"]


def test_calls_of_functions_are_answered_in_a_conversation(client: openai.OpenAI, served: LiveServer) -> None:
    says(served, LOOK_CALL, "it is dark", "too long to be said")
    made = client.conversations.create().id
    first = client.responses.create(model="fake", input="the hall?", conversation=made, tools=[LOOK])  # type: ignore[list-item]
    [call] = first.output
    assert isinstance(call, ResponseFunctionToolCall)
    answer: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "dark"}
    second = client.responses.create(model="fake", input=[answer], conversation=made, tools=[LOOK])  # type: ignore[list-item]
    assert second.output_text == "it is dark"
    assert texts(client, made) == ["the hall?", "function_call", "function_call_output", "it is dark"]
    cut = client.responses.create(model="fake", input="more", conversation=made, max_output_tokens=2)
    assert cut.status == "incomplete"
    assert texts(client, made)[-2:] == ["more", cut.output_text.strip()]
    client.conversations.items.delete(call.id or "", conversation_id=made)
    with pytest.raises(openai.BadRequestError) as bad:  # its output is still there, at this place
        client.responses.create(model="fake", input="and?", conversation=made)
    assert bad.value.param == "conversation.items[1].call_id"


def test_tokens_of_a_conversation_are_counted(client: openai.OpenAI, served: LiveServer) -> None:
    says(served, "hello")
    made = client.conversations.create(items=[HELLO]).id
    counted = client.responses.input_tokens.count(model="fake", input="hi", conversation=made)
    response = client.responses.create(model="fake", input="hi", conversation=made)
    assert response.usage is not None
    assert counted.input_tokens == response.usage.input_tokens


def test_what_is_deleted_is_gone_for_all_that_name_it(client: openai.OpenAI, served: LiveServer) -> None:
    says(served, "hello")
    made = client.conversations.create(items=[HELLO]).id
    client.conversations.delete(made)
    for use in (
        lambda: client.conversations.retrieve(made),
        lambda: client.conversations.update(made, metadata={}),
        lambda: client.conversations.delete(made),
        lambda: client.conversations.items.create(made, items=[HELLO]),
        lambda: client.conversations.items.list(made),
        lambda: client.conversations.items.retrieve("msg_1", conversation_id=made),
        lambda: client.conversations.items.delete("msg_1", conversation_id=made),
    ):
        with pytest.raises(openai.NotFoundError) as missing:
            use()
        gone(missing.value, made, "conversation_id")
    for fields in ({}, {"stream": True}, {"background": True}):
        check_error(refused(served, conversation=made, **fields), 404, "conversation_not_found", "conversation")
    counted = served.http.post("/v1/responses/input_tokens", json={"conversation": {"id": made}})
    check_error(counted, 404, "conversation_not_found", "conversation")


def test_a_response_is_no_conversation(client: openai.OpenAI, served: LiveServer) -> None:
    says(served, "hello")
    conversation = client.conversations.create().id
    response = client.responses.create(model="fake", input="hi").id
    for method in ("GET", "DELETE"):
        answer = served.http.request(method, f"{PATH}/{response}")
        check_error(answer, 404, "conversation_not_found", "conversation_id")
        answer = served.http.request(method, f"/v1/responses/{conversation}")
        check_error(answer, 404, "response_not_found", "response_id")
    check_error(refused(served, conversation=response), 404, "conversation_not_found", "conversation")
    answer = refused(served, previous_response_id=conversation)
    check_error(answer, 404, "previous_response_not_found", "previous_response_id")
    answer = served.http.get(f"/v1/responses/{conversation}/input_items")
    check_error(answer, 404, "response_not_found", "response_id")


def test_keys_see_nothing_of_each_other(client: openai.OpenAI, served: LiveServer) -> None:
    made = client.conversations.create(items=[HELLO]).id
    [item] = client.conversations.items.list(made).data
    with client_of(served, "two") as other:
        for use in (
            lambda: other.conversations.retrieve(made),
            lambda: other.conversations.update(made, metadata={}),
            lambda: other.conversations.items.list(made),
            lambda: other.conversations.items.create(made, items=[HELLO]),
            lambda: other.conversations.items.delete(item.id or "", conversation_id=made),
            lambda: other.conversations.delete(made),
        ):
            with pytest.raises(openai.NotFoundError):
                use()
        with pytest.raises(openai.NotFoundError):
            other.responses.create(model="fake", input="hi", conversation=made)
        with pytest.raises(openai.BadRequestError):
            other.conversations.create(items=[{"type": "item_reference", "id": item.id or ""}])
    assert texts(client, made) == ["hello"]
    copied = client.conversations.create(items=[{"type": "item_reference", "id": item.id or ""}]).id
    assert texts(client, copied) == ["hello"]


def test_no_item_is_there_twice(client: openai.OpenAI, served: LiveServer) -> None:
    says(served, "hello")
    item: Any = {**HELLO, "id": "msg_mine"}
    made = client.conversations.create(items=[item]).id
    twice = [{**HELLO, "id": "msg_other"}] * 2
    for path, body, param in (
        (PATH, {"items": twice}, "items[1].id"),
        (f"{PATH}/{made}/items", {"items": twice}, "items[1].id"),
        (f"{PATH}/{made}/items", {"items": [HELLO, item]}, "items[1].id"),
        ("/v1/responses", {"model": "fake", "input": [item], "conversation": made}, "input[0].id"),
    ):
        check_error(served.http.post(path, json=body), 400, "invalid_value", param)
    assert texts(client, made) == ["hello"]


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("", {"items": [HELLO] * 21}, "array_above_max_length", "items"),
    ("", {"items": "hello"}, "invalid_type", "items"),
    ("", {"items": [{"role": "nobody", "content": "a"}]}, "invalid_value", "items[0].role"),
    ("", {"items": [{"type": "mcp_call"}]}, "unsupported_parameter", "items[0].type"),
    ("", {"metadata": {str(number): "" for number in range(17)}}, "object_above_max_properties", "metadata"),
    ("", {"metadata": {"a": 1}}, "invalid_type", "metadata.a"),
    ("", {"name": "a"}, "unknown_parameter", "name"),
    ("/{}", {}, "missing_required_parameter", "metadata"),
    ("/{}", {"metadata": {"a": "b" * 513}}, "string_above_max_length", "metadata"),
    ("/{}/items", {}, "missing_required_parameter", "items"),
    ("/{}/items", {"items": None}, "missing_required_parameter", "items"),
    ("/{}/items", {"items": [HELLO] * 21}, "array_above_max_length", "items"),
    ("/{}/items?include=everything", {"items": [HELLO]}, "unsupported_parameter", "include[0]"),
]


@pytest.mark.parametrize(("path", "body", "code", "param"), BAD)
def test_bad_requests_name_the_field(
    client: openai.OpenAI, served: LiveServer, path: str, body: dict[str, Any], code: str, param: str
) -> None:
    made = client.conversations.create().id
    check_error(served.http.post(PATH + path.format(made), json=body), 400, code, param)


def test_a_response_names_one_past_only(client: openai.OpenAI, served: LiveServer) -> None:
    made = client.conversations.create().id
    both = refused(served, conversation=made, previous_response_id="resp_1")
    check_error(both, 400, "invalid_value", "conversation")
    check_error(refused(served, conversation=5), 400, "invalid_type", "conversation")
    check_error(refused(served, conversation={}), 400, "missing_required_parameter", "conversation.id")
    check_error(refused(served, conversation={"id": made, "x": 1}), 400, "unknown_parameter", "conversation.x")
    check_error(refused(served, conversation=made, input=None), 400, "empty_array", "input")
    served.http.post(f"{PATH}/{made}/items", json={"items": [HELLO]})
    bad = refused(served, conversation=made, temperature=-1)
    assert bad.status_code == 400  # and it is free again
    says(served, "hello")
    assert text_of(ask(served, conversation=made)) == "hello"


@pytest.fixture
def held(make_server: MakeServer) -> Iterator[LiveServer]:
    """A server whose engine makes no step until it is told to."""
    live = make_server(llm={"reply_text": "hello world"})
    live.do(live.fake_client.hold)
    yield live
    live.do(live.fake_client.resume)


def resume(server: LiveServer) -> None:
    server.do(server.fake_client.resume)
    server.wait_until(lambda: not server.engine.live and server.context.num_open == 0)


def test_one_response_at_a_time(held: LiveServer) -> None:
    with client_of(held) as client:
        made = client.conversations.create(items=[HELLO]).id
        one = ask(held, conversation=made, background=True)
        for fields in ({}, {"stream": True}, {"background": True}):
            check_error(refused(held, conversation=made, **fields), 409, "conversation_locked", "conversation")
        with pytest.raises(openai.ConflictError) as locked:
            client.conversations.items.create(made, items=[HELLO])
        assert (locked.value.code, locked.value.param) == ("conversation_locked", "conversation_id")
        [item] = client.conversations.items.list(made).data  # reading is not in its way
        with pytest.raises(openai.ConflictError):
            client.conversations.items.delete(item.id or "", conversation_id=made)
        client.conversations.update(made, metadata={"a": "b"})  # nor is the metadata
        check_error(refused(held, conversation=made), 409, "conversation_locked", "conversation")
        resume(held)
        assert held.http.get(f"/v1/responses/{one['id']}").json()["status"] == "completed"
        assert texts(client, made) == ["hello", "hi", "hello world"]
        ask(held, conversation=made)
        assert len(texts(client, made)) == 5


@pytest.mark.parametrize("end", ["cancel", "delete", "disconnect", "fail"])
def test_a_response_that_does_not_complete_adds_nothing_and_unlocks(held: LiveServer, end: str) -> None:
    with client_of(held) as client:
        made = client.conversations.create(items=[HELLO]).id
        if end == "disconnect":
            body = {"model": "fake", "input": "a", "stream": True, "conversation": made}
            with held.http.stream("POST", "/v1/responses", json=body) as answer:
                next(answer.iter_lines())
            held.wait_until(lambda: held.context.num_open == 0)
        else:
            response = ask(held, conversation=made, background=True)["id"]
            if end == "cancel":
                cancelled = client.responses.cancel(response)
                assert cancelled.conversation is not None and cancelled.conversation.id == made
            elif end == "delete":
                client.responses.delete(response)
            else:
                held.do(lambda: held.engine.fail_on.update(held.engine.live))
        resume(held)
        held.do(held.engine.fail_on.clear)
        assert texts(client, made) == ["hello"]
        ask(held, conversation=made)
        assert texts(client, made) == ["hello", "hi", "hello world"]


def test_a_conversation_that_is_deleted_meanwhile_is_not_added_to(held: LiveServer) -> None:
    with client_of(held) as client:
        made = client.conversations.create(items=[HELLO]).id
        response = ask(held, conversation=made, background=True)["id"]
        client.conversations.delete(made)
        check_error(refused(held, conversation=made), 404, "conversation_not_found", "conversation")
        resume(held)
        ended = client.responses.retrieve(response)
        assert (ended.status, ended.output_text) == ("completed", "hello world")
        with pytest.raises(openai.NotFoundError):
            client.conversations.items.list(made)
        assert held.call(held.context.responses.totals)[0] == 1


def test_a_conversation_outlives_the_server(tmp_path: Path) -> None:
    options: dict[str, Any] = {"data_dir": str(tmp_path / "data"), "llm": {"reply_text": "hello world"}}
    server = LiveServer(**options)
    with client_of(server) as client:
        made = client.conversations.create(metadata={"a": "b"}, items=ITEMS).to_dict()
        name: Any = made["id"]
        ask(server, conversation=name)
        said = client.conversations.items.list(name).to_dict()
        server.do(server.fake_client.hold)
        ask(server, conversation=name, background=True)
    server.context.responses.close()  # as when it is killed: nothing can be noted any more
    again = LiveServer(**options)
    with client_of(again) as client:
        assert client.conversations.retrieve(name).to_dict() == made
        assert client.conversations.items.list(name).to_dict() == said
        ask(again, conversation=name)  # what was made when it died does not lock it
        assert texts(client, name)[-4:] == ["hi", "hello world"] * 2
        client.conversations.delete(name)
    again.close()
    server.do(server.fake_client.resume)
    server.close()


def test_on_a_full_disk_a_response_says_that_it_was_not_added(tmp_path: Path) -> None:
    server = LiveServer(data_dir=str(tmp_path / "data"), llm={"reply_text": "hello world", "max_model_len": 100_000})
    with client_of(server) as client:
        made = client.conversations.create(items=[HELLO]).id
        for store in (True, False):
            response = ask(server, conversation=made, input="a" * 50, store=store)
            assert response["conversation"] == {"id": made}
        before = texts(client, made)
        server.do(server.fake_client.hold)
        body = {"model": "fake", "input": "x" * 20_000, "stream": True, "conversation": made, "store": False}
        with server.http.stream("POST", "/v1/responses", json=body) as answer:
            text = answer.iter_text()
            seen = [next(text)]
            limit_pages(server.context.responses, 0)
            server.do(server.fake_client.resume)
            seen += text
        final = check_story(read_events("".join(seen)))
        assert (text_of(final), final["store"], final["conversation"]) == ("hello world", False, None)
        check("Response", final)
        limit_pages(server.context.responses, 10_000)
        assert texts(client, made) == before
        assert ask(server, conversation=made)["conversation"] == {"id": made}
    server.close()


def put(shelves: Shelves, name: str, size: int = 10, owner: bytes = b"") -> str:
    """Store a conversation with so long a text; return its id."""
    conversation = {"id": f"conv_{name}", "metadata": {}}
    items = [{"id": f"msg_{name}", "text": "x" * size}]
    shelves.run(shelves.store.run(lambda database: database.insert_conversation(owner, conversation, items)))
    return f"conv_{name}"


def said(shelves: Shelves, name: str, owner: bytes = b"") -> bytes | None:
    """Return what a conversation holds; None if there is none."""
    try:
        return shelves.run(shelves.store.run(lambda database: database.said(owner, name)))
    except NotFoundError:
        return None


def add(shelves: Shelves, name: str, *items: dict[str, Any], owner: bytes = b"") -> None:
    shelves.run(shelves.store.change_items(owner, name, lambda database: database.add_items(owner, name, items)))


def counted(path: Path) -> tuple[int, int]:
    """Return how many rows there are, and their bytes."""
    connection = sqlite3.connect(path)
    [found] = connection.execute("SELECT COUNT(*), IFNULL(SUM(size), 0) FROM responses").fetchall()
    connection.close()
    count, size = found
    return count, size


class TestBounds:
    """Conversations count as responses do."""

    def test_the_oldest_go_first_and_a_change_makes_one_new(self) -> None:
        with Shelves(max_stored_responses=3) as shelves:
            old, used = put(shelves, "old"), put(shelves, "used")
            response = shelves.put()
            add(shelves, used, {"id": "msg_more"})
            put(shelves, "new")
            assert said(shelves, old) is None
            assert shelves.has(response)
            put(shelves, "newer")
            assert not shelves.has(response)
            assert said(shelves, used) is not None
            assert shelves.num_stored == 3

    def test_their_bytes_count(self, tmp_path: Path) -> None:
        with Shelves(max_stored_response_bytes=5000, data_dir=str(tmp_path)) as shelves:
            one = put(shelves, "one", 2000)
            two = put(shelves, "two", 2000)
            file = tmp_path / "responses.sqlite3"
            assert counted(file) == (2, shelves.size)
            shelves.run(shelves.store.run(lambda database: database.update_conversation(b"", one, metadata={"a": "b"})))
            assert counted(file) == (2, shelves.size)
            add(shelves, one, {"id": "msg_more", "text": "y" * 2000})
            assert said(shelves, two) is None
            assert counted(file) == (1, shelves.size)
            shelves.run(shelves.store.change_items(b"", one, lambda it: it.delete_item(b"", one, "msg_more")))
            assert counted(file) == (1, shelves.size)
            assert b"yyyy" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())
            assert 2000 < shelves.size < 3000
            add(shelves, one, {"id": "msg_more", "text": "y" * 6000})  # too large for the store
            assert (said(shelves, one), shelves.size, shelves.num_stored) == (None, 0, 0)

    def test_they_go_after_their_time_without_a_change(self) -> None:
        with Shelves(stored_response_ttl=10.0) as shelves:
            left, used = put(shelves, "left"), put(shelves, "used")
            shelves.now = 9.0
            add(shelves, used, {"id": "msg_more"})
            shelves.now = 10.0
            assert (said(shelves, left), said(shelves, used) is None) == (None, False)
            assert shelves.num_stored == 1

    def test_nobody_pushes_out_what_others_keep(self) -> None:
        with Shelves(max_stored_responses=4) as shelves:
            quiet = put(shelves, "quiet", owner=b"quiet")
            for number in range(20):
                put(shelves, str(number), owner=b"loud")
            assert said(shelves, quiet, b"quiet") is not None

    def test_a_server_that_keeps_nothing_refuses_them(self, make_server: MakeServer) -> None:
        server = make_server(max_stored_responses=0)
        check_error(server.http.post(PATH, json={}), 400, "unsupported_parameter")


class TestSeveralProcesses:
    """Stores in two slots, as two processes have them."""

    def test_one_locks_it_for_all(self, tmp_path: Path) -> None:
        with Shelves(0, data_dir=str(tmp_path)) as one, Shelves(1, data_dir=str(tmp_path)) as two:
            made = put(one, "a")
            one.run(one.store.lock(b"", made))
            for shelves in (one, two):
                with pytest.raises(ConflictError):
                    shelves.run(shelves.store.lock(b"", made))
            with pytest.raises(ConflictError):
                add(two, made, {"id": "msg_b"})
            response = {"id": "resp_1", "status": "completed", "conversation": {"id": made}, "store": False}
            stored = StoredResponse(
                b"", {**response, "output": [{"id": "msg_out"}]}, (), [{"id": "msg_in"}], events=False
            )

            async def finish() -> None:
                one.store.finish(stored)
                await stored.ended.wait()

            one.run(finish())
            assert b"msg_in" in (said(two, made) or b"")
            two.run(two.store.lock(b"", made))
            with pytest.raises(ConflictError):
                one.run(one.store.lock(b"", made))

            async def unlock() -> None:
                two.store.unlock(b"", made)

            two.run(unlock())
            add(two, made, {"id": "msg_b"})
            with pytest.raises(RequestError, match=r"items\[1\].id"):
                add(one, made, {"id": "msg_c"}, {"id": "msg_b"})
            ids = [item_id for item_id, _ in one.run(listed(one, made))]
            assert ids == ["msg_a", "msg_in", "msg_out", "msg_b"]

    def test_what_could_not_be_unlocked_is_tried_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(store_module, "UNLOCK_SECONDS", 0.0)
        with Shelves(0, data_dir=str(tmp_path)) as one, Shelves(1, data_dir=str(tmp_path)) as two:
            made = put(one, "a")
            one.run(one.store.lock(b"", made))
            response = {"id": "resp_1", "status": "completed", "conversation": {"id": made}, "store": False}
            items = [{"id": "msg_in", "text": "x" * 100_000}]
            stored = StoredResponse(b"", {**response, "output": []}, (), items, events=False)

            async def finish() -> None:
                limit_pages(one.store, 0)
                one.store.finish(stored)
                await stored.ended.wait()
                limit_pages(one.store, 10_000)
                async with asyncio.timeout(10):
                    while (await one.store.run(lambda database: database.connection.execute(HELD).fetchone()))[0]:
                        pass

            one.run(finish())
            assert stored.response["conversation"] is None
            two.run(two.store.lock(b"", made))

    def test_a_process_that_dies_unlocks_it(self, tmp_path: Path) -> None:
        with Shelves(0, data_dir=str(tmp_path)) as one:
            with Shelves(1, data_dir=str(tmp_path)) as two:
                made, other = put(two, "a"), put(two, "b")
                for name in (made, other):
                    two.run(two.store.lock(b"", name))
                with pytest.raises(ConflictError):
                    one.run(one.store.lock(b"", made))
            one.run(one.store.lock(b"", made))
            with Shelves(1, data_dir=str(tmp_path)) as again:  # it is alive, but not the one that has locked it
                assert again.num_stored == 2
                add(one, other, {"id": "msg_more"})
                with pytest.raises(ConflictError):
                    again.run(again.store.lock(b"", made))


async def listed(shelves: Shelves, name: str) -> list[tuple[str, bytes]]:
    """Return the items of a conversation."""
    items, more = await shelves.store.run(lambda it: it.list_items(b"", "conversation", name, 100, "asc", None))
    assert not more
    return items
