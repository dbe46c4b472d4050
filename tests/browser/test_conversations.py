"""The list of conversations, in a real browser: what is kept, and what is taken from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.browser.playground import Playground

pytestmark = pytest.mark.browser

FORMAT = {"format": "quire-conversations", "version": 1}


def titles(page: Playground) -> list[str]:
    found: list[str] = page.page.locator("#conversations .title").all_inner_texts()
    return found


def ask(page: Playground, *questions: str) -> None:
    """Have a conversation for each question."""
    for question in questions:
        page.page.click("#new-conversation")
        page.send(question)
        page.answer()


def delete(page: Playground) -> None:
    """Delete the conversation that is open."""
    page.page.click("#conversations >> text=Delete")
    page.page.click("#conversations >> text=Really delete?")


def load(page: Playground, content: Any) -> None:
    """Import a file."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    page.page.set_input_files("#import-file", [{"name": "c.json", "mimeType": "application/json", "buffer": data}])


def exported(page: Playground, button: str) -> dict[str, Any]:
    """Return what the file holds that a button has the browser save."""
    with page.page.expect_download() as download:
        page.page.click(button)
    found: dict[str, Any] = json.loads(Path(download.value.path()).read_text("utf-8"))
    return found


def file_of(*conversations: dict[str, Any]) -> dict[str, Any]:
    return {**FORMAT, "conversations": list(conversations)}


def conversation(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"title": "t", "updated": 5, "messages": list(messages), **fields}


def test_conversations_are_kept_and_opened_again(page: Playground) -> None:
    page.ready().fake_stream({"content": "Yes."})
    assert titles(page) == []
    ask(page, "one", "two", "three " * 20)
    assert titles(page) == ["three " * 10 + "\u2026", "two", "one"]
    page.page.click("#conversations >> text=one")
    assert page.last("user") == "one" and page.page.locator(".message").count() == 2
    assert page.text("#conversations [aria-current=true]") == "one"
    page.page.reload()
    page.ready()
    assert page.last("user") == "one" and len(titles(page)) == 3
    page.send("more")
    page.answer()
    assert titles(page)[0] == "one"  # the one that was changed last
    assert [message["content"] for message in page.bodies()[-1]["messages"]] == ["one", "Yes.", "more"]


def test_a_new_tab_begins_anew_and_sees_what_others_do(page: Playground) -> None:
    page.ready().fake_stream({"content": "Yes."})
    ask(page, "one")
    other = Playground(page.page.context.new_page(), page.url).ready()
    assert other.page.locator(".message").count() == 0 and titles(other) == ["one"]
    other.page.click("#conversations >> text=one")
    page.send("more")
    page.answer()
    other.until(lambda: other.last("user") == "more" and other.last("assistant") == "Yes.")
    ask(page, "two")
    other.until(lambda: titles(other) == ["two", "one"])
    assert other.last("user") == "more" and other.complaints() == []


@pytest.mark.parametrize("way", ["Enter", "Tab"])
def test_a_title_can_be_changed(page: Playground, way: str) -> None:
    page.ready().fake_stream({"content": "Yes."})
    ask(page, "one", "two")
    page.page.click("text=Rename")
    page.page.fill("#conversations input", "  <b>New</b>  ")
    page.page.press("#conversations input", way)
    assert titles(page) == ["<b>New</b>", "one"]
    page.page.click("text=Rename")
    page.page.fill("#conversations input", "not this")
    page.page.press("#conversations input", "Escape")
    assert titles(page) == ["<b>New</b>", "one"]
    page.page.reload()
    page.ready().send("more")
    page.answer()
    assert titles(page) == ["<b>New</b>", "one"]


def test_deleting_asks_once_more(page: Playground) -> None:
    page.ready().fake_stream({"content": "Yes."})
    ask(page, "one", "two")
    page.page.click("#conversations >> text=Delete")
    page.page.click("#prompt")
    assert titles(page) == ["two", "one"] and page.page.locator("text=Really delete?").count() == 0
    delete(page)
    assert titles(page) == ["one"] and page.page.locator(".message").count() == 0
    page.page.reload()
    assert titles(page.ready()) == ["one"]


@pytest.mark.parametrize("how", ["open", "delete"])
def test_an_answer_under_way_is_stopped_when_its_conversation_is_left(page: Playground, how: str) -> None:
    page.ready().long_answers()
    page.send("Go on.")
    page.until(lambda: page.answering and len(page.last("assistant")) > 5)
    if how == "open":
        page.page.click("#new-conversation")
    else:
        delete(page)
    page.until(lambda: not page.answering)
    assert page.page.locator(".message").count() == 0
    assert titles(page) == (["Go on."] if how == "open" else [])
    if how == "open":
        page.page.click("#conversations >> text=Go on.")
        assert "stopped" in page.footer() and len(page.last("assistant")) > 5


def test_what_is_exported_can_be_imported(page: Playground) -> None:
    page.ready().fake_stream({"reasoning": "Hm."}, {"content": "Yes."})
    ask(page, "one", "two")
    one = exported(page, "#conversations >> text=Export")
    both = exported(page, "#export-all")
    assert [item["title"] for item in one["conversations"]] == ["two"]
    assert [item["title"] for item in both["conversations"]] == ["two", "one"]
    assert {name: both[name] for name in FORMAT} == FORMAT
    delete(page)
    page.page.click("#conversations >> text=one")
    delete(page)
    assert titles(page) == []
    load(page, both)
    page.until(lambda: titles(page) == ["two", "one"])
    assert page.last("user") == "two" and page.last("assistant") == "Yes."
    page.page.reload()
    assert titles(page.ready()) == ["two", "one"]
    assert exported(page, "#export-all") == both


