"""Requests make the server open nothing: no connection, no file, no process, whatever they name."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.server.protocol import ChatCompletionRequest, CompletionRequest
from tests.helpers.live_server import LiveServer

SOURCES = (str(Path(__file__).resolve().parents[2]), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
EVENTS = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "subprocess.Popen", "os.system", "os.exec")
EVENTS += ("os.posix_spawn", "os.mkdir", "os.remove", "os.rename", "urllib.Request", "shutil.copyfile", "pty.spawn")


class Watch:
    """Notes what other threads than the test's own do while it is `on`. An audit hook cannot be taken away again."""

    def __init__(self) -> None:
        self.on = False
        self.seen: list[str] = []
        self._test = threading.get_ident()
        sys.addaudithook(self._note)

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on or threading.get_ident() == self._test:
            return
        if event == "open" and not str(args[0]).startswith((*SOURCES, "/proc/self/")):
            self.seen.append(f"open {args[0]}")
        elif event in EVENTS:
            self.seen.append(f"{event} {args[1:] or args}")


@pytest.fixture(scope="module")
def watch() -> Iterator[Watch]:
    made = Watch()
    yield made
    made.on = False


@pytest.fixture(scope="module")
def served() -> Iterator[LiveServer]:
    live = LiveServer(trust_request_chat_template=True, enable_debug_endpoints=True)
    yield live
    live.close()


def hostile(folder: Path) -> list[str]:
    """Texts that name something to open; `folder` is there to be touched."""
    return [
        "http://127.0.0.1:9/x",
        "https://localhost:9/x.png",
        "http://169.254.169.254\\@ok.example/",
        "file:///etc/passwd",
        "../../../../etc/passwd",
        str(folder / "made"),
        "data:image/png;base64,AAAA",
        f"{{{{ cycler.__init__.__globals__.os.popen('touch {folder}/made').read() }}}}",
        "{% include '/etc/passwd' %}",
    ]


def bodies(text: str, fields: list[str]) -> Iterator[dict[str, Any]]:
    """Yield bodies with `text` in each of these fields, one after the other, and then deep inside."""
    chat = [{"role": "user", "content": "hi"}]
    base = {"model": "fake", "prompt": "a", "input": "a", "messages": chat, "max_tokens": 2}
    for field in fields:
        yield {**base, field: text}
    parts = [{"type": kind, kind: {"url": text}} for kind in ("image_url", "file")]
    yield {**base, "prompt": f"![]({text})", "messages": [{"role": "user", "content": parts}]}


def schemas(text: str) -> Iterator[dict[str, Any]]:
    """Yield bodies with a schema that refers to `text`."""
    base = {"model": "fake", "prompt": "a", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    schema = {"type": "object", "properties": {"a": {"$ref": text}}, "$schema": text, "$id": text}
    yield {**base, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    yield {**base, "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}


def paths(server: LiveServer) -> list[tuple[str, str]]:
    described = server.http.get("/openapi.json").json()["paths"]
    return [(method.upper(), path) for path, item in described.items() for method in item]


def test_every_route_and_every_field(served: LiveServer, watch: Watch, tmp_path: Path) -> None:
    routes = paths(served)
    posts = [path for method, path in routes if method == "POST"]
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/messages"} <= set(posts)
    fields = sorted({*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields, "input", "system", "path"})
    for path in posts:  # what is loaded at the first request is loaded before anybody looks
        served.http.post(path, json={"model": "fake"})
        for body in bodies("x", ["prompt"]):
            served.http.post(path, json=body)
    watch.on = True
    for number, text in enumerate(hostile(tmp_path)):
        for path in posts:
            generates = path in ("/v1/completions", "/v1/chat/completions")
            chosen = fields if number == 0 and generates else ["model", "chat_template"]
            for body in [*bodies(text, chosen), *(schemas(text) if number == 0 and generates else ())]:
                answer = served.http.post(path, json=body)
                assert answer.status_code < 500 or answer.status_code == 503, (path, body, answer.text)
        for method, path in routes:
            if method == "GET":
                url = path.replace("{", "").replace("}", "")
                served.http.request(method, url, params={"path": text, "url": text, "model": text})
        served.http.get("/" + text.replace("\\", "/").split("://")[-1].lstrip("/"))
        served.http.get("/v1/models", headers={"x-request-id": text.encode(), "referer": text.encode()})
    watch.on = False
    assert watch.seen == []
    assert list(tmp_path.iterdir()) == []
    assert served.http.get("/health").status_code == 200


def test_the_watch_would_have_seen_it(watch: Watch, tmp_path: Path) -> None:
    watch.seen.clear()
    watch.on = True
    thread = threading.Thread(target=lambda: (tmp_path / "x").write_text("y"))
    thread.start()
    thread.join()
    watch.on = False
    assert watch.seen == [f"open {tmp_path / 'x'}"]
