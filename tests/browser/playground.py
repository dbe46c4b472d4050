"""`Playground`: the page as somebody uses it, and everything it complains of while that happens."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

SECONDS = 30.0
VIOLATIONS = """
window.violations = [];
document.addEventListener('securitypolicyviolation', (event) => {
  window.violations.push(`${event.violatedDirective} ${event.blockedURI}`);
});
"""
# A text that takes a while, which few questions to the demo model do.
LONG = {"type": "string", "minLength": 1900, "maxLength": 2000}


class Playground:
    """A page that has been opened.

    Attributes:
        page: playwright's. url: the server's address. requests: all that the page sent: (method, URL, body).
        expected: parts of console messages that are not complaints.
    """

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.url = url
        self.requests: list[tuple[str, str, str | None]] = []
        self.expected = ["Multiple readback"]  # what the tests themselves do to canvases
        self._messages: list[str] = []
        page.add_init_script(VIOLATIONS)
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self._messages.append(f"error: {error}"))
        page.on("request", lambda request: self.requests.append((request.method, request.url, request.post_data)))
        page.goto(url)

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self._messages.append(f"{message.type}: {message.text}")

    def complaints(self) -> list[str]:
        """Return errors, warnings, violations of the policy, and requests to anybody else."""
        found = [line for line in self._messages if not any(part in line for part in self.expected)]
        found += self.evaluate("() => window.violations")
        return found + [url for _, url, _ in self.requests if not url.startswith(self.url)]

    def evaluate(self, script: str, argument: Any = None) -> Any:
        """Run a function of the page's language in the page."""
        return self.page.evaluate(script, argument)

    def until(self, condition: Callable[[], Any], seconds: float = SECONDS) -> Any:
        """Return what `condition` returns once that is true. (The page's policy forbids playwright's own way.)"""
        end = time.monotonic() + seconds
        while True:
            value = condition()
            if value:
                return value
            assert time.monotonic() < end, f"it did not come true: {self.text('body')[:2000]}"
            self.page.wait_for_timeout(20)

    def ready(self) -> Playground:
        """Wait for models and the first picture."""
        self.until(lambda: self.text("#engine-state") == "ready" and self.page.locator(".pool canvas").count())
        return self

    def text(self, selector: str) -> str:
        """Return the text that can be read there."""
        found: str = self.page.inner_text(selector)
        return found

    def set(self, name: str, value: str) -> None:
        """Fill in a field, opening what hides it."""
        self.evaluate(
            "(id) => { for (let up = document.getElementById(id); up; up = up.parentElement)"
            " if (up instanceof HTMLDetailsElement) up.open = true; }",
            name,
        )
        if name in ("tool-choice", "parallel"):
            self.page.select_option(f"#{name}", value)
        else:
            self.page.fill(f"#{name}", value)

    def long_answers(self) -> None:
        """Have all answers take a while from now on."""
        self.set("schema", json.dumps(LONG))

    def send(self, text: str) -> None:
        """Write a message and send it."""
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")

    @property
    def answering(self) -> bool:
        """Whether an answer streams."""
        visible: bool = self.page.locator("#stop-button").is_visible()
        return visible

    def answer(self) -> str:
        """Wait for the end of the answer, and return its text."""
        self.until(lambda: not self.answering)
        return self.last("assistant")

    def last(self, role: str) -> str:
        """Return the text of the last message of a role."""
        found: str = self.page.locator(f".message.{role} .body").last.inner_text()
        return found

    def footer(self) -> str:
        """Return what is said below the last message."""
        found: str = self.page.locator(".message footer").last.inner_text()
        return found

    def bodies(self) -> list[dict[str, Any]]:
        """Return all chat requests that were sent."""
        return [json.loads(body) for _, url, body in self.requests if url.endswith("/chat/completions") and body]

    def pool(self) -> dict[str, int]:
        """Return what the drawing says of itself: used, cached, free, shared, mine, cells."""
        data = self.evaluate("() => ({...document.querySelector('.pool canvas').dataset})")
        return {name: int(value) for name, value in data.items()}

    def colors(self) -> int:
        """Return how many different colours the cells of the drawing have in their middles."""
        count: int = self.evaluate(
            """() => {
              const canvas = document.querySelector('.pool canvas');
              const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
              const counts = new Map();
              for (let at = 0; at < data.length; at += 4) {
                if (data[at + 3] < 255) continue;
                const color = data.slice(at, at + 3).join();
                counts.set(color, (counts.get(color) || 0) + 1);
              }
              return [...counts.values()].filter((number) => number > 30).length;
            }"""
        )
        return count

    def fake_stream(self, *deltas: dict[str, Any], finish: str = "stop") -> None:
        """Have chats answered with these deltas from now on, in the place of the server."""
        head = {"id": "chatcmpl-x", "object": "chat.completion.chunk", "created": 0, "model": "quire-demo"}
        chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        self.page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body),
        )