def test_of_an_import_only_known_fields_are_kept(page: Playground) -> None:
    called = {"id": "c", "type": "x", "function": {"name": "f", "arguments": "{}", "x": 1}, "x": 1}
    hostile = conversation(
        {"role": "user", "content": "<script>x</script>", "files": [{"name": "<i>", "text": "t", "x": 1}], "x": {}},
        {"role": "assistant", "content": "Yes.", "tool_calls": [called], "stats": {"tokens": 3, "x": 4}},
        {"role": "tool", "content": "r", "tool_call_id": "c", "x": 1},
        title="<img src=x onerror=alert(1)>",
        x=1,
    )
    load(page.ready(), file_of(hostile))
    page.until(lambda: titles(page) == ["<img src=x onerror=alert(1)>"])
    assert page.last("user") == "<script>x</script>" and "3 tokens" in page.text(".message.assistant footer")
    assert '"x":' not in json.dumps(exported(page, "#export-all"))
    page.fake_stream({"content": "Well."})
    page.send("And?")
    page.answer()
    assert [message["role"] for message in page.bodies()[-1]["messages"]] == ["user", "assistant", "tool", "user"]


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"{oops", "it is not JSON"),
        (b"\xff", "it is not JSON"),
        ([], "the file is [] (expected an object)"),
        ({"conversations": []}, 'format is missing (expected "quire-conversations")'),
        ({**FORMAT, "version": 2}, "version is 2 (expected 1)"),
        ({**FORMAT, "conversations": {}}, "conversations is {} (expected a list)"),
        (file_of(conversation(title=3)), "conversations[0].title is 3 (expected a text)"),
        (
            file_of(conversation(updated="x")),
            'conversations[0].updated is "x" (expected a number that is not negative)',
        ),
        (
            file_of(conversation(USER), conversation(USER, {"role": "system", "content": "x"})),
            'conversations[1].messages[1].role is "system" (expected user, assistant, tool)',
        ),
        (file_of(conversation({"role": "__proto__", "content": "x"})), 'messages[0].role is "__proto__"'),
        (file_of(conversation({"role": "user", "content": [1]})), "messages[0].content is [1] (expected a text)"),
        (
            file_of(conversation({"role": "assistant", "content": "", "tool_calls": [{}]})),
            "conversations[0].messages[0].tool_calls[0].function is missing (expected an object)",
        ),
        (file_of(conversation(*[USER] * 2001)), "messages has 2001 items (at most 2000 are allowed)"),
        (file_of(*[conversation()] * 101), "conversations has 101 items (at most 100 are allowed)"),
        (file_of(*[conversation()] * 100), "there is room for 99 of 100"),
        (b" " * (5 * 2**20 + 1), "it is larger than 5 MiB"),
    ],
    ids=range(16),
)
def test_a_file_that_is_wrong_is_refused_as_a_whole(page: Playground, content: Any, told: str) -> None:
    page.ready().fake_stream({"content": "Yes."})
    ask(page, "one")
    load(page, content)
    page.until(lambda: page.page.is_visible("#conversations-note"))
    note = page.text("#conversations-note")
    assert note.startswith("Nothing imported from c.json: ") and told in note
    assert titles(page) == ["one"]


def test_the_oldest_is_forgotten_beyond_the_hundredth(page: Playground) -> None:
    load(page.ready(), file_of(*(conversation(USER, title=f"c{number}", updated=number) for number in range(100))))
    page.until(lambda: len(titles(page)) == 100)
    page.fake_stream({"content": "Yes."})
    ask(page, "one")
    assert titles(page) == ["one", *(f"c{number}" for number in range(99, 0, -1))]


FILL = """() => {
  for (let size = 2 ** 22; size; size >>= 1) try { localStorage[`fill${size}`] = 'x'.repeat(size); } catch {}
}"""
EMPTY = """() => {
  for (const name of Object.keys(localStorage)) if (name.startsWith('fill')) delete localStorage[name];
}"""


def test_a_full_storage_is_told_of_and_the_chat_goes_on(page: Playground) -> None:
    page.ready().fake_stream({"content": "Yes."})
    page.evaluate(FILL)
    ask(page, "one")
    assert page.last("assistant") == "Yes."
    assert "The browser does not keep this conversation" in page.text("#conversations-note")
    load(page, file_of(conversation(USER)))
    page.until(lambda: "storage has no room" in page.text("#conversations-note"))
    assert titles(page) == []
    page.evaluate(EMPTY)
    page.send("more")
    page.answer()
    assert titles(page) == ["one"] and not page.page.is_visible("#conversations-note")


def test_what_others_put_into_the_storage_is_left_alone(page: Playground) -> None:
    page.ready().evaluate("() => { localStorage['quire.conversation.x'] = '{\"title\": 3}'; }")
    page.page.reload()
    assert titles(page.ready()) == []
    assert page.evaluate("() => localStorage['quire.conversation.x']")
