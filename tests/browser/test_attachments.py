"""Text files that go along with a message, in a real browser."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.playground import Playground

pytestmark = pytest.mark.browser

NOTES = {"name": "notes.md", "mimeType": "text/markdown", "buffer": "# N\u00f6tes\n".encode()}
DROP = """([type, name, text]) => {
  const data = new DataTransfer();
  data.items.add(new File([text], name));
  const event = type === 'paste' ? new ClipboardEvent(type, {clipboardData: data, bubbles: true, cancelable: true})
    : new DragEvent(type, {dataTransfer: data, bubbles: true, cancelable: true});
  document.getElementById('prompt').dispatchEvent(event);
  return event.defaultPrevented;
}"""


def attach(page: Playground, *files: dict[str, Any]) -> None:
    page.page.set_input_files("#attach-file", list(files))


def chips(page: Playground) -> list[str]:
    found: list[str] = page.page.locator("#attachments .chip span").all_inner_texts()
    return found


def test_files_are_sent_in_fenced_blocks_with_their_names(page: Playground) -> None:
    page.ready().fake_stream({"content": "Seen."})
    fenced = {"name": "how to.PY", "mimeType": "", "buffer": b"s = 1\n```\n````\nend"}
    attach(page, NOTES, fenced)
    page.until(lambda: chips(page) == ["notes.md 1 KiB", "how to.PY 1 KiB"])
    page.send("What is in there?")
    assert page.answer() == "Seen."
    assert chips(page) == [] and page.last("user") == "What is in there?"
    expected = (
        "What is in there?\n\nnotes.md:\n\n```md\n# N\u00f6tes\n```\n\n"
        "how to.PY:\n\n`````py\ns = 1\n```\n````\nend\n`````"
    )
    assert page.bodies()[-1]["messages"] == [{"role": "user", "content": expected}]
    page.page.click(".message.user .chip summary >> nth=0")
    assert page.text(".message.user .chip pre >> nth=0").strip() == "# N\u00f6tes"
    page.page.reload()
    page.ready().send("And now?")
    page.until(lambda: len(page.bodies()) == 2 and not page.answering)
    assert page.bodies()[-1]["messages"][0] == {"role": "user", "content": expected}


@pytest.mark.parametrize("way", ["drop", "paste"])
def test_files_are_dropped_and_pasted(page: Playground, way: str) -> None:
    assert page.ready().evaluate(DROP, [way, "a.txt", "hello"])
    page.until(lambda: chips(page) == ["a.txt 1 KiB"])
    page.page.click("#attachments button")
    assert chips(page) == [] and not page.page.is_visible("#attachments")


def test_a_file_alone_is_a_message_and_stays_when_the_text_is_changed(page: Playground) -> None:
    page.ready().fake_stream({"content": "Seen."})
    attach(page, NOTES)
    page.until(lambda: chips(page))
    page.page.click("#send")
    assert page.answer() == "Seen."
    assert page.text("#conversations .title") == "notes.md"
    page.page.locator(".message.user").hover()
    page.page.click("text=Edit")
    page.page.fill(".edit textarea", "Well?")
    page.page.press(".edit textarea", "Enter")
    page.until(lambda: len(page.bodies()) == 2 and not page.answering)
    assert page.bodies()[-1]["messages"][0]["content"].startswith("Well?\n\nnotes.md:\n\n```md\n")


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("x.png", b"\x89PNG\xff\xfe", "it is not a text in UTF-8"),
        ("x.bin", b"a\0b", "it is not a text"),
        ("x.txt", b"a" * (256 * 1024 + 1), "the files of a message may have 256 KiB in all"),
    ],
)
def test_what_is_no_text_or_too_large_is_refused(page: Playground, name: str, content: bytes, told: str) -> None:
    attach(page.ready(), {"name": name, "mimeType": "", "buffer": content})
    page.until(lambda: page.page.is_visible("#chat-error"))
    assert page.text("#chat-error") == f"{name} was not attached: {told}"
    assert chips(page) == []


def test_the_number_and_the_size_of_all_files_are_bounded(page: Playground) -> None:
    page.ready()
    attach(page, *({**NOTES, "name": f"{number}.md"} for number in range(9)))
    page.until(lambda: page.page.is_visible("#chat-error"))
    assert page.text("#chat-error") == "8.md was not attached: a message has at most 8 files"
    assert len(chips(page)) == 8
    page.page.click("#attachments button >> nth=0")
    attach(page, {"name": "large.md", "mimeType": "", "buffer": b"a" * (256 * 1024)})
    page.until(lambda: "256 KiB in all" in page.text("#chat-error"))
    assert len(chips(page)) == 7


def test_what_was_not_sent_comes_back_with_its_files(page: Playground) -> None:
    page.expected += ["400"]
    page.ready().set("temperature", "-1")
    attach(page, NOTES)
    page.until(lambda: chips(page))
    page.send("Look.")
    page.until(lambda: not page.answering and page.page.is_visible("#temperature-error"))
    assert page.page.input_value("#prompt") == "Look." and chips(page) == ["notes.md 1 KiB"]
    assert page.page.locator("#conversations li").count() == 0


def test_the_snippet_has_the_files_too(page: Playground) -> None:
    attach(page.ready(), NOTES)
    page.until(lambda: chips(page))
    page.page.click("#as-curl")
    assert "notes.md:\\n\\n```md" in page.text("#snippet")
