"""The playground for everybody: no errors, keyboard alone, names, contrast, small screens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.conftest import OpenPage
from tests.browser.playground import Playground

pytestmark = pytest.mark.browser

SIZES = [(1440, 900), (1024, 768), (390, 844), (320, 568)]

UNNAMED = """() => [...document.querySelectorAll(
    'button, input, select, textarea, summary, canvas[tabindex], a, [role]')]
  .filter((item) => item.checkVisibility())
  .filter((item) => {
    const labelled = (item.getAttribute('aria-labelledby') || '').split(' ').map((id) => document.getElementById(id));
    const texts = [item.getAttribute('aria-label'), ...[...(item.labels || [])].map((label) => label.textContent),
      ...labelled.map((other) => other && other.textContent),
      item.matches('input, select, textarea') ? '' : item.textContent];
    return !texts.some((text) => text && text.trim());
  })
  .filter((item) => !item.matches('[role=log], [role=status], [role=alert]'))
  .map((item) => item.outerHTML.slice(0, 120))"""

NEGLIGIBLE = """() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const light = ([r, g, b]) => [r, g, b].map((value) => value / 255)
    .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
  const ground = (item) => {
    for (let up = item; up; up = up.parentElement) {
      const color = rgba(getComputedStyle(up).backgroundColor);
      if (color[3] > 0.99) return color;
    }
    return [255, 255, 255, 1];
  };
  const found = [];
  for (const item of document.querySelectorAll('body *')) {
    const text = [...item.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const holds = item.matches('input, textarea, select');
    if ((!text && !holds) || item.closest('[hidden], .sr, .skip, noscript') || !item.checkVisibility()) continue;
    const style = getComputedStyle(item);
    const back = light(ground(item));
    const colors = [style.color];
    if (item.matches('[placeholder]')) colors.push(getComputedStyle(item, '::placeholder').color);
    for (const color of colors) {
      const front = light(rgba(color));
      const ratio = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
      const size = parseFloat(style.fontSize);
      const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
      const what = `${item.tagName} ${item.className} ${item.textContent.slice(0, 30)}`;
      if (ratio < (large ? 3 : 4.5)) found.push(`${ratio.toFixed(2)} ${what}`);
    }
  }
  return found;
}"""


def fill(page: Playground) -> None:
    """Have every part of the page show something."""
    line = "a_very_long_line_of_code = 1 + 'text' if None else True # comment" * 6
    code = f"```python\nreturn 12.5\n'text'\n{line}\n```\n\n| {'wide ' * 30} | b |\n|---|---|\n| {'W' * 90} | 2 |"
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    page.fake_stream(
        {"reasoning": "Hm."}, {"content": f"**Yes** `x` {'unbroken' * 40}\n\n- one\n\n{code}"}, {"tool_calls": [call]}
    )
    notes = {"name": "notes " * 8 + "N" * 40, "mimeType": "text/plain", "buffer": b"one\n" * 40}
    for message in ("word " * 40 + "W" * 200, ""):
        page.page.set_input_files("#attach-file", [notes])
        page.until(lambda: page.page.locator("#attachments .chip").count())
        if message:
            page.send(message)
            page.answer()
    page.evaluate("() => document.querySelectorAll('details').forEach((item) => { item.open = true; })")
    page.page.click("#schema-example")
    page.page.click("#tools-example")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_it_fits_and_can_be_read(open_page: OpenPage, width: int, height: int, theme: str) -> None:
    page = open_page(width=width, height=height, theme=theme).ready()
    assert page.evaluate("() => document.documentElement.dataset.theme") == theme
    for _ in range(2):
        assert page.evaluate(UNNAMED) == []
        assert page.evaluate(NEGLIGIBLE) == []
        assert page.evaluate("() => document.scrollingElement.scrollWidth <= innerWidth")
        wide = """() => [...document.querySelectorAll('body *')].filter((item) => item.checkVisibility()
          && !item.closest('pre, .table > *, .sr, .skip') && item.getBoundingClientRect().right > innerWidth + 1)
          .map((item) => item.outerHTML.slice(0, 90))"""
        assert page.evaluate(wide) == []
        fill(page)


def test_ids_are_unique_and_references_lead_somewhere(page: Playground) -> None:
    page.ready()
    assert (
        page.evaluate(
            """() => {
          const ids = [...document.querySelectorAll('[id]')].map((item) => item.id);
          const twice = ids.filter((id, index) => ids.indexOf(id) !== index);
          const lost = ['for', 'aria-describedby', 'aria-labelledby'].flatMap((name) =>
            [...document.querySelectorAll(`[${name}]`)].flatMap((item) => item.getAttribute(name).split(' ')))
            .filter((id) => !document.getElementById(id));
          return [...twice, ...lost];
        }"""
        )
        == []
    )


def test_the_keyboard_is_enough(page: Playground) -> None:
    press = page.page.keyboard.press
    page.ready()
    page.evaluate("() => { document.body.tabIndex = -1; document.body.focus(); }")
    press("Tab")
    assert focused(page) == "Skip to the message box"
    press("Enter")
    assert focused(page) == "prompt"
    page.page.keyboard.type("first")
    press("Shift+Enter")
    page.page.keyboard.type("second")
    assert page.page.input_value("#prompt") == "first\nsecond"
    page.long_answers()
    page.page.focus("#prompt")
    press("Enter")
    page.until(lambda: page.answering and len(page.last("assistant")) > 5)
    press("Escape")
    page.until(lambda: not page.answering)
    assert "stopped" in page.footer()
    assert focused(page) == "prompt"
    assert page.last("user") == "first\nsecond"


def test_tab_reaches_everything_and_shows_where_it_is(page: Playground) -> None:
    page.ready()
    page.evaluate("() => { document.body.tabIndex = -1; document.body.focus(); }")
    reached = []
    for _ in range(80):
        page.page.keyboard.press("Tab")
        if focused(page) == "BODY":
            break
        reached.append(focused(page))
        outlined = page.evaluate(
            """() => {
              const item = document.activeElement;
              const around = item.closest('.composer-box, .segmented label') || item;
              const style = [getComputedStyle(item), getComputedStyle(around)];
              return style.some((s) => s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 1)
                || style.some((s) => s.boxShadow !== 'none');
            }"""
        )
        assert outlined, reached[-1]
    for name in (
        "model",
        "theme-button",
        "system",
        "temperature",
        "seed",
        "stop",
        "as-curl",
        "prompt",
        "send",
        "new-conversation",
        "import",
        "attach",
    ):
        assert name in reached, (name, reached)
    assert "CANVAS" in reached
    assert reached.index("model") < reached.index("system") < reached.index("prompt") < reached.index("CANVAS")


def focused(page: Playground) -> str:
    """Return the id of what has the focus, or its text if that is a link, or its tag."""
    found: Any = page.evaluate(
        """() => {
          const item = document.activeElement;
          return item.id || (item.tagName === 'A' ? item.textContent : item.tagName);
        }"""
    )
    return str(found)


def test_the_theme_can_be_chosen_and_stays(open_page: OpenPage) -> None:
    page = open_page(theme="dark").ready()
    page.page.click("#theme-button")
    assert page.evaluate("() => document.documentElement.dataset.theme") == "light"
    page.page.reload()
    assert page.evaluate("() => document.documentElement.dataset.theme") == "light"
    page.page.click("#theme-button")
    page.page.click("#theme-button")
    assert page.text("#theme-name") == "auto"
    page.page.emulate_media(color_scheme="light")
    page.until(lambda: page.evaluate("() => document.documentElement.dataset.theme") == "light")


def test_a_phone_has_one_column_and_the_picture_can_be_folded(open_page: OpenPage) -> None:
    page = open_page(width=390, height=844).ready()
    assert not page.page.locator(".pool canvas").first.is_visible()
    assert "running" in page.text("#engine-brief")
    page.page.click("#engine-panel summary")
    page.until(lambda: page.page.locator(".pool canvas").first.is_visible())
    page.until(lambda: page.colors() >= 1)
    page.page.click("#engine-panel summary")
    page.send("What is 27 + 48?")
    assert page.answer() == "27 + 48 = 75"
    assert page.page.locator("#prompt").is_visible()


def test_it_is_quiet_while_a_text_streams_and_says_it_then(page: Playground) -> None:
    page.ready().long_answers()
    page.send("Go on.")
    page.until(lambda: len(page.last("assistant")) > 5)
    assert page.page.get_attribute("#messages", "aria-busy") == "true"
    page.page.keyboard.press("Escape")
    page.until(lambda: page.page.get_attribute("#messages", "aria-busy") is None)
    assert page.page.get_attribute("#messages", "role") == "log"
