"""The chat of the playground in a real browser, against a real server with the demo model."""

from __future__ import annotations

import ast
import json
import shlex
from typing import Any

import pytest

from tests.browser.conftest import OpenPage
from tests.browser.playground import Playground
from tests.helpers.server import Server

pytestmark = pytest.mark.browser

WATCH = """() => {
  window.seen = [];
  const list = document.getElementById('messages');
  new MutationObserver(() => {
    const last = [...list.querySelectorAll('.message.assistant .body')].at(-1);
    const length = last ? last.textContent.length : 0;
    if (length !== window.seen.at(-1)) window.seen.push(length);
  }).observe(list, {childList: true, subtree: true, characterData: true});
}"""
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def test_an_answer_streams_in(page: Playground) -> None:
    page.ready()
    page.evaluate(WATCH)
    page.set("schema", json.dumps({"type": "string", "minLength": 300, "maxLength": 320}))
    page.send("Tell me something long.")
    text = page.answer()
    assert len(text) >= 302
    lengths = page.evaluate("() => window.seen")
    assert len([length for length in lengths if 0 < length < len(text)]) >= 3, lengths
    assert "tokens/s" in page.footer() and "first after" in page.footer()


def test_it_answers_what_the_model_knows(page: Playground) -> None:
    page.ready().send("What is 27 + 48?")
    assert page.answer() == "27 + 48 = 75"
    page.send('Reverse the word "stone".')
    assert "enots" in page.answer()
    assert [message["role"] for message in page.bodies()[-1]["messages"]] == ["user", "assistant", "user"]
    assert "cached" in page.footer()


def test_stop_ends_the_request_in_the_engine(page: Playground, server: Server) -> None:
    page.ready().long_answers()
    page.send("Go on and on.")
    page.until(lambda: len(page.last("assistant")) > 20)
    page.page.click("#stop-button")
    text = page.answer()
    assert 20 < len(text) < 1900
    assert "stopped" in page.footer()
    page.until(lambda: server.metric("vllm:num_requests_running") == 0)
    page.set("schema", "")
    page.send("What is 27 + 48?")
    assert page.answer() == "27 + 48 = 75"


def test_parameters_are_honoured(page: Playground) -> None:
    page.ready()
    for name, value in {"temperature": "2", "seed": "7", "max_tokens": "24", "top_k": "200"}.items():
        page.set(name, value)
    page.send("Speak.")
    first = page.answer()
    assert "24 tokens" in page.footer() or "cut off" not in page.footer()
    page.page.click("text=Regenerate")
    assert page.answer() == first
    page.set("seed", "8")
    page.page.click("text=Regenerate")
    assert page.answer() != first
    body = page.bodies()[-1]
    assert (body["temperature"], body["seed"], body["max_tokens"], body["top_k"]) == (2, 8, 24, 200)


def test_a_limit_and_a_stop_string_end_the_text(page: Playground) -> None:
    page.ready().set("max_tokens", "5")
    page.send("What is Quire?")
    page.answer()
    assert "5 tokens" in page.footer() and "cut off at the limit" in page.footer()
    page.set("max_tokens", "")
    page.set("stop", "language")
    page.page.click("text=Regenerate")
    text = page.answer()
    assert text and "language" not in text
    assert page.bodies()[-1]["stop"] == ["language"]


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("temperature", "-1", "temperature must be at least 0"),
        ("top_p", "0", "top_p must be"),
        ("max_tokens", "many", "Max tokens must be a number"),
        ("seed", "1.5", "Seed must be a whole number"),
        ("schema", "{oops", "This is not JSON"),
        ("schema", '{"type": "strange"}', "strange"),
        ("tools", "[1]", "tools[0]"),
        ("stop", "a\n" * 129, "stop"),
    ],
)
def test_errors_are_shown_at_the_field(page: Playground, field: str, value: str, told: str) -> None:
    page.expected += ["400"]
    page.ready().set(field, value)
    page.send("Hello!")
    page.until(lambda: told in page.page.inner_text(f"#{field}-error"))
    page.until(lambda: not page.answering)
    assert page.page.get_attribute(f"#{field}", "aria-invalid") == "true"
    assert page.evaluate("() => document.activeElement.id") == field
    assert page.page.input_value("#prompt") == "Hello!"
    page.set(field, "")
    assert page.page.get_attribute(f"#{field}", "aria-invalid") is None
    page.page.press("#prompt", "Enter")
    assert page.answer()


def test_a_schema_is_followed(page: Playground) -> None:
    page.ready().set("schema", "")
    page.page.click("#schema-example")
    page.set("max_tokens", "400")
    page.set("temperature", "0")
    page.send("Tell me of a book.")
    found = json.loads(page.answer())
    assert set(found) == {"title", "pages", "bound"} and 1 <= found["pages"] <= 999


def test_tools_are_called_and_answered(page: Playground) -> None:
    page.ready().set("tools", json.dumps([TOOL]))
    page.set("tool-choice", "required")
    page.set("parallel", "one")
    page.send("How is the weather?")
    page.until(lambda: not page.answering)
    assert page.text(".call summary strong") == "weather"
    assert json.loads(page.text(".call pre")) == {"city": "Oslo"}
    page.set("tool-choice", "none")
    page.page.fill(".call .answer input", "It snows.")
    page.page.click(".call .answer button")
    page.until(lambda: len(page.bodies()) == 2)
    roles = [message["role"] for message in page.bodies()[-1]["messages"]]
    assert roles == ["user", "assistant", "tool"]
    _, call, answer = page.bodies()[-1]["messages"]
    assert answer["tool_call_id"] == call["tool_calls"][0]["id"] and answer["content"] == "It snows."
    page.until(lambda: not page.answering)
    assert page.page.locator(".message .field-error:visible").count() == 0


def test_what_is_there_stays_where_it_is_while_more_comes(page: Playground) -> None:
    page.ready().send("What is 27 + 48?")
    page.answer()
    page.evaluate("() => document.querySelectorAll('.message').forEach((item) => { item.dataset.seen = 'yes'; })")
    page.send("What is 11 + 12?")
    page.answer()
    seen = page.evaluate("() => [...document.querySelectorAll('.message')].map((item) => item.dataset.seen || 'no')")
    assert seen == ["yes", "yes", "no", "no"]
    assert page.page.locator("text=Regenerate").count() == 2
    assert [item.is_visible() for item in page.page.locator("text=Regenerate").all()] == [False, True]


def test_a_message_is_changed_and_sent_again(page: Playground) -> None:
    page.ready().send("What is 27 + 48?")
    page.answer()
    page.page.locator(".message.user").hover()
    page.page.click("text=Edit")
    page.page.fill(".edit textarea", "What is 27 + 49?")
    page.page.press(".edit textarea", "Enter")
    assert page.answer() == "27 + 49 = 76"
    assert page.page.locator(".message").count() == 2


def test_the_conversation_stays_until_another_is_begun(page: Playground) -> None:
    page.ready().set("system", "Be brief.")
    page.send("What is 27 + 48?")
    page.answer()
    assert page.bodies()[-1]["messages"][0] == {"role": "system", "content": "Be brief."}
    page.page.reload()
    page.ready()
    assert page.last("assistant") == "27 + 48 = 75"
    assert page.page.input_value("#system") == "Be brief."
    page.page.click("#new-conversation")
    assert page.page.locator(".message").count() == 0
    page.page.reload()
    assert page.page.locator(".message").count() == 0 and page.text(".welcome h2")


def test_what_a_model_writes_is_text(page: Playground) -> None:
    hostile = (
        "<img src=x onerror=alert(1)><script>alert(2)</script> **bold** `a<b` [x](javascript:alert(3))\n\n"
        "- one\n- two **b**\n\n1. first\n\n```html\n<b onclick=alert(4)>x</b>\n```\nend"
    )
    page.ready().fake_stream({"role": "assistant", "content": ""}, *({"content": char} for char in hostile))
    page.send("x")
    text = page.answer()
    assert "<img src=x onerror=alert(1)><script>alert(2)</script> bold a<b [x](javascript:alert(3))" in text
    last = page.page.locator(".message.assistant .body").last
    assert [last.locator(tag).count() for tag in ("img", "script", "a", "b")] == [0, 0, 0, 0]
    assert last.locator("strong").all_inner_texts() == ["bold", "b"]
    assert last.locator("ul li").count() == 2 and last.locator("ol li").count() == 1
    assert last.locator("pre code").inner_text() == "<b onclick=alert(4)>x</b>"


TABLE = r"""
| name | number | where |
|:-----|-------:|:-----:|
| `a`  | 1      | x \| <b>y</b> |
| **b** | 2 | z | too much |
| short |

a | b
---|---
one | two
not a table
"""
CODE = """
```python
def f(x):  # <i>why</i>
    return "a" + 'b' * 0x1F
```

```nothing-known
def f(x):
```

```js
const a = "unclosed
```
"""


def test_tables_are_drawn(page: Playground) -> None:
    page.ready().fake_stream({"content": TABLE})
    page.send("x")
    page.answer()
    last = page.page.locator(".message.assistant .body").last
    assert last.locator("table").count() == 2
    first = last.locator("table").first
    assert first.locator("th").all_inner_texts() == ["name", "number", "where"]
    rows = [row.locator("td").all_inner_texts() for row in first.locator("tbody tr").all()]
    assert rows == [["a", "1", "x | <b>y</b>"], ["b", "2", "z"], ["short"]]
    aligned = first.locator("tbody tr").first.locator("td")
    align = "(cells) => cells.map((cell) => getComputedStyle(cell).textAlign)"
    assert aligned.evaluate_all(align) == ["left", "right", "center"]
    assert first.locator("code").inner_text() == "a" and first.locator("strong").inner_text() == "b"
    assert last.locator("b").count() == 0


def test_code_has_colours(page: Playground) -> None:
    page.ready().fake_stream({"content": CODE})
    page.send("x")
    page.answer()
    blocks = page.page.locator(".message.assistant pre code")
    assert [block.inner_text() for block in blocks.all()] == [
        "def f(x):  # <i>why</i>\n    return \"a\" + 'b' * 0x1F",
        "def f(x):",
        'const a = "unclosed',
    ]
    found = {kind: blocks.first.locator(f".code-{kind}").all_inner_texts() for kind in ("keyword", "string", "number")}
    assert found == {"keyword": ["def", "return"], "string": ['"a"', "'b'"], "number": ["0x1F"]}
    assert blocks.first.locator(".code-comment").all_inner_texts() == ["# <i>why</i>"]
    assert blocks.nth(1).locator("span").count() == 0
    assert blocks.nth(2).locator("span").all_inner_texts() == ["const", '"unclosed']


PIECES = ["**a ", "`a``", "| ", "a|", "|-", "- ", '"\\', "/* ", "<!-- ", "'''", "# ", "```\n", "0x"]


def test_no_text_takes_long_to_draw(page: Playground) -> None:
    code = [f"```{name}\n{piece * 6_000}" for name in ("python", "js", "html", "sql", "json") for piece in PIECES]
    drawn = page.ready().evaluate(
        """async (texts) => {
          const { render } = await import(new URL('playground/markdown.js', document.baseURI).href);
          return texts.map((text) => render(text).length);
        }""",
        [*(piece * 20_000 for piece in PIECES), *code],
    )
    assert len(drawn) == len(PIECES) + len(code)


def test_reasoning_is_folded(page: Playground) -> None:
    page.ready().fake_stream({"reasoning": "Let me "}, {"reasoning": "think."}, {"content": "Yes."})
    page.send("Is it?")
    assert page.answer() == "Yes."
    assert not page.page.locator(".reasoning div").is_visible()
    page.page.click(".reasoning summary")
    assert page.text(".reasoning div") == "Let me think."
    page.send("And now?")
    page.answer()
    assert "reasoning" not in json.dumps(page.bodies()[-1])


def test_an_error_amid_a_stream_is_shown_with_what_came(page: Playground) -> None:
    error = {"error": {"message": "the engine died", "type": "server_error", "param": None, "code": "engine_dead"}}
    chunk = {"choices": [{"index": 0, "delta": {"content": "Half"}, "finish_reason": None}]}
    body = f"data: {json.dumps(chunk)}\n\ndata: {json.dumps(error)}\n\n"
    page.ready().page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body),
    )
    page.send("x")
    assert page.answer() == "Half"
    assert page.text(".message .field-error:visible") == "the engine died"


def test_the_request_can_be_taken_away_as_code(page: Playground) -> None:
    page.ready().set("temperature", "0.5")
    page.set("top_k", "7")
    page.set("tools", json.dumps([TOOL]))
    page.page.fill("#prompt", "It's \"quoted\"\nand 'long'")
    page.page.click("#as-curl")
    words = shlex.split(page.text("#snippet").replace("\\\n", " "))
    body = json.loads(words[words.index("-d") + 1])
    assert words[:2] == ["curl", f"{page.url}/v1/chat/completions"]
    assert body["messages"][-1]["content"] == "It's \"quoted\"\nand 'long'"
    page.page.keyboard.press("Escape")
    page.page.click("#as-python")
    call = next(
        node
        for node in ast.walk(ast.parse(page.text("#snippet")))
        if isinstance(node, ast.Call) and any(keyword.arg == "messages" for keyword in node.keywords)
    )
    given: dict[str, Any] = {str(item.arg): ast.literal_eval(item.value) for item in call.keywords}
    assert {**given.pop("extra_body"), **given, "stream_options": {"include_usage": True}} == body


def test_the_key_is_asked_for_and_kept_in_the_tab(open_page: OpenPage, locked: str) -> None:
    from tests.browser.conftest import KEY

    page = open_page(locked)
    page.expected += ["401"]
    page.until(lambda: page.page.locator("#key-dialog").is_visible())
    page.until(lambda: page.text("#engine-state") == "needs a key")
    page.page.fill("#key", "wrong")
    page.page.press("#key", "Enter")
    page.until(lambda: "does not accept" in page.page.inner_text("#key-reason"))
    page.page.fill("#key", KEY)
    page.page.press("#key", "Enter")
    page.ready()
    page.send("What is 27 + 48?")
    assert page.answer() == "27 + 48 = 75"
    assert KEY not in page.evaluate("() => JSON.stringify(localStorage)")
    page.page.click("#as-curl")
    assert "$QUIRE_API_KEY" in page.text("#snippet") and KEY not in page.text("#snippet")
    page.page.reload()
    page.ready()
    other = open_page(locked)
    other.expected += ["401"]
    other.until(lambda: other.page.locator("#key-dialog").is_visible())
    assert KEY not in " ".join(url for _, url, _ in page.requests)
